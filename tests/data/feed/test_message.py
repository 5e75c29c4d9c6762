"""A step as one vector: every number round-trips, problems replace microbatches, and heads add up."""

from dataclasses import replace

import pytest
import torch

from mm.batch import BatchTotals, Microbatch, image_passes
from mm.data.feed.message import Head, from_message, to_message
from tests.parallel.owner_worker import STEPS, batches, fingerprint
from tests.tiny import our_config

VISION = our_config(((4,),), ((4,),)).vision


def head_of(microbatches: list[Microbatch], num_failed: int = 0, num_bad: int = 0) -> Head:
    return Head(num_failed, num_bad, BatchTotals.of(microbatches, VISION))


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_everything_except_media_round_trips(number: int) -> None:
    """Token ids, grids, normalisation bits and feature keys, for all kinds of steps."""
    for dp_rank in range(2):
        step = batches(dp_rank)[number]
        head = head_of(step, num_bad=3)
        passes = image_passes(step, 2)
        found_head, problems, found, found_passes = from_message(to_message(head, (), step, passes))
        assert found_passes == passes
        assert (found_head, problems) == (head, [])
        assert [fingerprint(one) for one in found] == [
            fingerprint(replace(one, pixel_values=None, features=None)) for one in step]


def test_problems_replace_microbatches() -> None:
    reported = ("a.jsonl:3: no record", "b.json: 猫 \ud800")
    head = head_of([], num_failed=1)
    assert from_message(to_message(head, reported, batches(0)[0], ())) == (head, list(reported), [], ())


def test_heads_of_owners_add_up() -> None:
    replicas = [batches(dp_rank)[0] for dp_rank in range(2)]
    heads = [head_of(one, num_bad=1 + rank) for rank, one in enumerate(replicas)]
    summed = Head.of(torch.stack([one.numbers() for one in heads]).sum(0))
    assert summed == head_of([*replicas[0], *replicas[1]], num_bad=3)
