"""The memory of one rank's chunk besides its states: activations, logits, and the working set of a layer.

Not counted: allocations of the driver and the communication library, and the allocator's fragmentation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mm.config.model import ModelConfig, Tower, VisionConfig
from mm.cost.layer_memory import (
    ALL,
    FP32,
    INT64,
    NOTHING,
    WIDTHS,
    Keeps,
    LayerBytes,
    kept_by_layers,
    layer_memories,
    params_by_place,
    params_of,
    trained_layers,
    vision_division,
)
from mm.cost.workload import message_bytes
from mm.model.layers.loss import MAX_LOGIT_ROWS, max_logit_rows
from mm.model.recompute import PAGE_BYTES
from mm.placement import Message, Placement, StageSpec
from mm.weights.shard import memory_shape
from mm.weights.table import Place, Weight, owns, stage_weights, weights_by_place
from mm.weights.trained import GradientPath, is_frozen


@dataclass(frozen=True)
class MicrobatchSizes:
    """Sizes of one microbatch."""

    num_tokens: int
    num_patches: int
    num_targets: int


class Elements(NamedTuple):
    """Elements of weights on one rank, with padding."""

    total: int
    trained: int


@dataclass(frozen=True)
class LayerMemory:
    """Bytes per row of one layer."""

    sizes: LayerBytes
    keeps: Keeps
    is_offloaded: bool
    """Whether its activations wait in host memory, except ``stays``."""
    is_passing: bool
    """Whether they are on the device only while it and its neighbours are computed: it is offloaded, or would be if it
    were not the last layer before the head."""
    stays: int
    """Bytes of a passing layer that stay on the device: its input, if it is a message or has no gradient."""

    @property
    def kept(self) -> int:
        """From the forward to the backward pass, on the device."""
        return self.stays if self.is_passing else self.sizes.kept(self.keeps)

    @property
    def passing(self) -> int:
        """On the device while it and its neighbours are computed."""
        return self.sizes.kept(self.keeps) - self.stays if self.is_passing else 0

    @property
    def offloaded(self) -> int:
        """From the forward to the backward pass, in host memory."""
        return self.passing if self.is_offloaded else 0




@dataclass(frozen=True)
class ChunkMemory:
    """One rank's memory for the slot ``spec``, besides its states.  ``rows`` of methods: sizes of each microbatch."""

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
        """Bytes that ``count`` of a step's microbatches keep for their backward passes, without logits."""
        num_patches = self._num_encoded(count, num_microbatches) * rows.num_patches
        per_token = self._language_per_token + (0 if rows.num_patches else self._text_input_per_token)
        others = per_token * rows.num_tokens + self._head_per_target * rows.num_targets
        return self._vision_per_patch * num_patches + others * count

    def _num_encoded(self, count: int, num_microbatches: int) -> int:
        """The most microbatches whose images the ViT keeps while ``count`` consecutive ones are in flight.

        If four share a pass of the ViT, two in flight may belong to two passes, so eight are kept.
        """
        size = self.encoder_batch_size
        if size == 1 or not count:
            return count
        return min(size * (1 - (1 - count) // size), num_microbatches)

    def coming_bytes(self, rows: MicrobatchSizes, num_microbatches: int | None = None) -> int:
        """Bytes allocated for the next of ``num_microbatches`` (None: many): its inputs, and its message's buffer."""
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

    def logit_bytes(self, rows: MicrobatchSizes) -> int:
        """Peak bytes of logits: in 16-bit precision one block in fp32 and one in 16 bits, the most of any device."""
        if self.width == FP32:  # logits and their gradient
            return self._logits(min(rows.num_targets, max_logit_rows(FP32, is_fused=True))) * 2 * FP32
        return self._logits(min(rows.num_targets, MAX_LOGIT_ROWS)) * (FP32 + self.width)

    def working_bytes(self, rows: MicrobatchSizes) -> int:
        """Bytes that the largest layer needs while it runs, besides what is kept on the device.

        With offloaded layers these include the activations of two layers: those of one leave or arrive while the
        next one is computed.  Those of the ViT's last layer leave during the first layer of the LLM.
        """
        vision, language = self._working_per_row
        num_patches, num_tokens = rows.num_patches * self.encoder_batch_size, rows.num_tokens
        leaving, first = self._between_towers
        return max(vision * num_patches, language * num_tokens, leaving * num_patches + first * num_tokens)

    @cached_property
    def _between_towers(self) -> tuple[int, int]:
        """Bytes per patch of the ViT's last layer, which leaves, and per token of the LLM's first, which runs."""
        last = self._vision_layers[-1].passing if self._vision_layers else 0
        if not last or not self.spec.language_layers:
            return 0, 0
        first = self._language_layers[0]
        return last, first.passing + first.sizes.kept(ALL) - first.sizes.kept(first.keeps)

    def passing_bytes(self, rows: MicrobatchSizes) -> int:
        """Bytes of the last layer's passing activations: after its forward pass, beside logits."""
        if self.spec.language_layers:
            return self._language_layers[-1].passing * rows.num_tokens
        return self._vision_layers[-1].passing * rows.num_patches if self.spec.vision_layers else 0

    def host_bytes(self, rows: MicrobatchSizes, count: int = 1, num_microbatches: int = 1) -> int:
        """Bytes in host memory of ``count`` consecutive microbatches, in whole pages; see ``kept_bytes``."""
        num_patches = self._num_encoded(count, num_microbatches) * rows.num_patches
        of_vision = sum(_paged(layer.offloaded * num_patches) for layer in self._vision_layers)
        return of_vision + count * sum(_paged(layer.offloaded * rows.num_tokens) for layer in self._language_layers)

    @cached_property
    def _working_per_row(self) -> tuple[int, int]:
        """Per patch and per token."""
        def of(layers: Sequence[LayerMemory]) -> int:
            passing = [layer.passing for layer in layers if layer.passing]
            working = max((layer.sizes.working(layer.keeps) for layer in layers), default=0)
            return working + min(2, len(passing)) * max(passing, default=0)

        vision, language = of(self._vision_layers), of(self._language_layers)
        # the gradients of visual tokens twice: as they arrive, and joined
        return vision + 2 * self._together_per_patch * self._path.leads_to_images, language

    @property
    def _together_per_patch(self) -> int:
        """Bytes per patch of the visual tokens that wait for their microbatches."""
        hidden = self.model.language.hidden_size * self.width
        return hidden // self.model.vision.spatial_merge_size**2 if self.encoder_batch_size > 1 else 0

    @cached_property
    def layer(self) -> Elements:
        """The most of a layer, in total and trained."""
        known = params_by_place(self.model, self.tp_size)
        layers = [*(known[Place.VISION_LAYER, layer] for layer in self.spec.vision_layers),
                  *(known[Place.LANGUAGE_LAYER, layer] for layer in self.spec.language_layers)]
        return Elements(*(max((one[index] for one in layers), default=0) for index in range(2)))

    @cached_property
    def embedding(self) -> Elements:
        """The word embedding; none trained beside the head, whose gradients are as large and exist with more."""
        found = self._elements(self._of(Place.EMBEDDING))
        return Elements(found.total, 0) if self.spec.has_head else found

    @cached_property
    def head(self) -> Elements:
        """The output layer."""
        if not self.spec.has_head:
            return Elements(0, 0)
        return self._elements(self._of(Place.EMBEDDING) if self.shares_embedding else [
            one for one in stage_weights(self.model, self.spec)
            if one.is_tied_copy or (one.place is Place.HEAD and len(one.shape) > 1)])

    @property
    def shares_embedding(self) -> bool:
        """Whether the output layer is the word embedding; its buffer then exists from the head's backward pass on."""
        return self.model.language.tied and self.spec.has_embedding and self.spec.has_head

    def _elements(self, weights: Sequence[Weight]) -> Elements:
        return Elements(*params_of(weights, self.model, self.tp_size)[:2])

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

    @cached_property
    def _vision_layers(self) -> Sequence[LayerMemory]:
        return list(self._layers_of("vision"))

    @cached_property
    def _language_layers(self) -> Sequence[LayerMemory]:
        return list(self._layers_of("language"))

    def _layers_of(self, part: str) -> Iterator[LayerMemory]:
        tower: Tower = getattr(self.model, part)
        place = Place.VISION_LAYER if part == "vision" else Place.LANGUAGE_LAYER
        layers: range = getattr(self.spec, place.value)
        known = layer_memories(self.model, place, self.tp_size, self.width, self.num_pieces, self.ulysses_size)
        first = Message.PATCHES if part == "vision" else Message.HIDDEN_STATES
        is_message = self.spec.receives is first and not (part == "vision" and self._copies_patches)
        passing = tower.offload.layers(layers, is_before_head=False)
        is_before_head = part == "language" and self.spec.has_head
        for layer, sizes, keeps, is_offloaded in kept_by_layers(tower, layers, known, is_before_head=is_before_head):
            # a received message stays until its gradient is sent; so does what has no gradient
            stays = layer == layers[0] and keeps.keeps_input and (
                is_message or not self._path.needs_input_gradient(place, layer))
            is_passing = layer in passing
            yield LayerMemory(sizes, keeps, is_offloaded, is_passing, sizes.input if stays and is_passing else 0)

    @cached_property
    def _copies_patches(self) -> bool:
        """Whether a first layer with full attention keeps a reordered copy beside the received message."""
        spec, vision = self.spec, self.model.vision
        return (spec.receives is Message.PATCHES and bool(spec.vision_layers) and self._vision_division[1] == 1
                and spec.vision_layers[0] in vision.fullatt_block_indexes
                and self._path.needs_input_gradient(Place.VISION_LAYER, spec.vision_layers[0]))

    @cached_property
    def _vision_per_patch(self) -> int:
        model, spec, vision = self.model, self.spec, self.model.vision
        merged = vision.spatial_merge_size**2
        kept = sum(layer.kept for layer in self._vision_layers)
        kept += vision.hidden_size * self.width * self._copies_patches
        if any(layer.keeps != NOTHING for layer in self._vision_layers):
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
        kept = sum(layer.kept for layer in self._language_layers)
        if any(layer.keeps != NOTHING for layer in self._language_layers):
            kept += 2 * language.head_dim * self.width
        embedding = self._of(Place.EMBEDDING)
        return kept + (INT64 if any(not is_frozen(weight, self.model) for weight in embedding) else 0)

    @cached_property
    def _text_input_per_token(self) -> int:
        """Bytes per token of the first layer's input that stay on the device without images, having no gradient."""
        if not self.spec.has_embedding or not all(is_frozen(one, self.model) for one in self._of(Place.EMBEDDING)):
            return 0
        first = self._language_layers[0]
        return first.sizes.input if first.is_passing and first.keeps.keeps_input and not first.stays else 0

    @cached_property
    def _head_per_target(self) -> int:
        """Bytes of the final norm's input and output (from which the loss recomputes logits), and of the row index."""
        if not self.spec.has_head:
            return 0
        norm, hidden = self._of(Place.HEAD)[0], self.model.language.hidden_size * self.width
        enters_norm = self._path.needs_input_gradient(Place.HEAD) or not is_frozen(norm, self.model)
        return hidden + INT64 + enters_norm * (hidden + FP32)


def _paged(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _vision_table_bytes(vision: VisionConfig) -> int:
    """Bytes per patch of the cos and sin tables in both row orders, and of the indices between the orders."""
    return 2 * 2 * vision.head_dim * FP32 + 2 * INT64
