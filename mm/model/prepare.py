"""What a chunk needs of a microbatch: derived from the plan on the host, and copied to the device.

``mm.model.stage`` does the model's own computation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from mm.batch import BatchTotals, Images, Microbatch, normalised
from mm.config.args import LossUnit
from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.model.layers.attention import AttentionInputs
from mm.model.layers.dropout import patch_keys, token_keys
from mm.model.layers.embedding import EmbeddingInputs, embedding_inputs
from mm.model.layers.loss import LossInputs, loss_inputs
from mm.model.shared_vision_pass import EncodedTogether
from mm.model.towers import Towers, VisionInputs
from mm.parallel.context import Context
from mm.parallel.mesh import Mesh
from mm.placement import StageSpec
from mm.weights.trained import GradientPath


@dataclass(frozen=True)
class ChunkInputs:
    """A chunk's inputs from one microbatch, on the device; None for parts that it does not need."""

    vision: VisionInputs | None
    embedding: EmbeddingInputs | None
    language: AttentionInputs | None
    loss: LossInputs | None
    to_keep: tuple[tuple[str, int], ...] = ()
    """(key, number of patches) of each image here; the key is "" if its features are not to be stored."""
    together: EncodedTogether | None = None
    """Where its visual tokens come from if images of several microbatches pass the ViT together.  ``vision`` and
    ``to_keep`` then have all of these images in the first microbatch, and none in the others."""

    @property
    def images(self) -> Images:
        """What images do in the chunk's forward pass."""
        if self.vision is None:
            return Images.NONE
        return Images.PROJECTED | (Images.ENCODED if self.vision.features is None else Images.NONE)


class Preparation:
    """Derives a chunk's inputs from microbatches."""

    def __init__(
        self, model: ModelConfig, spec: StageSpec, mesh: Mesh, towers: Towers, device: Device, dtype: torch.dtype,
        loss_unit: LossUnit, cuts_rows: bool,
    ) -> None:
        """``cuts_rows``: whether sequence parallelism is on."""
        self.context = mesh.context
        self.cut_group = mesh.groups.tp if cuts_rows else None
        self.vision_cut_group = None if model.encodes_whole else self.cut_group
        self.gives_features = spec.has_projector and (model.encodes_whole or mesh.tp_rank == 0)
        """Whether this rank gives the features to be stored: all tensor-parallel ranks have the same images, unless
        each encodes its own."""
        self._model, self._spec, self._towers, self.device, self._dtype = model, spec, towers, device, dtype
        self._tp_group = mesh.groups.tp
        self._loss_unit: LossUnit = loss_unit
        self._visual_gradients = GradientPath.of(model).leads_to_images
        self._together: dict[bool, EncodedTogether] = {}
        """By whether the ViT is skipped: the encoder batch whose microbatches are being prepared."""

    def __call__(
        self, microbatch: Microbatch, totals: BatchTotals | None, dropout_seed: int | None = None, sums: bool = False,
        is_whole: bool = False, encoded_with: Sequence[Microbatch] = (),
    ) -> ChunkInputs:
        """Derive the chunk's inputs from the plan on the host and start copying them to the device.

        ``totals`` may be None if no loss is needed.  ``dropout_seed``: as in ``StepPlan``.  ``sums``: the loss is the
        sum over the microbatch's targets.  ``is_whole``: neither sequence nor context parallelism divides this
        microbatch.  ``encoded_with``: the microbatches whose images pass the ViT together, prepared in this order.
        """
        spec, model, device = self._spec, self._model, self.device
        cut_group, context = (None, replace(self.context, is_alone=True)) if is_whole else (
            self.cut_group, self.context)
        share = context.share(microbatch) if context.size > 1 else None
        vision = embedding = language = loss = together = None
        encoded, to_keep = (microbatch,), ()
        if len(encoded_with) > 1 and spec.has_whole_vit:
            encoded, together = self._encoded_together(microbatch, encoded_with)
        if spec.vision_layers and encoded:
            vision_cut_group = None if is_whole else self.vision_cut_group
            vision, to_keep = self._vision_inputs(encoded, context, vision_cut_group, dropout_seed)
        if spec.has_embedding:
            embedding = embedding_inputs(microbatch, model.visual_token_ids, device, context, self._tp_group, cut_group,
                                         share, self._visual_gradients)
            if together is not None and embedding.visual is not None:  # the chunk has gathered them
                embedding = replace(embedding, visual=replace(embedding.visual, cut=None))
        if spec.language_layers:
            keys = None if dropout_seed is None else token_keys(microbatch, dropout_seed)
            language = self._towers.language_inputs(
                microbatch, model.language, self._dtype, device, cut_group, share, keys)
        if spec.has_head and totals is not None:
            loss = loss_inputs(microbatch, totals, None if sums else self._loss_unit, device, share)
        return ChunkInputs(vision, embedding, language, loss, to_keep, together)

    def _encoded_together(
        self, microbatch: Microbatch, members: Sequence[Microbatch]
    ) -> tuple[Sequence[Microbatch], EncodedTogether]:
        """The microbatches whose images pass the ViT in the forward step of ``microbatch``, and where its visual tokens
        come from."""
        kind = microbatch.skips_vision
        if microbatch is not members[0]:
            together = self._together.pop(kind) if microbatch is members[-1] else self._together[kind]
            return (), together
        per_token = self._model.vision.spatial_merge_size**2
        num_tokens = [sum(map(math.prod, self.context.image_grids(one))) // per_token for one in members]
        are_exchanged = self._spec.has_embedding and self.context.num_encoders > 1
        self._together[kind] = EncodedTogether(num_tokens, are_exchanged)
        return members, self._together[kind]

    def _vision_inputs(
        self, microbatches: Sequence[Microbatch], context: Context, cut_group: dist.ProcessGroup | None,
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
        vision = self._towers.vision_inputs(grids, pixels, features, model.vision, device, cut_group, keys)
        return vision, self._images_to_keep(microbatches, context)

    def _images_to_keep(
        self, microbatches: Sequence[Microbatch], context: Context
    ) -> tuple[tuple[str, int], ...]:
        """``ChunkInputs.to_keep``, on the rank that gives features and on those that hold pieces of them."""
        if not (self.gives_features or (self._spec.has_projector and self.vision_cut_group is not None)):
            return ()
        images = tuple((one.feature_keys[image] if one.feature_keys else "", math.prod(one.image_grids[image]))
                       for one in microbatches for image in context.images(one))
        return images if any(key for key, _ in images) else ()

    def _pixels(self, microbatches: Sequence[Microbatch], context: Context) -> Tensor:
        """Copy the images' bytes to the device and normalise them there, consecutive images with the same normalisation
        at a time."""
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
