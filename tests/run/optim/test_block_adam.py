"""Adam with states in 16 bits: torch's own where nothing is rounded, and unbiased where something is.  States in host
memory pass through a device whose side streams are late: copies are made when somebody waits.
"""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor

from mm.device.cpu import CPU, HostRuntime
from mm.device.device import Device
from mm.errors import UserError
from mm.run.optim import block_adam
from mm.run.optim.block_adam import BlockAdam, HostStatesPass, KeptStates, host_memory
from mm.weights.shard import joined, split
from tests.stand_ins.late import late_device

DEVICE = Device.pick("cpu")
BOTH = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
ROUNDED = dict.fromkeys(BOTH, torch.bfloat16)
SHAPES = (7, 5), (40,), (3,), ()


def parameters(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def adam_of(trained: list[Tensor], dtypes: dict[str, torch.dtype] | None, lr: float = 1e-2) -> torch.optim.AdamW:
    """Two groups, one without weight decay; None: torch's own."""
    groups = [{"params": trained[:2], "weight_decay": 0.1}, {"params": trained[2:], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), fused=True)
    return plain if dtypes is None else BlockAdam(plain, KeptStates(dtypes), {}, DEVICE)


def step(adam: torch.optim.AdamW, trained: list[Tensor], seed: int, **switches: Tensor) -> None:
    generator = torch.Generator().manual_seed(seed)
    for one in trained:
        one.grad = torch.randn(one.shape, generator=generator)
    vars(adam).update(switches)
    adam.step()


@pytest.mark.parametrize("block", [16, 32, 1 << 24])
def test_in_fp32_it_is_torchs_adam_to_the_bit_whatever_the_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is a multiple of 16 numbers: the kernel rounds those that do not fill a vector otherwise."""
    monkeypatch.setattr(block_adam, "ROUNDED_AT_ONCE", block)
    ours, theirs = parameters(), parameters()
    mine, torchs = adam_of(ours, BOTH), adam_of(theirs, None)
    for seed in range(3):
        scale, is_bad = torch.tensor(1.5), torch.tensor(float(seed == 1))
        for adam, trained in ((mine, ours), (torchs, theirs)):
            step(adam, trained, seed, grad_scale=scale, found_inf=is_bad)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other) and mine.state[one]["step"] == torchs.state[other]["step"] == 2
        assert all(torch.equal(mine.state[one][moment], torchs.state[other][moment]) for moment in BOTH)


def test_the_second_moment_follows_changes_that_the_nearest_number_would_lose() -> None:
    """Gradients become ten times smaller, so the second moment should fall by a thousandth in each step; half of
    bf16's last place is two to four thousandths."""
    weight = torch.nn.Parameter(torch.zeros(4096))
    plain = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    adam = BlockAdam(plain, KeptStates(ROUNDED), {}, DEVICE)
    exact, nearest, generator = torch.zeros(4096), torch.zeros(4096).bfloat16(), torch.Generator().manual_seed(0)
    for number in range(1200):
        weight.grad = torch.randn(4096, generator=generator) * (1.0 if number < 400 else 0.1)
        square = weight.grad.square()
        exact.mul_(0.999).addcmul_(square, torch.tensor(0.001))
        nearest = (nearest.float() * 0.999 + 0.001 * square).bfloat16()
        adam.step()
    found, expected = adam.state[weight]["exp_avg_sq"].float().mean(), exact.mean()
    assert float(found) == pytest.approx(float(expected), rel=0.01)  # measured 0.0025
    assert float(nearest.float().mean()) > 2 * float(expected)  # measured 2.17


def without_copies(
    numbers: list[Tensor], copy: str, dtypes: dict[str, torch.dtype], host_share: float = 0.0
) -> tuple[BlockAdam, list[Tensor], list[Tensor]]:
    """Adam over bf16 weights that it fills itself; the weights, and what stands for them in its groups."""
    weights, stand_ins = [one.detach().bfloat16() for one in numbers], [one.detach().clone() for one in numbers]
    plain = adam_of(stand_ins, None)
    pairs = dict(zip(stand_ins, weights, strict=True))
    return BlockAdam(plain, KeptStates(dtypes, copy, host_share), pairs, DEVICE), weights, stand_ins


@pytest.mark.parametrize("block", [32, 1 << 24])
@pytest.mark.parametrize("dtypes", [BOTH, ROUNDED], ids=["moments in fp32", "in bf16"])
def test_with_remainders_it_updates_fp32_numbers_to_the_bit(
    dtypes: dict[str, torch.dtype], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_adam, "ROUNDED_AT_ONCE", block)
    exact = [torch.nn.Parameter(one.bfloat16().float()) for one in parameters()]
    mine, weights, stand_ins = without_copies(exact, "remainder", dtypes)
    reference = adam_of(exact, dtypes)
    for seed in range(4):
        scale, is_bad = torch.tensor(1.5), torch.tensor(float(seed == 1))
        for adam, trained in ((mine, stand_ins), (reference, exact)):
            step(adam, trained, seed, grad_scale=scale, found_inf=is_bad)
    for number, weight, stand_in in zip(exact, weights, stand_ins, strict=True):
        state, flat = mine.state[stand_in], number.detach().view(-1)
        assert stand_in.untyped_storage().nbytes() == 4 and stand_in.isnan().all()
        assert torch.equal(joined(weight.view(-1), state["remainder"].view(-1)), flat)
        expected = torch.empty_like(weight).view(-1)
        split(flat, expected, torch.empty(len(flat)).short())
        assert torch.equal(weight.view(-1), expected)
        assert all(torch.equal(state[moment], reference.state[number][moment]) for moment in BOTH)


@pytest.mark.parametrize("block", [32, 1 << 24])
@pytest.mark.parametrize("copy", ["fp32", "remainder", "none"])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.1])
def test_states_pass_through_the_device_to_the_same_numbers(
    share: float, copy: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 79 elements; all but those of the weight with 35; and those of the two smallest weights."""
    monkeypatch.setattr(block_adam, "ROUNDED_AT_ONCE", block)
    mine, weights, stand_ins = without_copies(parameters(), copy, ROUNDED, share)
    reference, others, doubles = without_copies(parameters(), copy, ROUNDED)
    for seed in range(3):
        for adam, trained in ((mine, stand_ins), (reference, doubles)):
            step(adam, trained, seed, grad_scale=torch.tensor(1.5), found_inf=torch.tensor(float(seed == 1)))
        mine.wait()
        for one, other, stand_in, double in zip(weights, others, stand_ins, doubles, strict=True):
            state, expected = mine.state[stand_in], reference.state[double]
            assert torch.equal(one, other) and state.keys() == expected.keys()
            assert all(torch.equal(state[kind], expected[kind]) for kind in state)


def test_a_weight_without_a_copy_follows_changes_that_the_nearest_number_would_lose() -> None:
    """Each step changes the weight by a tenth of bf16's spacing; 300 steps must add up."""
    number, lr, num_steps = torch.full((4096,), 1.5), 7.8e-4, 300
    gradient = 0.5 + torch.rand(4096, generator=torch.Generator().manual_seed(0))
    mine, (weight,), (stand_in,) = without_copies([number], "none", BOTH)
    for group in mine.param_groups:
        group |= {"lr": lr, "weight_decay": 0.0}
    for _ in range(num_steps):
        stand_in.grad = gradient.clone()
        mine.step()
    assert (number - lr).bfloat16().equal(number.bfloat16())  # the nearest number would stay for ever
    changed = 1.5 - float(weight.double().mean())
    assert changed == pytest.approx(lr * num_steps, rel=0.01)


def test_a_step_that_is_not_finite_changes_no_weight_without_a_copy() -> None:
    for copy in ("remainder", "none"):
        mine, weights, stand_ins = without_copies(parameters(), copy, ROUNDED)
        step(mine, stand_ins, 0)
        states = [[weight, *mine.state[one].values()] for weight, one in zip(weights, stand_ins, strict=True)]
        before = [[value.clone() for value in some] for some in states]
        step(mine, stand_ins, 1, found_inf=torch.tensor(1.0))
        assert all(map(torch.equal, chain(*states), chain(*before)))


@pytest.mark.parametrize("sizes", [[(3, 2)], [(3,), (4, 1), (2,)], [(2,), (), (5, 1), ()], []], ids=str)
def test_each_block_is_there_when_it_is_computed_on_and_arrives(sizes: list[tuple[int, ...]]) -> None:
    device = late_device()
    host_pass = HostStatesPass(device)
    flat = iter(host_memory(device, [(size, torch.float32) for block in sizes for size in block]))
    blocks = [[next(flat) for _ in block] for block in sizes]
    for step in range(1, 4):

        def compute(number: int, states: list[Tensor], step: int = step) -> None:
            assert len(states) == len(blocks[number])
            for state, host in zip(states, blocks[number], strict=True):
                assert state.tolist() == [10.0 * number * (step - 1)] * len(host)
                assert state.data_ptr() != host.data_ptr()
                state += 10.0 * number

        host_pass.through(blocks, compute)
        host_pass.wait()
        for number, block in enumerate(blocks):
            assert all(host.tolist() == [10.0 * number * step] * len(host) for host in block)


def test_too_little_host_memory_is_named() -> None:
    class Full(HostRuntime):
        def host_buffer(self, num_bytes: int) -> Tensor | None:
            raise RuntimeError("CUDA error: out of memory")

    said = "keeps 4,096 bytes of this rank's optimizer states in host memory, and 4,096 bytes of it cannot be allocated"
    with pytest.raises(UserError, match=said):
        host_memory(replace(Device.pick("cpu"), platform=replace(CPU, runtime=Full)), [(1024, torch.float32)])
