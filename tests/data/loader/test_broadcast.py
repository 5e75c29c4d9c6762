"""Each rank of a replica receives exactly its owner's steps, with pixels only where they are embedded and cached ViT
outputs only on ranks with the projector."""

import json
import math
from dataclasses import replace

import pytest
import torch

from mm.batch import BatchTotals, Microbatch
from mm.config.model import ModelConfig
from mm.data.loader.broadcast import deal_images
from mm.data.sampler.cost import in_pipeline_order
from tests.launch import run_ranks
from tests.parallel.owner_worker import FAILING_STEP, LAYOUTS, STEPS, Layout, batches, fingerprint, torch_generator
from tests.tiny import microbatch, our_config, random_sample

RANKS = range(4)


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The workers' results by rank."""
    directory = tmp_path_factory.mktemp("owner")
    run_ranks(4, "tests.parallel.owner_worker", str(directory), timeout_seconds=180)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in RANKS]


def expected_totals(layout: Layout, step: int) -> dict[str, int]:
    """Each count summed over the replicas."""
    vision = layout.config.vision
    parts = [vars(BatchTotals.of(batches(dp)[step], vision)) for dp in range(layout.dp)]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def with_media_of(one: Microbatch, rank: int) -> Microbatch:
    """The microbatch with the pixels or features of the images of this rank of ``Context.encoders``."""
    for name in ("pixel_values", "features"):
        rows = getattr(one, name)
        if rows is not None and one.image_ranks:
            parts = rows.split([math.prod(grid) for grid in one.image_grids])
            own = [part for part, holder in zip(parts, one.image_ranks, strict=True) if holder == rank]
            one = replace(one, **{name: torch.cat(own) if own else None})
    return one


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_rank_gets_its_replicas_batches(received: list[dict], layout: Layout) -> None:
    placement = layout.config.placement()
    for rank in RANKS:
        mine = received[rank][layout.name]
        spec = placement[mine["place"]["pp"]]
        assert len(mine["steps"]) == len(STEPS)
        for step, (given, owned) in enumerate(zip(mine["steps"], batches(mine["place"]["dp"]), strict=True)):
            ordered = in_pipeline_order(layout.config, owned)
            dealt = deal_images(ordered, layout.config, layout.num_encoders)
            encoder = mine["place"]["cp"]
            if layout.whole_encoder:
                encoder = mine["place"]["tp"] + layout.tp * encoder
            expected = [fingerprint(with_media_of(one, encoder)) for one in dealt]
            if not spec.has_patch_embedding:
                expected = [one | {"pixels": None} for one in expected]
            if not spec.has_projector:
                expected = [one | {"features": None} for one in expected]
            assert given["microbatches"] == expected, (rank, step)
            assert given["totals"] == expected_totals(layout, step), (rank, step)


def test_images_that_are_encoded_together_are_dealt_together() -> None:
    """Two microbatches with one image each: both go to one rank if each is dealt alone, to two if together."""
    one_image = microbatch([random_sample(torch_generator(0), ((1, 4, 6),), 8)])
    config = our_config(((4,),), ((4,),))
    together = replace(config, encoder_batch_microbatches=2)
    batch = [one_image, microbatch([random_sample(torch_generator(0), (), 8)]), one_image, one_image]

    def dealt(config: ModelConfig) -> list[tuple[int, ...]]:
        return [one.image_ranks for one in deal_images(batch, config, 2)]

    assert dealt(config) == [(0,), (), (0,), (0,)]
    assert dealt(together) == [(0,), (), (0,), (1,)]
    some_cached = [*batch[:2], *(replace(one, feature_bytes=24) for one in batch[2:])]
    together = replace(config, encoder_batch_microbatches=4)
    assert [one.image_ranks for one in deal_images(some_cached, together, 2)] == [(0,), (), (0,), (1,)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_only_the_owner_reads_and_reads_each_step_once(received: list[dict], layout: Layout) -> None:
    for rank in RANKS:
        mine = received[rank][layout.name]
        is_first = mine["place"]["pp"] == mine["place"]["cp"] == mine["place"]["tp"] == 0
        assert mine["owns_data"] == is_first
        assert mine["num_asked"] == (len(STEPS) if is_first else None)


@pytest.mark.parametrize(("case", "expected"), [
    ("user's mistake", "AgreedError: data.json: sample 17 has no answer"),
    ("broken picture", "AgreedError: rank 1: picture 17 cannot be read"),
])
def test_an_unreadable_sample_raises_the_same_error_on_every_rank(received, case: str, expected: str) -> None:
    """After the complete steps; on the ranks of the other replica too."""
    for rank in RANKS:
        assert received[rank][case]["error"] == expected
        assert len(received[rank][case]["steps"]) == FAILING_STEP


def test_a_bug_in_a_loader_is_raised_on_its_rank(received: list[dict]) -> None:
    """The owner raises its own error at once; the others notice the end of its process, and stop."""
    for rank in RANKS:
        mine = received[rank]["bug"]
        assert len(mine["steps"]) == FAILING_STEP
        is_failing_owner = mine["owns_data"] and mine["place"]["dp"] == 1
        assert (mine["error"] == "IndexError: list index out of range") == is_failing_owner, mine["error"]
        assert mine["error"] is not None
