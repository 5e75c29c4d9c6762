"""The word embedding, with the projector's visual tokens inserted in their places."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mm.batch import Microbatch
from mm.config.model import LanguageConfig
from mm.device.device import Device
from mm.model.cut_rows import CutRows, gather_rows
from mm.model.exchange import Exchange
from mm.model.layer_context import LayerContext
from mm.model.rows import Permutation, replace_rows
from mm.model.vocabulary import VocabularyEmbedding
from mm.parallel.context import Share
from mm.parallel.pieces import Pieces


@dataclass(frozen=True)
class VisualRows:
    """Where the visual tokens of a microbatch go, on the device."""

    index: Tensor
    """int64: the rows that they replace, in order, counted from the first row here."""
    exchange: Exchange | None = None
    """Moves them from the context-parallel ranks that made them to those that hold their rows."""
    needs_gradient: bool = False
    """Whether the exchange has a backward pass, which a rank that made no visual tokens must join too."""
    cut: CutRows | None = None
    """Sequence-parallel cut of the visual tokens made here; None if they are not cut, or none were made."""
    here: slice | None = None
    """The visual tokens whose rows are in this rank's piece."""

    def collect(self, visual_tokens: Tensor | None, x: Tensor) -> Tensor:
        """The visual tokens whose rows are here, from those made here (None: none); ``x`` gives width and dtype."""
        if visual_tokens is None:
            assert self.exchange is not None, "a microbatch with images came without their visual tokens"
            visual_tokens = x.new_empty(0, x.shape[1]).requires_grad_(self.needs_gradient)
        if self.cut is not None:
            visual_tokens = gather_rows(visual_tokens, self.cut, sums_gradients=True)
        if self.exchange is not None:
            visual_tokens = self.exchange(visual_tokens)
        return visual_tokens if self.here is None else visual_tokens[self.here]


@dataclass(frozen=True)
class EmbeddingInputs:
    """Token ids and where the visual tokens go, on the device."""

    token_ids: Tensor
    """int64 [num_tokens].  Visual tokens, which are overwritten, have spread-out ids: if thousands of gradients, even
    zeros, were added to one row, the additions would be serialised."""
    visual: VisualRows | None
    """None without images."""
    cut: CutRows | None = None
    """See ``AttentionInputs.cut``."""


def embedding_inputs(
    microbatch: Microbatch, visual_token_ids: tuple[int, int], device: Device,
    cut_group: dist.ProcessGroup | None = None, share: Share | None = None, visual_gradients: bool = False,
) -> EmbeddingInputs:
    """Plan where the visual tokens go, and copy the token ids to the device.

    ``visual_token_ids``: placeholders for the visual tokens of images and of videos, which are in one common order.
    ``visual_gradients``: whether visual tokens need gradients.  For the other arguments see ``language_inputs``.
    """
    is_visual = torch.isin(microbatch.token_ids, torch.tensor(visual_token_ids))
    spread = torch.arange(microbatch.num_tokens).remainder(min(visual_token_ids))
    # Without images, a visual token can only come from an answer of the model; it is embedded like any other.
    token_ids = torch.where(is_visual, spread, microbatch.token_ids) if microbatch.image_grids else microbatch.token_ids
    index, exchange, num_made = is_visual.nonzero().squeeze(1), None, int(is_visual.sum())
    if share is not None:
        token_ids = token_ids[share.here]
        exchange = _visual_exchange(microbatch, index, share)
        num_made, (_, index) = sum(exchange.sent), share.find(index)
    cut = None if cut_group is None else CutRows(Pieces(len(token_ids), cut_group))
    if not microbatch.image_grids:
        return EmbeddingInputs(device.copy(token_ids), None, cut)
    visual_cut = here = None
    if cut is not None:
        rows = cut.pieces.here
        first, stop = (int((index < end).sum()) for end in (rows.start, rows.stop))
        here, index = slice(first, stop), index[first:stop] - rows.start
        visual_cut = CutRows(Pieces(num_made, cut.pieces.group)) if num_made else None
    exchange = None if exchange is None else exchange.to_device(device.copy)
    visual = VisualRows(device.copy(index), exchange, visual_gradients, visual_cut, here)
    return EmbeddingInputs(device.copy(token_ids), visual, cut)


def _visual_exchange(microbatch: Microbatch, index: Tensor, share: Share) -> Exchange:
    """Move the visual tokens at rows ``index`` from the ranks that hold their images to those that hold the rows."""
    context = share.context
    patches_per_token = microbatch.num_patches // max(len(index), 1)
    num_patches = torch.tensor([math.prod(grid) for grid in microbatch.image_grids], dtype=torch.int64)
    made_by = torch.tensor(microbatch.image_ranks, dtype=torch.int64)
    made_by = made_by.repeat_interleave(num_patches // max(patches_per_token, 1))
    wanted_by = share.rank_of_rows()[index]
    sent, received = wanted_by[made_by == context.rank], made_by[wanted_by == context.rank]

    def counts(ranks: Tensor) -> tuple[int, ...]:
        return tuple(torch.bincount(ranks, minlength=context.size).tolist())

    return Exchange(
        context.group,
        send=Permutation.of(sent.argsort(stable=True)),
        sent=counts(sent),
        received=counts(received),
        receive=Permutation.of(received.argsort(stable=True)).reversed(),
    )


class WordEmbedding(nn.Module):
    """Token ids to hidden states, cut over the vocabulary, with the visual tokens inserted in their places."""

    def __init__(self, config: LanguageConfig, context: LayerContext) -> None:
        super().__init__()
        self.word_embeddings = VocabularyEmbedding(config, context)

    def forward(self, inputs: EmbeddingInputs, visual_tokens: Tensor | None) -> Tensor:
        x = self.word_embeddings(inputs.token_ids, inputs.cut)
        if inputs.visual is None:
            return x
        visual_tokens = inputs.visual.collect(visual_tokens, x)
        assert visual_tokens.shape[0] == inputs.visual.index.shape[0]
        return replace_rows(x, inputs.visual.index, visual_tokens.to(x.dtype))
