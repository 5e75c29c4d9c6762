"""Deterministic mode: what is set, and what of a user's environment is refused.  That runs are equal: test_train.py."""

from collections.abc import Iterator

import pytest
import torch

from mm.device.cuda import CUDA
from mm.device.device import Device
from mm.device.platform import make_deterministic
from mm.errors import UserError
from tests.device.marks import on_cuda
from tests.devices import platform_of


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    assert not torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(False)


def test_the_switch_is_torchs_own() -> None:
    Device.pick("cpu")
    assert not torch.are_deterministic_algorithms_enabled()
    Device.pick("cpu", deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.benchmark  # nobody here turns it on


@pytest.mark.parametrize(("kind", "given", "expected"), [
    ("cpu", {"NCCL_ALGO": "NVLS"}, {"NCCL_ALGO": "NVLS"}),
    ("cuda", {}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}),
    ("cuda", {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "^nvls"},
     {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "^nvls"}),
    ("npu", {"HCCL_DETERMINISTIC": "True", "ATB_MATMUL_SHUFFLE_K_ENABLE": "1"},
     {"HCCL_DETERMINISTIC": "True", "CLOSE_MATMUL_K_SHIFT": "1", "ATB_MATMUL_SHUFFLE_K_ENABLE": "0"}),
    ("npu", {}, {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1", "ATB_MATMUL_SHUFFLE_K_ENABLE": "0"}),
])  # fmt: skip
def test_the_libraries_variables_are_set_where_they_are_not(kind: str, given: dict, expected: dict) -> None:
    environment = dict(given)
    make_deterministic(platform_of(kind).deterministic_variables, environment)
    assert environment == expected


def test_variables_that_let_results_differ_are_refused_together() -> None:
    given = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "NCCL_ALGO": "NVLS"}
    environment = dict(given)
    with pytest.raises(UserError) as caught:
        make_deterministic(CUDA.deterministic_variables, environment)
    assert caught.value.problems == (
        "--deterministic-mode is set, but the environment variable CUBLAS_WORKSPACE_CONFIG is ':0:0', which lets "
        "results differ from run to run; unset it, or set it to one of :4096:8, :16:8",
        "--deterministic-mode is set, but the environment variable NCCL_ALGO is 'NVLS', which lets results differ from "
        "run to run; unset it, or set it to one of Ring, Tree, CollnetDirect, CollnetChain, ^NVLS",
    )
    assert environment == given and not torch.are_deterministic_algorithms_enabled()


@on_cuda
def test_attentions_backward_on_cuda_gives_the_same_bits() -> None:
    """Without the switch its sums are atomic additions in any order."""
    from mm.device.attention import Segments
    from mm.device.cuda import cuda_attention

    device = Device.pick("cuda", deterministic=True)
    generator = torch.Generator("cuda").manual_seed(0)
    segments = Segments.build((1500, 700, 1900), device.copy)
    q, k, v = (torch.randn(4100, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16,
                           requires_grad=True) for heads in (16, 2, 2))  # fmt: skip
    gradients = [torch.autograd.grad(cuda_attention(q, k, v, segments, True).float().square().sum(), (q, k, v))
                 for _ in range(5)]
    assert all(torch.equal(a, b) for one in gradients[1:] for a, b in zip(one, gradients[0], strict=True))
