"""What the README and the pages show runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rung.cli.app import program
from rung.config import VARIABLES, CompileConfig
from rung.errors import UnknownModelError
from rung.models import find_quickstart

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(source: str, folder: Path) -> str:
    """The output of a program in a process of its own, outside of the source tree."""
    file = folder / "pasted.py"
    file.write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, str(file)], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_ten_line_start_is_ten_lines_and_runs(tmp_path: Path) -> None:
    (source,) = blocks("README.md")
    assert len([line for line in source.splitlines() if line]) == 10
    output = run(source, tmp_path)
    assert [f"{rows} torch.Size([{rows}, 1])" for rows in (1, 3, 50)] == output.splitlines()[:3]
    assert "'step.full.best': 3" in output
    assert "'dynamo_traces': 1" in output


def test_module_with_a_split_op_of_the_wrapping_page_runs(tmp_path: Path) -> None:
    (source,) = blocks("docs/wrapping.md")
    assert run(source, tmp_path).splitlines()[-1] == "['piece_00', 'log_00', 'piece_01']"


def test_every_option_and_variable_is_on_the_wrapping_page() -> None:
    page = (ROOT / "docs/wrapping.md").read_text()
    for name in (*CompileConfig.__dataclass_fields__, *VARIABLES):
        assert f"`{name}`" in page


@pytest.mark.slow
def test_engine_of_the_runner_page_answers(tmp_path: Path) -> None:
    try:
        find_quickstart()
    except UnknownModelError as missing:
        pytest.skip(str(missing))
    (source,) = blocks("docs/runner.md")
    assert "Paris" in run(source, tmp_path)


def test_every_command_of_the_page_exists() -> None:
    named = set(re.findall(r"^## rung (\w+)", (ROOT / "docs/cli.md").read_text(), re.MULTILINE))
    assert named == set(program.commands)


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_links_to_sections_lead_to_one() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target, section in re.findall(r"\]\(((?!\w+:)[^)#]*)#([^)]+)\)", page.read_text()):
            headings = re.findall(r"^#+ (.*)$", ((page.parent / target) if target else page).read_text(), re.MULTILINE)
            assert section in map(section_of, headings), f"{page.name} links to {target}#{section}"


def section_of(heading: str) -> str:
    """As GitHub names it in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_engine_example_is_short() -> None:
    assert len((ROOT / "examples" / "engine.py").read_text().splitlines()) < 100
