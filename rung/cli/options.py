"""Options that several commands share, and what "auto" means for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import click

from rung.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")


def integers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """The callback of an option with comma-separated positive integers."""
    if value is None:
        return None
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of integers such as 1,8,64", ctx, param) from None
    if min(numbers) < 1:
        raise click.BadParameter(f"{value!r} holds a number below 1", ctx, param)
    return tuple(dict.fromkeys(numbers))


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `SamplingParams` takes; an option that is not given is None, and the model's own setting holds."""
    options = (
        click.option("--temperature", type=float, help="0: always the most likely token. Default of all of these: the model's, else none."),
        click.option("--top-k", type=int, help="Sample from the k most likely tokens; 0: all."),
        click.option("--top-p", type=float, help="Sample from the most likely tokens that together have this probability."),
        click.option("--min-p", type=float, help="Sample from tokens with at least this part of the best one's probability."),
        click.option("--presence-penalty", type=float, help="Against tokens that the answer has already."),
        click.option("--frequency-penalty", type=float, help="The same, times how often it has them."),
        click.option("--repetition-penalty", type=float, help="Above 1: against tokens that prompt or answer have already."),
        click.option("--min-tokens", type=int, help="At least so many tokens before the answer may end."),
        click.option("--seed", type=int, help="Makes sampling repeatable."),
        click.option("--logprobs", type=int, help="With --json: log-probabilities of each token and of the N most likely ones."),
        click.option("--json-schema", type=click.File(encoding="utf-8"), help="Answers are JSON that this schema accepts; needs xgrammar."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def device_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--device` and `--dtype`."""
    dtype = click.option("--dtype", type=click.Choice(DTYPES), default="auto", help="auto: bfloat16 on a GPU, else float32.")
    device = click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1; auto: a GPU if there is one.")
    return device(dtype(function))


QUANTISATIONS: dict[str, Literal["per_token", "per_tensor", "group128"]] = {
    "fp8": "per_token",
    "fp8-per-tensor": "per_tensor",
    "fp8-group128": "group128",
}  # name: scheme of `quantize_fp8`


def fp8_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--quantize` and `--kv-cache-dtype`."""
    quantize = click.option(
        "--quantize",
        type=click.Choice(tuple(QUANTISATIONS)),
        help="Linear layers in e4m3: a weight scale an output, one a layer, or one a square of 128; the head stays.",
    )
    cache = click.option(
        "--kv-cache-dtype", type=click.Choice(("auto", "fp8")), default="auto", show_default=True, help="fp8: keys and values in e4m3."
    )
    return cache(quantize(function))


def resolve_device(name: str) -> torch.device:
    """Raises `BackendUnavailableError` for a device that is not there."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device: {name!r} is no device", hint="use cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError(f"--device {name}: this torch ({torch.__version__}) sees no CUDA device", hint="use --device cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
