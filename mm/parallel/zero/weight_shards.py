"""Weights of which each data-parallel rank keeps only its shard (ZeRO-3), whole only while their bucket is open.

A *bucket* is the weights that one collective gathers, and whose gradients one reduces: those of a layer, the projector
or the word embedding.  Each element of a weight without memory reads as NaN, so that a use of a closed bucket cannot
pass unnoticed.  Norms and biases stay whole: a layer's last bias is added by the next layer.  ``schedule.py`` decides
when buckets open and close.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ALIGNED_ELEMENTS = 64
"""In its bucket a weight starts at a multiple of this many elements, and the size of a bucket is a multiple of
_BUCKET_ELEMENTS, as in megatron's ``_ParamAndGradBuffer``: 128 and 256 bytes of bf16, for cuBLAS."""
_BUCKET_ELEMENTS = 128

TowerName = Literal["vision", "projector", "language"]
BucketPlaces = dict[Any, tuple[int, int]]
"""Where each weight begins and ends in its bucket, in order."""


@dataclass(frozen=True)
class BucketSpec:
    """Which weights form a bucket."""

    modules: tuple[nn.Module, ...]
    """The modules that use them, in the order of the forward pass.  A later one may own none: a tied output layer."""
    tower: TowerName = "language"
    """Buckets of the ViT and the projector are used only by microbatches with images."""
    is_table: bool = False
    """Whether the first module only looks up rows of its weight, so that its backward pass does not read the weight."""

    @property
    def is_vision(self) -> bool:
        return self.tower != "language"


@dataclass(frozen=True)
class BucketLayout:
    """How weights lie in a bucket, which is divided evenly among the ranks that hold the same weights."""

    places: BucketPlaces
    num_elements: int
    """With padding."""
    stop: int
    """The end of the last weight."""

    @classmethod
    def of(cls, weights: Iterable[Any], num_ranks: int) -> "BucketLayout":
        places, stop = BucketPlaces(), 0
        for weight in weights:
            start = padded(stop, _ALIGNED_ELEMENTS)
            places[weight] = start, (stop := start + weight.numel())
        return cls(places, padded(stop, math.lcm(num_ranks, _BUCKET_ELEMENTS)), stop)


def padded(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def owned_weights(specs: Sequence[BucketSpec], weights: Iterable[Any]) -> list[list[Any]]:
    """For each bucket those of ``weights`` that it owns: a weight that two buckets use belongs to the first."""
    left, found = dict.fromkeys(weights), list[list[Any]]()
    for spec in specs:
        own = [weight for module in spec.modules for weight in module.parameters() if weight in left]
        found.append([*dict.fromkeys(own)])
        for weight in found[-1]:
            del left[weight]
    assert not left, "every weight is in a bucket"
    return found


def without_memory(module: nn.Module) -> None:
    """Free the memory of the weights of a module that has just been built, before the next one is."""
    for weight in module.parameters():
        weight.data = placeholder(weight)


def placeholder(weight: Tensor) -> Tensor:
    """A tensor with the shape of ``weight`` and without memory; each element reads as NaN."""
    return torch.full((), torch.nan, dtype=weight.dtype, device=weight.device).expand(weight.shape)


class _FlatWeights:
    """Weights that lie one after another, and this rank's shard of them."""

    def __init__(self, weights: Sequence[Any], group: dist.ProcessGroup) -> None:
        self.layout, self._group = BucketLayout.of(weights, group.size()), group
        self.shard = weights[0].new_zeros(self.layout.num_elements // group.size(), requires_grad=False)
        self._start = len(self.shard) * group.rank()
        self._whole: Tensor | None = None
        self._gather: Any = None
        self._small = [weight for weight in weights if weight.ndim == 1]
        self._placeholders = [(weight, placeholder(weight)) for weight in weights if weight.ndim > 1]
        for weight in self._small:
            weight.data = torch.empty_like(weight, requires_grad=False)
        for weight, one in self._placeholders:
            weight.data = one

    def shard_of(self, weight: Any) -> tuple[Tensor, int]:
        """The elements of ``weight`` that this rank keeps, flat and possibly none, and the index of the first in the
        weight."""
        first, last = self.layout.places[weight]
        begin = min(max(first, self._start), last)
        end = max(begin, min(last, self._start + len(self.shard)))
        here = max(0, begin - self._start)
        return self.shard[here : here + end - begin], begin - first

    def start_gathering(self) -> None:
        assert self._whole is None, "it is closed"
        self._whole = self.shard.new_empty(self.layout.num_elements)
        self._gather = dist.all_gather_into_tensor(self._whole, self.shard, group=self._group, async_op=True)

    def finish_gathering(self, is_new: bool) -> None:
        """``is_new``: whether the weights have changed since they were last gathered."""
        whole = self._whole
        assert whole is not None, "the gather has started"
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        for weight, _ in self._placeholders:
            start, stop = self.layout.places[weight]
            weight.data = whole[start:stop].view(weight.shape)
        if is_new and self._small:
            places = map(self.layout.places.get, self._small)
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]  (no public name)
                [weight.data for weight in self._small], [whole[slice(*place)] for place in places if place])

    def close(self) -> None:
        for weight, one in self._placeholders:
            weight.data = one
        self._whole = None


class WeightBucket:
    """The weights of one bucket on this rank: always its shard, all of them while the bucket is open."""

    def __init__(self, spec: BucketSpec, weights: Sequence[Any], group: dist.ProcessGroup) -> None:
        """Trained and frozen weights are gathered separately: the optimizer's shards divide only the trained ones."""
        self.spec = spec
        kinds = [[weight for weight in weights if weight.requires_grad is is_trained] for is_trained in (True, False)]
        self._flats = [_FlatWeights(some, group) for some in kinds if some]
        self.flat_of = {weight: flat for flat in self._flats for weight in flat.layout.places}
        self.is_open = self.is_arriving = False
        self._is_new = True

    def weights_change(self) -> None:
        assert not self.is_open and not self.is_arriving, "an open bucket would keep the weights of before"
        self._is_new = True

    def start_opening(self) -> None:
        assert not self.is_open and not self.is_arriving, "other ranks would wait for a gather that this one omits"
        for flat in self._flats:
            flat.start_gathering()
        self.is_arriving = True

    def open(self) -> None:
        """Wait for the weights that ``start_opening`` gathers."""
        if not self.is_open:
            assert self.is_arriving, "every rank gathers it at the same place"
            for flat in self._flats:
                flat.finish_gathering(self._is_new)
            self.is_open, self.is_arriving, self._is_new = True, False, False

    def close(self) -> None:
        """Free the memory of the weights, after waiting for those that are still arriving."""
        if self.is_arriving:
            self.open()
        if self.is_open:
            for flat in self._flats:
                flat.close()
            self.is_open = False


class WeightShards:
    """This rank's shards of all weights of a chunk."""

    def __init__(self, specs: Iterable[BucketSpec], weights: Iterable[Any], group: dist.ProcessGroup) -> None:
        """``specs``: in the order of the forward pass.  The values of ``weights`` are lost."""
        self.specs = tuple(specs)
        """Including those that own nothing because their module uses the weights of an earlier bucket."""
        owned = owned_weights(self.specs, weights)
        self.buckets = tuple(WeightBucket(spec, own, group)
                             for spec, own in zip(self.specs, owned, strict=True) if own)
        self._bucket_of = {weight: bucket for bucket in self.buckets for weight in bucket.flat_of}
        self.are_held = False

    def bucket_of(self, weight: Any) -> WeightBucket:
        return self._bucket_of[weight]

    def shard_of(self, weight: Any) -> tuple[Tensor, int]:
        """See ``_FlatWeights.shard_of``."""
        return self._bucket_of[weight].flat_of[weight].shard_of(weight)

    def set(self, weight: Any, values: Tensor) -> None:
        """Keep this rank's shard of ``values``, a whole weight."""
        shard, first = self.shard_of(weight)
        shard.copy_(values.reshape(-1)[first : first + len(shard)])
        self._bucket_of[weight].weights_change()

    def weights_change(self) -> None:
        """Call when the shards of any rank have changed."""
        for bucket in self.buckets:
            bucket.weights_change()

    @contextmanager
    def opened(self, bucket: WeightBucket) -> Iterator[None]:
        """Open ``bucket`` while the body runs, on all ranks together."""
        bucket.start_opening()
        bucket.open()
        try:
            yield
        finally:
            bucket.close()

    @contextmanager
    def all_opened(self) -> Iterator[None]:
        """Hold all buckets open while the body runs, on all ranks together."""
        with ExitStack() as closing:
            for bucket in self.buckets:
                closing.enter_context(self.opened(bucket))
            self.are_held = True
            closing.callback(setattr, self, "are_held", False)
            yield
