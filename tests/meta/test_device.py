"""The counter of the meta device: what is a kernel, which bytes it moves, what lives, and when the host waits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.meta.device import META, Recorder, Tally, meta_device
from tests.meta.kernels import fused_rms_norm, sdpa, varlen_attn

ROWS, WIDTH = 8, 16
X_BYTES = ROWS * WIDTH * 4


def recorded(work: Callable[[Tensor], object]) -> dict[str, Tally]:
    """What ``work`` on an fp32 tensor [ROWS, WIDTH] does, by operator."""
    with Recorder() as recorder:
        x = torch.empty(ROWS, WIDTH, device=META)
        work(x)
    return {name: tally for (_, name), tally in recorder.tallies.items()}


@pytest.mark.parametrize(("work", "operator", "num_bytes"), [
    (lambda x: x + x[:1], "add", 2 * X_BYTES + X_BYTES / ROWS), (lambda x: x.add_(x), "add_", 3 * X_BYTES),
    (lambda x: x.zero_(), "zero_", X_BYTES), (lambda x: x[:4].copy_(x[4:]), "copy_", X_BYTES),
    (lambda x: x[torch.zeros(2, dtype=torch.int64, device=META)], "index", 2 * 8 + 2 * 2 * WIDTH * 4),
    (lambda x: x.index_put_((torch.zeros(2, dtype=torch.int64, device=META),), x[:2], accumulate=True),
     "index_put_", 2 * 8 + 3 * 2 * WIDTH * 4),
    (lambda x: x.bfloat16(), "_to_copy", 1.5 * X_BYTES),
    (lambda x: torch.mul(x, 2, out=torch.empty_like(x)), "mul", 2 * X_BYTES),
    (lambda x: torch._foreach_copy_([x[:4]], [x[4:]]), "_foreach_copy_", X_BYTES),
])  # fmt: skip
def test_bytes_of_a_kernel(work: Callable[[Tensor], object], operator: str, num_bytes: float) -> None:
    tally = recorded(work)[operator]
    assert (tally.kernels, tally.num_bytes) == (1, num_bytes)


@pytest.mark.parametrize("work", [
    lambda x: x.view(-1)[3:].t(), torch.empty_like, lambda x: x.to(torch.float32), lambda x: x[:0] + 1,
    lambda x: x.copy_(x[:]), lambda x: torch.ones(3) + 1,  # on the host
])  # fmt: skip
def test_what_launches_nothing(work: Callable[[Tensor], object]) -> None:
    assert recorded(work) == {}


def test_a_product_adds_to_an_fp32_buffer_in_one_kernel() -> None:
    def work(x: Tensor) -> None:
        half, buffer = torch.empty_like(x, dtype=torch.bfloat16), torch.empty(WIDTH, WIDTH, device=META)
        torch.addmm(buffer, half.t(), half, out_dtype=torch.float32, out=buffer)

    assert recorded(work) == {
        "addmm": Tally(1, 2 * X_BYTES / 2 + 2 * WIDTH * WIDTH * 4, flops=2 * ROWS * WIDTH * WIDTH)
    }


def test_a_fused_function_is_one_kernel_and_keeps_no_intermediate() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(x * y) + 1, x - y

    with Recorder() as recorder:
        x, y = torch.empty(ROWS, WIDTH, device=META), torch.empty(WIDTH, device=META)
        before = recorder.live_bytes
        outputs = recorder.fuse(function)(x, y)
        assert recorder.live_bytes == before + 2 * X_BYTES
        del outputs
        assert recorder.live_bytes == before
    assert dict(recorder.tallies) == {("zero", "function"): Tally(1, 3 * X_BYTES + WIDTH * 4)}


def test_a_fused_function_that_sums_rows_is_two_kernels() -> None:
    """It writes a partial sum of every 64 rows, which the second reads."""
    with Recorder() as recorder:
        recorder.fuse(lambda x: (x * 2, x.sum(0)))(torch.empty(130, WIDTH, device=META))
    x_bytes, sum_bytes = 130 * WIDTH * 4, WIDTH * 4
    assert dict(recorder.tallies) == {
        ("zero", "<lambda>"): Tally(1, 2 * x_bytes + 3 * sum_bytes), ("zero", "sum"): Tally(1, 4 * sum_bytes)}


def test_memory_lives_as_long_as_a_view_or_the_graph_needs_it() -> None:
    with Recorder() as recorder:
        x = torch.empty(ROWS, WIDTH, device=META, requires_grad=True)
        view = (x * 2)[:1]
        assert recorder.live_bytes == 2 * X_BYTES
        del view
        assert recorder.live_bytes == X_BYTES
        out = x.exp().sum()  # exp keeps its own output
        assert recorder.live_bytes == 2 * X_BYTES + 4
        out.backward()
        assert recorder.peak_bytes >= 3 * X_BYTES
        assert recorder.in_flight_bytes == 2 * X_BYTES + 8  # with the gradient of the sum
        del out
        assert recorder.live_bytes == 2 * X_BYTES  # x and its gradient
    assert {phase for phase, _ in recorder.tallies} == {"zero", "backward"}


@pytest.mark.parametrize("read", [float, lambda x: x.item(), lambda x: x.tolist(), lambda x: x.cpu(), bool])
def test_the_host_waits_once(read: Callable[[Tensor], object]) -> None:
    with Recorder() as recorder:
        read(torch.empty((), device=META))
    assert dict(recorder.host_reads) == {"zero": 1}


def test_copies_to_the_device_are_no_kernels() -> None:
    with Recorder() as recorder:
        meta_device(recorder).copy(torch.arange(3))
    assert (recorder.num_copies, dict(recorder.tallies)) == (1, {})


def test_fused_kernels_keep_what_their_gradients_read() -> None:
    heads, groups, dim = 4, 2, 8
    with Recorder() as recorder:
        q = torch.empty(ROWS, heads, dim, device=META, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(ROWS, groups, dim, device=META, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
        starts = meta_device(recorder).copy(torch.tensor([0, 3, ROWS]))
        before = recorder.live_bytes
        out = varlen_attn(q, k, v, starts, starts, 5, 5, window_size=(-1, 0), enable_gqa=True)
        assert out.shape == q.shape and out.is_contiguous()
        assert recorder.live_bytes - before == ROWS * heads * (dim * 2 + 4)
        norm, weight = torch.empty(ROWS, WIDTH, device=META, requires_grad=True), torch.empty(WIDTH, device=META)
        total = out.float().sum() + fused_rms_norm(norm, weight)[0].sum()
        total.backward()
    tallies = {name: tally for (_, name), tally in recorder.tallies.items()}
    flops = 4 * (3**2 + 5**2) * heads * dim / 2
    assert (tallies["flash_attention"].flops, tallies["flash_attention_backward"].flops) == (flops, 2.5 * flops)
    assert tallies["rms_norm"].kernels == tallies["rms_norm_backward_input"].kernels == 1
    assert "rms_norm_backward_weight" not in tallies  # frozen
    assert v.grad is not None and v.grad.shape == v.shape


def test_sdpa_over_batches() -> None:
    with Recorder() as recorder:
        q = torch.empty(2, 4, ROWS, 8, device=META)
        assert sdpa(q, q, q).shape == q.shape
    assert recorder.tallies["zero", "flash_attention"].flops == 2 * 4 * 4 * ROWS**2 * 8
