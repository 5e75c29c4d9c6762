"""The memory that one rank of a stage needs beside its states, as formulas: activations, logits, and a layer at work.

Pure arithmetic over the model's settings; ``tests/test_budgets.py`` holds it to what a traced step really keeps.  Not
counted: what the driver and the communication library take for themselves, and the allocator's gaps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from operator import mul

from mm.config.model import LanguageConfig, ModelConfig, RecomputeConfig, VisionConfig
from mm.model.loss import MAX_LOGIT_ROWS
from mm.parallel.order import in_flight
from mm.placement import Message, Placement, StageSpec
from mm.weights.memory import memory_shape
from mm.weights.table import Fusion, Place, Weight, stage_weights

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a weight and of an activation, by precision."""
FP32, INT64 = 4, 8


@dataclass(frozen=True)
class Rows:
    """What one microbatch holds."""

    num_tokens: int
    num_patches: int
    num_targets: int


class Keeps(Enum):
    """What a layer keeps of its forward pass."""

    NOTHING = "no gradient comes back"
    INPUT = "full recompute"
    NO_OUTPUTS = "all but the outputs of norms and SwiGLU: selective recompute, or frozen on a gradient's way"
    ALL = "everything its gradients need"


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per row of what a layer makes in its forward pass and its backward pass reads."""

    input: int
    residuals: int
    """Inputs of both norms, and the norms' factors."""
    norm_outputs: int
    attention: int
    """q, k, v, the output and the log-sum-exp."""
    swiglu_input: int
    swiglu_output: int
    gathered: int
    """All rows of a linear layer's input, where each rank keeps a piece of them."""

    def kept(self, keeps: Keeps) -> int:
        without_outputs = self.residuals + self.attention + self.swiglu_input
        return {
            Keeps.NOTHING: 0,
            Keeps.INPUT: self.input,
            Keeps.NO_OUTPUTS: without_outputs,
            Keeps.ALL: without_outputs + self.norm_outputs + self.swiglu_output,
        }[keeps]

    def working(self, keeps: Keeps) -> int:
        """What lives beside the kept while the layer runs: the rest of its own, and in a backward pass the gradients
        of a row, of SwiGLU's output and input, and what SwiGLU's backward makes on the way."""
        own = self.kept(Keeps.ALL) - self.kept(keeps)
        gradients = 0 if keeps is Keeps.NOTHING else self.input + 2 * self.swiglu_input + self.swiglu_output
        return own + gradients + self.gathered


def layer_bytes(
    tower: VisionConfig | LanguageConfig, local_ffn: int, tp_size: int, width: int, num_pieces: int = 1,
    ulysses_size: int = 1,
) -> LayerBytes:
    """``local_ffn``: columns of one rank's SwiGLU output.  The last two are as ``ChunkMemory`` has them."""
    whole = tower.hidden_size * width
    hidden = whole // num_pieces
    q = tower.num_attention_heads * tower.head_dim // tp_size * width
    k = max(tower.num_query_groups // tp_size, ulysses_size) * tower.head_dim * width
    exchanged = q if ulysses_size > 1 else 0  # attention's output as it was made, and as it is used
    return LayerBytes(
        input=hidden,
        residuals=2 * hidden + 2 * FP32 // num_pieces,
        norm_outputs=2 * hidden,
        attention=2 * (q + k) + exchanged + FP32 * tower.num_attention_heads // tp_size,
        swiglu_input=2 * local_ffn * width,
        swiglu_output=local_ffn * width,
        gathered=whole if num_pieces > 1 else 0,
    )


@dataclass(frozen=True)
class ChunkMemory:
    """What one rank holds of the slot ``spec`` beside its states.  ``rows`` are those of every microbatch."""

    model: ModelConfig
    placement: Placement
    spec: StageSpec
    tp_size: int
    precision: str
    num_pieces: int = 1
    """Into how many the rows between two linear layers are cut: ``tp_size`` under sequence parallelism."""
    ulysses_size: int = 1
    """Context-parallel ranks that exchange heads for tokens; a ring's ranks keep no more than one rank does."""

    @property
    def width(self) -> int:
        return WIDTHS[self.precision]

    def kept_bytes(self, rows: Rows) -> int:
        """What one microbatch keeps from its forward to its backward step, without logits."""
        vision = self._vision_per_patch() * rows.num_patches
        return vision + self._language_per_token() * rows.num_tokens + self._head_per_target() * rows.num_targets

    def kept_logit_bytes(self, rows: Rows) -> int:
        """The logits that one microbatch keeps as well: those of its last chunk."""
        return self._logits((rows.num_targets - 1) % MAX_LOGIT_ROWS + 1 if rows.num_targets else 0) * FP32

    def logit_bytes(self, rows: Rows) -> int:
        """The logits that exist at a time, at their worst moment: in fp32, and beside them in 16 bits."""
        width = FP32 + (self.width if self.width < FP32 else 0)
        return self._logits(min(rows.num_targets, MAX_LOGIT_ROWS)) * width

    def working_bytes(self, rows: Rows) -> int:
        """What the layer that needs most holds while it runs, beside the kept."""
        vision = [layer.working(keeps) for layer, keeps in self._vision_layers()]
        language = [layer.working(keeps) for layer, keeps in self._language_layers()]
        return max(max(vision, default=0) * rows.num_patches, max(language, default=0) * rows.num_tokens)

    def _logits(self, num_rows: int) -> int:
        return num_rows * (self.model.language.vocab_size // self.tp_size) if self.spec.has_head else 0

    @cached_property
    def _weights(self) -> tuple[Weight, ...]:
        return stage_weights(self.model, self.spec)

    def _vision_layers(self) -> Iterator[tuple[LayerBytes, Keeps]]:
        vision, layers = self.model.vision, self.spec.vision_layers
        for _, keeps in _keeps(layers, vision.recompute, vision.freeze, gradient_passes=False):
            yield self._layer_bytes(vision, "vision"), keeps

    def _language_layers(self) -> Iterator[tuple[LayerBytes, Keeps]]:
        language, layers = self.model.language, self.spec.language_layers
        for _, keeps in _keeps(layers, language.recompute, language.freeze, self._language_passes):
            yield self._layer_bytes(language, "language"), keeps

    @property
    def _language_passes(self) -> bool:
        """Whether a gradient passes through the LLM's layers though they are frozen."""
        return self.placement.gradient_flows(Message.VISUAL_TOKENS, has_images=True)

    def _layer_bytes(self, tower: VisionConfig | LanguageConfig, part: str) -> LayerBytes:
        fused = next(w for w in self._weights if w.part == part and w.fusion is Fusion.GATE_UP)
        ulysses_size = self.ulysses_size if part == "language" else 1
        local_ffn = _held_shape(fused, self.tp_size)[0] // 2
        return layer_bytes(tower, local_ffn, self.tp_size, self.width, self.num_pieces, ulysses_size)

    def _vision_per_patch(self) -> int:
        model, spec, vision = self.model, self.spec, self.model.vision
        merged, num_pieces = vision.spatial_merge_size**2, self.num_pieces
        kept = sum(layer.kept(keeps) for layer, keeps in self._vision_layers())
        if kept:  # tables of cos and sin, in both orders of rows; the indices of both orders and back
            kept += 2 * 2 * vision.head_dim * FP32 + 2 * INT64
        if spec.has_patch_embedding and not vision.freeze:
            kept += vision.patch_elements * self.width // num_pieces + INT64
        if spec.has_projector and not (vision.freeze and model.projector.freeze):
            hidden, trained = vision.hidden_size * self.width // num_pieces, not model.projector.freeze
            first = next(w for w in self._weights if w.place is Place.PROJECTOR and w.tp_dim == 0 and len(w.shape) == 2)
            gelu = _held_shape(first, self.tp_size)[0] * self.width
            kept += hidden + FP32 // num_pieces + trained * hidden + ((1 + trained) * gelu + INT64) // merged
        if spec.has_embedding and self._language_passes:
            kept += INT64 // merged
        return kept

    def _language_per_token(self) -> int:
        language = self.model.language
        kept = sum(layer.kept(keeps) for layer, keeps in self._language_layers())
        if kept:
            kept += 2 * language.head_dim * self.width
        return kept + (INT64 if self.spec.has_embedding and not language.freeze else 0)

    def _head_per_target(self) -> int:
        """The final norm, and the index of the rows; a trained output layer keeps what the norm writes."""
        language = self.model.language
        if not self.spec.has_head or (language.freeze and not self._language_passes):
            return 0
        hidden = language.hidden_size * self.width
        return hidden + FP32 + INT64 + (0 if language.freeze else hidden)


@dataclass(frozen=True)
class StageMemory:
    """What one rank of a stage holds beside its states: all of its chunks."""

    chunks: tuple[ChunkMemory, ...]

    @classmethod
    def of(
        cls, model: ModelConfig, placement: Placement, stage: int, tp_size: int, precision: str,
        num_pieces: int = 1, ulysses_size: int = 1,
    ) -> "StageMemory":  # fmt: skip
        specs = [placement[stage, chunk] for chunk in range(placement.num_chunks)]
        return cls(tuple(
            ChunkMemory(model, placement, spec, tp_size, precision, num_pieces, ulysses_size) for spec in specs))

    def in_flight(self, rows: Rows, num_microbatches: int) -> tuple[int, ...]:
        """By chunk: of how many microbatches activations are kept at the worst moment of the schedule."""
        kept, placement = [chunk.kept_bytes(rows) for chunk in self.chunks], self.chunks[0].placement
        moments = in_flight(num_microbatches, self.chunks[0].spec.stage, placement.num_stages, placement.num_chunks)
        return max(moments, key=lambda counts: (sum(map(mul, counts, kept)), sum(counts)))

    def kept_bytes(self, rows: Rows, num_microbatches: int) -> int:
        """Activations at that moment."""
        kept = (chunk.kept_bytes(rows) for chunk in self.chunks)
        return sum(map(mul, self.in_flight(rows, num_microbatches), kept))

    def logit_bytes(self, rows: Rows) -> int:
        return max(chunk.logit_bytes(rows) for chunk in self.chunks)

    def working_bytes(self, rows: Rows) -> int:
        return max(chunk.working_bytes(rows) for chunk in self.chunks)

    def peak_bytes(self, rows: Rows, num_microbatches: int, state_bytes: int) -> int:
        """Most of what lives at a time: states, all microbatches in flight, and either logits or a layer at work."""
        at_work = max(self.logit_bytes(rows), self.working_bytes(rows))
        return state_bytes + self.kept_bytes(rows, num_microbatches) + at_work


def _keeps(
    layers: range, recompute: RecomputeConfig, is_frozen: bool, gradient_passes: bool
) -> Iterator[tuple[int, Keeps]]:
    """Each layer with what it keeps.  "block" recomputes the first layers of a stage, "uniform" all of them."""
    num_recomputed = recompute.num_layers if recompute.method == "block" else None
    recomputed = layers[:num_recomputed] if recompute.granularity == "full" else ()
    for layer in layers:
        if is_frozen and not gradient_passes:
            yield layer, Keeps.NOTHING
        elif layer in recomputed:
            yield layer, Keeps.INPUT
        elif is_frozen or recompute.granularity == "selective":
            yield layer, Keeps.NO_OUTPUTS
        else:
            yield layer, Keeps.ALL


def _held_shape(weight: Weight, tp_size: int) -> tuple[int, ...]:
    """Shape of one rank's shard in memory: the only place that asks."""
    return memory_shape(weight, tp_size)
