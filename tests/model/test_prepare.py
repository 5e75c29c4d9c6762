"""Several microbatches share a pass of the ViT: the same rows and the same gradient, and one backward pass."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mm.device.device import Device

Device.pick("cpu")  # before megatron is imported

from mm.model.prepare import SharedVisionPass  # noqa: E402

WIDTH = 3


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any), st.booleans(),
       st.randoms(use_true_random=False))  # fmt: skip
def test_one_backward_pass_whatever_the_order(num_tokens: list[int], are_exchanged: bool, random) -> None:
    generator = torch.Generator().manual_seed(sum(num_tokens))
    weight = torch.randn(WIDTH, WIDTH, generator=generator, requires_grad=True)
    pixels = torch.randn(sum(num_tokens), WIDTH, generator=generator)
    factors = torch.randn(sum(num_tokens), WIDTH, generator=generator)
    num_passes = []
    made = pixels @ weight
    made.register_hook(lambda gradient: num_passes.append(len(gradient)))
    together = SharedVisionPass(num_tokens, are_exchanged)
    together.fill(made)
    taken = [together.take() for _ in num_tokens]
    assert [0 if one is None else len(one) for one in taken] == num_tokens
    assert [one is not None for one in taken] == [bool(count) or are_exchanged for count in num_tokens]
    assert torch.equal(torch.cat([one for one in taken if one is not None]), made)
    assert all(one is None or one._base is None for one in taken)  # megatron frees what is sent
    losses = [(one * part).sum() for one, part in zip(taken, factors.split(num_tokens), strict=True) if one is not None]
    random.shuffle(losses)
    for number, loss in enumerate(losses):
        assert weight.grad is None and not num_passes, number
        loss.backward()
    assert num_passes == [sum(num_tokens)]
    assert torch.equal(weight.grad, pixels.T @ factors)


def test_without_gradients_only_rows_are_handed_on() -> None:
    together = SharedVisionPass([2, 0, 1], are_exchanged=False)
    made = torch.arange(9.0).view(3, 3)
    together.fill(made)
    first, second, third = (together.take() for _ in range(3))
    assert torch.equal(first, made[:2]) and second is None and torch.equal(third, made[2:])
    assert not first.requires_grad and first.data_ptr() != made.data_ptr()


def test_a_rank_that_encodes_nothing_takes_nothing() -> None:
    together = SharedVisionPass([0, 0], are_exchanged=True)
    assert together.take() is None and together.take() is None
