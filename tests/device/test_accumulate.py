"""Weight gradients added to an fp32 buffer by the product itself: what each device's form computes and calls."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mm.device import npu as npu_platform
from mm.device.cuda import cuda_accumulate
from mm.device.kernels import Accumulate, plain_accumulate
from mm.device.npu import npu_accumulate
from tests.device.marks import on_cuda

ROWS, OUTPUT, INPUT = 64, 48, 40
HALVES = (torch.bfloat16, torch.float16)

# Relative, by norm, after 48 microbatches, against their sum in float64.  Measured for bf16 and fp16: 1.4e-7 and 1.8e-7
# by the product that accumulates; 1.7e-3 and 2.1e-4 by a product rounded to bf16 or fp16 that is then added.
TOLERANCE = 1e-6


@pytest.fixture
def cuda_form_on_the_cpu() -> Iterator[None]:
    """The CPU has no product of two dtypes; what cuBLAS computes, as its implementation of torch's operator."""
    library = torch.library.Library("aten", "IMPL", "CPU")

    def addmm(self, mat1, mat2, out_dtype, *, beta=1, alpha=1, out):
        assert out.dtype == out_dtype == self.dtype == torch.float32 and mat1.dtype == mat2.dtype in HALVES
        return torch.addmm(self, mat1.float(), mat2.float(), beta=beta, alpha=alpha, out=out)

    def mm(self, mat2, out_dtype, *, out):
        assert out.dtype == out_dtype == torch.float32 and self.dtype == mat2.dtype and self.dtype in HALVES
        return torch.mm(self.float(), mat2.float(), out=out)

    library.impl("addmm.dtype_out", addmm)
    library.impl("mm.dtype_out", mm)
    yield
    library._destroy()


@pytest.fixture
def npu(torch_npu, monkeypatch: pytest.MonkeyPatch):
    """The stand-in; what was found out about the operator is forgotten before and after."""
    npu_platform._matmul_add_fault.cache_clear()
    yield torch_npu
    monkeypatch.undo()
    npu_platform._matmul_add_fault.cache_clear()


def rows(dtype: torch.dtype, seed: int = 0, num_rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """A gradient and the inputs of a layer; the gradient is a view whose rows are not together in memory."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(OUTPUT, num_rows, generator=generator).to(dtype).t()
    return gradient, torch.randn(num_rows, INPUT, generator=generator).to(dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def assert_accumulates(form: Accumulate, dtype: torch.dtype, where: str = "cpu") -> None:
    gradient, x = (tensor.to(where) for tensor in rows(dtype))
    buffer = torch.randn(OUTPUT, INPUT, device=where)
    expected = buffer.double() + gradient.double().t() @ x.double()
    form(buffer, gradient, x, False)
    assert relative_error(buffer, expected) < TOLERANCE
    buffer.fill_(torch.nan)
    form(buffer, gradient, x, True)
    assert relative_error(buffer, gradient.double().t() @ x.double()) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_product_is_added_in_fp32(dtype, npu, cuda_form_on_the_cpu) -> None:
    for form in (plain_accumulate, cuda_accumulate, npu_accumulate):
        assert_accumulates(form, dtype)


def test_a_buffer_in_the_dtype_of_the_rows_is_rounded_once_a_product(npu) -> None:
    """By 2^-9 at most, which is half of a unit in bf16's last place; measured 1.7e-3 by norm."""
    gradient, x = rows(torch.bfloat16)
    start = torch.randn(OUTPUT, INPUT).bfloat16()
    expected = start.double() + gradient.double().t() @ x.double()
    for form in (plain_accumulate, cuda_accumulate, npu_accumulate):
        buffer = start.clone()
        form(buffer, gradient, x)
        assert buffer.dtype == torch.bfloat16 and relative_error(buffer, expected) < 2**-9


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_on_cuda(dtype) -> None:
    assert_accumulates(cuda_accumulate, dtype, "cuda")


@pytest.mark.parametrize("dtype", HALVES)
def test_the_call_is_one_that_torch_takes_and_makes_no_product_to_be_added(dtype) -> None:
    """Shapes and dtypes are checked by torch's own meta implementation."""
    gradient, x = (tensor.to("meta") for tensor in rows(dtype))
    buffer = torch.empty(OUTPUT, INPUT, device="meta")
    made = []

    class Operators(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made.append((str(function), result := function(*args, **(kwargs or {}))))
            return result

    with Operators():
        cuda_accumulate(buffer, gradient, x)
    (name, result) = made[-1]
    assert name == "aten.addmm.dtype_out" and result is buffer
    assert [name for name, _ in made[:-1]] == ["aten.t.default"]


# Ascend


def counted(npu, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the operator's inputs, as it is called."""
    shapes, operator = [], npu._npu_matmul_add_fp32

    def call(x: Tensor, weight: Tensor, C: Tensor) -> None:
        shapes.append(tuple(x.shape))
        operator(x, weight, C)

    monkeypatch.setattr(npu, "_npu_matmul_add_fp32", call)
    return shapes


def test_the_npus_operator_is_tried_once_and_then_used(npu, monkeypatch) -> None:
    shapes = counted(npu, monkeypatch)
    for _ in range(3):
        assert_accumulates(npu_accumulate, torch.bfloat16)
    assert shapes == [(16, 16)] + [(ROWS, OUTPUT)] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_that_overwrites_is_one_that_is_added_to_zeros_to_the_bit(dtype) -> None:
    for seed in range(20):
        gradient, x = rows(dtype, seed, 1 + 37 * seed)
        written, added = torch.full((OUTPUT, INPUT), torch.nan), torch.zeros(OUTPUT, INPUT)
        plain_accumulate(written, gradient, x, True)
        plain_accumulate(added, gradient, x)
        assert torch.equal(written, added)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_change_nothing(dtype, npu) -> None:
    gradient, x = rows(dtype, num_rows=0)
    for form in (plain_accumulate, cuda_accumulate, npu_accumulate):
        buffer = torch.ones(OUTPUT, INPUT)
        form(buffer, gradient, x)
        assert torch.equal(buffer, torch.ones(OUTPUT, INPUT))
        form(buffer, gradient, x, True)
        assert not buffer.any()


def without_library(x: Tensor, weight: Tensor, C: Tensor) -> None:
    raise OSError("libatb.so: cannot open shared object file")


def does_nothing(x: Tensor, weight: Tensor, C: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("operator", "said"),
    [(without_library, "OSError: libatb.so"), (does_nothing, r"1 \+ 16 was \[1.0\]"), (None, "AttributeError")],
)
def test_where_the_npus_operator_does_not_work_one_warning_is_given_and_products_are_rounded(
    npu, monkeypatch, operator, said: str
) -> None:
    if operator is None:
        monkeypatch.delattr(npu, "_npu_matmul_add_fp32")
    else:
        monkeypatch.setattr(npu, "_npu_matmul_add_fp32", operator)
    gradient, x = rows(torch.bfloat16)
    buffer, expected = torch.ones(OUTPUT, INPUT), torch.ones(OUTPUT, INPUT) + gradient.t() @ x
    with pytest.warns(UserWarning, match=f"source its atb/set_env.sh. The error was: .*{said}"):
        npu_accumulate(buffer, gradient, x)
    assert torch.equal(buffer, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        npu_accumulate(buffer, gradient, x)
    assert_accumulates(npu_accumulate, torch.float32)
