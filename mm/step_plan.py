"""What every rank of a replica knows of an optimizer step before it begins: its microbatches and all message shapes.

Pure: knows nothing of processes or megatron.
"""

from dataclasses import dataclass

from mm.config.model import ModelConfig
from mm.batch import Microbatch
from mm.totals import BatchTotals
from mm.placement import Message


@dataclass(frozen=True)
class StepPlan:
    """Everything about one optimizer step that every rank of a replica knows before it begins."""

    microbatches: tuple[Microbatch, ...]
    totals: BatchTotals
    """Over the global batch, all replicas together."""


@dataclass(frozen=True)
class MessageShapes:
    """How large each message of a microbatch is."""

    vision_hidden: int
    language_hidden: int
    merge_factor: int

    @classmethod
    def of(cls, model: ModelConfig) -> "MessageShapes":
        return cls(model.vision.hidden_size, model.language.hidden_size, model.vision.spatial_merge_size**2)

    def shape(self, message: Message, microbatch: Microbatch) -> tuple[int, int] | None:
        """[rows, width], or None when nothing crosses."""
        match message:
            case Message.NOTHING:
                return None
            case Message.PATCHES:
                rows, width = microbatch.num_patches, self.vision_hidden
            case Message.VISUAL_TOKENS:
                rows, width = microbatch.num_patches // self.merge_factor, self.language_hidden
            case Message.HIDDEN_STATES:
                rows, width = microbatch.num_tokens, self.language_hidden
        return (rows, width) if rows else None
