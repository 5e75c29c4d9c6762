"""Which part of the model is on which pipeline stage, and what crosses each boundary.

A *slot* is one ``(chunk, stage)`` pair.  The forward pass visits all stages of chunk 0, then all of chunk 1, and so on.
ViT layers fill the slots in order, then LLM layers.  Patch embedding sits before ViT layer 0, the projector right
after the last ViT layer, word embedding and visual scatter right before LLM layer 0, norm and head after the last.
"""

from dataclasses import dataclass
from enum import Enum

PipelineLayout = tuple[tuple[int, ...], ...]
"""Layers per ``[chunk][stage]``.  One chunk unless virtual pipeline stages are used."""


class Message(Enum):
    """What one boundary between neighbouring slots carries, and its shape per microbatch."""

    NOTHING = "nothing"
    PATCHES = "patches"  # [num_patches, vision hidden], in window order
    VISUAL_TOKENS = "visual tokens"  # [num_visual_tokens, LLM hidden], in reading order
    HIDDEN_STATES = "hidden states"  # [num_tokens, LLM hidden]


@dataclass(frozen=True)
class StageSpec:
    """Everything that one slot owns and exchanges.  Layer numbers are global."""

    stage: int
    chunk: int
    vision_layers: range
    has_patch_embedding: bool
    has_projector: bool
    language_layers: range
    has_embedding: bool
    has_head: bool
    """Final norm, output layer and loss."""
    receives: Message
    sends: Message

    @property
    def has_whole_vit(self) -> bool:
        """Whether every ViT layer is in this slot, with the projector."""
        return self.has_patch_embedding and self.has_projector


@dataclass(frozen=True)
class Placement:
    """All slots of a layout, indexed as ``placement[stage]`` or ``placement[stage, chunk]``."""

    slots: tuple[StageSpec, ...]
    num_stages: int
    num_chunks: int

    @classmethod
    def of(cls, vision: PipelineLayout, language: PipelineLayout) -> "Placement":
        """Place the layers that the two lists count; the lists must have passed ``layout_problems``."""
        vision_counts = [count for chunk in vision for count in chunk]
        language_counts = [count for chunk in language for count in chunk]
        problems = layout_problems(vision, language, sum(vision_counts), sum(language_counts))
        assert not problems, problems
        return cls(_slots(vision_counts, language_counts, len(vision[0])), len(vision[0]), len(vision))

    def __getitem__(self, where: int | tuple[int, int]) -> StageSpec:
        stage, chunk = where if isinstance(where, tuple) else (where, 0)
        return self.slots[chunk * self.num_stages + stage]

    @property
    def has_whole_vit(self) -> bool:
        """Whether one slot has every ViT layer."""
        return any(spec.has_whole_vit for spec in self.slots)

    @property
    def patch_embedding_stage(self) -> int:
        return next(spec.stage for spec in self.slots if spec.has_patch_embedding)

    @property
    def projector_stage(self) -> int:
        return next(spec.stage for spec in self.slots if spec.has_projector)

    @property
    def embedding_slot(self) -> StageSpec:
        return next(spec for spec in self.slots if spec.has_embedding)

    @property
    def head_slot(self) -> StageSpec:
        return next(spec for spec in self.slots if spec.has_head)


def _slots(vision_counts: list[int], language_counts: list[int], num_stages: int) -> tuple[StageSpec, ...]:
    with_vision = [slot for slot, count in enumerate(vision_counts) if count]
    with_language = [slot for slot, count in enumerate(language_counts) if count]

    def message_after(slot: int) -> Message:
        if slot < with_vision[0] or slot >= with_language[-1]:
            return Message.NOTHING
        if slot >= with_language[0]:
            return Message.HIDDEN_STATES
        return Message.VISUAL_TOKENS if slot >= with_vision[-1] else Message.PATCHES

    return tuple(
        StageSpec(
            stage=slot % num_stages,
            chunk=slot // num_stages,
            vision_layers=range(sum(vision_counts[:slot]), sum(vision_counts[: slot + 1])),
            has_patch_embedding=slot == with_vision[0],
            has_projector=slot == with_vision[-1],
            language_layers=range(sum(language_counts[:slot]), sum(language_counts[: slot + 1])),
            has_embedding=slot == with_language[0],
            has_head=slot == with_language[-1],
            receives=message_after(slot - 1),
            sends=message_after(slot),
        )
        for slot in range(len(vision_counts))
    )


def layout_problems(
    vision: PipelineLayout, language: PipelineLayout, vision_num_layers: int, language_num_layers: int,
    vision_key: str = "image_encoder.vision_encoder.pipeline_num_layers",
    language_key: str = "text_decoder.pipeline_num_layers",
) -> list[str]:  # fmt: skip
    """All problems with a pair of ``[chunk][stage]`` lists; empty if they are legal.

    ``vision_key`` and ``language_key`` name the lists in messages: keys of the model JSON, or flags of the converter.
    """
    problems = _list_problems(vision_key, vision, vision_num_layers)
    problems += _list_problems(language_key, language, language_num_layers)
    if problems:
        return problems
    if (len(vision), len(vision[0])) != (len(language), len(language[0])):
        return [
            f"{vision_key} is {_shown(vision)} ({len(vision)} x {len(vision[0])}) but {language_key} is "
            f"{_shown(language)} ({len(language)} x {len(language[0])}): both need one entry per pipeline stage "
            f"(and per virtual chunk)"
        ]
    return _order_problems(vision, language, vision_key, language_key)


def _list_problems(key: str, layout: PipelineLayout, num_layers: int) -> list[str]:
    if not layout or not layout[0]:
        return [f"{key} is empty; expected one entry per pipeline stage, for example [{num_layers}]"]
    if len({len(chunk) for chunk in layout}) != 1:
        return [f"{key} is {_shown(layout)}: every virtual chunk needs the same number of stages"]
    problems = [
        f"{key}{_index(layout, chunk, stage)} is {count}; a stage cannot have a negative number of layers"
        for chunk, counts in enumerate(layout)
        for stage, count in enumerate(counts)
        if count < 0
    ]
    total = sum(sum(counts) for counts in layout)
    if not problems and total != num_layers:
        last = max((c, s) for c, counts in enumerate(layout) for s, n in enumerate(counts) if n or (c, s) == (0, 0))
        mended = [list(counts) for counts in layout]
        mended[last[0]][last[1]] += num_layers - total
        hint = f", for example {_shown(mended)}" if mended[last[0]][last[1]] >= 0 else ""
        problems.append(f"{key} is {_shown(layout)}, which sums to {total}; expected num_layers = {num_layers}{hint}")
    return problems


def _order_problems(vision: PipelineLayout, language: PipelineLayout, vision_key: str, language_key: str) -> list[str]:
    vision_counts = [count for chunk in vision for count in chunk]
    language_counts = [count for chunk in language for count in chunk]
    last_vision = max((slot for slot, count in enumerate(vision_counts) if count), default=0)
    early = [slot for slot, count in enumerate(language_counts[:last_vision]) if count]
    if not early:
        return []
    legal = [0] * last_vision + language_counts[last_vision:]
    legal[last_vision] += sum(language_counts[:last_vision])
    num_stages = len(vision[0])
    nested = [legal[start : start + num_stages] for start in range(0, len(legal), num_stages)]
    chunk, stage = divmod(early[0], num_stages)
    return [
        f"{language_key}{_index(language, chunk, stage)} is {language_counts[early[0]]}, but the ViT ends only at "
        f"position {last_vision} of {vision_key} = {_shown(vision)}: an LLM layer cannot come before the last ViT "
        f"layer; a legal list near it is {language_key} = {_shown(nested)}"
    ]


def _index(layout: PipelineLayout, chunk: int, stage: int) -> str:
    """The index of an entry in the list that ``_shown`` shows."""
    return f"[{stage}]" if len(layout) == 1 else f"[{chunk}][{stage}]"


def _shown(layout: PipelineLayout | list[list[int]]) -> str:
    """The list as a user writes it: flat when there is one chunk."""
    nested = [list(chunk) for chunk in layout]
    return str(nested[0] if len(nested) == 1 else nested)
