"""Formulas for the memory one rank needs besides its states: activations, logits, and the working set of a layer.

Pure arithmetic over the model's settings; ``mm.plan.layer_memory`` says what one layer keeps and needs.
``tests/test_budgets.py`` compares all of it with a traced step.  Not counted: allocations of the driver and the
communication library, and the allocator's fragmentation.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import le

from mm.config.model import ModelConfig, Tower, VisionConfig
from mm.model.loss import MAX_LOGIT_ROWS, max_logit_rows
from mm.parallel.order import in_flight, max_sent_ahead
from mm.placement import Message, Placement, StageSpec
from mm.plan.layer_memory import (
    FP32,
    INPUT,
    INT64,
    NOTHING,
    WIDTHS,
    Keeps,
    LayerBytes,
    layer_memories,
    trained_layers,
    vision_division,
)
from mm.plan.messages import message_bytes
from mm.weights.memory import memory_shape
from mm.weights.placed import owns, stage_weights, weights_by_place
from mm.weights.table import Place, Weight
from mm.weights.trained import GradientPath, is_frozen


@dataclass(frozen=True)
class MicrobatchSizes:
    """Sizes of one microbatch."""

    num_tokens: int
    num_patches: int
    num_targets: int


@dataclass(frozen=True)
class UnitBuffers:
    """Gradients that exist only while a backward pass fills and reduces them (``mm.parallel.sharded``), and weights
    that are whole only while they are used (``mm.parallel.weight_shards``)."""

    width: int
    """Bytes of one gradient."""
    num_layers: int
    """Layers whose gradients exist at once: one, and with overlapped reduction the one before, too."""
    weight_width: int = 0
    """Bytes of one weight; 0 if all are always whole."""
    num_open: int = 1
    """Layers whose weights are whole at once: one, and with overlapped gathers the next one, too."""


@dataclass(frozen=True)
class ChunkMemory:
    """One rank's memory for the slot ``spec``, besides its states.  ``rows``: sizes of each microbatch."""

    model: ModelConfig
    placement: Placement
    spec: StageSpec
    tp_size: int
    precision: str
    num_pieces: int = 1
    """Ranks that share the rows between two linear layers: ``tp_size`` under sequence parallelism, else 1."""
    ulysses_size: int = 1
    """Context-parallel ranks that exchange heads for tokens; 1 for a ring, whose ranks need no extra memory."""
    keeps_features: bool = False
    """Whether ViT features may come from disk: whole rows then replace pixels or a message."""

    @property
    def width(self) -> int:
        return WIDTHS[self.precision]

    @property
    def _vision_division(self) -> tuple[int, int]:
        return vision_division(self.model, self.tp_size, self.num_pieces)

    @property
    def encoder_batch_size(self) -> int:
        """Microbatches whose images pass the ViT together."""
        return self.model.encoder_batch_microbatches if self.spec.has_whole_vit else 1

    def kept_bytes(self, rows: MicrobatchSizes, count: int = 1, num_microbatches: int = 1) -> int:
        """Bytes that ``count`` consecutive microbatches of a step with ``num_microbatches`` keep from their forward to
        their backward passes, without logits."""
        num_patches = self._num_encoded(count, num_microbatches) * rows.num_patches
        others = self._language_per_token * rows.num_tokens + self._head_per_target * rows.num_targets
        return self._vision_per_patch * num_patches + others * count

    def _num_encoded(self, count: int, num_microbatches: int) -> int:
        """The most microbatches whose images the ViT keeps while ``count`` consecutive ones are in flight: all of each
        pass of the ViT to which one of them belongs."""
        size = self.encoder_batch_size
        if size == 1 or not count:
            return count
        return min(size * (1 - (1 - count) // size), num_microbatches)

    def coming_bytes(self, rows: MicrobatchSizes, num_microbatches: int | None = None) -> int:
        """Bytes already allocated for the next microbatch: its inputs and the buffer for its message.

        ``num_microbatches``: of the step; None: many.
        """
        spec, vision, language = self.spec, self.model.vision, self.model.language
        per_patch = _vision_table_bytes(vision) if spec.vision_layers else 0
        per_token = 2 * language.head_dim * self.width if spec.language_layers else 0
        per_token += INT64 if spec.has_embedding else 0
        message = self._message_bytes(spec.receives, rows)
        pixels = vision.patch_elements * self.width if spec.has_patch_embedding else 0
        features = vision.hidden_size * self.width if self.keeps_features and spec.has_projector else 0
        size = self.encoder_batch_size
        if size > 1 and num_microbatches is not None:  # the images of the first pass of the ViT are there already
            size = min(size, max(0, num_microbatches - size))
        num_patches = rows.num_patches * size
        media = max(num_patches * pixels + message, num_patches * features)
        return num_patches * per_patch + rows.num_tokens * per_token + media

    def ahead_bytes(self, rows: MicrobatchSizes) -> int:
        """Bytes of a microbatch's message to the next stage, or 0 if the slot waits for a gradient in return."""
        waits = self._path.comes_back(self.spec, rows.num_patches > 0)
        return 0 if waits else self._message_bytes(self.spec.sends, rows)

    def kept_logit_bytes(self, rows: MicrobatchSizes) -> int:
        """Bytes of logits that one microbatch also keeps: those of its last block, as with CUDA's kernels."""
        if not rows.num_targets:
            return 0
        return self._logits((rows.num_targets - 1) % max_logit_rows(self.width, is_fused=True) + 1) * self.width

    def logit_bytes(self, rows: MicrobatchSizes) -> int:
        """Peak bytes of logits: in 16-bit precision one block in fp32 and one in 16 bits, as on NPUs.

        CUDA's kernels need less for few rows, and as much for many (``max_logit_rows``).
        """
        if self.width == FP32:  # logits and their gradient
            return self._logits(min(rows.num_targets, max_logit_rows(FP32, is_fused=True))) * 2 * FP32
        return self._logits(min(rows.num_targets, MAX_LOGIT_ROWS)) * (FP32 + self.width)

    def working_bytes(self, rows: MicrobatchSizes) -> int:
        """Bytes that the largest layer needs while it runs, besides what is kept."""
        vision, language = self._working_per_row
        return max(vision * rows.num_patches * self.encoder_batch_size, language * rows.num_tokens)

    @cached_property
    def _working_per_row(self) -> tuple[int, int]:
        vision, language = (max((layer.working(keeps) for layer, keeps in self._layers(part)), default=0)
                            for part in ("vision", "language"))
        # the gradients of visual tokens, as they come and joined
        return vision + 2 * self._together_per_patch * self._path.leads_to_images, language

    @property
    def _together_per_patch(self) -> int:
        """Bytes per patch of the visual tokens that wait for their microbatches."""
        hidden = self.model.language.hidden_size * self.width
        return hidden // self.model.vision.spatial_merge_size**2 if self.encoder_batch_size > 1 else 0

    @cached_property
    def layer_gradients(self) -> int:
        """Trained elements of the largest layer."""
        return max(map(self._trained_elements, self._weights_of_layers), default=0)

    @cached_property
    def layer_weights(self) -> int:
        """All elements of the largest layer."""
        return max(map(self._elements, self._weights_of_layers), default=0)

    @property
    def _weights_of_layers(self) -> list[Sequence[Weight]]:
        places = [*((Place.VISION_LAYER, layer) for layer in self.spec.vision_layers),
                  *((Place.LANGUAGE_LAYER, layer) for layer in self.spec.language_layers)]
        return [self._of(*one) for one in places]

    @cached_property
    def embedding_weights(self) -> int:
        """All elements of the word embedding."""
        return self._elements(self._of(Place.EMBEDDING)) if self.spec.has_embedding else 0

    @cached_property
    def embedding_gradients(self) -> int:
        """Trained elements of the word embedding, unless the slot has the head, whose buffer is as large and exists
        when more activations do."""
        return 0 if self.spec.has_head else self._trained_elements(self._of(Place.EMBEDDING))

    @cached_property
    def head_gradients(self) -> int:
        """Trained elements of the output layer."""
        return self._trained_elements(self._head)

    @cached_property
    def head_weights(self) -> int:
        """All elements of the output layer."""
        return self._elements(self._head)

    @property
    def _head(self) -> Sequence[Weight]:
        if not self.spec.has_head:
            return ()
        if self.shares_embedding:
            return self._of(Place.EMBEDDING)
        return [one for one in stage_weights(self.model, self.spec)
                if one.is_tied_copy or (one.place is Place.HEAD and len(one.shape) > 1)]

    @property
    def shares_embedding(self) -> bool:
        """Whether the output layer is the word embedding, whose buffer then exists from the one to the other."""
        return self.model.language.tied and self.spec.has_embedding and self.spec.has_head

    def _trained_elements(self, weights: Sequence[Weight]) -> int:
        return self._elements([one for one in weights if not is_frozen(one, self.model)])

    def _elements(self, weights: Sequence[Weight]) -> int:
        return sum(math.prod(memory_shape(one, self.tp_size)) for one in weights)

    def _message_bytes(self, message: Message, rows: MicrobatchSizes) -> int:
        num_pieces = self.num_pieces if message is Message.HIDDEN_STATES else self._vision_division[1]
        return message_bytes(message, rows.num_patches, rows.num_tokens, self.model, self.width) // num_pieces

    def _logits(self, num_rows: int) -> int:
        return num_rows * (self.model.language.vocab_size // self.tp_size) if self.spec.has_head else 0

    @cached_property
    def _path(self) -> GradientPath:
        return GradientPath.of(self.model)

    def _of(self, place: Place, layer: int | None = None) -> Sequence[Weight]:
        return weights_by_place(self.model)[place, layer] if owns(self.spec, place, layer) else ()

    def _layers(self, part: str) -> Sequence[tuple[LayerBytes, Keeps]]:
        return self._vision_layers if part == "vision" else self._language_layers

    @cached_property
    def _vision_layers(self) -> Sequence[tuple[LayerBytes, Keeps]]:
        return list(self._layers_of("vision"))

    @cached_property
    def _language_layers(self) -> Sequence[tuple[LayerBytes, Keeps]]:
        return list(self._layers_of("language"))

    def _layers_of(self, part: str) -> Iterator[tuple[LayerBytes, Keeps]]:
        tower: Tower = getattr(self.model, part)
        place = Place.VISION_LAYER if part == "vision" else Place.LANGUAGE_LAYER
        layers: range = getattr(self.spec, place.value)
        ulysses_size = self.ulysses_size if part == "language" else 1
        known = layer_memories(self.model, place, self.tp_size, self.width, self.num_pieces, ulysses_size)
        whole = tower.recompute.whole_layers(layers)
        for layer in layers:
            bytes_of, keeps = known[layer]
            yield bytes_of, INPUT if keeps != NOTHING and layer in whole else keeps

    @cached_property
    def _vision_per_patch(self) -> int:
        model, spec, vision = self.model, self.spec, self.model.vision
        merged = vision.spatial_merge_size**2
        kept = sum(layer.kept(keeps) for layer, keeps in self._layers("vision"))
        if kept:
            kept += _vision_table_bytes(vision)
        if spec.has_patch_embedding and not all(is_frozen(one, model) for one in self._of(Place.PATCH_EMBEDDING)):
            kept += vision.patch_elements * self.width // self._vision_division[1] + INT64
        if spec.has_projector:
            kept += self._projector_per_patch
        if spec.has_embedding and self._path.leads_to_images:
            kept += INT64 // merged
        return kept + self._together_per_patch

    @cached_property
    def _projector_per_patch(self) -> int:
        """Bytes per patch of the norm's input and output, GELU's input and output, and the row index."""
        weights, (_, num_pieces) = self._of(Place.PROJECTOR), self._vision_division
        hidden = self.model.vision.hidden_size * self.width // num_pieces
        trained, (first, second), ranks = trained_layers(weights, self.model)
        passes = self._path.needs_input_gradient(Place.PROJECTOR)
        fc1 = next(weight for weight in weights if len(weight.shape) > 1)
        gelu = memory_shape(fc1, self.tp_size)[0] * self.width
        kept = (passes or any(trained[:first])) * (hidden + FP32 // num_pieces) + trained[first] * hidden
        merged = ((passes or any(trained[:second])) + trained[second]) * gelu + (passes or any(trained)) * INT64
        merged += sum(ranks) * self.width // num_pieces
        return kept + merged // self.model.vision.spatial_merge_size**2

    @cached_property
    def _language_per_token(self) -> int:
        language = self.model.language
        kept = sum(layer.kept(keeps) for layer, keeps in self._layers("language"))
        if kept:
            kept += 2 * language.head_dim * self.width
        embedding = self._of(Place.EMBEDDING)
        return kept + (INT64 if any(not is_frozen(weight, self.model) for weight in embedding) else 0)

    @cached_property
    def _head_per_target(self) -> int:
        """Bytes of the final norm's input and output (from which the loss recomputes logits), and of the row index."""
        if not self.spec.has_head:
            return 0
        norm, hidden = self._of(Place.HEAD)[0], self.model.language.hidden_size * self.width
        enters_norm = self._path.needs_input_gradient(Place.HEAD) or not is_frozen(norm, self.model)
        return hidden + INT64 + enters_norm * (hidden + FP32)


@dataclass(frozen=True)
class StageMemory:
    """One rank's memory besides its states, over all of its chunks."""

    chunks: tuple[ChunkMemory, ...]

    @classmethod
    def of(
        cls, model: ModelConfig, placement: Placement, stage: int, tp_size: int, precision: str,
        num_pieces: int = 1, ulysses_size: int = 1, keeps_features: bool = False,
    ) -> "StageMemory":  # fmt: skip
        specs = [placement[stage, chunk] for chunk in range(placement.num_chunks)]
        return cls(tuple(
            ChunkMemory(model, placement, spec, tp_size, precision, num_pieces, ulysses_size, keeps_features)
            for spec in specs))

    def in_flight(self, rows: MicrobatchSizes, num_microbatches: int) -> tuple[int, ...]:
        """Number of microbatches, by chunk, whose activations are kept at the schedule's peak."""
        placement = self.chunks[0].placement
        moments = _moments(num_microbatches, self.chunks[0].spec.stage, placement.num_stages, placement.num_chunks)
        return max(moments, key=lambda counts: (self._kept_bytes(rows, counts, num_microbatches), sum(counts)))

    def _kept_bytes(self, rows: MicrobatchSizes, counts: Sequence[int], num_microbatches: int) -> int:
        """Bytes of activations with ``counts`` microbatches in flight."""
        return sum(chunk.kept_bytes(rows, count, num_microbatches)
                   for chunk, count in zip(self.chunks, counts, strict=True))

    def kept_bytes(self, rows: MicrobatchSizes, num_microbatches: int) -> int:
        """Bytes of activations at the schedule's peak, and of what is already allocated for the next microbatch."""
        counts = self.in_flight(rows, num_microbatches)
        is_last = sum(counts) == num_microbatches * len(self.chunks)
        coming = 0 if is_last else max(chunk.coming_bytes(rows, num_microbatches) for chunk in self.chunks)
        return self._kept_bytes(rows, counts, num_microbatches) + coming

    def logit_bytes(self, rows: MicrobatchSizes) -> int:
        return max(chunk.logit_bytes(rows) for chunk in self.chunks)

    def working_bytes(self, rows: MicrobatchSizes) -> int:
        return max(chunk.working_bytes(rows) for chunk in self.chunks)

    def buffer_bytes(self, buffers: UnitBuffers) -> tuple[int, int, int]:
        """Bytes of the gradients and weights that exist with logits, with a running layer, and with the word embedding.
        """
        chunks, width, num_layers = self.chunks, buffers.width, buffers.num_layers
        weight_width, num_open = buffers.weight_width, buffers.num_open
        at_layers = (one.layer_gradients * num_layers + one.head_gradients * one.shares_embedding for one in chunks)
        at_embedding = (one.embedding_gradients + one.layer_gradients * (num_layers - 1) for one in chunks
                        if one.embedding_gradients)
        opened = (max(one.head_weights + one.layer_weights * (num_open - 1) for one in chunks),
                  max(one.layer_weights * num_open for one in chunks),
                  max(one.embedding_weights + one.layer_weights * (num_open - 1) for one in chunks))
        return (width * max(one.head_gradients for one in chunks) + weight_width * opened[0],
                width * max(at_layers) + weight_width * opened[1],
                max(width * max(at_embedding, default=0), weight_width * opened[2]))

    def ahead_bytes(self, rows: MicrobatchSizes, num_microbatches: int) -> int:
        """Bytes of messages that a slow next stage has not received: the most that may be in flight, and the next."""
        placement = self.chunks[0].placement
        most = max_sent_ahead(placement.num_stages, placement.num_chunks) + 1
        messages = [one for chunk in self.chunks for one in [chunk.ahead_bytes(rows)] * min(num_microbatches, most)]
        return sum(sorted(messages)[-most:])

    def peak_bytes(
        self, rows: MicrobatchSizes, num_microbatches: int, state_bytes: int, buffers: UnitBuffers | None = None
    ) -> int:
        """Peak: states, all microbatches in flight, messages sent ahead, and either logits or a running layer.

        ``buffers``: those that exist during the backward pass, if the states hold only shards of the gradients.
        """
        held = self.kept_bytes(rows, num_microbatches) + self.ahead_bytes(rows, num_microbatches)
        return state_bytes + held + sum(self.working_parts(rows, buffers))

    def working_parts(self, rows: MicrobatchSizes, buffers: UnitBuffers | None) -> tuple[int, int]:
        """The most that logits, a running layer or the word embedding need: bytes of their own work, and of gradients
        and weights that exist only then."""
        at_logits, at_layer, at_embedding = (0, 0, 0) if buffers is None else self.buffer_bytes(buffers)
        moments = (self.logit_bytes(rows), at_logits), (self.working_bytes(rows), at_layer), (0, at_embedding)
        return max(moments, key=sum)


@cache
def _moments(num_microbatches: int, stage: int, num_stages: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """The states that ``in_flight`` passes through, without those that hold no more of any chunk than another."""
    found = dict.fromkeys(in_flight(num_microbatches, stage, num_stages, num_chunks))
    return tuple(one for one in found if not any(
        other != one and all(map(le, one, other)) for other in found))


def _vision_table_bytes(vision: VisionConfig) -> int:
    """Bytes per patch of the cos and sin tables in both row orders, and of the indices between the orders."""
    return 2 * 2 * vision.head_dim * FP32 + 2 * INT64
