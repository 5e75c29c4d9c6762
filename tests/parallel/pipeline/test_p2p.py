"""What crosses the pipeline's boundaries is what the step plan says and nothing else, and nobody waits for a device.

Whether what crosses is right is shown by tests/test_parity.py.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mm.batch import BatchTotals, encoder_batches_of
from mm.data.loader.broadcast import deal_images
from mm.device.cpu import CPU, HostRuntime
from mm.device.device import Device
from mm.parallel.context import even_rows, row_shard
from tests.launch import run_ranks
from tests.parallel.cases import Case, batch_of
from tests.parallel.pipeline_worker import CASES
from tests.parallel.replay import Event, Message, Program, Start, Wait, replay
from tests.tiny import RawSample, microbatch, our_config, random_sample

NOTHING, PATCHES, VISUAL, HIDDEN = "nothing", "patches", "visual tokens", "hidden states"
BOUNDARIES = {
    # what crosses from stage 0 to 1 and so on, from the last to the next chunk on stage 0; and across which of them
    # gradients come back with images, and with text alone
    "mixed": ((PATCHES, VISUAL, HIDDEN), (True, True, True), (False, False, True)),
    "text": ((PATCHES, VISUAL, HIDDEN), (True, True, True), (False, False, True)),
    "vision-frozen": ((PATCHES, VISUAL, HIDDEN), (False, True, True), (False, False, True)),
    "vision-and-projector-frozen": ((PATCHES, VISUAL, HIDDEN), (False, False, True), (False, False, True)),
    "language-frozen": ((PATCHES, VISUAL, HIDDEN), (True, True, True), (False, False, False)),
    "only-projector": ((PATCHES, VISUAL, HIDDEN), (False, True, True), (False, False, False)),
    "nothing-on-the-first": ((NOTHING, PATCHES, HIDDEN), (False, True, True), (False, False, True)),
    "nothing-on-the-last": ((HIDDEN, NOTHING, NOTHING), (True, False, False), (True, False, False)),
    "virtual": ((PATCHES, PATCHES, PATCHES, VISUAL, HIDDEN, HIDDEN, HIDDEN),
                (False, False, False, True, True, True, True), (False, False, False, False, True, True, True)),
    "two-microbatches": ((PATCHES, VISUAL, HIDDEN), (True, True, True), (False, False, True)),
    "first-of-vit-frozen": ((PATCHES, VISUAL, HIDDEN), (False, True, True), (False, False, True)),
    "first-of-llm-frozen": ((PATCHES, VISUAL, HIDDEN), (False, False, False), (False, False, False)),
    "frozen-recompute": ((PATCHES, VISUAL, HIDDEN), (False, False, True), (False, False, True)),
    "mlp-recompute": ((PATCHES, VISUAL, HIDDEN), (True, True, True), (False, False, True)),
    "sequence-virtual": ((PATCHES, PATCHES, HIDDEN), (True, True, True), (False, False, True)),
    "distributed-overlap-virtual": ((PATCHES, PATCHES, HIDDEN), (True, True, True), (False, False, True)),
    "waits": ((PATCHES, VISUAL, HIDDEN), (True, True, True), (False, False, True)),
    "virtual-waits": ((PATCHES, PATCHES, PATCHES, VISUAL, HIDDEN, HIDDEN, HIDDEN),
                      (False, False, False, True, True, True, True), (False, False, False, False, True, True, True)),
    "frozen-twice": ((VISUAL,), (False,), (False,)),
    "ulysses": ((PATCHES,), (True,), (False,)),
    "whole-encoder": ((PATCHES,), (True,), (False,)),
}
FROZEN_STAGES = {"vision-frozen": 1, "vision-and-projector-frozen": 2, "only-projector": 1, "first-of-vit-frozen": 1,
                 "first-of-llm-frozen": 3, "frozen-recompute": 2, "frozen-twice": 1}  # fmt: skip
"""So many stages at the start have nothing that is trained."""
FLOAT_BYTES, VISION_HIDDEN, LANGUAGE_HIDDEN = 4, 32, 48
Seen = tuple[str, int, int]
"""Operation, the other rank, bytes."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """By rank: what the worker wrote."""
    directory = tmp_path_factory.mktemp("pipeline")
    run_ranks(4, "tests.parallel.pipeline_worker", str(directory), timeout_seconds=600)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(4)]


def expected_messages(case: Case) -> list[Counter[Seen]]:
    """By rank: every message of a step, counted from the samples.  The other rank is a stage of its own pipeline."""
    return [Counter(_messages_of(case, rank)) for rank in range(4)]


def stage_of(rank: int, case: Case) -> int:
    return rank // (4 // case.pp)


def _messages_of(case: Case, rank: int) -> Iterator[Seen]:
    stage, replica = divmod(rank, 4 // case.pp)
    dp_rank, axis_rank = divmod(replica, case.tp * case.cp)  # no case has both
    crosses, with_images, with_text = BOUNDARIES[case.name]
    for samples in batch_of(case)[dp_rank]:
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        num_patches = sum(t * h * w for sample in samples for t, h, w in sample.grids)
        if case.cp > 1:
            num_tokens, num_patches = share_of(samples, axis_rank, case.cp)
        if case.whole_encoder:  # it cuts no patches
            _, num_patches = share_of(samples, axis_rank, case.tp)
        for boundary, what in enumerate(crosses):
            rows, width, unit = {
                NOTHING: (0, 0, 1),
                PATCHES: (num_patches, VISION_HIDDEN, 4),
                VISUAL: (num_patches // 4, LANGUAGE_HIDDEN, 1),
                HIDDEN: (num_tokens, LANGUAGE_HIDDEN, 1),
            }[what]
            if case.sequence_parallel and not case.whole_encoder:
                here = row_shard(rows, unit, axis_rank, case.tp)
                rows = here.stop - here.start
            before, after, num_bytes = boundary % case.pp, (boundary + 1) % case.pp, FLOAT_BYTES * rows * width
            comes_back = (with_images if num_patches else with_text)[boundary]
            if num_bytes and stage == before:
                yield from [("send", after, num_bytes)] + [("recv_", after, num_bytes)] * comes_back
            if num_bytes and stage == after:
                yield from [("recv_", before, num_bytes)] + [("send", before, num_bytes)] * comes_back


def share_of(samples: list[RawSample], rank: int, size: int) -> tuple[int, int]:
    """Tokens and patches that a rank of the context axis holds; with whole encoders, the patches of any rank."""
    (one,) = deal_images([microbatch(samples)], our_config(((4,),), ((4,),)), size)
    grids = [grid for grid, holder in zip(one.image_grids, one.image_ranks, strict=True) if holder == rank]
    return len(even_rows(one.num_tokens, size)[rank]), sum(t * h * w for t, h, w in grids)


COUNTED = [case for case in CASES if not case.ring]
"""A ring's ranks send each other keys beside what crosses boundaries."""


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_exactly_the_planned_messages_are_exchanged(case: Case, found: list[dict]) -> None:
    """No shape handshake, nothing over a boundary that carries nothing, no gradient into a frozen prefix."""
    for rank, expected in enumerate(expected_messages(case)):
        operations = found[rank][case.name]["operations"]
        seen = Counter((o["name"], o["peer"], o["bytes"]) for o in operations if o["name"] in ("send", "recv_"))
        assert seen == expected, rank
        if case.pp == 4 or case.name in FROZEN_STAGES:  # the others have a tensor or context axis, or a tied embedding
            others = [o["name"] for o in operations if o["name"] not in ("send", "recv_")]
            num_trained = found[rank][case.name]["num_trained_chunks"]
            # one reduction of each trained chunk's gradients over data-parallel ranks, also where there is only one
            assert others == ["allreduce_coalesced_"] * num_trained, rank
            if stage_of(rank, case) < FROZEN_STAGES.get(case.name, 0):
                assert not others, rank


def test_the_cases_cover_what_they_are_for() -> None:
    by_name = {case.name: expected_messages(case) for case in COUNTED}
    assert by_name.keys() == BOUNDARIES.keys()
    assert not by_name["text"][0] and by_name["text"][3], "text alone crosses no boundary of the ViT"
    assert not by_name["nothing-on-the-first"][0] and not by_name["nothing-on-the-last"][3]
    assert not [m for m in by_name["only-projector"][0] if m[0] == "recv_"], "a frozen prefix receives no gradient"
    assert len(batch_of(next(case for case in CASES if case.name == "two-microbatches"))[0]) < 4
    mixed = [bool(sum(len(s.grids) for s in pair)) for pair in batch_of(CASES[0])[0]]
    assert True in mixed and False in mixed


@pytest.mark.parametrize("name", FROZEN_STAGES)
def test_a_frozen_prefix_keeps_nothing_and_has_no_backward(name: str, found: list[dict]) -> None:
    (case,) = [case for case in CASES if case.name == name]
    for stage, step in ((stage_of(number, case), rank[name]) for number, rank in enumerate(found)):
        is_frozen = stage < FROZEN_STAGES[name]
        assert (step["num_kept"] == 0) is is_frozen and (step["num_backward_operators"] == 0) is is_frozen, stage
        assert (step["num_weight_products"] == 0) is (is_frozen or (stage > 1 and "language" in case.freeze)), stage


def program_of(events: list[list]) -> Program:
    """From JSON."""
    def event(name: str, batch: int, *others: Any) -> Event:
        if name == "Wait":
            return Wait(batch)
        group, messages = others
        return Start(batch, group, tuple(Message(is_sent, peer, tuple(map(str, content)))
                                         for is_sent, peer, content in messages))

    return [event(*one) for one in events]


@pytest.mark.parametrize("case", [case for case in CASES if not case.ring], ids=lambda case: case.name)
def test_no_order_of_messages_holds_up_a_group_that_is_one_queue(case: Case, found: list[dict]) -> None:
    """As NCCL's and HCCL's are; more layouts: test_messages.py."""
    for replica in range(4 // case.pp):
        ranks = range(replica, 4, 4 // case.pp)
        assert replay([program_of(found[rank][case.name]["messages"]) for rank in ranks]).stuck == ()


def test_messages_come_while_a_stage_computes(found: list[dict]) -> None:
    """The next activation during a backward step, the next gradient during a forward step."""
    def during(name: str) -> list[tuple[bool, bool]]:
        coming = [rank[name]["num_coming"] for rank in found]
        return [(one["backward"] > 0, one["forward"] > 0) for one in coming]

    assert during("mixed") == [(False, True), (True, True), (True, True), (True, False)]
    assert during("virtual") == [(False, True), (True, True), (True, True), (True, True)]
    assert during("waits") == [(False, False)] * 4
    # the first and the last stage get what comes around long before its turn
    assert during("virtual-waits") == [(False, True), *[(False, False)] * 2, (True, True)]


def test_a_frozen_prefix_runs_ahead(found: list[dict]) -> None:
    """Through all of its forward steps, of more microbatches than there are stages, before the last stage begins."""
    assert all(rank["runs_ahead"] for rank in found)


def test_a_frozen_prefix_runs_ahead_within_a_limit(found: list[dict]) -> None:
    """It waits for its oldest message before it sends beyond the limit: what begins then is one message more."""
    (case,) = [case for case in CASES if case.name == "frozen-twice"]
    limit = 4 * case.pp  # of one chunk a stage
    assert all(len(one) > limit + 2 for one in batch_of(case)), "more than can be on the way"
    firsts = [rank["runs_to_its_limit"] for rank in found[:2]]
    assert firsts == [{"limit": limit, "most": limit + 1}] * 2


def test_a_frozen_llm_computes_input_gradients_only(found: list[dict]) -> None:
    steps = [rank["language-frozen"] for rank in found]
    assert [step["num_weight_products"] > 0 for step in steps] == [True, True, False, False]
    assert all(step["num_backward_operators"] > 0 for step in steps)


@pytest.mark.parametrize(("name", "vision", "language"), [
    ("mixed", 1, 1), ("mlp-recompute", 1, 1), ("vision-frozen", 1, 1), ("frozen-recompute", 1, 2)])
def test_a_frozen_part_is_never_recomputed(name: str, vision: int, language: int, found: list[dict]) -> None:
    """Runs of each layer for a microbatch: of the ViT for those with images."""
    (microbatches,) = batch_of(next(case for case in CASES if case.name == name))
    num_with_images = sum(any(sample.grids for sample in samples) for samples in microbatches)
    assert 0 < num_with_images < len(microbatches)
    runs = [(rank[name]["num_vision_layer_runs"], rank[name]["num_language_layer_runs"]) for rank in found]
    assert runs == [(2 * vision * num_with_images, 0)] * 2 + [(0, 2 * language * len(microbatches))] * 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_ends_clean(case: Case, found: list[dict]) -> None:
    assert [rank[case.name]["num_in_flight"] for rank in found] == [0] * 4
    assert found[0][case.name]["refuses_leftovers"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_loop_reads_nothing_back(case: Case, found: list[dict]) -> None:
    """Nor does it wait for the device.

    Covers everything between the start and the end of ``run_schedule`` in Python and in the dispatcher (schedule,
    communicator, stage, backward, gradient reduction), except what ``Chunk.prepare`` reads: see the next test for that.
    """
    assert [rank["num_known_reads"] for rank in found] == [9] * 4, "the counter does not count"
    assert [rank[case.name]["num_read_back"] for rank in found] == [0] * 4


def test_stopped_groups_leave_no_threads(found: list[dict]):
    """Each mesh has about sixty gloo threads: if they stayed, all cases together would have thousands."""
    assert [rank["num_more_threads"] < 10 for rank in found] == [True] * 4, [rank["num_more_threads"] for rank in found]


class MetaRuntime(HostRuntime):
    """A host whose device is the meta device."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("meta")

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("meta")


@pytest.fixture(scope="module")
def whole_model(one_rank: Any):
    """The whole small model on the meta device: tensors without contents, of which reading any raises an error."""
    device = Device.pick("cpu")
    from mm.model.stage import Stage

    (chunk,) = Stage(our_config(((4,),), ((4,),)), one_rank, "fp32", device).chunks
    meta = dataclasses.replace(device, platform=dataclasses.replace(CPU, name="meta", runtime=MetaRuntime))
    chunk.device = chunk.prepare.device = meta
    return chunk.to("meta")


def test_cached_and_other_microbatches_of_one_encoder_batch_keep_apart(one_rank) -> None:
    """They alternate within four neighbours: losses and gradients are those of microbatches that are encoded alone."""
    from mm.model.stage import Stage

    (chunk,) = Stage(our_config(((4,),), ((4,),)), one_rank, "fp32", Device.pick("cpu")).chunks
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.normal_(0.0, 0.05, generator=generator)
    batch = []
    for number in range(4):
        one = microbatch([random_sample(generator, ((1, 4, 6),), 9), random_sample(generator, ((1, 2, 4),), 5)])
        if number % 2:
            features = torch.randn(one.num_patches, chunk.model.vision.hidden_size, generator=generator)
            one = dataclasses.replace(one, pixel_values=None, features=features.view(torch.uint8),
                                      feature_bytes=4 * features.shape[1])
        batch.append(one)
    totals = BatchTotals.of(batch, chunk.model.vision)

    def run(size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        chunk.zero_grad()
        members = {number: [batch[one] for one in found] for found in encoder_batches_of(batch, size)
                   for number in found}
        losses = [chunk(chunk.prepare(one, totals, encoded_with=members[number]), None)
                  for number, one in enumerate(batch)]
        for loss in losses:
            loss.backward()
        return [float(loss.detach()) for loss in losses], {
            name: one.grad.clone() for name, one in chunk.named_parameters()}

    (alone, gradients), (together, found) = run(1), run(4)
    assert len(set(alone)) == 4 and together == pytest.approx(alone, rel=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-6), name
    assert not chunk.prepare._shared_passes  # nothing outlives its microbatches


@pytest.mark.parametrize("grids", [((1, 8, 12), (1, 10, 6)), ()], ids=["images", "text"])
def test_a_stage_needs_no_value_from_its_device(whole_model, grids: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs, forward and backward: every shape comes from the plan on the host."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # needs an accelerator, and reads nothing
    generator = torch.Generator().manual_seed(0)
    samples = [random_sample(generator, grids, 12), random_sample(generator, (), 9)]
    batch = microbatch(samples)
    inputs = whole_model.prepare(batch, BatchTotals.of([batch], whole_model.model.vision))
    loss = whole_model(inputs, None)
    loss.backward()
    assert loss.is_meta and whole_model.get_parameter("text_decoder.output_layer.weight").grad is not None
    with pytest.raises(RuntimeError):
        loss.item()
