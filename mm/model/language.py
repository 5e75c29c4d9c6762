"""The LLM, as far as a stage owns it: word embedding with the visual scatter, layers, norm and output layer."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mm.batch import Microbatch
from mm.config.model import LanguageConfig
from mm.device.attention import Segments
from mm.device.device import Device
from mm.model.cut_rows import CutRows, gather_rows
from mm.model.layers import AttentionInputs, LayerContext, LayerStack, RMSNorm
from mm.model.loss import LossInputs
from mm.model.rope import mrope_cos_sin
from mm.model.rows import replace_rows
from mm.model.vocabulary import OutputLayer, VocabularyEmbedding
from mm.parallel.pieces import Pieces
from mm.placement import StageSpec


def language_inputs(
    microbatch: Microbatch, config: LanguageConfig, dtype: torch.dtype, device: Device,
    cut_group: dist.ProcessGroup | None = None,
) -> AttentionInputs:
    """Rope tables and segments of the packed row.  Transformers casts the LLM's rope tables to the model's dtype.

    ``cut_group``: the ranks that cut rows among them.
    """
    positions = device.copy(microbatch.positions)
    cos, sin = mrope_cos_sin(positions, config.kv_channels, config.rope_theta, config.mrope_section)
    segments = Segments.build(microbatch.segment_lengths, device.copy)
    cut = None if cut_group is None else CutRows(Pieces(microbatch.num_tokens, cut_group))
    return AttentionInputs(cos.to(dtype), sin.to(dtype), segments, True, cut)


@dataclass(frozen=True)
class EmbeddingInputs:
    """Token ids and where the visual tokens go, on the device."""

    token_ids: Tensor
    """int64 [num_tokens].  At the visual tokens, which are overwritten, all sorts of ids: gradients, even theirs of 0,
    wait for each other where thousands meet on one row."""
    visual_index: Tensor | None
    """Rows that visual tokens take, in order, counted from the first row here; None without images."""
    cut: CutRows | None = None
    """As ``AttentionInputs.cut``."""
    visual_cut: CutRows | None = None
    """Of the visual tokens, which come in pieces of their own."""
    visual_here: slice | None = None
    """The visual tokens whose rows are here."""


def embedding_inputs(
    microbatch: Microbatch, image_token_id: int, device: Device, cut_group: dist.ProcessGroup | None = None
) -> EmbeddingInputs:
    cut = None if cut_group is None else CutRows(Pieces(microbatch.num_tokens, cut_group))
    if not microbatch.image_grids:
        return EmbeddingInputs(device.copy(microbatch.token_ids), None, cut)
    is_visual = microbatch.token_ids == image_token_id
    spread = torch.arange(microbatch.num_tokens).remainder(image_token_id)
    token_ids = torch.where(is_visual, spread, microbatch.token_ids)
    index = is_visual.nonzero().squeeze(1)
    if cut is None:
        return EmbeddingInputs(device.copy(token_ids), device.copy(index))
    rows = cut.pieces.here
    first, stop = (int((index < end).sum()) for end in (rows.start, rows.stop))
    visual_cut = CutRows(Pieces(len(index), cut.pieces.group))
    index = index[first:stop] - rows.start
    return EmbeddingInputs(device.copy(token_ids), device.copy(index), cut, visual_cut, slice(first, stop))


class WordEmbedding(nn.Module):
    """Token ids to hidden states, cut over the vocabulary, with the visual tokens put in their places."""

    def __init__(self, config: LanguageConfig, context: LayerContext) -> None:
        super().__init__()
        self.word_embeddings = VocabularyEmbedding(config, context)

    def forward(self, inputs: EmbeddingInputs, visual_tokens: Tensor | None) -> Tensor:
        x = self.word_embeddings(inputs.token_ids, inputs.cut)
        if inputs.visual_index is None:
            return x
        assert visual_tokens is not None, "a microbatch with images came without their visual tokens"
        if inputs.visual_cut is not None and inputs.visual_here is not None:
            visual_tokens = gather_rows(visual_tokens, inputs.visual_cut, sums_gradients=True)[inputs.visual_here]
        assert visual_tokens.shape[0] == inputs.visual_index.shape[0]
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
            self.output_layer = OutputLayer(config, context, has_weight=not self.shares_embedding)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        for layer in self.decoder.layers:
            x = self.decoder.run(layer, x, inputs)
        return x

    def loss(self, x: Tensor, inputs: LossInputs) -> Tensor:
        """The rows [num_targets, hidden] that have a target -> the sum of their weighted losses."""
        return self.output_layer(self.decoder.final_layernorm(x), inputs, self._shared_weight())

    def logits(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary / TP]: the columns of this tensor-parallel rank; not for training."""
        shared = self._shared_weight()
        weight: Any = self.output_layer.weight if shared is None else shared
        return F.linear(self.decoder.final_layernorm(x), weight)

    def _shared_weight(self) -> Tensor | None:
        """The word embedding's, where it is the output layer's too and on this stage."""
        return self.embedding.word_embeddings.weight if self.shares_embedding else None
