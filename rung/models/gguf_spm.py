"""The SentencePiece vocabulary of a GGUF file ("llama"): pieces with scores, spaces as "▁", bytes for what no piece covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rung.errors import TokenizerError

_PREFIX = "tokenizer.ggml."
_NORMAL = 1  # a value of tokenizer.ggml.token_type
_SPACE = "\u2581"


def spm_backend(metadata: Mapping[str, Any]) -> Any:
    """A `tokenizers.Tokenizer` without special tokens. Raises `TokenizerError` for a kind that is not supported."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    if metadata.get(_PREFIX + "add_space_prefix", True):
        raise TokenizerError(
            "a SentencePiece vocabulary that puts a space in front is not supported", hint="use the model's safetensors folder instead"
        )
    tokens: list[str] = metadata[_PREFIX + "tokens"]
    scores: Sequence[float] = metadata[_PREFIX + "scores"]
    types: Sequence[int] = metadata.get(_PREFIX + "token_type") or [_NORMAL] * len(tokens)
    unknown = metadata.get(_PREFIX + "unknown_token_id", 0)
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(tokens, scores, types), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece merges whatever pair gives the piece of the highest score: as a list, all splits of all pieces by falling score."""
    numbers = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _NORMAL}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, index in numbers.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in numbers and right in numbers:
                merges.append((-scores[index], numbers[left], numbers[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]
