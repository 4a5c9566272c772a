"""The CUDA driver's calls, over a stand-in for cuda-bindings that records them."""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rung.errors import BackendUnavailableError, KernelArgumentError, LaunchError
from rung.launch import driver as driver_module
from rung.launch.driver import CudaDriver, LaunchAttributes


class Result(IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1
    NO_BINARY_FOR_GPU = 209


class Names:
    """An enum of the driver: every name stands for itself."""

    def __getattr__(self, name: str) -> str:
        return name


class Attribute:
    def __init__(self) -> None:
        self.id, self.value = "", SimpleNamespace(clusterDim=SimpleNamespace())


class Cuda(ModuleType):
    """`cuda.bindings.driver`, as far as `CudaDriver` uses it."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[str, Result] = {}  # of calls that are refused
        self.values = {
            "cuDeviceGet": 0,
            "cuDevicePrimaryCtxRetain": "context",
            "cuModuleLoadData": "module",
            "cuModuleGetFunction": "function",
        }
        self.CUlaunchConfig, self.CUlaunchAttribute = SimpleNamespace, Attribute
        self.CUlaunchAttributeID = self.CUfunction_attribute = self.CUdevice_attribute = self.CUclusterSchedulingPolicy = Names()

    def cuGetErrorString(self, result: Result) -> tuple[Result, bytes]:  # noqa: N802
        return Result.SUCCESS, b"described"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return self.results.get(name, Result.SUCCESS), self.values.get(name)

        call.__name__ = name
        return call


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = found  # type: ignore[attr-defined]
    for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": bindings, "cuda.bindings.driver": found}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(driver_module, "why_no_cuda_bindings", lambda: None)
    return found


PLAIN = LaunchAttributes(block=(128, 1, 1), shared_bytes=0)


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "why_no_cuda_bindings", lambda: "cuda-bindings is not installed")
    with pytest.raises(BackendUnavailableError, match="cuda-bindings is not installed"):
        CudaDriver()


def test_without_a_driver(cuda: Cuda) -> None:
    cuda.results["cuInit"] = Result.INVALID_VALUE
    with pytest.raises(BackendUnavailableError, match="cuInit failed"):
        CudaDriver()


def test_a_module_is_loaded_in_the_primary_context_of_its_device(cuda: Cuda) -> None:
    assert CudaDriver().load(1, b"code") == "module"
    names = [call[0] for call in cuda.calls[1:]]
    assert names == ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuModuleLoadData", "cuCtxPopCurrent"]
    assert ("cuDeviceGet", 1) in cuda.calls


def test_the_context_is_restored_after_a_refusal(cuda: Cuda) -> None:
    cuda.results["cuModuleLoadData"] = Result.NO_BINARY_FOR_GPU
    with pytest.raises(LaunchError, match=r"cuModuleLoadData failed: NO_BINARY_FOR_GPU \(described\)") as caught:
        CudaDriver().load(0, b"code")
    assert (caught.value.code, "another kind of device" in caught.value.hint) == (209, True)
    assert cuda.calls[-1] == ("cuCtxPopCurrent",)


def test_unloading_waits_first(cuda: Cuda) -> None:
    CudaDriver().unload(0, "module")
    names = [call[0] for call in cuda.calls]
    assert names.index("cuCtxSynchronize") < names.index("cuModuleUnload")


def test_shared_memory_is_a_function_attribute(cuda: Cuda) -> None:
    CudaDriver().allow_shared(0, "function", 70_000)
    assert ("cuFuncSetAttribute", "function", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 70_000) in cuda.calls


def test_a_launch_hands_over_config_function_and_table(cuda: Cuda) -> None:
    CudaDriver().prepare(0, "function", LaunchAttributes(block=(64, 1, 1), shared_bytes=9), 1234)(2, 3, 4, 77)
    name, config, function, table, extra = cuda.calls[-1]
    assert (name, function, table, extra) == ("cuLaunchKernelEx", "function", 1234, 0)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX) == (2, 3, 4, 64)
    assert (config.sharedMemBytes, config.hStream, config.attrs, config.numAttrs) == (9, 77, [], 0)


def test_a_later_launch_may_change_grid_and_stream(cuda: Cuda) -> None:
    launch = CudaDriver().prepare(0, "function", PLAIN, 0)
    for arguments in ((2, 3, 4, 77), (2, 3, 5, 77), (2, 3, 5, 0)):
        launch(*arguments)
    config = cuda.calls[-1][1]
    assert (config.gridDimZ, config.hStream) == (5, 0)


def test_attributes_of_a_launch(cuda: Cuda) -> None:
    attributes = LaunchAttributes(block=(128, 1, 1), shared_bytes=0, cluster=(2, 1, 1), cooperative=True, programmatic=True)
    CudaDriver().prepare(0, "function", attributes, 0)(1, 1, 1, 1)
    config = cuda.calls[-1][1]
    assert [attribute.id.removeprefix("CU_LAUNCH_ATTRIBUTE_") for attribute in config.attrs] == [
        "PROGRAMMATIC_STREAM_SERIALIZATION",
        "COOPERATIVE",
        "CLUSTER_DIMENSION",
        "CLUSTER_SCHEDULING_POLICY_PREFERENCE",
    ]
    programmatic, cooperative, cluster, _ = (attribute.value for attribute in config.attrs)
    assert (programmatic.programmaticStreamSerializationAllowed, cooperative.cooperative) == (1, 1)
    assert (cluster.clusterDim.x, cluster.clusterDim.y, cluster.clusterDim.z) == (2, 1, 1)
    assert config.numAttrs == 4


def test_a_refused_launch(cuda: Cuda) -> None:
    launch = CudaDriver().prepare(0, "function", PLAIN, 0)
    cuda.results["cuLaunchKernelEx"] = Result.INVALID_VALUE
    with pytest.raises(LaunchError, match="cuLaunchKernelEx failed") as caught:
        launch(1, 1, 1, 0)
    assert caught.value.code == 1


def test_a_thread_without_a_context_is_given_one(cuda: Cuda) -> None:
    launch = CudaDriver().prepare(1, "function", PLAIN, 0)
    cuda.results["cuLaunchKernelEx"] = Result.INVALID_VALUE
    cuda.values |= {"cuCtxGetCurrent": 0, "cuDevicePrimaryCtxRetain": "context"}
    with pytest.raises(LaunchError):  # and the launch is tried once more
        launch(1, 1, 1, 0)
    assert ("cuDeviceGet", 1) in cuda.calls
    assert ("cuCtxSetCurrent", "context") in cuda.calls
    assert [call[0] for call in cuda.calls].count("cuLaunchKernelEx") == 2
    cuda.values["cuCtxGetCurrent"] = 7
    with pytest.raises(LaunchError):
        launch(1, 1, 1, 0)
    assert [call[0] for call in cuda.calls].count("cuLaunchKernelEx") == 3


def test_a_grid_beyond_the_limits_is_named_when_the_driver_refuses_it(cuda: Cuda) -> None:
    launch = CudaDriver().prepare(0, "function", PLAIN, 0)
    cuda.results["cuLaunchKernelEx"] = Result.INVALID_VALUE
    with pytest.raises(KernelArgumentError, match="65536 blocks in y"):
        launch(1, 65536, 1, 0)


class StrictConfig(SimpleNamespace):
    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("gridDim") and value < 0:
            raise OverflowError("can't convert negative value to unsigned int")
        super().__setattr__(name, value)


def test_after_a_grid_that_is_refused_the_last_one_is_set_again(cuda: Cuda) -> None:
    cuda.CUlaunchConfig = StrictConfig
    launch = CudaDriver().prepare(0, "function", PLAIN, 0)
    launch(2, 3, 4, 0)
    with pytest.raises(OverflowError):
        launch(5, -1, 1, 0)
    launch(2, 3, 4, 0)
    config = cuda.calls[-1][1]
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (2, 3, 4)


def test_a_float_in_a_grid_is_not_cut_down(cuda: Cuda) -> None:
    with pytest.raises(TypeError):
        CudaDriver().prepare(0, "function", PLAIN, 0)(1.5, 1, 1, 0)  # type: ignore[arg-type]


def test_the_capability(cuda: Cuda) -> None:
    cuda.values["cuDeviceGetAttribute"] = 9  # major and minor
    assert CudaDriver().capability(0) == 99
