"""One pipeline stage of a model: its chunks, each of which owns what its ``StageSpec`` says.

A chunk maps a message to a message.  ``mm.placement`` decides what crosses which boundary; this module only computes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from mm.batch import BatchTotals, Microbatch, normalised
from mm.config.flags import LossUnit
from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.device.side import SideQueue
from mm.model.attention import AttentionInputs
from mm.model.cut_rows import gather_rows
from mm.model.dropout import patch_keys, token_keys
from mm.model.embedding import EmbeddingInputs, embedding_inputs
from mm.model.families import towers_of
from mm.model.layer_context import LayerContext
from mm.model.lora import attach
from mm.model.loss import LossInputs, loss_inputs
from mm.model.towers import Towers, VisionInputs
from mm.model.visual_rows import VisualRows
from mm.parallel.activity import Journal, Work
from mm.parallel.context import Context
from mm.parallel.megatron import mark_parameters, parallel_config
from mm.parallel.mesh import Mesh
from mm.weights.memory import memory_shape
from mm.weights.placed import stage_weights
from mm.weights.trained import GradientPath, is_frozen


@dataclass(frozen=True)
class ChunkInputs:
    """A chunk's inputs from one microbatch, on the device; None for parts that it does not need."""

    vision: VisionInputs | None
    embedding: EmbeddingInputs | None
    language: AttentionInputs | None
    loss: LossInputs | None
    to_keep: tuple[tuple[str, int], ...] = ()
    """(key, number of patches) of each image here; the key is "" if its features are not to be stored."""


@dataclass(frozen=True)
class MadeFeatures:
    """ViT features of some images, to be stored."""

    images: tuple[tuple[str, int], ...]
    """As ``ChunkInputs.to_keep``."""
    read: Callable[[], Tensor]
    """Gives [num_patches, hidden] on the host, image by image; waits for the device, in any thread."""
    num_bytes: int


class Chunk(nn.Module):
    """One rank's part of one slot, frozen and marked as megatron expects; the weights have no values yet."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, model: ModelConfig, number: int, mesh: Mesh, settings: TransformerConfig, device: Device,
                 loss_unit: LossUnit, journal: Journal, side: SideQueue) -> None:
        super().__init__()
        placement = model.placement()
        self.spec = spec = placement[mesh.pp_rank, number]
        self.model = model
        self.config = settings  # where megatron's DDP and schedules look for it
        self.device = device
        self.loss_unit: LossUnit = loss_unit
        self.journal = journal
        self.side = side
        self.made: list[MadeFeatures] = []
        """This step's features, if they are stored."""
        # All tensor-parallel ranks have the same images, unless each encodes its own.
        self.gives_features = spec.has_projector and (model.encodes_whole or mesh.tp_rank == 0)
        self.tp_group, self.context = mesh.groups.tp, mesh.context
        self.cut_group = self.tp_group if settings.sequence_parallel else None
        self.vision_cut_group = None if model.encodes_whole else self.cut_group
        self.visual_gradients = GradientPath.of(model).leads_to_images
        self.towers: Towers = towers_of(model)
        towers = self.towers
        context = LayerContext(self.config, mesh.groups.tp, device)
        encoder_context = context.alone if model.encodes_whole else context
        if spec.vision_layers:
            self.image_encoder = nn.ModuleDict({"encoder": towers.vision_encoder(model.vision, spec, encoder_context)})
            if spec.has_projector:
                merge_factor = model.vision.spatial_merge_size**2
                self.image_encoder["projector"] = towers.projector(model.projector, merge_factor, encoder_context)
        if spec.language_layers:
            self.text_decoder = towers.language_model(model.language, spec, context)
        self.weights = stage_weights(model, spec)
        attach(self, self.weights, model.lora.dropout, context)
        parameters = dict(self.named_parameters())
        names = {weight.name for weight in self.weights}
        assert set(parameters) == names, sorted(set(parameters) ^ names)
        for weight in self.weights:
            assert parameters[weight.name].shape == memory_shape(weight, mesh.tp_size), weight.name
            parameters[weight.name].requires_grad_(not is_frozen(weight, model))
        tied_over_slots = model.language.tied and placement.embedding_slot != placement.head_slot
        mark_parameters(parameters, self.weights, tied_over_slots, settings.sequence_parallel)

    def set_input_tensor(self, _: list[Tensor | None]) -> None:
        """Ignored: megatron's schedule offers the received tensor here; ours is an argument of ``forward``."""

    def prepare(
        self, microbatch: Microbatch, totals: BatchTotals | None, dropout_seed: int | None = None, sums: bool = False,
        is_whole: bool = False,
    ) -> ChunkInputs:
        """Derive this chunk's inputs from the plan on the host and start copying them to the device.

        ``totals`` may be None if no loss is needed.  ``dropout_seed``: as in ``StepPlan``; None drops nothing.
        ``sums``: the loss is the sum over the microbatch's targets.  ``is_whole``: neither sequence nor context
        parallelism divides this microbatch, though they divide others.

        Made only when the slot needs them: ``vision`` if this rank has images and ViT layers (without the projector,
        not if the microbatch skips the ViT), with pixels at the patch embedding; ``embedding`` at the word embedding;
        ``language`` for LLM layers; ``loss`` at the head, given ``totals``.
        """
        spec, model, device = self.spec, self.model, self.device
        cut_group, context = (None, replace(self.context, is_alone=True)) if is_whole else (
            self.cut_group, self.context)
        vision_cut_group = None if is_whole else self.vision_cut_group
        share = context.share(microbatch) if context.size > 1 else None
        vision = embedding = language = loss = None
        grids, to_keep = context.image_grids(microbatch), ()
        if grids and spec.vision_layers and (spec.has_projector or not microbatch.skips_vision):
            pixels = self._pixels(microbatch, context) if spec.has_patch_embedding else None
            features = None if microbatch.features is None else (
                device.copy(microbatch.features).view(self.config.params_dtype))
            keys = None if dropout_seed is None else patch_keys(
                microbatch, context.images(microbatch), model.visual_token_ids, dropout_seed)
            vision = self.towers.vision_inputs(grids, pixels, features, model.vision, device, vision_cut_group, keys)
            to_keep = self._images_to_keep(microbatch, context)
        if spec.has_embedding:
            embedding = embedding_inputs(microbatch, model.visual_token_ids, device, context, self.tp_group, cut_group,
                                         share, self.visual_gradients)
        if spec.language_layers:
            keys = None if dropout_seed is None else token_keys(microbatch, dropout_seed)
            language = self.towers.language_inputs(
                microbatch, model.language, self.config.params_dtype, device, cut_group, share, keys)
        if spec.has_head and totals is not None:
            loss = loss_inputs(microbatch, totals, None if sums else self.loss_unit, device, share)
        return ChunkInputs(vision, embedding, language, loss, to_keep)

    def _images_to_keep(self, microbatch: Microbatch, context: Context) -> tuple[tuple[str, int], ...]:
        """``ChunkInputs.to_keep``, on the rank that gives features and on those that hold pieces of them."""
        keys = microbatch.feature_keys
        if not keys or not (self.gives_features or (self.spec.has_projector and self.vision_cut_group is not None)):
            return ()
        images = tuple((keys[image], math.prod(microbatch.image_grids[image]))
                       for image in context.images(microbatch))
        return images if any(key for key, _ in images) else ()

    def _pixels(self, microbatch: Microbatch, context: Context) -> Tensor | None:
        """Copy the images' bytes to the device and normalise them there."""
        if microbatch.pixel_values is None:
            return None
        bytes_here, rows, start = self.device.copy(microbatch.pixel_values), [], 0
        rules = [(microbatch.normalisations[image], math.prod(microbatch.image_grids[image]))
                 for image in context.images(microbatch)]
        for rule, some in groupby(rules, key=lambda one: one[0]):
            stop = start + sum(num_patches for _, num_patches in some)
            constants = self.device.copy(rule.constants())
            rows.append(normalised(bytes_here[start:stop], constants, self.config.params_dtype))
            start = stop
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def forward(self, inputs: ChunkInputs, received: Tensor | None) -> Tensor:
        """Message in, message out; the chunk with the head returns the microbatch's share of the loss.

        If nothing crosses the next boundary, the result is an empty tensor.
        """
        x = self.hidden_states(inputs, received)
        if x is None:
            return torch.empty(0, device=self.device.torch_device)
        if inputs.loss is not None:
            with self.journal.during(Work.LANGUAGE_FORWARD):
                return self._loss(x, inputs, inputs.loss)
        # A chunk that only passes a message on must return a copy: megatron frees outputs after sending.
        return x.clone() if x is received else x

    def hidden_states(self, inputs: ChunkInputs, received: Tensor | None) -> Tensor | None:
        """Everything but the output layer and loss; None if there is nothing to pass on."""
        x = received
        if inputs.vision is not None:
            with self.journal.during(Work.VISION_FORWARD):
                x = self._vision(x, inputs, inputs.vision)
        if inputs.language is not None:
            with self.journal.during(Work.LANGUAGE_FORWARD):
                if inputs.embedding is not None:
                    x = self.text_decoder.embedding(inputs.embedding, self._collected(x, inputs.embedding.visual))
                assert x is not None, "every microbatch has tokens"
                x = self.text_decoder(x, inputs.language)
        return x

    def _collected(self, x: Tensor | None, visual: VisualRows | None) -> Tensor | None:
        """The visual tokens whose rows are here, given those that this rank made; None if the microbatch has none."""
        if visual is None:
            return None
        if x is None:
            assert visual.exchange is not None, "a microbatch with images came without their visual tokens"
            x = torch.empty(0, self.model.language.hidden_size, dtype=self.config.params_dtype,
                            device=self.device.torch_device, requires_grad=visual.needs_gradient)
        with nullcontext() if visual.exchange is None else self.journal.during(Work.VISUAL_EXCHANGE):
            return visual.collect(x)

    def _vision(self, x: Tensor | None, inputs: ChunkInputs, vision: VisionInputs) -> Tensor:
        """Apply the ViT layers and projector of this chunk; stored features replace the layers' output."""
        spec = self.spec
        if vision.features is not None:
            seen: Tensor = self.towers.last_output(vision.features, vision)
        else:
            x = vision.pixel_values if spec.has_patch_embedding else x
            assert x is not None, "a microbatch with images came without their pixels or patches"
            seen = self.image_encoder["encoder"](x, vision)
            if inputs.to_keep:
                self._give(self.towers.features_of(seen, vision), inputs.to_keep)
        return self.image_encoder["projector"](seen, vision) if spec.has_projector else seen

    def _give(self, features: Tensor, images: tuple[tuple[str, int], ...]) -> None:
        """Start copying ``features`` to the host; nothing waits for them before the step ends."""
        if self.gives_features:
            read = self.device.start_copying_back(features)
            self.made.append(MadeFeatures(images, read, features.nbytes))

    def _loss(self, x: Tensor, inputs: ChunkInputs, targets: LossInputs) -> Tensor:
        if inputs.language is not None and inputs.language.cut is not None:
            x = gather_rows(x, inputs.language.cut, sums_gradients=False)
        return self.text_decoder.loss(x.index_select(0, targets.target_index), targets)


class Stage:
    """All chunks of one rank as one module; the names of weights have global layer numbers."""

    def __init__(
        self, model: ModelConfig, mesh: Mesh, precision: str, device: Device, loss_unit: LossUnit = "token",
        sequence_parallel: bool = False,
    ) -> None:
        self.model, self.device = model, device
        self.config = parallel_config(model, mesh, precision, sequence_parallel)
        self.journal = Journal()
        side = device.side_queue()
        self.chunks = tuple(Chunk(model, number, mesh, self.config, device, loss_unit, self.journal, side)
                            for number in range(model.num_chunks))
        self.weights = tuple(weight for chunk in self.chunks for weight in chunk.weights)
        self._parameters = dict(self.named_parameters())
        assert len(self._parameters) == len(self.weights), "a name stands for one weight of the rank"

    @property
    def has_patch_embedding(self) -> bool:
        return any(chunk.spec.has_patch_embedding for chunk in self.chunks)

    @property
    def has_projector(self) -> bool:
        return any(chunk.spec.has_projector for chunk in self.chunks)

    @property
    def gives_features(self) -> bool:
        """Whether ``take_features`` returns features on this rank, if they are to be stored."""
        return any(chunk.gives_features for chunk in self.chunks)

    def take_features(self) -> list[MadeFeatures]:
        """Features to be stored that the ViT has made since the last call."""
        made = [one for chunk in self.chunks for one in chunk.made]
        for chunk in self.chunks:
            chunk.made.clear()
        return made

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """In the order of the chunks."""
        for chunk in self.chunks:
            yield from chunk.named_parameters()

    def get_parameter(self, name: str) -> nn.Parameter:
        return self._parameters[name]
