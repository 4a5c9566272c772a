"""A job of `rung precompile` in a process of its own: read from the input as JSON, its results the last line of the output.

For a GPU that is not here torch is made to believe that it is, which no other process may see."""

from __future__ import annotations

import json
import sys
import warnings

from rung.cli.precompile_jobs import Job, run_here


def main() -> None:
    given = json.load(sys.stdin)
    given |= {name: tuple(given[name]) for name in ("sizes", "requests")}
    job = Job(**given)
    if job.place != "native":
        from rung.torch_compat import pretend_cuda

        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # it is 0, and nothing runs here
        pretend_cuda(job.place)
    results = run_here(job)
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main()
