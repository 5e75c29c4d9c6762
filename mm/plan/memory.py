"""Formulas for the memory one rank needs besides its states: activations, logits, and the working set of a layer.

Pure arithmetic over the model's settings; ``tests/test_budgets.py`` compares it with a traced step.  Not counted:
allocations of the driver and the communication library, and the allocator's fragmentation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import le, mul

from mm.config.model import ModelConfig, RecomputeConfig, Tower, VisionConfig
from mm.model.loss import MAX_LOGIT_ROWS, max_logit_rows
from mm.parallel.order import in_flight, max_sent_ahead
from mm.placement import Message, Placement, StageSpec
from mm.plan.messages import message_bytes
from mm.weights.lora import matrix_pairs
from mm.weights.memory import memory_shape
from mm.weights.placed import owns, weights_by_place
from mm.weights.table import Fusion, Place, Weight
from mm.weights.trained import GradientPath, is_frozen

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element of weights and activations, by precision."""
FP32, INT64 = 4, 8


@dataclass(frozen=True)
class MicrobatchSizes:
    """Sizes of one microbatch."""

    num_tokens: int
    num_patches: int
    num_targets: int


@dataclass(frozen=True)
class Keeps:
    """Which tensors a layer keeps from its forward pass for the backward pass."""

    input: bool = False
    """The layer's input, for full recompute; then nothing else is kept."""
    num_residuals: int = 0
    """Inputs of norms."""
    num_norm_outputs: int = 0
    attention: bool = False
    swiglu_input: bool = False
    swiglu_output: bool = False
    adapter_numbers: int = 0
    """Hidden elements of adapters per row: the sum of their ranks."""


NOTHING, INPUT = Keeps(), Keeps(input=True)
ALL = Keeps(False, 2, 2, True, True, True)
"""Everything that the gradients of a trained layer need."""


def trained_layers(weights: Sequence[Weight], model: ModelConfig) -> tuple[list[bool], list[int], list[int]]:
    """Describe the base weights among ``weights``, in model order.

    Returns for each whether it or an adapter of it is trained; the indices of linear layers' matrices; and for each of
    these matrices the sum of its adapters' ranks.
    """
    base_weights = [weight for weight in weights if not weight.is_adapter]
    ranks = dict.fromkeys((weight.name for weight in base_weights), 0)
    for base, a, _ in matrix_pairs(weights):
        ranks[base.name] += a.shape[0]
    linear = [index for index, weight in enumerate(base_weights) if len(weight.shape) > 1]
    trained = [ranks[weight.name] > 0 or not is_frozen(weight, model) for weight in base_weights]
    return trained, linear, [ranks[base_weights[index].name] for index in linear]


def layer_keeps(weights: Sequence[Weight], model: ModelConfig, passes: bool, recompute: RecomputeConfig) -> Keeps:
    """What one layer keeps, given its ``weights`` in model order.  ``passes``: the layer's input needs a gradient.

    Two conditions matter.  A linear layer that is *trained* (itself or an adapter) keeps its input.  A gradient that is
    *needed* before an operation (``needs_gradient``: the layer's input or an earlier weight needs one) makes the
    operation keep its operands.

    - residuals (inputs of norms): if needed before the next linear layer, or if the norm's output or the MLP is
      recomputed
    - norm outputs: if the next linear layer is trained, unless recomputed
    - attention: if needed before or in qkv
    - SwiGLU's input: if needed before fc2, or if its output is recomputed for a trained fc2; not if the MLP is
      recomputed
    - SwiGLU's output: if fc2 is trained, unless recomputed
    """
    trained, (qkv, _, fc1, fc2), ranks = trained_layers(weights, model)

    def needs_gradient(stop: int) -> bool:
        return passes or any(trained[:stop])

    if not needs_gradient(len(trained)):
        return NOTHING
    norms, mlp, mlp_act = map(recompute.recomputes, ("layernorm", "mlp", "mlp_act"))
    return Keeps(
        num_residuals=((needs_gradient(qkv) or (norms and trained[qkv]))
                       + (mlp or needs_gradient(fc1) or (norms and trained[fc1]))),
        num_norm_outputs=(trained[qkv] and not norms) + (trained[fc1] and not (norms or mlp)),
        attention=needs_gradient(qkv + 1),
        swiglu_input=not mlp and (needs_gradient(fc2) or (mlp_act and trained[fc2])),
        swiglu_output=trained[fc2] and not (mlp or mlp_act),
        adapter_numbers=sum(ranks[:2] if mlp else ranks),
    )


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per row of each tensor that a layer's forward pass creates and its backward pass reads."""

    input: int
    residuals: int
    """Inputs of both norms, and the norms' scale factors."""
    norm_outputs: int
    attention: int
    """q, k, v, the output and the log-sum-exp."""
    swiglu_input: int
    swiglu_output: int
    gathered: int
    """All rows of a linear layer's input, gathered under sequence parallelism."""
    adapter_number: int
    """One hidden element of an adapter."""

    def kept(self, keeps: Keeps) -> int:
        norms = keeps.num_residuals * self.residuals + keeps.num_norm_outputs * self.norm_outputs
        swiglu = keeps.swiglu_input * self.swiglu_input + keeps.swiglu_output * self.swiglu_output
        hidden = keeps.adapter_numbers * self.adapter_number
        return keeps.input * self.input + norms // 2 + keeps.attention * self.attention + swiglu + hidden

    def working(self, keeps: Keeps) -> int:
        """Bytes per row needed while the layer runs, besides what is kept.

        These are its other activations and, in the backward pass, the gradients of its input and of SwiGLU's output and
        input, and the intermediates of SwiGLU's backward.
        """
        activations = self.kept(replace(ALL, adapter_numbers=keeps.adapter_numbers)) - self.kept(keeps)
        gradients = 0 if keeps == NOTHING else self.input + 2 * self.swiglu_input + self.swiglu_output
        return activations + gradients + self.gathered


def layer_bytes(
    tower: Tower, local_ffn: int, tp_size: int, width: int, num_pieces: int = 1, ulysses_size: int = 1
) -> LayerBytes:
    """``local_ffn``: columns of one rank's SwiGLU output.  ``num_pieces``, ``ulysses_size``: see ``ChunkMemory``."""
    whole = tower.hidden_size * width
    hidden = whole // num_pieces
    q = tower.num_attention_heads * tower.head_dim // tp_size * width
    k = max(tower.num_query_groups // tp_size, ulysses_size) * tower.head_dim * width
    exchanged = q if ulysses_size > 1 else 0  # attention's output before and after the all-to-all
    return LayerBytes(
        input=hidden,
        residuals=2 * hidden + 2 * FP32 // num_pieces,
        norm_outputs=2 * hidden,
        attention=2 * (q + k) + exchanged + FP32 * tower.num_attention_heads // tp_size,
        swiglu_input=2 * local_ffn * width,
        swiglu_output=local_ffn * width,
        gathered=whole if num_pieces > 1 else 0,
        adapter_number=-(-width // num_pieces),
    )


def vision_division(model: ModelConfig, tp_size: int, num_pieces: int) -> tuple[int, int]:
    """``tp_size`` and ``num_pieces`` of the ViT and the projector."""
    return (1, 1) if model.encodes_whole else (tp_size, num_pieces)


@cache
def layer_memories(
    model: ModelConfig, place: Place, tp_size: int, width: int, num_pieces: int, ulysses_size: int
) -> Sequence[tuple[LayerBytes, Keeps]]:
    """For each layer of a tower: its bytes, and what it keeps if it is not recomputed as a whole.  For the sizes, see
    ``layer_bytes``."""
    tower: Tower = model.vision if place is Place.VISION_LAYER else model.language
    path, found = GradientPath.of(model), list[tuple[LayerBytes, Keeps]]()
    for layer in range(tower.num_layers):
        weights = weights_by_place(model)[place, layer]
        keeps = layer_keeps(weights, model, path.needs_input_gradient(place, layer), tower.recompute)
        fused = next(weight for weight in weights if weight.fusion is Fusion.GATE_UP)
        local_ffn = memory_shape(fused, tp_size)[0] // 2
        own = vision_division(model, tp_size, num_pieces) if place is Place.VISION_LAYER else (tp_size, num_pieces)
        found.append((layer_bytes(tower, local_ffn, own[0], width, own[1], ulysses_size), keeps))
    return found


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

    def kept_bytes(self, rows: MicrobatchSizes) -> int:
        """Bytes that one microbatch keeps from its forward to its backward pass, without logits."""
        vision = self._vision_per_patch * rows.num_patches
        return vision + self._language_per_token * rows.num_tokens + self._head_per_target * rows.num_targets

    def coming_bytes(self, rows: MicrobatchSizes) -> int:
        """Bytes already allocated for the next microbatch: its inputs and the buffer for its message."""
        spec, vision, language = self.spec, self.model.vision, self.model.language
        per_patch = _vision_table_bytes(vision) if spec.vision_layers else 0
        per_token = 2 * language.head_dim * self.width if spec.language_layers else 0
        per_token += INT64 if spec.has_embedding else 0
        message = self._message_bytes(spec.receives, rows)
        pixels = vision.patch_elements * self.width if spec.has_patch_embedding else 0
        features = vision.hidden_size * self.width if self.keeps_features and spec.has_projector else 0
        media = max(rows.num_patches * pixels + message, rows.num_patches * features)
        return rows.num_patches * per_patch + rows.num_tokens * per_token + media

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
        return max(vision * rows.num_patches, language * rows.num_tokens)

    @cached_property
    def _working_per_row(self) -> tuple[int, int]:
        vision, language = (max((layer.working(keeps) for layer, keeps in self._layers(part)), default=0)
                            for part in ("vision", "language"))
        return vision, language

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
        return kept

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
        kept, placement = [chunk.kept_bytes(rows) for chunk in self.chunks], self.chunks[0].placement
        moments = _moments(num_microbatches, self.chunks[0].spec.stage, placement.num_stages, placement.num_chunks)
        return max(moments, key=lambda counts: (sum(map(mul, counts, kept)), sum(counts)))

    def kept_bytes(self, rows: MicrobatchSizes, num_microbatches: int) -> int:
        """Bytes of activations at the schedule's peak, and of what is already allocated for the next microbatch."""
        kept, counts = (chunk.kept_bytes(rows) for chunk in self.chunks), self.in_flight(rows, num_microbatches)
        is_last = sum(counts) == num_microbatches * len(self.chunks)
        coming = 0 if is_last else max(chunk.coming_bytes(rows) for chunk in self.chunks)
        return sum(map(mul, counts, kept)) + coming

    def logit_bytes(self, rows: MicrobatchSizes) -> int:
        return max(chunk.logit_bytes(rows) for chunk in self.chunks)

    def working_bytes(self, rows: MicrobatchSizes) -> int:
        return max(chunk.working_bytes(rows) for chunk in self.chunks)

    def ahead_bytes(self, rows: MicrobatchSizes, num_microbatches: int) -> int:
        """Bytes of messages that a slow next stage has not received: the most that may be in flight, and the next."""
        placement = self.chunks[0].placement
        most = max_sent_ahead(placement.num_stages, placement.num_chunks) + 1
        messages = [one for chunk in self.chunks for one in [chunk.ahead_bytes(rows)] * min(num_microbatches, most)]
        return sum(sorted(messages)[-most:])

    def peak_bytes(self, rows: MicrobatchSizes, num_microbatches: int, state_bytes: int) -> int:
        """Peak: states, all microbatches in flight, messages sent ahead, and either logits or a running layer."""
        working = max(self.logit_bytes(rows), self.working_bytes(rows))
        held = self.kept_bytes(rows, num_microbatches) + self.ahead_bytes(rows, num_microbatches)
        return state_bytes + held + working


@cache
def _moments(num_microbatches: int, stage: int, num_stages: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """The states that ``in_flight`` passes through, without those that hold no more of any chunk than another."""
    found = dict.fromkeys(in_flight(num_microbatches, stage, num_stages, num_chunks))
    return tuple(one for one in found if not any(
        other != one and all(map(le, one, other)) for other in found))


def _vision_table_bytes(vision: VisionConfig) -> int:
    """Bytes per patch of the cos and sin tables in both row orders, and of the indices between the orders."""
    return 2 * 2 * vision.head_dim * FP32 + 2 * INT64
