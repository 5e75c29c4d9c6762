"""One pipeline stage of Qwen2.5-VL: it owns what its ``StageSpec`` says and maps a message to a message.

What crosses the boundaries, and when, is decided in ``mm.placement``; this module only computes.
"""

from dataclasses import dataclass

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from mm.batch import BatchTotals, Microbatch
from mm.config.model import ModelConfig, RecomputeConfig
from mm.device.device import Device, Kernels
from mm.device.transfer import to_device
from mm.model.language import EmbeddingInputs, LanguageModel, embedding_inputs, language_inputs
from mm.model.layers import AttentionInputs, Build
from mm.model.loss import LossInputs, loss_inputs, weighted_cross_entropy
from mm.model.vision import Projector, VisionEncoder, VisionInputs, vision_inputs
from mm.placement import Placement, StageSpec
from mm.weights.table import EMBEDDING_NAME, OUTPUT_LAYER_NAME, stage_weights


@dataclass(frozen=True)
class StageInputs:
    """What this stage needs of one microbatch, on the device; parts it does not need are None."""

    pixel_values: Tensor | None
    vision: VisionInputs | None
    embedding: EmbeddingInputs | None
    language: AttentionInputs | None
    loss: LossInputs | None


class Stage(nn.Module):
    """What one rank owns of the model."""

    model_type = ModelType.encoder_or_decoder

    def __init__(
        self, model: ModelConfig, spec: StageSpec, parallel: TransformerConfig, kernels: Kernels, per_sample_loss: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.spec = spec
        self.config = parallel  # where megatron's DDP and schedules look for it
        self.per_sample_loss = per_sample_loss
        build = Build(parallel, kernels)
        if spec.has_vision:
            self.image_encoder = nn.Module()
            num_recomputed = _num_recomputed(model.vision.recompute, spec.vision_layers)
            self.image_encoder.encoder = VisionEncoder(model.vision, spec, build, num_recomputed)
            if spec.has_projector:
                merge_factor = model.vision.spatial_merge_size**2
                self.image_encoder.projector = Projector(model.projector, merge_factor, build)
        if spec.has_language:
            num_recomputed = _num_recomputed(model.language.recompute, spec.language_layers)
            self.text_decoder = LanguageModel(model.language, spec, build, num_recomputed)

    def set_input_tensor(self, _: list[Tensor | None]) -> None:
        """Ignored: megatron's schedule offers the received tensor here; ours is an argument of ``forward``."""

    def prepare(self, microbatch: Microbatch, totals: BatchTotals | None, device: torch.device) -> StageInputs:
        """Derive this stage's inputs from the plan on the host and start copying them to the device.

        ``totals`` may be None where no loss is wanted.
        """
        spec, has_images = self.spec, bool(microbatch.image_grids)
        pixels = None
        if spec.has_patch_embedding and has_images:
            assert microbatch.pixel_values is not None
            pixels = to_device(microbatch.pixel_values, device)
        wants_loss = spec.has_head and totals is not None
        return StageInputs(
            pixel_values=pixels,
            vision=vision_inputs(microbatch, self.model.vision, device) if spec.has_vision and has_images else None,
            embedding=embedding_inputs(microbatch, self.model.image_token_id, device) if spec.has_embedding else None,
            language=(
                language_inputs(microbatch, self.model.language, self.config.params_dtype, device)
                if spec.language_layers
                else None
            ),
            loss=loss_inputs(microbatch, totals, self.per_sample_loss, device) if wants_loss else None,
        )

    def forward(self, inputs: StageInputs, received: Tensor | None) -> Tensor:
        """Message in, message out; the stage with the head returns the microbatch's share of the loss.

        Where nothing crosses the next boundary an empty tensor stands in.
        """
        x = self.hidden_states(inputs, received)
        if self.spec.has_head:
            rows = x[inputs.loss.target_index]
            return weighted_cross_entropy(
                self.text_decoder.logits(rows), inputs.loss, self.config.tensor_model_parallel_size
            )
        if x is None:
            return torch.empty(0, device=torch.cuda.current_device())
        # A stage that only hands on must still return a tensor of its own: megatron frees outputs after sending.
        return x.clone() if x is received else x

    def hidden_states(self, inputs: StageInputs, received: Tensor | None) -> Tensor | None:
        """Everything but the output layer and loss; None where there is nothing to hand on."""
        spec, x = self.spec, received
        if inputs.vision is not None:
            encoder = self.image_encoder.encoder
            if spec.has_patch_embedding:
                x = encoder.embed(inputs.pixel_values, inputs.vision)
            x = encoder(x, inputs.vision)
            if spec.has_projector:
                x = self.image_encoder.projector(x, inputs.vision)
        if spec.has_embedding:
            x = self.text_decoder.embedding(inputs.embedding, x)
        if inputs.language is not None:
            x = self.text_decoder(x, inputs.language)
        return x


def _num_recomputed(recompute: RecomputeConfig, layers: range) -> int:
    """How many of a stage's layers recompute in the backward pass.

    "selective" means the attention scores, which our kernels never keep: nothing to recompute.  Method "uniform"
    recomputes all of a stage's layers, "block" the first ``num_layers`` of them, as in Megatron.
    """
    if recompute.granularity != "full":
        return 0
    return len(layers) if recompute.method == "uniform" else min(recompute.num_layers or len(layers), len(layers))


def build_stage(
    model: ModelConfig,
    placement: Placement,
    stage: int,
    parallel: TransformerConfig,
    device: Device,
    per_sample_loss: bool = False,
) -> Stage:
    """Build pipeline stage ``stage`` with uninitialised weights, frozen and marked as megatron expects.

    The module's parameters are checked against the weight table: a name or shape that differs is a bug here.
    """
    spec = placement[stage]
    module = Stage(model, spec, parallel, device.kernels, per_sample_loss)
    weights = {weight.name: weight for weight in stage_weights(model, spec, placement)}
    parameters = dict(module.named_parameters())
    assert set(parameters) == set(weights), sorted(set(parameters) ^ set(weights))
    frozen = {
        "vision": model.vision.freeze,
        "projector": model.projector.freeze,
        "language": model.language.freeze,
    }
    for name, parameter in parameters.items():
        weight = weights[name]
        parameter.requires_grad_(not frozen[weight.part])
        # megatron sets these only where it draws initial values; its gradient norm counts a parameter without the
        # mark on one tensor-parallel rank only
        parameter.tensor_model_parallel = weight.tp_dim is not None
        parameter.partition_dim = -1 if weight.tp_dim is None else weight.tp_dim
        parameter.partition_stride = 1
    if model.language.tied and placement.embedding_stage != placement.head_stage:
        _mark_tied(parameters)
    return module


def _mark_tied(parameters: dict[str, nn.Parameter]) -> None:
    """Tell megatron that embedding and output layer are one weight on two stages.

    ``shared_embedding`` gives both the same cut of the distributed optimizer; ``shared`` on the copy keeps the
    gradient norm from counting it twice.
    """
    embedding = parameters.get(EMBEDDING_NAME)
    head = parameters.get(OUTPUT_LAYER_NAME)
    for parameter in (embedding, head):
        if parameter is not None:
            parameter.shared_embedding = True
    if head is not None:
        head.shared = True
