"""Linear layers with e4m3 weights, and the function that gives a loaded model such layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import nn

from rung.errors import ConfigError
from rung.passes.ir.fp8 import E4M3, GROUP, LARGEST, TINY, quant_per_token_body

Scheme = Literal["per_token", "per_tensor", "group128"]


class FP8Linear(nn.Module):
    """`nn.Linear` with an e4m3 weight and float32 scales; activations come and go in the model's dtype and are quantised on their way.

    state_dict: `weight` e4m3 [out, in], `weight_scale` [out] or [out / 128, in / 128], perhaps `input_scale` [1] and `bias` [out]. A
    conversion of the module to another dtype would convert all of them, so quantise last."""

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group = GROUP if weight_scale.dim() == 2 else 0
        self.weight = _parameter(weight)
        self.weight_scale = _parameter(weight_scale)
        self.bias = None if bias is None else _parameter(bias)
        self.input_scale = None if input_scale is None else _parameter(input_scale)

    @classmethod
    def from_linear(cls, linear: nn.Linear, scheme: Scheme = "per_token", input_scale: float | None = None) -> FP8Linear:
        """Quantise a layer's weight. Raises `ConfigError` for sizes that the scheme cannot have."""
        weight, scale = quantise_weight(linear.weight.detach(), scheme)
        given = None if input_scale is None else torch.tensor([input_scale], dtype=torch.float32, device=weight.device)
        return cls(weight, scale, None if linear.bias is None else linear.bias.detach(), given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features] in the dtype of x."""
        scale: torch.Tensor | None = self.input_scale
        if scale is not None:
            values = torch.ops.rung.fp8_quant_static(x, scale)
        elif self.group:
            values, scale = torch.ops.rung.fp8_quant_group(x, self.group)
        else:
            values, scale = torch.ops.rung.fp8_quant_per_token(x)
        result: torch.Tensor = torch.ops.rung.fp8_linear(values, scale, self.weight, self.weight_scale, self.bias, x.dtype)
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any, **named: Any) -> None:
        given, own = state_dict.get(f"{prefix}input_scale"), self.input_scale
        if given is not None and own is not None and (own.is_meta or given.is_meta or not torch.equal(given.to(own), own)):
            self.input_scale = _parameter(torch.empty_like(own))  # another layer may share the old one
        super()._load_from_state_dict(state_dict, prefix, *more, **named)

    def __getstate__(self) -> dict[str, Any]:
        # torch 2.13 cannot unpickle an e4m3 tensor outside of torch.save: its storages have no type that the old format knows.
        state = self.__dict__.copy()
        state["_parameters"] = {**self._parameters, "weight": self.weight.detach().view(torch.uint8)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._parameters["weight"] = _parameter(state["_parameters"]["weight"].view(E4M3))

    def extra_repr(self) -> str:
        kind = "static" if self.input_scale is not None else f"groups of {self.group}" if self.group else "per token"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, activations {kind}"


def quantise_weight(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [n, k] -> e4m3 [n, k], float32 scales: [n], for "per_tensor" n times the same, or [n / 128, k / 128] for "group128"."""
    if scheme == "per_token":
        values, scale = quant_per_token_body(weight)
        return values, scale.squeeze(1)
    if scheme == "per_tensor":
        values, scale = quant_per_token_body(weight.reshape(1, -1))
        return values.view(weight.shape), scale.view(1).repeat(weight.shape[0])
    squares = weight.float().unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scale = squares.abs().amax((1, 3)).clamp_min(TINY) / LARGEST
    values = (squares / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return values.flatten(0, 1).flatten(1, 2), scale


@torch.no_grad()
def quantize_fp8(
    model: nn.Module, scheme: Scheme = "per_token", *, skip: Iterable[str] = ("lm_head",), input_scales: Mapping[str, float] | None = None
) -> dict[str, FP8Linear]:
    """Put an `FP8Linear` in place of every linear layer of a loaded model, one after the other; returns them by name.

    "per_token" has a weight scale for each output, and a scale for each row of activations; "per_tensor" one weight scale for a layer;
    "group128" one for each square of 128 x 128 of a weight and for each 128 activations of a row. `input_scales` (the largest magnitude of
    a layer's input / 448) makes the quantisation of activations static, by the layer's name; not for "group128". Layers of one module with
    the same scale share the parameter (`share_input_scales`), now and after each load of a state. `skip` are the last components, or full
    names, of layers that stay. Raises `ConfigError` before anything is changed."""
    if scheme not in get_args(Scheme):
        raise ConfigError(f"scheme must be one of {', '.join(get_args(Scheme))}; got {scheme!r}", hint="use 'per_token' if unsure")
    given, left = dict(input_scales or {}), set(skip)
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in left and name.rpartition(".")[2] not in left
    }
    if not linears:
        raise ConfigError("the model has no linear layer to quantise", hint="load a model first; layers are nn.Linear, minus `skip`")
    for name, module in linears.items():
        _check(name, module, scheme)
    _check_input_scales(given, linears, scheme)
    made: dict[str, FP8Linear] = {}
    shared: dict[tuple[str, float, torch.device], nn.Parameter | None] = {}  # by what was given: a model without memory shares as well
    for name, module in linears.items():
        made[name] = FP8Linear.from_linear(module, scheme, given.get(name))
        parent, _, child = name.rpartition(".")
        if name in given:
            made[name].input_scale = shared.setdefault((parent, given[name], module.weight.device), made[name].input_scale)
        setattr(model.get_submodule(parent), child, made[name])
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in given):
        model.get_submodule(parent).register_load_state_dict_post_hook(share_input_scales)
    return made


@torch.no_grad()
def share_input_scales(module: nn.Module, loaded: object = None) -> None:
    """Give those FP8 layers that are children of the module, on one device and with equal input scales, one parameter: what several of them
    read is then quantised once, where a trace sees by the parameter that the scales are equal. Reads their values. `quantize_fp8` has this
    done after each load of a state (`loaded` is torch's, and not looked at); layers put together by hand need a call."""
    shared: dict[tuple[float, torch.device], nn.Parameter] = {}
    for layer in module.children():
        if isinstance(layer, FP8Linear) and (scale := layer.input_scale) is not None and not scale.is_meta:
            layer.input_scale = shared.setdefault((float(scale), scale.device), scale)


def _check(name: str, linear: nn.Linear, scheme: Scheme) -> None:
    multiple = GROUP if scheme == "group128" else 16
    for what, size in (("in_features", linear.in_features), ("out_features", linear.out_features)):
        if size % multiple:
            raise ConfigError(
                f"{name}: {what} must be a multiple of {multiple} for {scheme!r}, got {size}",
                hint="use scheme='per_token'" if size % 16 == 0 else f"name {name.rpartition('.')[2]!r} in `skip`",
            )
    if not linear.weight.dtype.is_floating_point or linear.weight.dtype.itemsize < 2:
        raise ConfigError(f"{name}: its weight is of dtype {linear.weight.dtype} already", hint="quantise a bf16, fp16 or fp32 model")
    if linear.weight.is_meta:
        raise ConfigError(f"{name}: its weight has no values (meta device)", hint="load the model before it is quantised")


def _check_input_scales(given: Mapping[str, float], linears: Mapping[str, nn.Linear], scheme: Scheme) -> None:
    for name, value in given.items():
        if name not in linears:
            raise ConfigError(
                f"input_scales names {name!r}, which is not quantised", hint=f"layers are {', '.join(list(linears)[:3])}, ..."
            )
        if not value > 0:
            raise ConfigError(f"input_scales[{name!r}] must be positive, got {value}", hint="the largest magnitude of the input / 448")
    if given and scheme == "group128":
        raise ConfigError("group128 takes no input_scales: each group gets its own", hint="use 'per_token' or 'per_tensor'")


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
