"""Every order-preserving layout is placed exactly; every other one is refused with a legal one near it."""

import ast
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.placement import Message, layout_problems
from tests.tiny import our_config

NUM_LAYERS = 4


@st.composite
def legal_layouts(draw: st.DrawFn) -> tuple[tuple, tuple]:
    """Lists of any number of chunks and stages in which the ViT ends before or where the LLM begins."""
    num_chunks, num_stages = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    num_slots = num_chunks * num_stages
    last_vision = draw(st.integers(0, num_slots - 1))
    vision = [0] * num_slots
    for _ in range(NUM_LAYERS):
        vision[draw(st.integers(0, last_vision))] += 1
    last_vision = max(slot for slot, count in enumerate(vision) if count)
    language = [0] * num_slots
    for _ in range(NUM_LAYERS):
        language[draw(st.integers(last_vision, num_slots - 1))] += 1

    def nested(counts: list[int]) -> tuple:
        return tuple(tuple(counts[chunk * num_stages : (chunk + 1) * num_stages]) for chunk in range(num_chunks))

    return nested(vision), nested(language)


@given(legal_layouts())
def test_every_layer_is_placed_once_and_in_order(layout: tuple) -> None:
    vision, language = layout
    assert layout_problems(vision, language, NUM_LAYERS, NUM_LAYERS) == []
    placement = our_config(vision, language).placement()
    assert [layer for spec in placement.slots for layer in spec.vision_layers] == list(range(NUM_LAYERS))
    assert [layer for spec in placement.slots for layer in spec.language_layers] == list(range(NUM_LAYERS))
    for part in ("has_patch_embedding", "has_projector", "has_embedding", "has_head"):
        assert sum(getattr(spec, part) for spec in placement.slots) == 1
    for spec in placement.slots:
        assert spec is placement[spec.stage, spec.chunk]
        assert spec.has_patch_embedding == (0 in spec.vision_layers)
        assert spec.has_projector == (NUM_LAYERS - 1 in spec.vision_layers)
        assert spec.has_embedding == (0 in spec.language_layers)
        assert spec.has_head == (NUM_LAYERS - 1 in spec.language_layers)


@given(legal_layouts())
def test_boundaries_carry_what_the_next_slot_needs(layout: tuple) -> None:
    slots = our_config(*layout).placement().slots
    assert slots[0].receives is Message.NOTHING and slots[-1].sends is Message.NOTHING
    for before, after in pairwise(slots):
        assert before.sends is after.receives
        vision_left = any(spec.vision_layers for spec in slots[slots.index(after) :])
        vision_begun = any(spec.vision_layers for spec in slots[: slots.index(after)])
        if vision_left and vision_begun:
            assert before.sends is Message.PATCHES
        if after.has_embedding and not after.has_patch_embedding and not after.vision_layers:
            assert before.sends is Message.VISUAL_TOKENS
        if before.language_layers and any(spec.language_layers for spec in slots[slots.index(after) :]):
            assert before.sends is Message.HIDDEN_STATES


@pytest.mark.parametrize(("vision", "language", "words"), [
    (((4, 0),), ((1, 2),), "sums to 3"),
    (((5, -1),), ((2, 2),), "pipeline_num_layers[1] is -1; a stage cannot have a negative"),
    (((5, 0), (-1, 0)), ((0, 0), (0, 4)), "pipeline_num_layers[1][0] is -1; a stage cannot have a negative"),
    (((4, 0),), ((1, 1, 2),), "both need one entry per pipeline stage"),
    (((2, 2),), ((1, 3),), "cannot come before the last ViT layer"),
    ((), ((4,),), "is empty"),
    (((2, 2), (0,)), ((0, 0), (2, 2)), "same number of stages"),
])
def test_illegal_layouts_are_refused(vision: tuple, language: tuple, words: str) -> None:
    (problem,) = layout_problems(vision, language, NUM_LAYERS, NUM_LAYERS)
    assert words in problem


def test_the_list_offered_is_legal() -> None:
    vision = ((30, 2, 0, 0),)
    (problem,) = layout_problems(vision, ((1, 10, 10, 7),), 32, 28)
    offered = ast.literal_eval(re.findall(r"\[[\d, ]+\]$", problem)[0])
    assert layout_problems(vision, (tuple(offered),), 32, 28) == []
