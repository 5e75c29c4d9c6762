"""The row order of the ViT's qkv in a directory by MindSpeed-MM, which no file states.

Its converters of 2.1.0 and since 26.0.0 write qkv per head, as its runtime reads it; those of 2.2.0 and 2.3.0 leave it
as [Q; K; V] and cut that as a whole.  Comparing with a Hugging Face directory of the same model shows which it is.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.mindspeed import MindSpeedDirectory
from mm.checkpoint.mindspeed_layout import Structure
from mm.checkpoint.tensor_io import Files
from mm.config.args import VitQkvOrder
from mm.config.model import ModelConfig
from mm.weights.table import Fusion, Weight, model_weights
from mm.weights.views import View, ViewIndex


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
    """Return ``directory`` annotated with its qkv order, and notes for the user.

    Directories by this project, and those of the canonical structure, have one possible order.
    """
    if directory.manifest is not None or directory.storage.structure is Structure.CANONICAL or not order.flag:
        return directory, ()
    whole = replace(directory, storage=replace(directory.storage, whole_vision_qkv=True))
    found = order.stated
    if found is None and order.base is not None:
        base = HFDirectory.open(order.base, weights_required=False)
        if base.tensors:
            found = _order_by_comparison(directory, whole, model, tp_size, base)
    if found is None:
        return directory, (
            f"{directory.path} has no manifest, so the order of the ViT's qkv is unknown; it is read per head.  If "
            f"MindSpeed-MM 2.2.0 or 2.3.0 converted it, give {order.flag} whole",)
    if found == "per_head":
        return directory, ()
    return whole, (f"{directory.path} has the ViT's qkv as a whole, as MindSpeed-MM 2.2.0 and 2.3.0 write it; it is "
                   f"read correctly here",)


def _order_by_comparison(
    per_head: MindSpeedDirectory, whole: MindSpeedDirectory, model: ModelConfig, tp_size: int, base: HFDirectory
) -> VitQkvOrder | None:
    """The order in which the ViT's first qkv is much closer to that of ``base``; None if neither is."""
    weight = next(weight for weight in model_weights(model) if weight.fusion is Fusion.PER_HEAD_QKV)
    sides = [(base.path, base.views(model)), *((one.path, one.views(model, tp_size)) for one in (per_head, whole))]
    if any(problems for _, (_, problems) in sides):
        return None
    expected, *both = (_rows(path, views, weight) for path, (views, _) in sides)
    one, other = (float((found - expected).abs().sum()) for found in both)
    if min(one, other) > max(one, other) / 2:
        return None
    return "whole" if other < one else "per_head"


def _rows(root: Path, views: list[View], weight: Weight) -> Tensor:
    """The whole Hugging Face tensor of ``weight`` in fp32."""
    with Files(root) as files:
        rows = range(weight.hf_shapes[0][0])
        return files.block(ViewIndex(views), weight.hf_names[0], range(1), rows)[0].float()
