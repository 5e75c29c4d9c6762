"""The inverse of ``mm.weights.table.fuse``, only for tests: it proves that fusing loses nothing."""

from torch import Tensor

from mm.weights.table import Fusion, Weight


def unfuse(weight: Weight, whole: Tensor) -> list[Tensor]:
    """The Hugging Face tensors of a whole fused tensor; contiguous, and without shared memory."""
    rest = whole.shape[1:]
    match weight.fusion:
        case Fusion.COPY | Fusion.STACKED_QKV:
            return [whole.contiguous()]
        case Fusion.GATE_UP:
            return [half.clone() for half in whole.chunk(2)]
        case Fusion.PER_HEAD_QKV:
            per_head = whole.reshape(weight.num_units, 3, weight.head_dim, *rest)
            return [per_head.transpose(0, 1).reshape(-1, *rest).contiguous()]
        case Fusion.GROUPED_QKV:
            grouped = whole.reshape(weight.num_units, -1, *rest)
            sizes = [shape[0] // weight.num_units for shape in weight.hf_shapes]
            return [part.reshape(-1, *rest).clone() for part in grouped.split(sizes, dim=1)]
