"""Chat templates: Jinja in a sandbox, with the names that templates of published models use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from rung.errors import TokenizerError


class ChatTemplate:
    """One compiled template. Templates come with the weights, so they are untrusted: the sandbox forbids attribute tricks and writes."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        from jinja2 import TemplateError, TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = dict(special_tokens or {})  # "bos_token" and "eos_token", as texts
        self._template_error = TemplateError
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as problem:
            hint = "give the prompt as plain text, or use another model"
            raise TokenizerError(f"the chat template is not valid Jinja: {problem}", hint=hint) from problem

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. `messages` are {"role": ..., "content": ...}; raises `TokenizerError` when the template refuses them."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (self._template_error, TypeError) as problem:
            raise TokenizerError(
                f"the chat template refuses the messages: {problem}", hint="give each message a `role` the model knows and a text `content`"
            ) from problem


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)  # Jinja's own filter escapes HTML characters


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
