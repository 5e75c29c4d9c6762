"""The weight of every token's loss, for the three definitions of the loss, whatever the microbatching."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.batch import IGNORE_INDEX, BatchTotals, Microbatch
from mm.config.args import LossUnit
from mm.device.device import Device
from tests.tiny import our_config

CPU = Device.pick("cpu")  # importing megatron needs it

from mm.model.layers.loss import LossInputs, loss_inputs  # noqa: E402

fast = settings(max_examples=40, deadline=None)
VISION = our_config(((4,),), ((4,),)).vision
VOCAB = 11
UNITS: tuple[LossUnit, ...] = ("token", "sample", "microbatch")

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


def expected_loss(pairs: list[tuple[Microbatch, torch.Tensor]], unit: LossUnit) -> float:
    """Mean over all target tokens, over the means of samples with a target, or over the means of microbatches."""
    losses = [[
        F.cross_entropy(rows, labels, ignore_index=IGNORE_INDEX, reduction="none")[labels != IGNORE_INDEX]
        for rows, labels in zip(
            logits.split(microbatch.segment_lengths), microbatch.labels.split(microbatch.segment_lengths), strict=True
        )
    ] for microbatch, logits in pairs]
    samples = [tokens for part in losses for tokens in part if len(tokens)]
    if not samples:
        return 0.0
    match unit:
        case "token":
            return float(torch.cat(samples).mean())
        case "sample":
            return float(torch.stack([tokens.mean() for tokens in samples]).mean())
        case "microbatch":  # one without a target counts with a loss of 0
            return float(sum(torch.cat(part).mean() for part in losses if len(torch.cat(part))) / len(losses))


def weighted_sum(logits: torch.Tensor, inputs: LossInputs) -> float:
    losses = F.cross_entropy(logits[inputs.target_index], inputs.target_ids, reduction="none")
    return float((losses * inputs.weights).sum())


@fast
@given(drawn=samples, cut=st.integers(0, 6), unit=st.sampled_from(UNITS), seed=st.integers(0, 9))
def test_the_parts_of_any_microbatching_sum_to_the_loss(drawn, cut: int, unit: LossUnit, seed: int) -> None:
    batch = [pack(part, seed + number) for number, part in enumerate((drawn[:cut], drawn[cut:])) if part]
    totals = BatchTotals.of(batch, VISION)
    pairs = [(microbatch, logits_of(microbatch, seed)) for microbatch in batch]
    total, weights = 0.0, 0.0
    for microbatch, logits in pairs:
        inputs = loss_inputs(microbatch, totals, unit, CPU)
        assert torch.equal(inputs.target_ids, microbatch.labels[inputs.target_index])
        assert inputs.target_index.tolist() == (microbatch.labels != IGNORE_INDEX).nonzero().flatten().tolist()
        total += weighted_sum(logits, inputs)
        weights += float(inputs.weights.double().sum())
    assert math.isclose(total, expected_loss(pairs, unit), rel_tol=1e-5)
    num_learnt = sum(microbatch.num_target_tokens > 0 for microbatch in batch)
    whole = num_learnt / len(batch) if unit == "microbatch" else float(num_learnt > 0)
    assert math.isclose(weights, whole, rel_tol=1e-6)


@pytest.mark.parametrize("unit", UNITS)
def test_without_targets_there_are_no_rows(unit: LossUnit) -> None:
    microbatch = pack([[False] * 3, [False]], seed=0)
    inputs = loss_inputs(microbatch, BatchTotals.of([microbatch], VISION), unit, CPU)
    assert len(inputs.target_index) == len(inputs.target_ids) == len(inputs.weights) == 0
