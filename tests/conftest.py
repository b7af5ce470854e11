"""Settings of every test: float64, one thread, uninitialized memory filled with NaN, shapes checked at each call."""

import os

from support.typechecks import install_checker

# Set before anything imports Triton: its interpreter then runs the GPU kernels. Tests compile them in a subprocess.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # the default, but Triton warns if it is unset

# Installed before adptnet is imported anywhere.
hook = install_checker("adptnet", "adptnet_lab")

import importlib  # noqa: E402
import importlib.util  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402

import numpy  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from adptnet.ops import _gpu  # noqa: E402

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


KERNELS = ("adptnet.ops.linear_scan.triton", "adptnet.ops.adpt_scan.triton", "adptnet.ops.adpt_step.triton")


@pytest.fixture
def emulated_gpu(monkeypatch) -> Iterator[None]:
    """Make CPU tensors take every branch of CUDA tensors, with the kernels run by Triton's interpreter (tiny sizes)."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'adptnet[triton]'")
    monkeypatch.setenv("ADPTNET_BACKEND", "auto")
    finders = list(sys.meta_path)
    if not set(KERNELS) <= set(sys.modules):
        hook.uninstall()  # Triton reads the source of the kernels, which must not be decorated
        for name in KERNELS:
            importlib.import_module(name)
        sys.meta_path[:] = finders
    monkeypatch.setattr(_gpu, "_emulated", True)
    with numpy.errstate(all="ignore"):  # a GPU does not warn of overflow
        yield
