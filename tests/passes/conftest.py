from tests.attention.conftest import _interpreter_takes_ranges  # noqa: F401  for kernels in Triton's interpreter
