"""The row order of the ViT's qkv in a directory by MindSpeed-MM, which no file states.

Its converters of 2.1.0 and since 26.0.0 write qkv per head, as its runtime reads it; those of 2.2.0 and 2.3.0 leave it
as [Q; K; V] and cut that as a whole.  Comparing with a Hugging Face directory of the same model shows which it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from mm.config.flags import VitQkvOrder
from mm.config.model import ModelConfig
from mm.formats.files import Files
from mm.formats.hf import HFDirectory
from mm.formats.mindspeed import MindSpeedDirectory
from mm.formats.storage import Structure
from mm.weights.cut import Span
from mm.weights.plan import ViewIndex
from mm.weights.table import Fusion, Weight, model_weights
from mm.weights.views import View


@dataclass(frozen=True)
class QkvOrder:
    """How the order is determined: stated by the user, or by comparison with a Hugging Face directory."""

    stated: VitQkvOrder | None = None
    """The order that the user states."""
    base: str | Path | None = None
    """A Hugging Face directory of the model, or of the model that the training started from."""
    flag: str = ""
    """The flag that states the order; if empty, the order is not examined."""


def in_qkv_order(
    directory: MindSpeedDirectory, model: ModelConfig, tp_size: int, order: QkvOrder
) -> tuple[MindSpeedDirectory, tuple[str, ...]]:
    """``directory`` with the order to read it in, and notes for the user.

    Directories by this project, and those of the canonical structure, have one possible order.
    """
    if directory.manifest is not None or directory.storage.structure is Structure.CANONICAL or not order.flag:
        return directory, ()
    found = order.stated
    if found is None and order.base is not None:
        found = _order_by_comparison(directory, model, tp_size, HFDirectory.open(order.base, weights_required=False))
    if found is None:
        return directory, (
            f"{directory.path} has no manifest, so the order of the ViT's qkv is unknown; it is read per head, as "
            f"MindSpeed-MM 2.1.0 and releases since 26.0.0 write it.  If 2.2.0 or 2.3.0 converted it, give "
            f"{order.flag} whole",)
    if found == "per_head":
        return directory, ()
    storage = replace(directory.storage, whole_vision_qkv=True)
    return replace(directory, storage=storage), (
        f"{directory.path} has the ViT's qkv as a whole, [Q; K; V], as the converters of MindSpeed-MM 2.2.0 and 2.3.0 "
        f"write it, although its runtime expects it per head; it is read correctly here",)


def _order_by_comparison(
    directory: MindSpeedDirectory, model: ModelConfig, tp_size: int, base: HFDirectory
) -> VitQkvOrder | None:
    """The order in which the ViT's first qkv is much closer to that of ``base``; None if neither is."""
    weight = next(weight for weight in model_weights(model) if weight.fusion is Fusion.PER_HEAD_QKV)
    either = [replace(directory, storage=replace(directory.storage, whole_vision_qkv=is_whole))
              for is_whole in (False, True)]
    expected = _rows(base.path, base.views(model)[0], weight)
    per_head, whole = (_rows(one.path, one.views(model, tp_size)[0], weight) for one in either)
    if expected is None or per_head is None or whole is None:
        return None
    from_per_head, from_whole = (float((found - expected).abs().sum()) for found in (per_head, whole))
    if min(from_per_head, from_whole) > max(from_per_head, from_whole) / 2:
        return None
    return "whole" if from_whole < from_per_head else "per_head"


def _rows(root: Path, views: Sequence[View], weight: Weight) -> Tensor | None:
    """The whole Hugging Face tensor of ``weight`` in fp32; None if ``views`` lack part of it."""
    index, rows = ViewIndex(views), Span(weight.hf_names[0], 0, weight.hf_shapes[0][0])
    if sum(one.span.length for one in index.find(rows)) != rows.length:
        return None
    with Files(root) as files:
        return files.block(index, weight.hf_names[0], range(1), range(rows.length))[0].float()
