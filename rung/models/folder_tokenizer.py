"""The tokenizer of a transformers folder: tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rung.errors import TokenizerError
from rung.models.chat import ChatTemplate
from rung.models.config import read_json
from rung.models.tokenizer import Tokenizer


def tokenizer_from_folder(folder: Path, stop_ids: list[int]) -> Tokenizer | None:
    """None when the folder has no tokenizer.json. Raises `TokenizerError` for one that cannot be read."""
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        backend = Backend.from_file(str(path))
    except Exception as problem:  # the library raises bare Exception
        raise TokenizerError(f"cannot read {path}: {problem}", hint="download the file again") from problem
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    eos = backend.token_to_id(_text(settings.get("eos_token")) or "")
    ids = stop_ids or ([] if eos is None else [eos])
    return Tokenizer(backend, stop_ids=ids, chat_template=_template(folder, settings))


def generation_from_folder(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json, with `eos_token_id` as a list; the ids of config.json when it names none."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    return {**generation, "eos_token_id": [] if ids is None else [ids] if isinstance(ids, int) else list(ids)}


def _template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    special = {name: _text(settings[name]) for name in ("bos_token", "eos_token") if settings.get(name)}
    return None if source is None else ChatTemplate(source, special_tokens=special)


def _text(token: Any) -> str:
    """A special token is written as a text or as an object with its text in `content`."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")
