"""The tokenizer that a GGUF file keeps in its metadata: byte-level BPE ("gpt2") with the split rule named by `tokenizer.ggml.pre`, or
SentencePiece ("llama")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rung.errors import TokenizerError
from rung.models.chat import ChatTemplate
from rung.models.gguf_spm import spm_backend
from rung.models.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
# Split rules, as published in the tokenizer.json files of the model families.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}"}
_PLAIN = ("gpt-2", "default")
_SINGLE_DIGITS = ("smollm",)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises `TokenizerError` for a vocabulary or a split rule that is not supported."""
    from tokenizers import AddedToken, processors

    kind = metadata.get(_PREFIX + "model")
    if kind not in _KINDS:
        raise TokenizerError(
            f"tokenizer model {kind!r} is not supported",
            hint="use a GGUF file with a byte-level BPE ('gpt2') or SentencePiece ('llama') vocabulary",
        )
    tokens: list[str] = metadata[_PREFIX + "tokens"]
    backend = _KINDS[kind](metadata)
    types = metadata.get(_PREFIX + "token_type") or [1] * len(tokens)
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED])
    bos, eos = metadata.get(_PREFIX + "bos_token_id"), metadata.get(_PREFIX + "eos_token_id")
    if bos is not None and metadata.get(_PREFIX + "add_bos_token", metadata.get(_PREFIX + "pre") == "llama-bpe"):
        front = f"{tokens[bos]}:0"
        backend.post_processor = processors.TemplateProcessing(
            single=f"{front} $A:0", pair=f"{front} $A:0 $B:0", special_tokens=[(tokens[bos], bos)]
        )
    return Tokenizer(backend, stop_ids=stop_ids(metadata), chat_template=_template(metadata, tokens, bos, eos))


def stop_ids(metadata: Mapping[str, Any]) -> list[int]:
    """End of text, and end of turn where the file names one."""
    ids = [metadata.get(_PREFIX + "eos_token_id"), metadata.get(_PREFIX + "eot_token_id")]
    return sorted({int(token) for token in ids if token is not None})


def _byte_level_backend(metadata: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    merges = [_pair(merge) for merge in metadata.get(_PREFIX + "merges", ())]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(metadata[_PREFIX + "tokens"])}, merges=merges))
    backend.pre_tokenizer = _pre_tokenizer(str(metadata.get(_PREFIX + "pre", "default")))
    backend.decoder = decoders.ByteLevel()
    return backend


_KINDS = {"gpt2": _byte_level_backend, "llama": spm_backend}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(rule: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if rule in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[rule]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if rule in _PLAIN:
        return words
    known = ", ".join((*_PLAIN, *_SINGLE_DIGITS, *_SPLITS))
    raise TokenizerError(f"pre-tokenizer {rule!r} is not supported; known are {known}", hint="use the model's safetensors folder instead")


def _template(metadata: Mapping[str, Any], tokens: list[str], bos: int | None, eos: int | None) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    special = {name: tokens[token] for name, token in (("bos_token", bos), ("eos_token", eos)) if token is not None}
    return None if source is None else ChatTemplate(source, special_tokens=special)
