"""Wrapped modules from the outside: values against the module run eagerly, and the counters of `module.rung`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rung
import rung.api
from rung.counters import Count
from rung.errors import ConfigError, DynamicShapeError, InputMismatchError, RungError, TraceError, UnsupportedModuleError
from tests.compile.cases import STRUCTURES, Child, Net, Structures, assert_same

ROWS = {"x": {0: "rows"}}


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def both(module: nn.Module, **options: Any) -> tuple[Any, nn.Module]:
    """A wrapped module and an eager copy of it."""
    eager = copy.deepcopy(module)
    return rung.wrap(module, dynamic=ROWS, **options), eager


def traces(module: Any) -> int:
    count: int = module.rung.counters[Count.DYNAMO_TRACES]
    return count


# --- sizes ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 2, 5, 64), (64, 1, 0, 2), (0, 3)])
def test_every_size_in_any_order_with_one_trace(order: tuple[int, ...]) -> None:
    module, eager = both(Net())
    for rows in order:
        x = torch.randn(rows, 8)
        assert_same(module(x), eager(x))
    assert traces(module) == 1


class BufferAdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


class BufferNarrow(BufferAdd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[0]]


class Arange(BufferAdd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[0]).unsqueeze(1)


def test_whole_buffer_beside_the_dynamic_dimension_is_refused() -> None:
    module, _ = both(BufferAdd())
    with pytest.raises(
        DynamicShapeError, match=r"dimension 0 \('rows'\) of argument 'x' to 64 at .*test_api.py:\d+ \(return x \+ self.table"
    ):
        module(torch.randn(64, 8))


@pytest.mark.parametrize("cls", [BufferNarrow, Arange])
def test_buffer_of_the_size_of_the_argument(cls: type[nn.Module]) -> None:
    module, eager = both(cls())
    for rows in (64, 7, 1):
        x = torch.randn(rows, 8)
        assert_same(module(x), eager(x))
    assert traces(module) == 1


def test_more_rows_than_the_narrowed_buffer_is_an_error() -> None:
    module, _ = both(BufferNarrow())
    module(torch.randn(3, 8))
    with pytest.raises(InputMismatchError, match=r"x.shape\[0\] is 65, above the maximum of 64"):
        module(torch.randn(65, 8))


class BranchOnSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 128 else x - 1


class BranchOnRemainder(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] % 8 == 0 else x - 1


class ReshapeByFour(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] // 4, 4, -1) + 1


@pytest.mark.parametrize("cls", [BranchOnSize, BranchOnRemainder, ReshapeByFour])
def test_decision_on_the_size_is_never_frozen(cls: type[nn.Module]) -> None:
    module, eager = both(cls())
    for rows in (64, 256, 63, 62):
        x = torch.randn(rows, 8)
        try:
            expected: Any = eager(x)
        except RuntimeError:
            expected = None
        try:
            actual = module(x)
        except RungError as error:
            assert error.hint  # noqa: PT017 - an error is as good as the right value
            continue
        assert expected is not None
        assert_same(actual, expected)


@pytest.mark.parametrize("cls", [BufferAdd, BranchOnSize])
def test_dimension_that_nobody_declared_may_be_fixed(cls: type[nn.Module]) -> None:
    module = cls()
    for order in ((64, 1, 64), (1, 64, 1)):
        wrapped = rung.wrap(copy.deepcopy(module))
        for rows in order:
            x = torch.randn(rows, 8)
            assert_same(wrapped(x), module(x))


def test_branch_on_the_size_names_the_line() -> None:
    module, _ = both(BranchOnSize())
    with pytest.raises(DynamicShapeError, match=r"test_api.py:\d+ \(return x \+ 1 if x.shape\[0\] > 128"):
        module(torch.randn(3, 8))


class TwoTensors(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y


def test_sizes_of_one_name_must_agree() -> None:
    module = rung.wrap(TwoTensors(), dynamic={"x": {0: "rows"}, "y": {0: "rows"}})
    module(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(InputMismatchError, match=r"x.shape\[0\] is 2 and y.shape\[0\] is 3"):
        module(torch.ones(2, 4), torch.ones(3, 4))


def test_one_tensor_passed_twice_is_still_two_arguments() -> None:
    module = rung.wrap(TwoTensors(), dynamic={})
    a, b = torch.randn(2, 4), torch.randn(2, 4)
    assert_same(module(a, a), a * 3)
    assert_same(module(a, b), a * 2 + b)


def test_argument_that_is_not_contiguous() -> None:
    module, eager = both(Net())
    x = torch.randn(8, 5).t()
    assert_same(module(x), eager(x))
    assert_same(module(x), eager(x))


# --- arguments and outputs -----------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        y = x * scale * self.factor
        return y if shift is None else y + shift


def test_number_argument_is_never_stale() -> None:
    module, eager = both(Scale())
    x = torch.randn(3, 4)
    for scale in (1.5, 2.5, float("nan"), 2, 1.5, float("nan")):
        assert_same(module(x, scale), eager(x, scale))
    assert traces(module) == 4


def test_number_attributes_of_two_instances() -> None:
    x = torch.randn(3, 4)
    for factor in (1.5, 2.5):
        module, eager = both(Scale(factor))
        assert_same(module(x), eager(x))


def test_arguments_by_position_keyword_default_and_none() -> None:
    module, eager = both(Scale())
    x, shift = torch.randn(3, 4), torch.ones(4)
    for args, kwargs in [((x,), {}), ((), {"x": x}), ((x, 1.0), {"shift": None}), ((x,), {"shift": shift})]:
        assert_same(module(*args, **kwargs), eager(*args, **kwargs))
    assert traces(module) == 2


def test_too_many_values_of_a_number_is_an_error() -> None:
    module, _ = both(Scale(), max_variants=1)
    module(torch.ones(2, 4), 1.0)
    with pytest.raises(InputMismatchError, match="scale"):
        module(torch.ones(2, 4), 2.0)


def names_of_the_generated_entry(x: torch.Tensor, owner: int = 1, variant: int = 2, miss: int = 3, good: int = 4) -> torch.Tensor:
    return x * owner + variant * miss - good


def test_arguments_may_have_any_name() -> None:
    function = rung.wrap(names_of_the_generated_entry, dynamic=ROWS)
    for x in (torch.randn(3, 4), torch.randn(2, 4)):
        assert_same(function(x, good=5), names_of_the_generated_entry(x, good=5))


def in_place(x: torch.Tensor) -> None:
    x.add_(1)


def test_argument_updated_in_place() -> None:
    function = rung.wrap(in_place, dynamic=ROWS)
    for x in (torch.zeros(3, 4), torch.zeros(2, 4)):
        function(x)
        assert_same(x, torch.ones_like(x))


def test_argument_updated_in_place_that_is_not_contiguous_is_right_or_refused() -> None:
    function = rung.wrap(in_place, dynamic=ROWS)
    x = torch.zeros(4, 3).t()
    try:
        function(x)
    except InputMismatchError as error:
        assert error.hint  # noqa: PT017 - an error is as good as the right value
    else:
        assert_same(x, torch.ones_like(x))


@pytest.mark.parametrize("kind", [*STRUCTURES])
def test_output_structure_cold_and_warm(kind: str) -> None:
    x = torch.randn(3, 4)
    for count in (1, 0):
        module, eager = both(Structures(kind))
        assert_same(module(x), eager(x))
        assert_same(module(x[:2]), eager(x[:2]))
        assert traces(module) == count


class SizeAsText(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str, float]:
        return x + 1, f"rows={x.shape[0]}", x.shape[0] / 2


def test_a_size_as_text_fixes_a_dimension_that_nobody_declared() -> None:
    module = rung.wrap(SizeAsText())
    for rows in (4, 6, 4):
        x = torch.randn(rows, 8)
        assert_same(module(x), (x + 1, f"rows={rows}", rows / 2))
    assert traces(module) == 2


# --- what cannot be traced -----------------------------------------------------------------------------------------------------------


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum().item() > 0 else x - 1


class BranchOnValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Builtin(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open("/dev/null"):
            return x + 1


class Prints(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print(y)  # noqa: T201
        return y


@pytest.mark.parametrize("cls", [Item, BranchOnValue, Builtin, Prints])
def test_break_in_the_graph_is_an_error_with_place_and_hint(cls: type[nn.Module]) -> None:
    module, _ = both(cls())
    with pytest.raises(TraceError, match=r"(?s)could not be traced as one graph at .*test_api.py:\d+ .*hint: "):
        module(torch.ones(3, 4))


def test_a_corrected_module_compiles_after_an_error() -> None:
    module, _ = both(Item())
    with pytest.raises(TraceError):
        module(torch.ones(3, 4))
    good, eager = both(Net())
    x = torch.randn(3, 8)
    assert_same(good(x), eager(x))


class RebindsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state + 1
        return x + self.state


class RebindsNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state += 1
        return x + 1


class AppendsToList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.append(1)
        return x + 1


class FillsDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state["last"] = x + 1
        return x + 1


@pytest.mark.parametrize("cls", [RebindsBuffer, RebindsNumber, AppendsToList, FillsDict])
def test_changed_attribute_is_refused_by_name_and_put_back(cls: type[nn.Module]) -> None:
    module: Any = cls()
    before = copy.deepcopy(module.state)
    rung.wrap(module, dynamic=ROWS)
    with pytest.raises(UnsupportedModuleError, match=r"(?s)'state'.*hint: "):
        module(torch.ones(3, 4))
    assert type(module.state) is type(before)
    assert module.state == before if not isinstance(before, torch.Tensor) else torch.equal(module.state, before)


class CountsInBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


def test_buffer_updated_in_place_each_call() -> None:
    module, eager = both(CountsInBuffer())
    x = torch.randn(3, 4)
    for _ in range(4):
        assert_same(module(x), eager(x))
        assert_same(module.count, eager.count)


def test_batch_norm_counts_each_call_once() -> None:
    norm = nn.BatchNorm1d(4)
    norm.num_batches_tracked = None  # its update rebinds the attribute
    wrapped = rung.wrap(copy.deepcopy(norm), dynamic={})
    for _ in range(3):
        x = torch.randn(6, 4)
        assert_same(wrapped(x), norm(x))
        assert_same(wrapped.running_mean, norm.running_mean)


# --- module semantics ----------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


def test_tied_weights_are_one_input_and_follow_updates() -> None:
    module, eager = both(Tied())
    x = torch.arange(5)
    assert_same(module(x), eager(x))
    compiled = next(iter(module.rung._entry.variants.values())).compiled
    assert len(compiled.weights) == 1
    for one in (module, eager):
        one.head.weight.fill_(0.5)
    assert_same(module(x), eager(x))


def test_weights_of_their_own_after_tied_ones_with_one_store() -> None:
    tied, _ = both(Tied())
    tied(torch.arange(5))
    own = Tied()
    own.head.weight = nn.Parameter(torch.randn(8, 4))
    module, eager = both(own)
    assert_same(module(torch.arange(5)), eager(torch.arange(5)))


GRADS = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("serve", GRADS)
@pytest.mark.parametrize("warm", GRADS)
def test_grad_modes(warm: str, serve: str) -> None:
    module, eager = both(Net())
    x = torch.randn(3, 8)
    with GRADS[warm]():
        module(x)
    with GRADS[serve]():
        assert_same(module(x).detach(), eager(x).detach())
    assert traces(module) == (0 if warm == serve == "grad" else 1)
    assert module.rung.counters["eager.gradient"] == [warm, serve].count("grad")


def test_gradient_flows_through_the_eager_call() -> None:
    module, _ = both(Net())
    with torch.enable_grad():
        module(torch.randn(3, 8)).sum().backward()
    assert module.linear.weight.grad is not None


def test_hooks_run_at_every_call() -> None:
    module, eager = both(Net())
    x = torch.randn(3, 8)
    calls: list[str] = []
    module(x)
    handle = module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    for _ in range(3):
        assert_same(module(x), eager(x))
    assert calls == ["before", "after"] * 3
    handle.remove()
    module(x)
    assert calls[-1] == "before"
    assert traces(module) == 1


def test_hook_of_a_submodule_runs_at_every_call_or_is_refused() -> None:
    module, _ = both(Child())
    calls: list[int] = []
    module.net.register_forward_hook(lambda *_: calls.append(1))
    try:
        module(torch.randn(3, 8))
        module(torch.randn(3, 8))
    except RungError as error:
        assert error.hint  # noqa: PT017 - an error is as good as the right value
    else:
        assert len(calls) == 2


def test_state_dict_class_and_isinstance_stay() -> None:
    plain = Net()
    module, _ = both(copy.deepcopy(plain))
    assert list(module.state_dict()) == list(plain.state_dict())
    assert type(module) is Net
    module(torch.randn(3, 8))
    assert list(module.state_dict()) == list(plain.state_dict())


@rung.compiled(dynamic=ROWS)
class Decorated(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(8, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


@rung.compiled(dynamic=ROWS)
def decorated(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) + 1


def test_decorated_function() -> None:
    x = torch.randn(3, 8)
    assert_same(decorated(x), torch.sin(x) + 1)


def test_decorated_class_compiles_each_instance_on_its_own() -> None:
    x = torch.randn(3, 8)
    for hidden in (8, 16):
        module: Any = Decorated(hidden)
        assert_same(module(x), torch.relu(module.linear(x)))
        assert traces(module) == 1


MAKERS = {"wrapped": lambda: rung.wrap(Net(), dynamic=ROWS), "decorated": Decorated}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copy_is_independent(kind: str, how: str) -> None:
    module: Any = MAKERS[kind]()
    x = torch.randn(3, 8)
    before = module(x)
    other = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    other.linear.weight.zero_()
    other.linear.bias.zero_()
    assert_same(other(x), type(module).forward(other, x) if kind == "wrapped" else torch.zeros(3, 8))
    assert_same(module(x), before)
    assert other.rung.counters is not module.rung.counters


CONFIGURATIONS: list[dict[str, Any]] = [{}, {"bias": False}, {"activation": "tanh"}, {"epsilon": 0.5}, {"hidden": 32}]


@pytest.mark.parametrize("order", [1, -1])
def test_same_class_with_another_configuration_cold_and_from_the_store(order: int) -> None:
    x = torch.randn(3, 8)
    keys: list[set[str]] = []
    for count in (1, 0):
        found = set()
        for options in CONFIGURATIONS[::order]:
            module, eager = both(Net(**options))
            assert_same(module(x), eager(x))
            assert traces(module) == count
            found.add(module.rung.report()[0]["plan_key"])
        keys.append(found)
    assert len(keys[0]) == len(CONFIGURATIONS)
    assert keys[0] == keys[1]


class TwoMethods(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def test_another_method_by_name() -> None:
    module = rung.wrap(TwoMethods(), dynamic=ROWS, method="encode")
    x = torch.randn(3, 4)
    assert_same(module.encode(x), x * 3)
    assert traces(module) == 1
    assert_same(module(x), x + 1)
    assert traces(module) == 1


def test_two_methods_of_a_wrapped_module_have_a_handle_each() -> None:
    module = rung.wrap(rung.wrap(TwoMethods(), dynamic=ROWS), dynamic=ROWS, method="encode")
    x = torch.randn(3, 4)
    assert_same(module(x), x + 1)
    assert_same(module.encode(x), x * 3)
    assert traces(module) == 1
    assert module.rung.method("forward").counters is module.forward.counters
    assert module.rung.method("encode").counters is module.rung.counters
    with pytest.raises(ConfigError, match=r"no method 'decode' was compiled\nhint: "):
        module.rung.method("decode")


@rung.compiled(dynamic=ROWS, method="encode")
@rung.compiled(dynamic=ROWS)
class DecoratedTwice(TwoMethods):
    pass


@pytest.mark.parametrize("order", [("forward", "encode"), ("encode", "forward")])
def test_two_methods_of_a_decorated_class_have_code_of_their_own(order: tuple[str, str]) -> None:
    x = torch.randn(3, 4)
    for count in (1, 0):
        made: Any = DecoratedTwice()
        made(x)
        for module in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            for name in order:
                assert_same(getattr(module, name)(x), x + 1 if name == "forward" else x * 3)
            found = [module.rung.method(name).counters for name in order]
            assert found[0] is not found[1]
            assert module.rung.counters is found[order.index("encode")]
            assert [one[Count.DYNAMO_TRACES] for one in found] == [count if module is made else 0] * 2


@rung.compiled(dynamic=ROWS)
class DecoratedChild(Decorated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class PlainChild(Decorated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize("cls", [DecoratedChild, PlainChild])
@pytest.mark.parametrize("how", ["compiled", "gradient", "empty", "disabled"])
def test_super_of_a_decorated_class(cls: type[Decorated], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = cls()
    x = torch.randn(0 if how == "empty" else 3, 8)
    if how == "disabled":
        monkeypatch.setenv("RUNG_DISABLE", "1")
    with torch.set_grad_enabled(how == "gradient"):
        for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert_same(one(x), torch.relu(module.linear(x)) + 1)


class WithoutGradient(Decorated):
    forward = torch.no_grad()(Decorated.forward)


def test_a_decorator_over_a_decorated_method_stays() -> None:
    module = rung.wrap(WithoutGradient(), dynamic=ROWS)
    x = torch.randn(3, 8)
    with torch.enable_grad():
        assert not module.forward.function(x).requires_grad


def test_another_method_of_a_decorated_class_can_be_wrapped() -> None:
    @rung.compiled(dynamic=ROWS)
    class One(TwoMethods):
        pass

    module: Any = rung.wrap(One(), dynamic=ROWS, method="encode")
    x = torch.randn(3, 4)
    assert_same(module(x), x + 1)
    assert_same(module.encode(x), x * 3)
    assert module.rung.counters is module.encode.counters is not module.rung.method("forward").counters


def test_autocast_runs_eagerly_with_a_reason() -> None:
    module, eager = both(Net())
    x = torch.randn(3, 8)
    module(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(module(x), eager(x))
    assert module.rung.counters["eager.autocast"] == 1
    assert module(x).dtype == torch.float32


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float16])
def test_a_call_under_another_autocast_never_meets_the_code_of_one_before(first: torch.dtype) -> None:
    """As a second process with the same store would: nothing is traced under autocast, so nothing of it is kept."""
    for _ in range(2):
        module, eager = both(Net())
        x = torch.randn(3, 8)
        for dtype in (first, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype):
                assert_same(module(x), eager(x))
        assert (module.rung.counters["eager.autocast"], traces(module)) == (3, 0)
    assert module(x).dtype == torch.float32


class Tagged(torch.Tensor):
    """A subclass that changes what operations do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("when", ["before", "after the first call"])
def test_weights_of_a_tensor_subclass_are_named(when: str) -> None:
    module, eager = both(Net().requires_grad_(False))
    x = torch.randn(3, 8)
    if when != "before":
        assert_same(module(x), eager(x))
    for one in (module, eager):
        one.linear.weight = nn.Parameter((eager.linear.weight.detach() * 2).as_subclass(Tagged), requires_grad=False)
    with pytest.raises(UnsupportedModuleError, match=r"'self.linear.weight' is a Tagged, a subclass of torch.Tensor"):
        module(x)


class ByMode(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x + 1


def test_training_mode_after_the_trace() -> None:
    module, eager = both(ByMode().eval())
    x = torch.ones(3, 4)
    for mode in (False, True, False):
        module.train(mode)
        eager.train(mode)
        assert_same(module(x), eager(x))


def test_disabled_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_DISABLE", "1")
    module, eager = both(Net())
    x = torch.randn(3, 8)
    assert_same(module(x), eager(x))
    assert traces(module) == 0
    assert module.rung.counters["eager.disabled"] == 1


def test_new_parameter_after_weights_changed() -> None:
    module, eager = both(Net())
    x = torch.randn(3, 8)
    module(x)
    for one in (module, eager):
        one.linear.weight = nn.Parameter(torch.full((16, 8), 0.25), requires_grad=False)
    module.rung.weights_changed()
    assert_same(module(x), eager(x))
    assert traces(module) == 1


def test_release_starts_again_from_the_store() -> None:
    module, eager = both(Net())
    x = torch.randn(3, 8)
    module(x)
    module.rung.release()
    assert_same(module(x), eager(x))
    assert traces(module) == 1
    assert module.rung.counters[Count.PLAN_HITS] == 1


def test_explain_before_and_after_the_first_call() -> None:
    module, _ = both(Net())
    assert "call the module once" in module.rung.explain()
    module(torch.randn(3, 8))
    assert "): 1 pieces, 1 unique" in module.rung.explain()


# --- misuse --------------------------------------------------------------------------------------------------------------------------


class NoInstanceMethods(nn.Module):
    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x


MISUSES = {
    "not a module": lambda: rung.wrap(3),
    "twice": lambda: rung.wrap(rung.wrap(Net())),
    "an instance of a decorated class": lambda: rung.wrap(Decorated()),
    "a class twice": lambda: rung.compiled(Decorated),
    "a function twice": lambda: rung.compiled(decorated),
    "a method twice": lambda: rung.wrap(rung.wrap(Net()).forward),
    "a static method": lambda: rung.compiled(method="static")(NoInstanceMethods),
    "a class method": lambda: rung.compiled(method="of_class")(NoInstanceMethods),
    "a submodule as method": lambda: rung.wrap(Net(), method="linear"),
    "no config": lambda: rung.wrap(Net(), config=3),
    "an empty config": lambda: rung.wrap(Net(), config={}),
    "no such method": lambda: rung.wrap(Net(), method="encode"),
    "no such option": lambda: rung.wrap(Net(), dynamics={}),
    "class": lambda: rung.compiled(int),
    "no such method of a class": lambda: rung.compiled(method="encode")(Net),
    "no such argument": lambda: rung.wrap(Net(), dynamic={"y": {0: "rows"}})(torch.ones(2, 8)),
    "no such dimension": lambda: rung.wrap(Net(), dynamic={"x": {2: "rows"}})(torch.ones(2, 8)),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_an_error_with_a_hint(misuse: str) -> None:
    with pytest.raises((ConfigError, DynamicShapeError), match="hint: "):
        MISUSES[misuse]()


# --- torch.compile -------------------------------------------------------------------------------------------------------------------


def test_backend_of_torch_compile_over_sizes() -> None:
    torch._dynamo.reset()
    eager = Net()
    module = torch.compile(copy.deepcopy(eager), backend=rung.api.dynamo_backend)
    for rows in (4, 1, 7, 3):
        x = torch.randn(rows, 8)
        assert_same(module(x), eager(x))


def breaks_in_two(x: torch.Tensor) -> torch.Tensor:
    y = x.t() + 1
    torch._dynamo.graph_break()
    return y[:, 1:].sum(0) * 2


def test_backend_of_torch_compile_with_several_graphs_and_views() -> None:
    torch._dynamo.reset()
    function = torch.compile(breaks_in_two, backend=rung.api.dynamo_backend)
    x = torch.randn(4, 6)
    assert_same(function(x), breaks_in_two(x))
    assert_same(function(x[:, ::2]), breaks_in_two(x[:, ::2]))


def scaled_by(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def places(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x > 0) + 1


BACKEND_CALLS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "a float that changes": (scaled_by, [(torch.ones(3, 4), factor) for factor in (1.5, 2.5, 3.5)]),
    "a size that depends on values": (places, [(torch.tensor([1.0, -1.0, 2.0]),), (torch.ones(3),)]),
}


@pytest.mark.parametrize("case", BACKEND_CALLS)
def test_backend_of_torch_compile_runs_eagerly_what_it_cannot_compile(case: str) -> None:
    torch._dynamo.reset()
    function, calls = BACKEND_CALLS[case]
    compiled = torch.compile(function, backend=rung.api.dynamo_backend, fullgraph=True)
    before = rung.counters["eager.values"]
    for arguments in calls:
        assert_same(compiled(*arguments), function(*arguments))
    assert rung.counters["eager.values"] > before


# --- tensors without strides ---------------------------------------------------------------------------------------------------------

OTHER_LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3, 8).to_sparse(),
    "CSR": lambda: torch.eye(3, 8).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3, 8), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)]),
}


class AsItIs(nn.Module):
    """Takes tensors of every layout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
@pytest.mark.parametrize("first", ["dense", "other"])
def test_argument_without_strides_runs_eagerly(layout: str, first: str) -> None:
    module = rung.wrap(AsItIs())
    x = OTHER_LAYOUTS[layout]()
    if first == "dense":
        module(torch.ones(3, 8))
    result = module(x)
    assert (result.layout, result.is_quantized, result.is_nested) == (x.layout, x.is_quantized, x.is_nested)
    assert module.rung.counters["eager.layout"] == 1


class HasBuffer(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(self.buffer, x) + 1


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", ["sparse", "CSR"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_buffer_without_strides_runs_eagerly(layout: str, when: str) -> None:
    x = torch.randn(8, 2)
    eager = HasBuffer(OTHER_LAYOUTS[layout]())
    module = rung.wrap(HasBuffer(torch.ones(3, 8) if when == "after" else eager.buffer))
    if when == "after":
        module(x)
        module.buffer = eager.buffer
    assert_same(module(x), eager(x))
    assert module.rung.counters["eager.layout"] == 1


def test_the_report_has_the_memory_of_graphs_by_size() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    module = rung.wrap(Twice(), dynamic={"x": {0: "rows"}}, graphs="full")
    module(torch.ones(3, 4))
    memory = module.rung.report()[0]["graph_memory"]
    assert [entry["descriptor"] for entry in memory["entries"]] == ["full, 3 tokens"]
    assert memory["pool_bytes"] == memory["entries"][0]["pool_bytes"] >= 3 * 4 * 4
