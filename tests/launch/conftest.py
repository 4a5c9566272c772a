from __future__ import annotations

from pathlib import Path

import pytest

from rung.cache import Store
from rung.launch import TritonLauncher
from tests.launch.fakes import MODULE, FakeDriver, FakeImages


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def launcher(driver: FakeDriver, tmp_path: Path) -> TritonLauncher:
    found = TritonLauncher(MODULE, "scale_kernel", driver=driver, road="prebound")
    found.__dict__["images"] = FakeImages(driver, Store(tmp_path))
    return found
