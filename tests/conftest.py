"""Settings of every test process and of the processes that tests start, made before torch is imported."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

os.environ |= {
    "OMP_NUM_THREADS": "1",  # several processes share two cores
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch would import any accelerator plugin that is installed
    "HF_HUB_OFFLINE": "1",
}


# A busy machine is no mistake of the code: no example fails because it took long.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="module")
def torch_npu() -> Iterator[ModuleType]:
    """The stand-in for Ascend's package, importable for the tests of one file only."""
    folder = str(Path(__file__).parent / "stand_ins")
    sys.path.insert(0, folder)
    yield importlib.import_module("torch_npu")
    sys.path.remove(folder)
    del sys.modules["torch_npu"]
