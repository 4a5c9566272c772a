from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rung.errors import UnknownModelError
from rung.models import LoadedModel, find_quickstart, load_model
from tests.models.harness import transformers_gguf


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return find_quickstart()
    except UnknownModelError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path)


@pytest.fixture(scope="session")
def their_smollm2(smollm2_path: Path) -> Any:
    pytest.importorskip("transformers")
    return transformers_gguf(smollm2_path)


@pytest.fixture(scope="session")
def their_tokenizer(smollm2_path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
