"""The weight of every token's loss, for both definitions of the loss, whatever the microbatching."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.batch import IGNORE_INDEX, BatchTotals, Microbatch
from mm.device.device import Device
from tests.tiny import our_config

CPU = Device.pick("cpu")  # importing megatron needs it

from mm.model.loss import loss_inputs, weighted_cross_entropy  # noqa: E402

fast = settings(max_examples=40, deadline=None)
VISION = our_config(((4,),), ((4,),)).vision
VOCAB = 11

samples = st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=6)
"""For each sample, which of its tokens are targets."""


def pack(is_target: list[list[bool]], seed: int) -> Microbatch:
    flat = torch.tensor([target for sample in is_target for target in sample], dtype=torch.bool)
    ids = torch.randint(0, VOCAB, flat.shape, generator=torch.Generator().manual_seed(seed))
    labels = torch.where(flat, ids, IGNORE_INDEX)
    lengths = tuple(len(sample) for sample in is_target)
    return Microbatch(ids, labels, torch.zeros(3, len(flat), dtype=torch.int64), lengths, (), None)


def logits_of(microbatch: Microbatch, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(microbatch.num_tokens, VOCAB, generator=generator, dtype=torch.float64)


def expected_loss(pairs: list[tuple[Microbatch, torch.Tensor]], per_sample: bool) -> float:
    """Mean over all target tokens, or mean over samples with a target of each one's mean."""
    by_sample = []
    for microbatch, logits in pairs:
        parts = zip(
            logits.split(microbatch.segment_lengths), microbatch.labels.split(microbatch.segment_lengths), strict=True
        )
        by_sample += [
            F.cross_entropy(rows, labels, ignore_index=IGNORE_INDEX, reduction="none")[labels != IGNORE_INDEX]
            for rows, labels in parts
        ]
    by_sample = [losses for losses in by_sample if len(losses)]
    if not by_sample:
        return 0.0
    means = torch.stack([losses.mean() for losses in by_sample])
    return float(means.mean() if per_sample else torch.cat(by_sample).mean())


@fast
@given(drawn=samples, cut=st.integers(0, 6), per_sample=st.booleans(), seed=st.integers(0, 9))
def test_the_parts_of_any_microbatching_sum_to_the_loss(drawn, cut: int, per_sample: bool, seed: int) -> None:
    batch = [pack(part, seed + number) for number, part in enumerate((drawn[:cut], drawn[cut:])) if part]
    totals = BatchTotals.of(batch, VISION)
    pairs = [(microbatch, logits_of(microbatch, seed)) for microbatch in batch]
    total, weights = 0.0, 0.0
    for microbatch, logits in pairs:
        inputs = loss_inputs(microbatch, totals, per_sample, CPU)
        assert torch.equal(inputs.target_ids, microbatch.labels[inputs.target_index])
        assert inputs.target_index.tolist() == (microbatch.labels != IGNORE_INDEX).nonzero().flatten().tolist()
        total += float(weighted_cross_entropy(logits[inputs.target_index], inputs, tp_size=1))
        weights += float(inputs.weights.double().sum())
    assert math.isclose(total, expected_loss(pairs, per_sample), rel_tol=1e-5)
    assert math.isclose(weights, 1.0 if totals.num_target_tokens else 0.0, rel_tol=1e-6)


@pytest.mark.parametrize("per_sample", [False, True])
def test_without_targets_loss_and_gradient_are_zero(per_sample: bool) -> None:
    microbatch = pack([[False] * 3, [False]], seed=0)
    inputs = loss_inputs(microbatch, BatchTotals.of([microbatch], VISION), per_sample, CPU)
    logits = torch.randn(4, VOCAB, requires_grad=True)
    loss = weighted_cross_entropy(logits[inputs.target_index], inputs, tp_size=1)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(logits.grad, torch.zeros(4, VOCAB))


def test_the_loss_is_computed_in_float32() -> None:
    """bfloat16 logits lose no more than their own rounding."""
    microbatch = pack([[True] * 6], seed=1)
    inputs = loss_inputs(microbatch, BatchTotals.of([microbatch], VISION), False, CPU)
    logits = logits_of(microbatch, 2).bfloat16()
    loss = weighted_cross_entropy(logits, inputs, tp_size=1)
    assert loss.dtype == torch.float32
    assert math.isclose(float(loss), expected_loss([(microbatch, logits.double())], False), rel_tol=1e-6)
