"""The word embedding, with the projector's visual tokens inserted in their places, wherever they were made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mm.batch import Microbatch
from mm.config.model import LanguageConfig
from mm.device.device import Device
from mm.model.layers.layer_context import LayerContext
from mm.model.layers.vocabulary import VocabularyEmbedding
from mm.model.parallel.ring import Exchange
from mm.model.parallel.rows import Permutation, replace_rows
from mm.model.parallel.sharded_rows import ShardedRows, gather_rows
from mm.parallel.context import Context, RowShards, Share, row_shard


@dataclass(frozen=True)
class EmbeddingInputs:
    """Token ids and where the visual tokens go, on the device."""

    token_ids: Tensor
    """int64 [num_tokens].  Visual tokens, which are overwritten, have spread-out ids: if thousands of gradients, even
    zeros, were added to one row, the additions would be serialised."""
    visual: "VisualRows | None"
    sharded: ShardedRows | None = None
    """See ``AttentionInputs.sharded``."""


def embedding_inputs(
    microbatch: Microbatch, visual_token_ids: tuple[int, int], device: Device, context: Context,
    tp_group: dist.ProcessGroup, shard_group: dist.ProcessGroup | None = None, share: Share | None = None,
    visual_gradients: bool = False,
) -> EmbeddingInputs:
    """Plan where the visual tokens go, and copy the token ids to the device.

    ``visual_token_ids``: placeholders for the visual tokens of images and of videos, which are in one common order.
    ``shard_group``: the ranks over which this rank's rows are sharded.  ``share``: ``context.share(microbatch)``, None
    if this rank has all rows.  ``visual_gradients``: whether visual tokens need gradients.
    """
    is_visual = torch.isin(microbatch.token_ids, torch.tensor(visual_token_ids))
    spread = torch.arange(microbatch.num_tokens).remainder(min(visual_token_ids))
    # Without images, a visual token can only come from an answer of the model; it is embedded like any other.
    token_ids = torch.where(is_visual, spread, microbatch.token_ids) if microbatch.image_grids else microbatch.token_ids
    rows = [torch.arange(microbatch.num_tokens)] if share is None else share.rows
    token_ids = token_ids[rows[context.rank]]
    sharded = None if shard_group is None else ShardedRows(RowShards(len(token_ids), shard_group))
    if not microbatch.image_grids:
        return EmbeddingInputs(device.copy(token_ids), None, sharded)
    places = is_visual.nonzero().squeeze(1)
    visual = plan_visual_rows(microbatch, places, rows, context, sharded, tp_group, visual_gradients)
    exchange = None if visual.exchange is None else visual.exchange.to_device(device.copy)
    visual = replace(visual, index=device.copy(visual.index), exchange=exchange)
    return EmbeddingInputs(device.copy(token_ids), visual, sharded)


class WordEmbedding(nn.Module):
    """Token ids to hidden states, sharded over the vocabulary, with the visual tokens inserted in their places."""

    def __init__(self, config: LanguageConfig, context: LayerContext) -> None:
        super().__init__()
        self.word_embeddings = VocabularyEmbedding(config, context)

    def forward(self, inputs: EmbeddingInputs, visual_tokens: Tensor | None) -> Tensor:
        """``visual_tokens``: as ``VisualRows.collect`` returns them; None if the microbatch has none."""
        x = self.word_embeddings(inputs.token_ids, inputs.sharded)
        if inputs.visual is None:
            return x
        assert visual_tokens is not None and visual_tokens.shape[0] == inputs.visual.index.shape[0]
        return replace_rows(x, inputs.visual.index, visual_tokens.to(x.dtype))


# From the ranks that made the visual tokens to the rows that they replace


@dataclass(frozen=True)
class VisualRows:
    """Where the visual tokens of a microbatch go, on the device."""

    index: Tensor
    """int64: the rows that they replace, in order, counted from the first row here."""
    exchange: Exchange | None = None
    """Moves them from the ranks that made them to those that hold their rows."""
    needs_gradient: bool = False
    """Whether the exchange has a backward pass, which a rank that made no visual tokens must join too."""
    sharded: ShardedRows | None = None
    """How sequence parallelism shards the visual tokens made here; None if they are not sharded, or none were made."""
    here: slice | None = None
    spread: ShardedRows | None = None
    """With whole encoders, where tensor-parallel ranks hold the same rows: the exchange gives each an even shard of the
    visual tokens, and then all gather them.  So no rank sends its tokens more than twice, even if it made them all."""

    def collect(self, visual_tokens: Tensor) -> Tensor:
        """The visual tokens whose rows are here, from those made here, which may be none: [0, hidden]."""
        if self.sharded is not None:
            visual_tokens = gather_rows(visual_tokens, self.sharded, sums_gradients=True)
        if self.exchange is not None:
            visual_tokens = self.exchange(visual_tokens)
        if self.spread is not None:
            # Each of these ranks has the whole gradient of all visual tokens, and returns only that of its shard.
            visual_tokens = gather_rows(visual_tokens, self.spread, sums_gradients=False)
        return visual_tokens if self.here is None else visual_tokens[self.here]


def plan_visual_rows(
    microbatch: Microbatch, places: Tensor, rows: Sequence[Tensor], context: Context, sharded: ShardedRows | None,
    tp_group: dist.ProcessGroup, needs_gradient: bool,
) -> VisualRows:
    """Plan where the visual tokens at rows ``places`` of the packed microbatch go; on the host.

    ``rows``: those of each context-parallel rank.  ``sharded``: how sequence parallelism shards this rank's rows, None
    without it.
    """
    rank = context.rank
    held_by, index = _held(places, rows)
    made_by = _makers(microbatch, len(places)) if context.num_encoders > 1 else torch.zeros_like(places)
    own = index[held_by == rank]
    if context.encoders_per_share > 1:
        tensor_ranks = _tensor_rank_of(held_by, index, rows, sharded is not None, tp_group.size())
        wanted_by = tensor_ranks + tp_group.size() * held_by
        exchange = _exchange(made_by, wanted_by, context.encoders)
        if sharded is not None:
            in_piece = index[wanted_by == context.encoders.rank()] - sharded.shards.here.start
            return VisualRows(in_piece, exchange, needs_gradient)
        spread = ShardedRows(RowShards(len(own), tp_group)) if len(own) else None
        return VisualRows(own, exchange, needs_gradient, spread=spread)
    exchange = _exchange(made_by, held_by, context.group) if context.size > 1 else None
    if sharded is None:
        return VisualRows(own, exchange, needs_gradient)
    shard, num_made = sharded.shards.here, int((made_by == rank).sum())
    first, stop = (int((own < end).sum()) for end in (shard.start, shard.stop))
    made = ShardedRows(RowShards(num_made, sharded.shards.group)) if num_made else None
    return VisualRows(own[first:stop] - shard.start, exchange, needs_gradient, made, slice(first, stop))


def _held(places: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """int64: the context-parallel rank that holds each of ``places``, and the index of the place among its ``rows``."""
    held_by, index = (torch.empty(sum(map(len, rows)), dtype=torch.int64) for _ in range(2))
    for rank, own in enumerate(rows):
        held_by[own], index[own] = rank, torch.arange(len(own))
    return held_by[places], index[places]


def _makers(microbatch: Microbatch, num_visual_tokens: int) -> Tensor:
    """int64: the rank of ``Context.encoders`` that makes each visual token."""
    patches_per_token = microbatch.num_patches // max(num_visual_tokens, 1)
    num_patches = torch.tensor([math.prod(grid) for grid in microbatch.image_grids], dtype=torch.int64)
    made_by = torch.tensor(microbatch.image_ranks, dtype=torch.int64)
    return made_by.repeat_interleave(num_patches // max(patches_per_token, 1))


def _tensor_rank_of(
    held_by: Tensor, index: Tensor, rows: Sequence[Tensor], shards_rows: bool, num_ranks: int
) -> Tensor:
    """int64: the tensor-parallel rank to which the exchange brings each visual token.

    That is the rank whose shard has its row (``shards_rows``), or its shard of an even division of the visual tokens of
    the same context-parallel rank (``VisualRows.spread``).
    """
    found = torch.empty_like(held_by)
    for rank, own in enumerate(rows):
        is_held = held_by == rank
        number = index[is_held] if shards_rows else torch.arange(int(is_held.sum()))
        shard = row_shard(len(own) if shards_rows else len(number), 1, 0, num_ranks).stop
        found[is_held] = number // max(shard, 1)
    return found


def _exchange(made_by: Tensor, wanted_by: Tensor, group: dist.ProcessGroup) -> Exchange:
    """An exchange that moves rows from the ranks of ``group`` that made them to those that want them, in order."""
    sent, received = wanted_by[made_by == group.rank()], made_by[wanted_by == group.rank()]

    def counts(ranks: Tensor) -> tuple[int, ...]:
        return tuple(torch.bincount(ranks, minlength=group.size()).tolist())

    return Exchange(
        group, send=Permutation.of(sent.argsort(stable=True)), sent=counts(sent), received=counts(received),
        receive=Permutation.of(received.argsort(stable=True)).reversed())
