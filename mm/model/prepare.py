"""What a chunk needs of a microbatch, derived from the plan on the host and copied to the device; and visual tokens of
several microbatches that pass the ViT as one.  ``mm.model.stage`` does the model's own computation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm.batch import BatchTotals, Images, Microbatch, normalised
from mm.config.args import LossUnit
from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.model.layers.attention import AttentionInputs
from mm.model.layers.embedding import EmbeddingInputs, embedding_inputs
from mm.model.layers.lora_linear import patch_keys, token_keys
from mm.model.layers.loss import LossInputs, loss_inputs
from mm.model.towers import Towers, VisionInputs
from mm.parallel.context import Context
from mm.parallel.mesh import Mesh
from mm.placement import StageSpec
from mm.weights.trained import GradientPath


class SharedVisionPass:
    """The visual tokens that one rank makes of several microbatches' images in one pass through the ViT.

    The first microbatch fills it; each takes its own rows, in order.  Backward passes may run in any order: the ViT's
    runs once, inside that of the microbatch whose gradient comes last.
    """

    def __init__(self, num_tokens: Sequence[int], are_exchanged: bool) -> None:
        """``num_tokens``: visual tokens that this rank makes of each microbatch, which may be none.

        ``are_exchanged``: every microbatch contributes a gradient, even one without rows here, so that all ranks of the
        exchange run the ViT's backward pass in the same microbatch, and none waits for another.
        """
        self.num_tokens = tuple(num_tokens)
        self._numbers = [number for number, count in enumerate(num_tokens) if count or are_exchanged]
        self._next = 0
        self._made: Tensor | None = None
        self._rows: tuple[Tensor, ...] = ()
        self._gradients: dict[int, Tensor] = {}

    def fill(self, made: Tensor) -> None:
        """``made``: [sum(num_tokens), hidden], with the graph that leads to it."""
        self._made, self._rows = made, made.detach().split(self.num_tokens)

    def take(self) -> Tensor | None:
        """The visual tokens of the next microbatch, as a tensor of its own; None if this rank made none of them and no
        exchange needs it, or none at all."""
        number, self._next = self._next, self._next + 1
        if number not in self._numbers or not any(self.num_tokens):
            return None
        assert self._made is not None, "the first of these microbatches encodes the images of all"
        if not self._made.requires_grad:
            return self._rows[number].clone()
        return _Rows.apply(self._made.new_empty(0, requires_grad=True), self._rows[number], self, number)

    def take_gradient(self, number: int, gradient: Tensor) -> None:
        """``gradient`` of the visual tokens of microbatch ``number``; the last one to come starts the backward pass."""
        self._gradients[number] = gradient
        if len(self._gradients) == len(self._numbers):
            whole = torch.cat([self._gradients[number] for number in self._numbers])
            made, self._made, self._rows, self._gradients = self._made, None, (), {}
            assert made is not None, "each microbatch has one backward pass"
            torch.autograd.backward(made, whole)


class _Rows(torch.autograd.Function):
    """Rows without a graph, whose gradient goes to ``SharedVisionPass``; ``anchor`` makes autograd ask for it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, shared_pass: SharedVisionPass, number: int) -> Tensor:
        ctx.shared_pass, ctx.number = shared_pass, number
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.shared_pass.take_gradient(ctx.number, gradient)
        return None, None, None, None


@dataclass(frozen=True)
class ChunkInputs:
    """On the device; None for parts that the chunk does not need."""

    vision: VisionInputs | None
    embedding: EmbeddingInputs | None
    language: AttentionInputs | None
    loss: LossInputs | None
    to_keep: tuple[tuple[str, int], ...] = ()
    """(key, number of patches) of each image here; the key is "" if its features are not to be stored."""
    shared_pass: SharedVisionPass | None = None
    """Where its visual tokens come from if images of several microbatches share a pass.  ``vision`` and ``to_keep``
    then have all of these images in the first microbatch, and none in the others."""

    @property
    def images(self) -> Images:
        if self.vision is None:
            return Images.NONE
        return Images.PROJECTED | (Images.ENCODED if self.vision.features is None else Images.NONE)


class Preparation:
    """Derives a chunk's inputs from microbatches."""

    def __init__(
        self, model: ModelConfig, spec: StageSpec, mesh: Mesh, towers: Towers, device: Device, dtype: torch.dtype,
        loss_unit: LossUnit, shards_rows: bool,
    ) -> None:
        self.context = mesh.context
        self.shard_group = mesh.groups.tp if shards_rows else None
        self.vision_shard_group = None if model.encodes_whole else self.shard_group
        self.gives_features = spec.has_projector and (model.encodes_whole or mesh.tp_rank == 0)
        """Whether this rank gives the features to be stored: tensor-parallel ranks have the same images, unless each
        encodes its own."""
        self._model, self._spec, self._towers, self.device, self._dtype = model, spec, towers, device, dtype
        self._tp_group = mesh.groups.tp
        self._loss_unit: LossUnit = loss_unit
        self._visual_gradients = GradientPath.of(model).leads_to_images
        self._shared_passes: dict[bool, SharedVisionPass] = {}
        """By whether the ViT is skipped: the pass whose microbatches are being prepared."""

    def __call__(
        self, microbatch: Microbatch, totals: BatchTotals | None, dropout_seed: int | None = None, sums: bool = False,
        is_whole: bool = False, encoded_with: Sequence[Microbatch] = (),
    ) -> ChunkInputs:
        """Derive the chunk's inputs from the plan on the host and start copying them to the device.

        ``totals`` may be None if no loss is needed.  ``sums``: the loss is the sum over the microbatch's targets.
        ``is_whole``: neither sequence nor context parallelism divides this microbatch.  ``encoded_with``: the
        microbatches whose images share a pass through the ViT, prepared in this order.
        """
        spec, model, device = self._spec, self._model, self.device
        shard_group, context = (None, replace(self.context, is_alone=True)) if is_whole else (
            self.shard_group, self.context)
        share = context.share(microbatch) if context.size > 1 else None
        vision = embedding = language = loss = shared_pass = None
        encoded, to_keep = (microbatch,), ()
        if len(encoded_with) > 1 and spec.has_whole_vit:
            encoded, shared_pass = self._shared_pass(microbatch, encoded_with)
        if spec.vision_layers and encoded:
            vision_shard_group = None if is_whole else self.vision_shard_group
            vision, to_keep = self._vision_inputs(encoded, context, vision_shard_group, dropout_seed)
        if spec.has_embedding:
            embedding = embedding_inputs(microbatch, model.visual_token_ids, device, context, self._tp_group,
                                         shard_group, share, self._visual_gradients)
            if shared_pass is not None and embedding.visual is not None:  # the chunk has gathered them
                embedding = replace(embedding, visual=replace(embedding.visual, sharded=None))
        if spec.language_layers:
            keys = None if dropout_seed is None else token_keys(microbatch, dropout_seed)
            language = self._towers.language_inputs(
                microbatch, model.language, self._dtype, device, shard_group, share, keys)
        if spec.has_head and totals is not None:
            loss = loss_inputs(microbatch, totals, None if sums else self._loss_unit, device, share)
        return ChunkInputs(vision, embedding, language, loss, to_keep, shared_pass)

    def _shared_pass(
        self, microbatch: Microbatch, members: Sequence[Microbatch]
    ) -> tuple[Sequence[Microbatch], SharedVisionPass]:
        """The microbatches whose images pass the ViT in that of ``microbatch``, and where its visual tokens come
        from."""
        kind = microbatch.skips_vision
        if microbatch is not members[0]:
            shared_pass = self._shared_passes.pop(kind) if microbatch is members[-1] else self._shared_passes[kind]
            return (), shared_pass
        per_token = self._model.vision.spatial_merge_size**2
        num_tokens = [sum(map(math.prod, self.context.image_grids(one))) // per_token for one in members]
        are_exchanged = self._spec.has_embedding and self.context.num_encoders > 1
        self._shared_passes[kind] = SharedVisionPass(num_tokens, are_exchanged)
        return members, self._shared_passes[kind]

    def _vision_inputs(
        self, microbatches: Sequence[Microbatch], context: Context, shard_group: dist.ProcessGroup | None,
        dropout_seed: int | None,
    ) -> tuple[VisionInputs | None, tuple[tuple[str, int], ...]]:
        """``vision`` and ``to_keep`` for the images of ``microbatches``.  All or none skip the ViT."""
        spec, model, device, first = self._spec, self._model, self.device, microbatches[0]
        grids = [grid for one in microbatches for grid in context.image_grids(one)]
        if not grids or not (spec.has_projector or not first.skips_vision):
            return None, ()
        pixels = features = keys = None
        if spec.has_patch_embedding and not first.skips_vision:
            pixels = self._pixels(microbatches, context)
        elif spec.has_projector and first.skips_vision:
            features = _joined([device.copy(one.features).view(self._dtype)
                                for one in microbatches if one.features is not None])
        if dropout_seed is not None:
            keys = _joined([patch_keys(one, context.images(one), model.visual_token_ids, dropout_seed)
                            for one in microbatches])
        vision = self._towers.vision_inputs(grids, pixels, features, model.vision, device, shard_group, keys)
        return vision, self._images_to_keep(microbatches, context)

    def _images_to_keep(
        self, microbatches: Sequence[Microbatch], context: Context
    ) -> tuple[tuple[str, int], ...]:
        """``ChunkInputs.to_keep``, on the rank that gives features and on those that hold shards of them."""
        if not (self.gives_features or (self._spec.has_projector and self.vision_shard_group is not None)):
            return ()
        images = tuple((one.feature_keys[image] if one.feature_keys else "", math.prod(one.image_grids[image]))
                       for one in microbatches for image in context.images(one))
        return images if any(key for key, _ in images) else ()

    def _pixels(self, microbatches: Sequence[Microbatch], context: Context) -> Tensor:
        """Copy the images' bytes to the device and normalise them there."""
        given = [(one, one.pixel_values) for one in microbatches if one.pixel_values is not None]
        num_rows, (_, first) = sum(len(rows) for _, rows in given), given[0]
        found, end = torch.empty(num_rows, first.shape[1], dtype=self._dtype, device=self.device.torch_device), 0
        for one, rows in given:
            bytes_here, start = self.device.copy(rows), 0
            rules = [(one.normalisations[image], math.prod(one.image_grids[image])) for image in context.images(one)]
            for rule, some in groupby(rules, key=lambda one: one[0]):
                stop = start + sum(num_patches for _, num_patches in some)
                constants = self.device.copy(rule.constants())
                normalised(bytes_here[start:stop], constants, self._dtype, found[end + start : end + stop])
                start = stop
            end += start
        return found


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
