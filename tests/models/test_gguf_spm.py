"""SentencePiece vocabularies out of GGUF metadata, in small."""

from __future__ import annotations

from typing import Any

import pytest

from rung.errors import TokenizerError
from rung.models.gguf_tokenizer import tokenizer_from_gguf

# piece, score, kind: 1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte
PIECES = [
    ("<unk>", 0.0, 2),
    ("<bos>", 0.0, 3),
    ("\u2581", -9.0, 1),
    ("a", -9.0, 1),
    ("b", -9.0, 1),
    ("ba", -2.0, 1),
    ("ab", -1.0, 1),
    ("bab", -4.0, 1),
    ("\u2581ab", -3.0, 1),
    ("<0xC3>", 0.0, 6),
    ("<0xA9>", 0.0, 6),
    ("<turn>", 0.0, 4),
]


def metadata(**changes: Any) -> dict[str, Any]:
    tokens, scores, types = (list(column) for column in zip(*PIECES, strict=True))
    values = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "add_space_prefix": False, **changes}
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abba", ["ab", "ba"]),
        ("bab", ["bab"]),
        ("bba", ["b", "ba"]),
        ("a ab", ["a", "\u2581ab"]),
        ("aé", ["a", "<0xC3>", "<0xA9>"]),
        ("a<turn>b", ["a", "<turn>", "b"]),
    ],
)
def test_the_pair_with_the_best_score_is_merged_first(text: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_from_gguf(metadata())
    ids = tokenizer.encode(text)
    assert [PIECES[token][0] for token in ids] == pieces
    assert tokenizer.decode(ids) == text


def test_the_start_token_is_put_in_front_where_the_file_says_so() -> None:
    tokenizer = tokenizer_from_gguf(metadata(bos_token_id=1, add_bos_token=True))
    assert tokenizer.encode("ab") == [1, 6]
    assert tokenizer.encode("ab", add_special_tokens=False) == [6]


def test_a_vocabulary_that_puts_a_space_in_front_is_refused() -> None:
    with pytest.raises(TokenizerError, match="puts a space in front"):
        tokenizer_from_gguf(metadata(add_space_prefix=True))
