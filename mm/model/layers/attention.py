"""What attention reads besides the rows of its layer: positions, segments, other ranks' rows and earlier tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mm.device.attention import Segments
from mm.model.cache import LayerCache
from mm.model.layers.dropout import NO_KEYS, RowKeys
from mm.model.parallel.exchange import Ulysses
from mm.model.parallel.ring import Ring
from mm.model.parallel.sharded_rows import CutRows


@dataclass(frozen=True)
class AttentionInputs:
    """What an attention layer needs besides its rows."""

    cos: Tensor
    """[rows, head_dim]; its dtype is the one rope computes in."""
    sin: Tensor
    segments: Segments
    causal: bool
    cut: CutRows | None = None
    """Under sequence parallelism, a layer's input and output are pieces of the rows; its attention sees all rows, in
    the order of ``segments``.  None: each rank has all rows, in that order."""
    across: Ulysses | Ring | LayerCache | None = None
    """How attention sees tokens beyond this rank's rows: other ranks' under context parallelism (``segments`` then
    describe the tokens of all ranks), or earlier tokens when a layer caches keys and values."""
    caches: Mapping[str, LayerCache] | None = None
    """Each layer's keys and values, by its global number, during generation."""
    keys: RowKeys = NO_KEYS
    """Keys of the rows, for the adapters' dropout."""
