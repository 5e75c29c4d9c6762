"""What crosses the pipeline's boundaries is what the step plan says and nothing else, and nobody waits for a device.

Whether what crosses is right is shown by tests/test_parity.py.
"""

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
import torch

from mm.batch import BatchTotals
from mm.device.device import Device
from tests.launch import run_ranks
from tests.parallel.cases import Case, batch_of
from tests.parallel.pipeline_worker import CASES
from tests.tiny import microbatch, our_config, random_sample

NOTHING, PATCHES, VISUAL, HIDDEN = "nothing", "patches", "visual tokens", "hidden states"
BOUNDARIES = {
    # what crosses from stage 0 to 1, 1 to 2, 2 to 3, and on to the next chunk on stage 0; and across which of them
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
}
FLOAT_BYTES, VISION_HIDDEN, LANGUAGE_HIDDEN = 4, 32, 48
Message = tuple[str, int, int]
"""Operation, the other rank, bytes."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """By rank: what the worker wrote."""
    directory = tmp_path_factory.mktemp("pipeline")
    run_ranks(4, "tests.parallel.pipeline_worker", str(directory), timeout_seconds=240)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(4)]


def expected_messages(case: Case) -> list[Counter[Message]]:
    """By rank: every message of a step, counted from the samples."""
    crosses, with_images, with_text = BOUNDARIES[case.name]
    messages: list[Counter[Message]] = [Counter() for _ in range(4)]
    for samples in batch_of(case)[0]:
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        num_patches = sum(t * h * w for sample in samples for t, h, w in sample.grids)
        for boundary, what in enumerate(crosses):
            num_bytes = FLOAT_BYTES * {
                NOTHING: 0,
                PATCHES: num_patches * VISION_HIDDEN,
                VISUAL: num_patches // 4 * LANGUAGE_HIDDEN,
                HIDDEN: num_tokens * LANGUAGE_HIDDEN,
            }[what]
            before, after = boundary % 4, (boundary + 1) % 4
            if num_bytes:
                messages[before]["send", after, num_bytes] += 1
                messages[after]["recv_", before, num_bytes] += 1
            if num_bytes and (with_images if num_patches else with_text)[boundary]:
                messages[after]["send", before, num_bytes] += 1
                messages[before]["recv_", after, num_bytes] += 1
    return messages


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exactly_the_planned_messages_are_exchanged(case: Case, found: list[dict]) -> None:
    """No shape handshake, nothing over a boundary that carries nothing, no gradient into a frozen prefix."""
    for rank, expected in enumerate(expected_messages(case)):
        operations = found[rank][case.name]["operations"]
        seen = Counter((o["name"], o["peer"], o["bytes"]) for o in operations if o["name"] in ("send", "recv_"))
        assert seen == expected, rank
        others = [o["name"] for o in operations if o["name"] not in ("send", "recv_")]
        # one reduction of each chunk's gradients over a data-parallel group of one rank; none where nothing is trained
        assert set(others) <= {"allreduce_coalesced_"} and len(others) <= len(case.vision_chunks), rank


def test_the_cases_cover_what_they_are_for() -> None:
    by_name = {case.name: expected_messages(case) for case in CASES}
    assert by_name.keys() == BOUNDARIES.keys()
    assert not by_name["text"][0] and by_name["text"][3], "text alone crosses no boundary of the ViT"
    assert not by_name["nothing-on-the-first"][0] and not by_name["nothing-on-the-last"][3]
    assert not [m for m in by_name["only-projector"][0] if m[0] == "recv_"], "a frozen prefix receives no gradient"
    assert len(batch_of(next(case for case in CASES if case.name == "two-microbatches"))[0]) < 4
    mixed = [bool(sum(len(s.grids) for s in pair)) for pair in batch_of(CASES[0])[0]]
    assert True in mixed and False in mixed


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_ends_clean(case: Case, found: list[dict]) -> None:
    assert [rank[case.name]["num_in_flight"] for rank in found] == [0] * 4
    assert found[0][case.name]["refuses_leftovers"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_loop_reads_nothing_back(case: Case, found: list[dict]) -> None:
    """Covers everything between the start and the end of ``run_schedule`` in Python and in the dispatcher (schedule,
    communicator, stage, backward, gradient reduction), except ``Chunk.prepare``: see the next test for that."""
    assert [rank["num_known_reads"] for rank in found] == [5] * 4, "the counter does not count"
    assert [rank[case.name]["num_read_back"] for rank in found] == [0] * 4


@pytest.fixture(scope="module")
def whole_model(one_rank: Any):
    """The whole small model on the meta device: tensors without contents, of which reading any raises an error."""
    device = Device.pick("cpu")
    from mm.model.stage import Stage

    (chunk,) = Stage(our_config(((4,),), ((4,),)), one_rank, "fp32", device).chunks
    chunk.device = dataclasses.replace(device, kind="meta")
    return chunk.to("meta")


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
