"""The parts of the LLM that a stage owns: word embedding, layers with M-RoPE, norm and output layer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mm.batch import Microbatch
from mm.config.model import LanguageConfig
from mm.device.attention import Segments
from mm.device.device import Device
from mm.families.qwen2_5_vl import QWEN2_5_VL
from mm.model.layers.attention import AttentionInputs
from mm.model.layers.embedding import WordEmbedding
from mm.model.layers.layer_context import LayerContext
from mm.model.layers.lora_linear import RowKeys
from mm.model.layers.loss import LossInputs
from mm.model.layers.norm import Residual
from mm.model.layers.vocabulary import OutputLayer
from mm.model.parallel.ring import Ring, Ulysses
from mm.model.parallel.sharded_rows import ShardedRows
from mm.model.qwen2_5_vl.layers import LayerStack
from mm.model.qwen2_5_vl.positions import mrope_cos_sin
from mm.parallel.context import RowShards, Share
from mm.parallel.zero.weight_shards import BucketSpec
from mm.placement import StageSpec


def language_inputs(
    microbatch: Microbatch, config: LanguageConfig, dtype: torch.dtype, device: Device,
    shard_group: dist.ProcessGroup | None = None, share: Share | None = None, keys: Tensor | None = None,
) -> AttentionInputs:
    """Rope tables and segments of the packed row.  Transformers casts the LLM's rope tables to the model's dtype.

    ``share``: how context-parallel ranks divide the row; ``shard_group``: the ranks among which this rank's rows are
    sharded; ``keys``: of the whole row, for dropout.
    """
    positions, across = microbatch.positions, None
    if share is not None:
        positions, group = positions[:, share.here], share.context.group
        if share.context.is_ring:
            partial = device.kernels.partial_attention
            across = Ring.of(microbatch.segment_lengths, share.num_rows, group, partial, device.copy)
        else:
            across = Ulysses(group, share.num_rows)
    cos, sin = mrope_cos_sin(device.copy(positions), config.kv_channels, config.rope_theta, config.mrope_section)
    segments = Segments.build(microbatch.segment_lengths, device.copy)
    sharded = None if shard_group is None else ShardedRows(RowShards(positions.shape[1], shard_group))
    inputs = AttentionInputs(cos.to(dtype), sin.to(dtype), segments, True, sharded, across)
    if keys is None:
        return inputs
    whole = device.copy(keys if share is None else keys[share.here])
    return replace(inputs, keys=RowKeys(whole if sharded is None else whole[sharded.shards.here], whole, whole))


class LanguageModel(nn.Module):
    """The LLM parts of one stage."""

    def __init__(self, config: LanguageConfig, spec: StageSpec, context: LayerContext) -> None:
        super().__init__()
        self.has_embedding, self.has_head = spec.has_embedding, spec.has_head
        self.shares_embedding = config.tied and spec.has_embedding and spec.has_head
        if spec.has_embedding:
            self.embedding = context.built(WordEmbedding(config, context))
        self.decoder = LayerStack(
            spec.language_layers, config, context, QWEN2_5_VL.weights.language_layer.has_bias,
            is_before_head=spec.has_head)  # fmt: skip
        if spec.has_head:
            self.decoder.final_layernorm = context.norm(config.hidden_size, config.layernorm_epsilon)
            self.output_layer = OutputLayer(config, context, has_weight=not self.shares_embedding)

    def bucket_specs(self) -> Iterator[BucketSpec]:
        """Units of weights, in the order of the forward pass.

        The last norm belongs to the last layer's unit, not to the output layer's, because a tied embedding and its copy
        in the output layer must have equal shards.
        """
        shared = (self.output_layer,) if self.shares_embedding else ()
        if self.has_embedding:
            yield BucketSpec((self.embedding, *shared), is_table=True)
        *others, last = self.decoder.layers.values()
        yield from (BucketSpec((layer,)) for layer in others)
        if not self.has_head:
            yield BucketSpec((last,))
            return
        yield BucketSpec((last, self.decoder.final_layernorm))
        yield BucketSpec((self.decoder.final_layernorm,))
        yield BucketSpec((self.output_layer,))

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        residual = Residual(x)
        for layer in self.decoder.layers:
            residual = self.decoder.run(layer, residual, inputs)
        return residual.total()

    def loss(self, x: Tensor, inputs: LossInputs) -> Tensor:
        """Rows with a target, [num_targets, hidden] -> the sum of their weighted losses."""
        return self.output_layer(self.decoder.final_layernorm(Residual(x))[1], inputs, self._shared_weight())

    def logits(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary / TP]: the columns of this tensor-parallel rank; not for training."""
        shared = self._shared_weight()
        weight: Any = self.output_layer.weight if shared is None else shared
        return F.linear(self.decoder.final_layernorm(Residual(x))[1], weight)

    def _shared_weight(self) -> Tensor | None:
        """The word embedding's weight if it is also the output layer's and in this slot; else None."""
        return self.embedding.word_embeddings.weight if self.shares_embedding else None
