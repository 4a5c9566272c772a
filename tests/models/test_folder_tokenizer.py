"""The tokenizer files of a transformers folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rung.errors import TokenizerError
from rung.models.folder_tokenizer import tokenizer_from_folder

tokenizers = pytest.importorskip("tokenizers")


def write(folder: Path, **settings: object) -> Path:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "</s>": 3}, merges=[("a", "b")]))
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, **settings}))
    return folder


def test_ids_come_from_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(write(tmp_path), [])
    assert tokenizer is not None
    assert tokenizer.encode("aba</s>") == [2, 0, 3]


def test_end_token_of_the_settings_stops_when_no_other_is_given(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert [tokenizer_from_folder(folder, ids).stop_ids for ids in ([], [1])] == [{3}, {1}]  # type: ignore[union-attr]


def test_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    folder = write(tmp_path, chat_template="settings")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    tokenizer = tokenizer_from_folder(folder, [])
    assert tokenizer is not None
    assert tokenizer.apply_chat([{"role": "user", "content": "ab"}]) == [2, 3]


def test_named_templates_use_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "ab"}]
    tokenizer = tokenizer_from_folder(write(tmp_path, chat_template=named), [])
    assert tokenizer is not None
    assert tokenizer.render_chat([]) == "ab"


def test_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert tokenizer_from_folder(tmp_path, []) is None


def test_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        tokenizer_from_folder(tmp_path, [])
