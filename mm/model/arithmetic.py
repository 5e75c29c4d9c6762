"""What data and reports ask a family about a batch: token positions and FLOPs.

Neither megatron nor a device is needed, so processes that only prepare data can use it too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mm.batch import BatchTotals, Grid
from mm.config.model import ModelConfig, VisionConfig
from mm.weights.table import Place


@dataclass(frozen=True)
class VideoTimes:
    """Where the frames of one sample's videos lie on the time axis."""

    video_token_id: int
    tokens_per_second: int
    """Positions per second of video, from the model JSON."""
    seconds: tuple[float | None, ...]
    """For each grid, in reading order: the time from one temporal patch to the next; None for an image."""


@dataclass(frozen=True)
class Block:
    """A piece of the model and its work in a forward pass: an embedding, a layer, the projector or the head."""

    place: Place
    layer: int | None
    kind: str
    """Blocks of one kind do the same operations on matrices of the same shapes."""
    forward: float
    """FLOPs."""
    rows: int
    """Patches, tokens or target tokens: its matrix products have this many rows, or a fixed fraction of them."""
    pairs: int = 0
    """Pairs of rows between which attention computes scores."""


@dataclass(frozen=True)
class Arithmetic:
    """The functions of one family."""

    positions: Callable[[Tensor, Sequence[Grid], int, int, int, VideoTimes], Tensor]
    """Positions of the tokens of one sample, int64 [axes, num_tokens], from its token ids and grids, the ids of the
    image token and of the token before each image, the side of a merge unit in patches, and the times of its videos."""
    blocks: Callable[[ModelConfig, BatchTotals], list[Block]]
    """Every block, in the order of the forward pass."""
    image_flops: Callable[[VisionConfig, Grid], float]
    """Forward FLOPs of one image in the ViT."""
