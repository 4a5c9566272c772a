"""Ids, chat texts and streamed text against transformers and against the whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rung.errors import TokenizerError
from rung.models import LoadedModel, Tokenizer
from rung.models.chat import ChatTemplate
from rung.models.gguf_tokenizer import tokenizer_from_gguf

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  \n\n\t tabs\r\n",
    "It's we're I'LL don't",
    "def f(x):\n    return {'a': [x ** 2 for x in range(10)]}\n",
    "1234567890 3.14159 0x1F\n7, 8 and 9",
    "Grüße, naïve café, Ελληνικά, русский, 你好世界, こんにちは, مرحبا, हिन्दी",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u200b \ufffd \x00 \x7f",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x<not_special>",
    "a" * 300,
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'What is 2 < 3 & "x"?\n'}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: LoadedModel) -> Tokenizer:
    return smollm2.tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers(text: str, tokenizer: Tokenizer, their_tokenizer: Any) -> None:
    assert tokenizer.encode(text) == their_tokenizer.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_decode_gives_the_text_back(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(("text", "parts"), [("x  12", ["x", "  ", "1", "2"]), ("a ½", ["a", " ", "½"])])
def test_digits_are_split_before_words(text: str, parts: list[str], tokenizer: Tokenizer) -> None:
    """The smollm rule cuts out each digit first, so the spaces before it stay by themselves; transformers reads no such rule from GGUF."""
    detokenizer = tokenizer.detokenizer()
    assert [part for token in tokenizer.encode(text) if (part := detokenizer.add([token]))] == parts


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CHATS)
def test_chat_text_and_ids_equal_transformers(
    messages: list[dict[str, str]], add_generation_prompt: bool, tokenizer: Tokenizer, their_tokenizer: Any
) -> None:
    text = their_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt) == text
    ids = their_tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.apply_chat(messages, add_generation_prompt=add_generation_prompt) == ids


def test_unfinished_characters_are_held_back(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.add([token]) for token in tokenizer.encode("a👩‍👧b")]
    assert "".join(parts) + detokenizer.finish() == "a👩‍👧b"
    assert not any("\ufffd" in part for part in parts)
    assert "" in parts


def test_bytes_that_never_come_are_shown_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("👩")[:-1]
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.add(ids) == ""
    assert detokenizer.finish() == tokenizer.decode(ids)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_streamed_parts_equal_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(max_size=80))
    ids = tokenizer.encode(text) + data.draw(st.lists(st.integers(0, 49151), max_size=40))
    detokenizer, parts, at = tokenizer.detokenizer(), [], 0
    while at < len(ids):
        count = data.draw(st.integers(1, 4))
        parts.append(detokenizer.add(ids[at : at + count]))
        at += count
    assert "".join(parts) + detokenizer.finish() == tokenizer.decode(ids)


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    assert detokenizer.add([2]) == "<|im_end|>"


def test_model_without_template_says_so(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer(tokenizer.backend).apply_chat(CHATS[0])


def test_template_may_refuse_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TokenizerError, match="roles must alternate"):
        template.render(CHATS[0])


def test_template_is_sandboxed() -> None:
    with pytest.raises(TokenizerError, match="refuses"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render(CHATS[0])


def test_broken_template_is_refused() -> None:
    with pytest.raises(TokenizerError, match="not valid Jinja"):
        ChatTemplate("{% for %}")


def test_beginning_of_text_is_added_when_the_file_asks() -> None:
    metadata = {"model": "gpt2", "tokens": ["a", "<s>"], "token_type": [1, 3], "bos_token_id": 1, "add_bos_token": True}
    ours = tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    assert ours.encode("a") == [1, 0]
    assert ours.encode("a", add_special_tokens=False) == [0]


@pytest.mark.parametrize(("key", "value"), [("model", "bert"), ("pre", "unheard-of")])
def test_other_vocabularies_are_refused(key: str, value: str) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], f"tokenizer.ggml.{key}": value}
    with pytest.raises(TokenizerError, match=value):
        tokenizer_from_gguf(metadata)
