"""The LLM, as far as a stage owns it: word embedding with the visual scatter, layers, norm and output layer."""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor, nn

from mm.batch import Microbatch
from mm.config.model import LanguageConfig
from mm.device.attention import Segments
from mm.device.device import Device
from mm.model.layers import AttentionInputs, LayerContext, LayerStack, RMSNorm, never_initialize
from mm.model.rope import mrope_cos_sin
from mm.model.rows import replace_rows
from mm.placement import StageSpec


def language_inputs(
    microbatch: Microbatch, config: LanguageConfig, dtype: torch.dtype, device: Device
) -> AttentionInputs:
    """Rope tables and segments of the packed row.  Transformers casts the LLM's rope tables to the model's dtype."""
    positions = device.copy(microbatch.positions)
    cos, sin = mrope_cos_sin(positions, config.kv_channels, config.rope_theta, config.mrope_section)
    segments = Segments.build(microbatch.segment_lengths, device.copy)
    return AttentionInputs(cos.to(dtype), sin.to(dtype), segments, causal=True)


@dataclass(frozen=True)
class EmbeddingInputs:
    """Token ids and where the visual tokens go, on the device."""

    token_ids: Tensor
    visual_index: Tensor | None
    """Rows that visual tokens take, in order; None without images."""


def embedding_inputs(microbatch: Microbatch, image_token_id: int, device: Device) -> EmbeddingInputs:
    visual = None
    if microbatch.image_grids:
        visual = device.copy((microbatch.token_ids == image_token_id).nonzero().squeeze(1))
    return EmbeddingInputs(device.copy(microbatch.token_ids), visual)


class WordEmbedding(nn.Module):
    """Token ids to hidden states, cut over the vocabulary, with the visual tokens put in their places."""

    def __init__(self, config: LanguageConfig, context: LayerContext) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            init_method=never_initialize,
            config=context.parallel,
            tp_group=context.tp_group,
        )

    def forward(self, inputs: EmbeddingInputs, visual_tokens: Tensor | None) -> Tensor:
        x = self.word_embeddings(inputs.token_ids)
        if inputs.visual_index is None:
            return x
        assert visual_tokens is not None and visual_tokens.shape[0] == inputs.visual_index.shape[0]
        return replace_rows(x, inputs.visual_index, visual_tokens.to(x.dtype))


class LanguageModel(nn.Module):
    """The LLM parts of one stage."""

    def __init__(self, config: LanguageConfig, spec: StageSpec, context: LayerContext) -> None:
        super().__init__()
        if spec.has_embedding:
            self.embedding = WordEmbedding(config, context)
        self.decoder = LayerStack(spec.language_layers, config, context, bias=False)
        if spec.has_head:
            self.decoder.final_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon, context)
            self.shares_embedding = config.tied and spec.has_embedding
            self.output_layer = context.column(
                config.hidden_size, config.vocab_size, bias=False, has_weight=not self.shares_embedding
            )

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        for layer in self.decoder.layers:
            x = self.decoder.run(layer, x, inputs)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary / TP]: the columns of this tensor-parallel rank."""
        weight = self.embedding.word_embeddings.weight if self.shares_embedding else None
        return self.output_layer(self.decoder.final_layernorm(x), weight)
