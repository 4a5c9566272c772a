"""The main job of `make demo`: a chat model, a module that is no language model, and what each mode costs.

    python examples/demo.py

On a CPU the graphs run on the recorded backend, which shows what a captured graph would do, not how fast it is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `examples` can be imported from anywhere

from examples import wrap_mlp
from rung.cli.app import program

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Rewrite this in one friendly sentence: the meeting of the garden club on Tuesday was moved to Thursday at seven, because the hall "
    "is being painted and the chairs are not there until Wednesday evening.",
)


def section(title: str) -> None:
    print(f"\n=== {title} ({time.perf_counter() - START:.0f} s)\n", flush=True)


def rung(*arguments: str) -> None:
    print("$ rung " + " ".join(argument if " " not in argument else f'"{argument}"' for argument in arguments) + "\n", flush=True)
    program.main(list(arguments), prog_name="rung", standalone_mode=False)
    sys.stderr.flush()


def main() -> None:
    section("1. Three prompts of different length, one continuous batch, compiled pieces and graphs")
    rung("generate", "smollm2", *PROMPTS, "--max-tokens", "96", "--prefill-chunk", "16")
    section("2. A module that is no language model, in four modes")
    wrap_mlp.main()
    section("3. What each mode costs: a decode step of the chat model, and a call of the module")
    rung("bench", "smollm2", "--sizes", "1,4", "--repeats", "3", "--sets", "2")
    rung("bench", "examples.wrap_mlp:build", "--inputs", "examples.wrap_mlp:inputs", "--sizes", "1,50,64")
    section("done")


START = time.perf_counter()

if __name__ == "__main__":
    main()
