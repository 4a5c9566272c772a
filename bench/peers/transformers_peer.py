"""transformers with a static cache as a peer: `generate`, whose decode step it compiles by itself on a GPU, with
`torch.compile(mode="reduce-overhead")`. What it compiled is measured alone too, without sampling or the read of the ids: rows of a peer
`reduce-overhead`, so that one compile of a batch size, by far the longest part, serves both.

    python -m bench.peers.transformers_peer --model 135m --batches 1,8 --out transformers.json
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from typing import Any

from bench.peers.asked import numbers, options, shape_of
from bench.peers.measure import Prompts, Report, busy, kernels, memory, on_gpu, prefill, prompts, steps

_CALLS = 40


def main() -> None:
    asked = options(__doc__)
    report = Report(asked.out)
    with report.phase("import torch"):
        import torch
    with report.phase("import transformers"):
        from transformers import LlamaConfig, LlamaForCausalLM
    report.turn(asked)
    config = {name: value for name, value in shape_of(asked).items() if name not in ("architectures", "model_type", "torch_dtype")}
    with report.phase("weights"), torch.device("cuda" if on_gpu() else "cpu"):
        torch.set_default_dtype(torch.bfloat16 if on_gpu() else torch.float32)
        model = LlamaForCausalLM(LlamaConfig(**config)).eval()
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        served = Served(model, asked)
        for batch in numbers(asked.batches):
            with report.guarded(f"batch of {batch}"):
                with report.phase(f"compile and capture of {batch}"):
                    served.generate(prompts(batch, asked.context, asked.model), 4)
                if batch == numbers(asked.batches)[0]:
                    report.ready()
                    if asked.start_only:
                        return
                one = argparse.Namespace(**{**vars(asked), "batches": str(batch)})
                steps(report, served.generate, one)
                served.decode_call(report, batch)
                kernels(report, served.generate, one)
            torch.compiler.reset()  # else the next batch size would be compiled for any
        if asked.prefill:
            prefill(report, served.generate, asked, min(asked.prefill, config["max_position_embeddings"] - asked.long))
        memory(report, "end")


class Served:
    """A model with its caches, and the last call of its compiled step."""

    def __init__(self, model: Any, asked: argparse.Namespace) -> None:
        from transformers import CompileConfig

        self._model, self._asked = model, asked
        self._caches: dict[tuple[int, int], Any] = {}
        self._compiled: Any = None
        self._arguments: dict[str, Any] = {}
        config = CompileConfig()
        config._compile_all_devices = True  # on a CPU too, to try this
        self._options = {} if on_gpu() else {"compile_config": config}
        compiled_call = model.get_compiled_call

        def recorded_call(*args: Any) -> Any:
            self._compiled = compiled_call(*args)

            def call(**arguments: Any) -> Any:
                self._arguments = arguments
                return self._compiled(**arguments)

            return call

        model.get_compiled_call = recorded_call

    def generate(self, some: Prompts, tokens: int) -> None:
        import torch

        ids = torch.tensor(some, device=self._model.device)
        # one length for all that is done with a batch size, the calls alone included: each length is a compile
        length = -(-(max(ids.shape[1], self._asked.context) + self._asked.long + 4 * _CALLS) // 256) * 256
        key = (ids.shape[0], length)
        if key not in self._caches:
            self._caches[key] = _cache(self._model, length)
        self._caches[key].reset()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **{_cache_name(self._model): self._caches[key]},
            **self._options,
        )
        out.tolist()

    def decode_call(self, report: Report, batch: int) -> None:
        """Rows of the compiled step alone, behind the last generation, with the arguments of that one's last step."""
        with report.guarded(f"decode call of {batch}"):
            if self._compiled is None:
                raise RuntimeError("generate compiled nothing")
            found = []
            self._calls(4)
            for _ in range(3):
                _synchronize()
                start = time.perf_counter()
                self._calls(_CALLS)
                _synchronize()
                found.append((time.perf_counter() - start) / _CALLS * 1e3)
            row = {"peer": "reduce-overhead", "batch": batch, "context": self._asked.context}
            report.add("step", **row, wall_ms=statistics.median(found), min_ms=min(found), max_ms=max(found))
            if on_gpu():
                milliseconds, count = busy(lambda: self._calls(8))
                report.add("kernels", **row, device_ms=milliseconds / 8, kernels=count / 8)

    def _calls(self, count: int) -> None:
        import torch

        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            self._compiled(**self._arguments)


def _synchronize() -> None:
    import torch

    if on_gpu():
        torch.cuda.synchronize()


def _cache(model: Any, length: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


def _cache_name(model: Any) -> str:
    """The parameter that takes a cache; its name changed during transformers 5."""
    return "past_key_values" if "past_key_values" in inspect.signature(model.forward).parameters else "cache"


if __name__ == "__main__":
    main()
