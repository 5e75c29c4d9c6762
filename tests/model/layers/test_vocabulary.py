"""Word embedding and output layer: exact for any cut and any number of logits at a time, without a tensor too many.

Under tensor and data parallelism in real processes: tests/test_parity.py.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mm.device.cuda import cuda_accumulate
from mm.device.device import Device
from mm.device.kernels import EAGER_LOGITS, LogitKernels, plain_accumulate
from tests.devices import kernels_of

Device.pick("cpu")  # importing megatron needs it

from mm.model.layers import vocabulary  # noqa: E402
from mm.model.layers.loss import MAX_LOGIT_ROWS, max_logit_rows  # noqa: E402
from mm.model.layers.vocabulary import rows_here, weighted_cross_entropy  # noqa: E402

fast = settings(max_examples=40, deadline=None)
VOCAB, HIDDEN = 24, 6
FUSABLE = kernels_of("cuda", lambda function: function).logits
"""CUDA's, not compiled; compiled: tests/device/test_compiled.py."""
EXACT = 1e-5  # relative, by norm; measured 3.2e-6 over 1000 examples, and 1.7e-5 by torch's own cross entropy in fp32
ids = st.lists(st.integers(0, VOCAB - 1), max_size=12).map(lambda drawn: torch.tensor(drawn, dtype=torch.int64))
cuts = st.sampled_from([1, 2, 3, 8])

lookup = vocabulary._Lookup.apply


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


READS_THE_DEVICE = ("_local_scalar_dense", "nonzero", "masked_select", "masked_fill", "aten.equal", "is_nonzero")
"""Operators for which the device must tell the host a value or a size: on NPU, if not everywhere."""


class Recorder(TorchDispatchMode):
    """Which operators ran, the shapes of what they made, and the bytes of ``watched`` tensors that lived at once."""

    def __init__(self, watched=lambda tensor: False) -> None:
        super().__init__()
        self.names: list[str] = []
        self.reads: list[str] = []
        self.made: list[torch.Size] = []
        self.watched, self.alive, self.peak_bytes = watched, [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        old = {tensor.untyped_storage()._cdata for tensor in given}
        result = function(*args, **(kwargs or {}))
        self.names.append(name)
        by_mask = "index" in name and any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given)
        if by_mask or any(word in name for word in READS_THE_DEVICE):
            self.reads.append(name)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in old:
                self.made.append(tensor.shape)
                if self.watched(tensor):
                    self.alive.append((StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()))
        self.alive = [(storage, num_bytes) for storage, num_bytes in self.alive if not storage.expired()]
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self.alive))
        return result


def relative_error(found: Tensor, expected: Tensor) -> float:
    """By norm."""
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


# The word embedding


@fast
@given(token_ids=ids, num_cuts=cuts, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_cut_lookups_sum_to_the_whole_one(token_ids: Tensor, num_cuts: int, dtype: torch.dtype) -> None:
    weight, upstream = leaf(VOCAB, HIDDEN, dtype=dtype), torch.randn(len(token_ids), HIDDEN).to(dtype)
    whole = copy_of(weight.float())
    F.embedding(token_ids, whole).backward(upstream.float())
    parts = [copy_of(part) for part in weight.chunk(num_cuts)]
    outputs = []
    for rank, part in enumerate(parts):
        where = (token_ids, None) if num_cuts == 1 else rows_here(token_ids, rank * len(part), len(part))
        outputs.append(lookup(part, *where))
        outputs[-1].backward(upstream)
    assert torch.equal(sum(outputs), F.embedding(token_ids, weight))
    found = torch.cat([part.grad for part in parts])
    torch.testing.assert_close(found, whole.grad.to(dtype))


def test_the_embeddings_gradient_is_added_to_megatrons_buffer_in_fp32() -> None:
    """Many times the same token: a sum in bf16 would stop growing at 256."""
    weight, token_ids = leaf(VOCAB, HIDDEN, dtype=torch.bfloat16), torch.full((1000,), 3)
    weight.main_grad = torch.ones(VOCAB, HIDDEN)
    lookup(weight, token_ids, None).backward(torch.ones(1000, HIDDEN, dtype=torch.bfloat16))
    expected = torch.ones(VOCAB, HIDDEN)
    expected[3] += 1000
    assert torch.equal(weight.main_grad, expected)
    assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape


# The output layer


def reference(x: Tensor, weight: Tensor, target: Tensor, row_weights: Tensor) -> Tensor:
    return (F.cross_entropy(F.linear(x, weight).float(), target, reduction="none") * row_weights).sum()


@fast
@given(target=ids, max_rows=st.integers(1, 14), is_frozen=st.booleans(), has_buffer=st.booleans(),
       kernels=st.sampled_from([EAGER_LOGITS, FUSABLE]))
def test_any_number_of_rows_at_a_time_is_the_same_loss(
    target: Tensor, max_rows: int, is_frozen: bool, has_buffer: bool, kernels: LogitKernels
) -> None:
    """Against torch's cross entropy in float64."""
    x, weight, row_weights = leaf(len(target), HIDDEN), leaf(VOCAB, HIDDEN, seed=1), torch.rand(len(target))
    exact_x, exact_weight = copy_of(x.double()), copy_of(weight.double())
    exact = (F.cross_entropy(F.linear(exact_x, exact_weight), target, reduction="none") * row_weights).sum()
    (3 * exact).backward()
    if has_buffer:
        weight.main_grad = torch.zeros(VOCAB, HIDDEN)
    weight.requires_grad_(not is_frozen)
    loss = weighted_cross_entropy(
        x, weight, target, None, row_weights, plain_accumulate, max_rows=max_rows, kernels=kernels)
    (3 * loss).backward()
    assert relative_error(loss.detach(), exact.detach()) < EXACT
    assert relative_error(x.grad, exact_x.grad) < EXACT
    if is_frozen:
        assert weight.grad is None and not (has_buffer and weight.main_grad.any())
    else:
        assert relative_error(weight.main_grad if has_buffer else weight.grad, exact_weight.grad) < EXACT


def test_float16_keeps_gradients_that_only_the_loss_scale_makes_large_enough() -> None:
    """A weight of 1e-6 for each token, as in a batch of a million: e^logit times it is below float16's least number."""
    target, row_weights, scale = torch.arange(8), torch.full((8,), 1e-6), 65536.0
    x, weight = leaf(8, HIDDEN, dtype=torch.float16), leaf(VOCAB, HIDDEN, seed=1, dtype=torch.float16)
    exact_x, exact_weight = copy_of(x.float()), copy_of(weight.float())
    (reference(exact_x, exact_weight, target, row_weights) * scale).backward()
    weight.main_grad = torch.zeros(VOCAB, HIDDEN)
    (weighted_cross_entropy(x, weight, target, None, row_weights, plain_accumulate, max_rows=3) * scale).backward()
    for found, expected in ((x.grad, exact_x.grad), (weight.main_grad, exact_weight.grad)):
        assert relative_error(found, expected) < 2e-3  # measured 3.5e-4


def test_the_loss_is_computed_in_float32() -> None:
    """bfloat16 logits lose no more than their own rounding."""
    x, weight, target = leaf(6, HIDDEN).bfloat16(), leaf(VOCAB, HIDDEN, seed=1).bfloat16(), torch.arange(6)
    expected = F.cross_entropy(F.linear(x, weight).double(), target, reduction="sum")
    for kernels in (EAGER_LOGITS, FUSABLE):
        loss = weighted_cross_entropy(
            x, weight, target, None, torch.ones(6), plain_accumulate, max_rows=4, kernels=kernels)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("num_cuts", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_and_eager_logits_have_equal_gradients_to_the_bit(dtype: torch.dtype, num_cuts: int) -> None:
    """Also of a rank's part of the vocabulary, where some targets are another's."""
    target, is_here = rows_here(torch.arange(8) * 3, 0, VOCAB // num_cuts)
    found = []
    for kernels in (EAGER_LOGITS, FUSABLE):
        x, weight = leaf(8, HIDDEN, dtype=dtype), leaf(VOCAB // num_cuts, HIDDEN, seed=1, dtype=dtype)
        loss = weighted_cross_entropy(x, weight, target, None if num_cuts == 1 else is_here, torch.rand(
            8, generator=torch.Generator().manual_seed(2)), plain_accumulate, max_rows=5, kernels=kernels)
        loss.backward()
        found.append((loss.detach(), x.grad, weight.grad))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("num_targets", "num_products"), [(0, 0), (1024, 3), (1025, 7), (3000, 11)])
def test_only_rounds_before_the_last_make_their_logits_again(num_targets: int, num_products: int) -> None:
    """Three products a round, and one more for each round but one."""
    x, weight = leaf(num_targets, HIDDEN), leaf(VOCAB, HIDDEN, seed=1)
    target = torch.zeros(num_targets, dtype=torch.int64)
    with Recorder() as recorder:
        weighted_cross_entropy(x, weight, target, None, torch.ones(num_targets), plain_accumulate).backward()
    assert len([name for name in recorder.names if name.startswith(("aten.mm", "aten.addmm"))]) == num_products


# What is never made: on the meta device, at the real sizes of 3B


with_cudas_torch = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13.0a0"),
    reason="torch below 2.13 cannot trace a product with another output dtype on the meta device")
REAL_VOCAB, REAL_HIDDEN, NUM_TARGETS, NUM_TOKENS = 151_936, 2048, 8000, 8192


def tied_step(is_cut: bool, has_buffer: bool = True, kernels: LogitKernels = EAGER_LOGITS,
              max_rows: int = MAX_LOGIT_ROWS) -> Recorder:
    """Forward and backward of a tied embedding and head as on CUDA, in bf16."""
    num_rows = REAL_VOCAB // 2 if is_cut else REAL_VOCAB
    weight = torch.empty(num_rows, REAL_HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    if has_buffer:
        weight.main_grad = torch.empty(num_rows, REAL_HIDDEN, device="meta")
    token_ids = torch.empty(NUM_TOKENS, dtype=torch.int64, device="meta")
    recorder = Recorder(watched=lambda tensor: num_rows in tensor.shape[1:])
    with recorder:
        rows, is_here = rows_here(token_ids, num_rows, num_rows) if is_cut else (token_ids, None)
        x = lookup(weight, rows, is_here)[:NUM_TARGETS]
        row_weights, target = torch.empty(NUM_TARGETS, device="meta"), rows[:NUM_TARGETS]
        is_here = None if is_here is None else is_here[:NUM_TARGETS]
        weighted_cross_entropy(
            x, weight, target, is_here, row_weights, cuda_accumulate, max_rows=max_rows, kernels=kernels).backward()
    return recorder


@with_cudas_torch
@pytest.mark.parametrize("is_cut", [False, True])
def test_no_gradient_of_the_vocabularys_shape_is_made(is_cut: bool) -> None:
    recorder = tied_step(is_cut)
    num_rows = REAL_VOCAB // 2 if is_cut else REAL_VOCAB
    assert not [shape for shape in recorder.made if shape == (num_rows, REAL_HIDDEN)]
    assert [shape for shape in tied_step(is_cut, has_buffer=False).made if shape == (num_rows, REAL_HIDDEN)]


@with_cudas_torch
@pytest.mark.parametrize("is_cut", [False, True])
def test_logits_live_for_no_more_rows_than_stated(is_cut: bool) -> None:
    recorder = tied_step(is_cut)
    num_columns = REAL_VOCAB // 2 if is_cut else REAL_VOCAB
    logits = [shape for shape in recorder.made if num_columns in shape[1:]]
    assert max(shape[0] for shape in logits) == MAX_LOGIT_ROWS
    assert recorder.peak_bytes == MAX_LOGIT_ROWS * num_columns * (4 + 2)


@with_cudas_torch
@pytest.mark.parametrize("is_cut", [False, True])
def test_more_rows_of_fused_logits_live_in_the_same_memory(is_cut: bool) -> None:
    """As one kernel makes the gradient: of what it makes on the way nothing lives."""
    num_columns, max_rows = REAL_VOCAB // 2 if is_cut else REAL_VOCAB, max_logit_rows(2, is_fused=True)
    kernels = replace(FUSABLE, sums=lambda logits: (logits.new_empty(len(logits), 1, dtype=torch.float32),) * 2,
                      gradient=lambda logits, *_: torch.empty_like(logits))  # fmt: skip
    recorder = tied_step(is_cut, kernels=kernels, max_rows=max_rows)
    assert max(shape[0] for shape in recorder.made if num_columns in shape[1:]) == max_rows == 1536
    assert recorder.peak_bytes == max_rows * num_columns * (2 + 2) == MAX_LOGIT_ROWS * num_columns * (4 + 2)


def test_megatrons_hook_runs_once_and_after_both_uses_of_a_tied_weight() -> None:
    """It sends the gradients away; what came later would be lost."""
    weight, token_ids = leaf(VOCAB, HIDDEN), torch.tensor([1, 5, 5, 7])
    expected = copy_of(weight)
    for _ in range(2):
        reference(F.embedding(token_ids, expected), expected, token_ids, torch.ones(4)).backward()
    weight.main_grad, sent = torch.zeros(VOCAB, HIDDEN), []
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]

    def hook(*_: object) -> None:
        assert weight.grad is not None and weight.grad_added_to_main_grad
        weight.grad = None
        sent.append(weight.main_grad.clone())

    accumulator.register_hook(hook)
    for _ in range(2):
        x = lookup(weight, token_ids, None)
        weighted_cross_entropy(x, weight, token_ids, None, torch.ones(4), plain_accumulate, max_rows=3).backward()
    assert len(sent) == 2
    torch.testing.assert_close(sent[-1], expected.grad)
