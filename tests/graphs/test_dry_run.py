"""What must not be captured is found before the capture, with the operation and the line that calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rung.errors import CaptureError, GeneratorError, HostCopyError, HostReadError
from rung.graphs import Descriptor, GraphMode
from rung.graphs.dry_run import DryRun
from tests.graphs.toys import brk, data, make_manager, only, run_padded

FULL_4 = Descriptor(mode=GraphMode.FULL, num_tokens=4)
PIECEWISE_4 = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4)

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x * x[0, 0].item(),
    "tolist": lambda x: x * x[0].tolist()[0],
    "cpu": lambda x: x + x.cpu().sum(),
    "numpy": lambda x: x * float(x.numpy()[0, 0]),
    "__bool__": lambda x: x * 2 if x.sum() > 0 else x,
    "__float__": lambda x: x * float(x[0, 0]),
    "aten::nonzero": lambda x: x + x.nonzero().shape[0],
    "aten::index": lambda x: x + x[x > 0].sum(),
    "aten::_unique2": lambda x: x + x.unique().sum(),
    "aten::repeat_interleave": lambda x: x + x.repeat_interleave(x[:, 0].abs().long(), dim=0).sum(),
}


@pytest.mark.parametrize("operation", READS)
def test_a_read_on_the_host_is_named_with_its_line(operation: str) -> None:
    """T77: what Python read at the capture would be repeated by every replay."""
    manager = make_manager(only(brk("break_00", lambda x: (READS[operation](x),))))
    with pytest.raises(HostReadError, match=rf"{operation} reads device values.* at .*{__file__}:\d+") as error:
        manager.capture([FULL_4])
    assert f'"{operation}": lambda' in error.value.message
    assert (error.value.size, error.value.piece) == (4, "break_00")


@pytest.mark.parametrize("operation", READS)
def test_the_same_break_is_fine_between_graphs(operation: str) -> None:
    plan = only(brk("break_00", lambda x: (READS[operation](x),)))
    manager = make_manager(plan)
    manager.capture([PIECEWISE_4])
    x = data(4, 3)
    assert torch.equal(run_padded(manager, PIECEWISE_4, x)[0], plan(x)[0])


def test_every_finding_is_told_and_each_once() -> None:
    def reads(x: torch.Tensor) -> Sequence[Any]:
        first = x[0, 0].item()
        rows = x.nonzero()
        return (x * first + rows.shape[0],)

    with pytest.raises(HostReadError, match="item") as error:
        make_manager(only(brk("break_00", reads))).capture([FULL_4])
    assert len(error.value.__notes__) == 1
    assert "aten::nonzero" in error.value.__notes__[0]


def test_a_branch_that_only_a_capture_takes_is_stopped_there() -> None:
    calls = []

    def reads_later(x: torch.Tensor) -> Sequence[Any]:
        calls.append(1)
        return (x * (x[0, 0].item() if len(calls) > 1 else 2),)

    with pytest.raises(HostReadError, match=r"capture of .*Tensor\.item"):
        make_manager(only(brk("break_00", reads_later))).capture([FULL_4])


def test_other_sizes_are_captured_beside_a_refused_one() -> None:
    plan = only(brk("break_00", lambda x: (x * (x[0, 0].item() if x.shape[0] == 4 else 2),)))
    manager = make_manager(plan)
    full_8 = Descriptor(mode=GraphMode.FULL, num_tokens=8)
    report = manager.capture([FULL_4, full_8], on_failure="skip")
    assert ([error.size for error in report.failures], manager.failed) == ([4], {FULL_4})
    x = data(8, 1)
    assert torch.equal(run_padded(manager, full_8, x)[0], x * 2)


def test_an_unregistered_generator_is_named_with_its_line() -> None:
    """T73."""
    generator = torch.Generator()
    plan = only(brk("break_00", lambda x: (x + torch.rand(x.shape, generator=generator),)))
    with pytest.raises(GeneratorError, match=rf"aten::rand.*not registered.* at .*{__file__}:\d+"):
        make_manager(plan).capture([FULL_4])
    make_manager(plan, generators=[generator]).capture([FULL_4])


def test_the_inside_of_an_op_written_in_python_is_seen() -> None:
    library = torch.library.Library("rung_dry_run", "FRAGMENT")
    library.define("first(Tensor x) -> Tensor")
    library.impl("first", lambda x: x * x[0, 0].item(), "CompositeExplicitAutograd")
    try:
        plan = only(brk("break_00", lambda x: (torch.ops.rung_dry_run.first(x),)))
        with pytest.raises(HostReadError, match="item reads device values"):
            make_manager(plan).capture([FULL_4])
    finally:
        library._destroy()


def watched(work: Callable[[], Any]) -> list[Any]:
    """Findings of `work` for a device that is not here; tensors are fake."""
    run = DryRun(torch.device("cuda", 0))
    with FakeTensorMode(), run.watch():
        work()
    return run.findings


def test_copies_from_host_memory_are_found() -> None:
    """T77: a graph would read the host address again."""
    (finding,) = watched(lambda: torch.ops.aten._to_copy(torch.zeros(3), device="cuda"))
    assert finding.kind is HostCopyError
    assert "aten::_to_copy copies from pageable host memory" in finding.text
    (finding,) = watched(lambda: torch.ops.aten.copy_(torch.empty(3, device="cuda"), torch.zeros(3)))
    assert (finding.kind, "aten::copy_" in finding.text) == (HostCopyError, True)
    assert "lambda: torch.ops.aten.copy_" in finding.where


def test_copies_to_the_host_are_found() -> None:
    (finding,) = watched(lambda: torch.ops.aten._to_copy(torch.empty(3, device="cuda"), device="cpu"))
    assert finding.kind is HostReadError
    (finding,) = watched(lambda: torch.ops.aten.copy_(torch.zeros(3), torch.empty(3, device="cuda")))
    assert "copies to the host" in finding.text


def test_work_on_the_host_beside_the_device_is_fine() -> None:
    def work() -> torch.Tensor:
        scale = torch.tensor([2.0])  # on the host: a constant of the graph
        assert scale.device.type == "cpu"
        return torch.empty(3, device="cuda") * 2 + torch.empty((), device="cuda")

    assert watched(work) == []


def test_errors_of_the_dry_run_are_capture_errors() -> None:
    run = DryRun(torch.device("cpu"))
    with run.watch():
        torch.ones(2).sum().item()
    with pytest.raises(CaptureError, match=r"item.*\nhint: keep lengths"):
        run.refuse()
