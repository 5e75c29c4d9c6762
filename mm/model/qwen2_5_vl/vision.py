"""The parts of the ViT and the projector that a stage owns.

Rows are patches in window order (see ``mm.model.qwen2_5_vl.positions``) from the patch embedding to the projector,
which puts the visual tokens back in reading order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mm.batch import Grid
from mm.config.model import ProjectorConfig, VisionConfig
from mm.device.attention import Segments
from mm.device.device import Device
from mm.device.pointwise import biased
from mm.families.qwen2_5_vl import QWEN2_5_VL
from mm.model.layers.attention import AttentionInputs
from mm.model.layers.layer_context import LayerContext
from mm.model.layers.linear import linear
from mm.model.layers.lora_linear import NO_KEYS, RowKeys
from mm.model.layers.norm import Residual
from mm.model.parallel.rows import Permutation
from mm.model.parallel.sharded_rows import ShardedRows
from mm.model.qwen2_5_vl.layers import LayerStack
from mm.model.qwen2_5_vl.positions import VisionPlan, plan_vision, vision_cos_sin
from mm.parallel.context import RowShards
from mm.parallel.zero.weight_shards import BucketSpec
from mm.placement import StageSpec
from mm.weights.shard import memory_ffn


@dataclass(frozen=True)
class WindowedVisionInputs:
    """One microbatch's images in the form that the ViT needs, on the device."""

    pixel_values: Tensor | None
    """In the model's dtype; None without the patch embedding."""
    features: Tensor | None
    """[num_patches, hidden], in the processor's order: stored output of the last ViT layer; None if not stored."""
    plan: VisionPlan
    window: AttentionInputs
    """Window layers: rows in window order."""
    full: AttentionInputs
    """Full-attention layers: rows in image order."""
    sharded_tokens: ShardedRows | None = None
    """Shards and order of the projector's rows; see ``AttentionInputs.sharded``."""
    patch_keys: Tensor | None = None
    """Dropout keys of the patch embedding's rows."""
    token_keys: RowKeys = NO_KEYS
    """Dropout keys of the projector's rows."""


def vision_inputs(
    grids: Sequence[Grid], pixels: Tensor | None, features: Tensor | None, config: VisionConfig, device: Device,
    shard_group: dist.ProcessGroup | None = None, keys: Tensor | None = None,
) -> WindowedVisionInputs:
    """Plan the attention over images of ``grids``.  Host work only, then one copy per tensor to ``device``.

    ``pixels``, normalised, or ``features`` are already on the device.  ``shard_group``: the ranks among which rows are
    sharded.  ``keys``: of the patches in reading order, for dropout.
    """
    plan = plan_vision(grids, config.patch_size, config.spatial_merge_size, config.window_attn_size)
    orders = {name: order.to_device(device.copy) for name, order in vars(plan).items()
              if isinstance(order, Permutation)}
    num_patches, plan = len(plan.positions), replace(plan, positions=device.copy(plan.positions), **orders)
    # Transformers computes the ViT's rope in fp32 whatever the weights' dtype (apply_rotary_pos_emb_vision).
    cos, sin = vision_cos_sin(plan.positions, config.head_dim)
    image_cos, image_sin = (cos, sin) if plan.image_order is None else map(plan.image_order, (cos, sin))
    sharded_window = sharded_images = sharded_tokens = None
    if shard_group is not None:
        patches_per_token = config.spatial_merge_size**2  # patches that become one visual token stay on one rank
        sharded_window = ShardedRows(RowShards(num_patches, shard_group, patches_per_token))
        sharded_images = replace(sharded_window, order=plan.image_order)
        num_tokens = num_patches // patches_per_token
        sharded_tokens = ShardedRows(RowShards(num_tokens, shard_group), plan.token_restore.reversed())
    inputs = WindowedVisionInputs(
        pixel_values=pixels, features=features, plan=plan,
        window=AttentionInputs(cos, sin, Segments.build(plan.window_lengths, device.copy), False, sharded_window),
        full=AttentionInputs(
            image_cos, image_sin, Segments.build(plan.image_lengths, device.copy), False, sharded_images),
        sharded_tokens=sharded_tokens)
    return inputs if keys is None else _with_keys(inputs, device.copy(keys), config.spatial_merge_size**2)


def _with_keys(inputs: WindowedVisionInputs, keys: Tensor, merged: int) -> WindowedVisionInputs:
    """``inputs`` with keys of rows.  ``keys``: of patches in reading order; ``merged``: patches per visual token."""
    plan, sharded, tokens = inputs.plan, inputs.window.sharded, inputs.sharded_tokens
    window = keys.index_select(0, plan.patch_order.index)
    image = window if plan.image_order is None else window.index_select(0, plan.image_order.index)
    merged_rows = window[::merged]
    if sharded is None or tokens is None:
        return replace(
            inputs, window=replace(inputs.window, keys=RowKeys(window, window, window)), patch_keys=keys,
            full=replace(inputs.full, keys=RowKeys(image, image, image)), token_keys=RowKeys(merged_rows, merged_rows))
    shard = window[sharded.shards.here]
    return replace(
        inputs, window=replace(inputs.window, keys=RowKeys(shard, window, window)), patch_keys=shard,
        full=replace(inputs.full, keys=RowKeys(shard, window, image)),
        token_keys=RowKeys(merged_rows[tokens.shards.here], merged_rows))


class PatchProjection(nn.Module):
    """Flattened patches to hidden states.

    The weight keeps the shape of the 3-D convolution it is in Hugging Face's files; kernel equals stride there, so
    a linear layer is the same function, and far faster where 3-D convolutions are slow or lack a backward (Ascend).
    """

    def __init__(self, config: VisionConfig, context: LayerContext) -> None:
        super().__init__()
        self.accumulate = context.device.kernels.accumulate
        self.weight = context.empty(
            config.hidden_size, config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size
        )
        self.adapters: tuple[Any, ...] = ()
        """See ``ColumnLinear``."""

    def forward(self, patches: Tensor, keys: Tensor | None = None) -> Tensor:
        patches = patches.to(self.weight.dtype)
        y = linear(patches, self.weight, None, self.accumulate)
        for adapter in self.adapters:
            y = adapter.add_to(y, patches, keys)
        return y


class VisionEncoder(nn.Module):
    """The ViT layers of one stage, with the patch embedding if the stage owns it."""

    def __init__(self, config: VisionConfig, spec: StageSpec, context: LayerContext) -> None:
        super().__init__()
        self.full_attention = frozenset(config.fullatt_block_indexes)
        self.has_patch_embedding = spec.has_patch_embedding
        if spec.has_patch_embedding:
            self.patch_embed = nn.ModuleDict({"proj": PatchProjection(config, context)})
        self.blocks = LayerStack(spec.vision_layers, config, context, QWEN2_5_VL.weights.vision_layer.has_bias)

    def bucket_specs(self) -> Iterator[BucketSpec]:
        """Units of weights, in the order of the forward pass."""
        if self.has_patch_embedding:
            yield BucketSpec((self.patch_embed["proj"],), "vision")
        yield from (BucketSpec((layer,), "vision") for layer in self.blocks.layers.values())

    def forward(self, x: Tensor, inputs: WindowedVisionInputs) -> Tensor:
        """``x``: pixel values if the stage has the patch embedding, else [num_patches, hidden] in window order.

        If rows are sharded, ``x`` (unless it is pixel values) and the result are a shard of them.
        """
        plan, sharded = inputs.plan, inputs.window.sharded
        if self.has_patch_embedding and sharded is not None:
            own = plan.patch_order.index[sharded.shards.here]
            x = self.patch_embed["proj"](x.index_select(0, own), inputs.patch_keys)
        elif self.has_patch_embedding:
            x = plan.patch_order(self.patch_embed["proj"](x, inputs.patch_keys))
        residual = Residual(x)
        for layer in self.blocks.layers:
            if int(layer) not in self.full_attention:
                residual = self.blocks.run(layer, residual, inputs.window)
            elif plan.image_order is None or sharded is not None:  # a shard cannot be reordered; attention does it
                residual = self.blocks.run(layer, residual, inputs.full)
            else:
                residual = self.blocks.run(layer, residual.ordered(plan.image_order), inputs.full)
                residual = residual.ordered(plan.image_order.reversed())
        return residual.total()


def features_of(x: Tensor, inputs: WindowedVisionInputs) -> Tensor:
    """The last layer's whole output in the form of ``WindowedVisionInputs.features``; detached."""
    sharded, x = inputs.window.sharded, x.detach()
    return (x if sharded is None else sharded.gather(x)).index_select(0, inputs.plan.patch_order.inverse)


def last_output(features: Tensor, inputs: WindowedVisionInputs) -> Tensor:
    """The inverse of ``features_of``: in window order, or this rank's shard of it."""
    sharded, order = inputs.window.sharded, inputs.plan.patch_order.index
    return features.index_select(0, order if sharded is None else order[sharded.shards.here])


class Projector(nn.Module):
    """Norm, then 2x2 neighbouring patches to one visual token of the LLM's width."""

    def __init__(self, config: ProjectorConfig, merge_factor: int, context: LayerContext) -> None:
        super().__init__()
        self.merged_size = config.input_size * merge_factor
        ffn = memory_ffn(config.ffn_hidden_size, context.tp_size)
        self.layernorm = context.norm(config.input_size, config.layernorm_epsilon)
        self.encoder = nn.ModuleDict({
            "linear_fc1": context.column(self.merged_size, ffn, bias=True),
            "linear_fc2": context.row(ffn, config.hidden_size, bias=True),
        })

    def forward(self, x: Tensor, inputs: WindowedVisionInputs) -> Tensor:
        """[num_patches, ViT hidden] in window order -> [num_visual_tokens, LLM hidden] in reading order."""
        _, normed = self.layernorm(Residual(x))
        x, sharded, keys = normed.view(-1, self.merged_size), inputs.sharded_tokens, inputs.token_keys
        x = F.gelu(biased(*self.encoder["linear_fc1"](x, None if sharded is None else sharded.unordered, keys.shard)))
        last: Any = self.encoder["linear_fc2"]  # torch calls a layer's attributes tensors or modules
        x, bias = last(x, sharded, keys.whole)
        x = biased(x if bias is None else x + bias, last.bias)
        return inputs.plan.token_restore(x) if sharded is None else x
