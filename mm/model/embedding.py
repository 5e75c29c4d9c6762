"""The word embedding, with the projector's visual tokens inserted in their places."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mm.batch import Microbatch
from mm.config.model import LanguageConfig
from mm.device.device import Device
from mm.model.cut_rows import CutRows
from mm.model.layer_context import LayerContext
from mm.model.rows import replace_rows
from mm.model.visual_rows import VisualRows, plan_visual_rows
from mm.model.vocabulary import VocabularyEmbedding
from mm.parallel.context import Context, Share
from mm.parallel.pieces import Pieces


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
    microbatch: Microbatch, visual_token_ids: tuple[int, int], device: Device, context: Context,
    tp_group: dist.ProcessGroup, cut_group: dist.ProcessGroup | None = None, share: Share | None = None,
    visual_gradients: bool = False,
) -> EmbeddingInputs:
    """Plan where the visual tokens go, and copy the token ids to the device.

    ``visual_token_ids``: placeholders for the visual tokens of images and of videos, which are in one common order.
    ``cut_group``: the ranks over which this rank's rows are cut.  ``share``: ``context.share(microbatch)``, None if
    this rank has all rows.  ``visual_gradients``: whether visual tokens need gradients.
    """
    is_visual = torch.isin(microbatch.token_ids, torch.tensor(visual_token_ids))
    spread = torch.arange(microbatch.num_tokens).remainder(min(visual_token_ids))
    # Without images, a visual token can only come from an answer of the model; it is embedded like any other.
    token_ids = torch.where(is_visual, spread, microbatch.token_ids) if microbatch.image_grids else microbatch.token_ids
    rows = [torch.arange(microbatch.num_tokens)] if share is None else share.rows
    token_ids = token_ids[rows[context.rank]]
    cut = None if cut_group is None else CutRows(Pieces(len(token_ids), cut_group))
    if not microbatch.image_grids:
        return EmbeddingInputs(device.copy(token_ids), None, cut)
    places = is_visual.nonzero().squeeze(1)
    visual = plan_visual_rows(microbatch, places, rows, context, cut, tp_group, visual_gradients)
    return EmbeddingInputs(device.copy(token_ids), visual.to_device(device.copy), cut)


class WordEmbedding(nn.Module):
    """Token ids to hidden states, cut over the vocabulary, with the visual tokens inserted in their places."""

    def __init__(self, config: LanguageConfig, context: LayerContext) -> None:
        super().__init__()
        self.word_embeddings = VocabularyEmbedding(config, context)

    def forward(self, inputs: EmbeddingInputs, visual_tokens: Tensor | None) -> Tensor:
        """``visual_tokens``: as ``VisualRows.collect`` returns them; None if the microbatch has none."""
        x = self.word_embeddings(inputs.token_ids, inputs.cut)
        if inputs.visual is None:
            return x
        assert visual_tokens is not None and visual_tokens.shape[0] == inputs.visual.index.shape[0]
        return replace_rows(x, inputs.visual.index, visual_tokens.to(x.dtype))
