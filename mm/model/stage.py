"""One pipeline stage of a model: its chunks, each of which owns what its ``StageSpec`` says and maps a message to a
message.  ``mm.placement`` decides what crosses which boundary; this module only computes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from mm.config.args import LossUnit
from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.device.platform import SideStream
from mm.model.families import towers_of
from mm.model.layers.embedding import VisualRows
from mm.model.layers.layer_context import LayerContext
from mm.model.layers.lora_linear import attach
from mm.model.layers.loss import LossInputs
from mm.model.parallel.sharded_rows import ShardedRows, gather_rows
from mm.model.prepare import ChunkInputs, Preparation, SharedVisionPass
from mm.model.recompute import HostActivations
from mm.model.towers import Towers, VisionInputs
from mm.parallel.activity import Journal, Work
from mm.parallel.context import RowShards
from mm.parallel.megatron import parallel_config, set_megatron_attributes
from mm.parallel.mesh import Mesh
from mm.parallel.zero.weight_shards import BucketSpec, WeightBucket, WeightShards
from mm.weights.shard import memory_shape
from mm.weights.table import Weight, stage_weights
from mm.weights.trained import is_frozen


@dataclass(frozen=True)
class MadeFeatures:
    """ViT features of some images, to be stored."""

    images: tuple[tuple[str, int], ...]
    read: Callable[[], Tensor]
    """Gives [num_patches, hidden] on the host, image by image; waits for the device, in any thread."""
    num_bytes: int


class Chunk(nn.Module):
    """One rank's part of one slot, with the attributes that megatron expects; the weights have no values yet."""

    def __init__(self, model: ModelConfig, number: int, mesh: Mesh, settings: TransformerConfig, device: Device,
                 loss_unit: LossUnit, journal: Journal, side: SideStream, shards_weights: bool = False,
                 host: HostActivations | None = None) -> None:
        super().__init__()
        placement = model.placement()
        self.spec = spec = placement[mesh.pp_rank, number]
        self.model = model
        self.config = settings  # where megatron's DDP looks for it
        self.device = device
        self.journal = journal
        self.side = side
        self.made: list[MadeFeatures] = []
        """This step's features, if they are stored."""
        self.tp_group = mesh.groups.tp
        self.towers: Towers = towers_of(model)
        self.prepare = Preparation(
            model, spec, mesh, self.towers, device, settings.params_dtype, loss_unit, settings.sequence_parallel)
        self._vision_shard_group = self.prepare.vision_shard_group
        towers = self.towers
        context = LayerContext(self.config, mesh.groups.tp, device, keeps_weights=not shards_weights, host=host)
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
        set_megatron_attributes(parameters, self.weights, tied_over_slots, settings.sequence_parallel)
        self.weight_shards = (
            WeightShards(self.bucket_specs(), self.parameters(), mesh.groups.dp_cp) if shards_weights else None)

    def bucket_specs(self) -> Iterator[BucketSpec]:
        """All weights, bucket by bucket, in the order of the forward pass."""
        if self.spec.vision_layers:
            encoder: Any = self.image_encoder["encoder"]
            yield from encoder.bucket_specs()
            if self.spec.has_projector:
                yield BucketSpec((self.image_encoder["projector"],), "projector")
        if self.spec.language_layers:
            yield from self.text_decoder.bucket_specs()

    def forward(self, inputs: ChunkInputs, received: Tensor | None) -> Tensor:
        """Message in, message out (empty if nothing crosses); the chunk with the head returns its share of the loss."""
        x = self.hidden_states(inputs, received)
        if x is None:
            return torch.empty(0, device=self.device.torch_device)
        if inputs.loss is not None:
            with self.journal.during(Work.LANGUAGE_FORWARD):
                return self._loss(x, inputs, inputs.loss)
        # megatron frees an output once it is sent, so it must share no memory with a message or any other tensor
        return x.clone() if x is received or x._base is not None else x

    def hidden_states(self, inputs: ChunkInputs, received: Tensor | None) -> Tensor | None:
        """Everything but the output layer and loss; None if there is nothing to pass on."""
        x = received
        if inputs.vision is not None:
            with self.journal.during(Work.VISION_FORWARD):
                x = self._vision(x, inputs, inputs.vision)
        if inputs.shared_pass is not None:
            x = self._own(inputs.shared_pass, is_sent=inputs.embedding is None)
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
        made: Tensor = self.image_encoder["projector"](seen, vision) if spec.has_projector else seen
        if inputs.shared_pass is not None:
            if (group := self._vision_shard_group) is not None:  # not shards of each microbatch's rows
                shards = RowShards(sum(inputs.shared_pass.num_tokens), group)
                made = gather_rows(made, ShardedRows(shards), sums_gradients=True)
            inputs.shared_pass.fill(made)
        return made

    def _own(self, shared_pass: SharedVisionPass, is_sent: bool) -> Tensor | None:
        """The next microbatch's visual tokens, or what this rank sends of them."""
        x, group = shared_pass.take(), self._vision_shard_group
        return x if x is None or not is_sent or group is None else x[RowShards(len(x), group).here]

    def _give(self, features: Tensor, images: tuple[tuple[str, int], ...]) -> None:
        """Start copying ``features`` to the host; nothing waits for them before the step ends."""
        if self.prepare.gives_features:
            read = self.device.runtime.start_copying_back(features)
            self.made.append(MadeFeatures(images, read, features.nbytes))

    def _loss(self, x: Tensor, inputs: ChunkInputs, targets: LossInputs) -> Tensor:
        if inputs.language is not None and inputs.language.sharded is not None:
            x = gather_rows(x, inputs.language.sharded, sums_gradients=False)
        return self.text_decoder.loss(x.index_select(0, targets.target_index), targets)


class Stage:
    """All chunks of one rank as one module; the names of weights have global layer numbers."""

    def __init__(
        self, model: ModelConfig, mesh: Mesh, precision: str, device: Device, loss_unit: LossUnit = "token",
        sequence_parallel: bool = False, shards_weights: bool = False,
    ) -> None:
        """``shards_weights``: a rank keeps only its shard of each weight if others hold the same ones."""
        shards_weights &= mesh.num_copies > 1
        assert not shards_weights or mesh.pp_size == 1, "checked with the settings"
        self.model, self.device = model, device
        self.config = parallel_config(model, mesh, precision, sequence_parallel)
        self.journal = Journal()
        side, host = device.runtime.side_stream(), HostActivations(device) if model.offloads_activations else None
        self.chunks = tuple(
            Chunk(model, number, mesh, self.config, device, loss_unit, self.journal, side, shards_weights, host)
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
        return any(chunk.prepare.gives_features for chunk in self.chunks)

    def take_features(self) -> list[MadeFeatures]:
        """Features to be stored that the ViT has made since the last call."""
        made = [one for chunk in self.chunks for one in chunk.made]
        for chunk in self.chunks:
            chunk.made.clear()
        return made

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for chunk in self.chunks:
            yield from chunk.named_parameters()

    def get_parameter(self, name: str) -> nn.Parameter:
        """The parameter; without values if ranks keep shards of weights."""
        return self._parameters[name]

    @property
    def shards_weights(self) -> bool:
        return self._weight_shards is not None

    @property
    def _weight_shards(self) -> WeightShards | None:
        """Those of the only chunk, if ranks keep shards of weights."""
        return self.chunks[0].weight_shards

    @torch.no_grad()
    def set_values(self, name: str, values: Tensor) -> None:
        """Set a parameter of this rank, or this rank's shard of it, to ``values``, with padding."""
        parameter, shards = self.get_parameter(name), self._weight_shards
        assert parameter.shape == values.shape, name
        if shards is None:
            parameter.copy_(values)
        else:
            shards.set(parameter, values)

    def whole_weights(self, weights: Iterable[Weight]) -> Iterator[tuple[Weight, Tensor]]:
        """Yield each of ``weights`` with its values on this rank, which are valid until the next one is taken.  If
        ranks keep shards of weights, all of them must iterate over the same weights: this is a collective."""
        shards = self._weight_shards
        if shards is None:
            yield from ((weight, self.get_parameter(weight.name).detach()) for weight in weights)
            return
        by_bucket: dict[WeightBucket, list[Weight]] = {}
        for weight in weights:
            by_bucket.setdefault(shards.bucket_of(self.get_parameter(weight.name)), []).append(weight)
        for bucket, some in by_bucket.items():
            with shards.opened(bucket):
                yield from ((weight, self.get_parameter(weight.name).detach()) for weight in some)

    def all_whole(self) -> AbstractContextManager[None]:
        """Hold the values of all weights while the body runs, on all ranks together."""
        shards = self._weight_shards
        return nullcontext() if shards is None else shards.all_opened()
