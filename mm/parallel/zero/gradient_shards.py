"""Gradients of which each data-parallel rank keeps only its shard (ZeRO-2).

A bucket (``weight_shards.py``), such as a layer, has a gradient buffer only while a backward pass fills it.  The pass
reduce-scatters it, and each rank adds its shard to the sum of the step.  Shards are those of megatron's distributed
optimizer, so its states, its gathers of weights and our checkpoints are the same as without this.

Other engines do not fit: torch's ``fully_shard`` rounds each microbatch's gradients to the weights' dtype, where our
products add to fp32 buffers, and megatron-core's FSDP runs on CUDA alone.  ``schedule.py`` decides when a bucket is
reduced.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBucket,
    _ParamAndGradBucketGroup,
    partition_buckets,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from mm.batch import Images
from mm.parallel.zero.gradient_buffers import mark_stale, zero_stale
from mm.parallel.zero.weight_shards import BucketLayout, BucketPlaces, BucketSpec, WeightShards, owned_weights

_ASKS_FOR_PLACES = "param_index_map" in inspect.signature(_ParamAndGradBucket.__init__).parameters
"""A bucket must be told where its weights lie in the buffer; one of megatron-core 0.16 computes this itself."""


class GradientBucket:
    """The gradients of one bucket: all of them while a backward pass fills them, and this rank's shard of their sum."""

    def __init__(self, group: _ParamAndGradBucketGroup, spec: BucketSpec, places: BucketPlaces) -> None:
        (bucket,) = group.buckets
        self.spec, self.group, self.places = spec, group, places
        self.megatron_bucket: _ParamAndGradBucket = bucket
        self._shape_only, start, stop = bucket.grad_data, *self.shard_range
        assert bucket.param_data is not None, "the optimizer is megatron's distributed one"
        self.shard = torch.empty(stop - start, dtype=torch.float32, device=bucket.param_data.device)
        """fp32 [bucket / ranks]: the sum over the step's microbatches and all ranks, once the step is reduced."""
        self.is_open = self._is_summed = False

    @property
    def weights(self) -> list[Any]:
        return self.megatron_bucket.params_list

    @property
    def shard_range(self) -> tuple[int, int]:
        return shard_range(self.megatron_bucket, self.group)

    def begin_step(self) -> None:
        assert not self.is_open, "the step before reduced it"
        self._is_summed = False

    def open(self, overwrites: bool) -> None:
        """Allocate the buffers, ``main_grad`` of each weight.  ``overwrites``: see ``reduction.begin``."""
        if self.is_open:
            return
        buffer = self._shape_only.new_empty(self._shape_only.shape)
        for weight, (start, stop) in self.places.items():
            weight.main_grad = buffer[start:stop].view(weight.shape)
        if overwrites:
            mark_stale(self.weights)
        else:
            buffer.zero_()
        self._set_buffer(buffer)
        self.is_open = True

    def start_reducing(self) -> None:
        """Reduce-scatter what the buffers hold; with overlapped reduction the collective runs on."""
        zero_stale(self.weights)
        self.group.start_grad_sync()

    def finish_reducing(self) -> None:
        """Add the reduced shard to the sum and free the buffers; a late use of ``main_grad`` fails."""
        if self.group.grad_reduce_handle is not None:
            self.group.grad_reduce_handle.wait()
            self.group.grad_reduce_handle = None
        reduced = self.megatron_bucket.grad_data[slice(*self.shard_range)]
        if self._is_summed:
            self.shard += reduced
        else:
            self.shard.copy_(reduced)
        for weight in self.weights:
            del weight.main_grad
        self._set_buffer(self._shape_only)
        self.is_open, self._is_summed = False, True

    def end_step(self) -> None:
        """Set the sum to 0 if nothing was reduced in this step."""
        assert not self.is_open, "the last pass reduced it"
        if not self._is_summed:
            self.shard.zero_()

    def shards(self) -> Iterator[tuple[Any, Tensor]]:
        """Each weight of which this rank's shard has a part, and that part."""
        start, stop = self.shard_range
        for weight, (first, last) in self.places.items():
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                yield weight, self.shard[begin - start : end - start]

    def _set_buffer(self, buffer: Tensor) -> None:
        self.megatron_bucket.grad_data = buffer
        self.group.cached_grad_buffer_shard_list = [None]  # megatron's shards of the buffer before


def shard_range(bucket: _ParamAndGradBucket, group: _ParamAndGradBucketGroup) -> tuple[int, int]:
    """Where this rank's shard begins and ends in ``bucket``, as megatron's distributed optimizer divides it."""
    size = bucket.grad_data.numel() // group.intra_distributed_optimizer_instance_size
    start = size * group.intra_distributed_optimizer_instance_rank
    return start, start + size


class _ShardedBuffer:
    """The part of megatron's ``_ParamAndGradBuffer`` that its optimizer and its bucket groups read.

    megatron's buckets are views of one tensor; here each has its own, and gradients without memory until it is opened.
    """

    def __init__(
        self, config: DistributedDataParallelConfig, group: Any, buckets: Sequence[list[Any]], holds_weights: bool
    ) -> None:
        """``holds_weights``: buckets have memory for their weights; otherwise ``WeightShards`` has it for shards."""
        self._holds_weights = holds_weights
        self.ddp_config, self.data_parallel_group, self.data_parallel_world_size = config, group, group.size()
        self.params = [weight for weights in buckets for weight in weights]
        self.param_indices = list(range(len(self.params)))
        (self.param_dtype,) = {weight.dtype for weight in self.params}
        self.grad_dtype = torch.float32 if config.grad_reduce_in_fp32 else self.param_dtype
        self.gradient_scaling_factor = 1.0
        self.param_index_map: dict[Any, tuple[int, int, int]] = {}
        self.buckets: list[_ParamAndGradBucket] = []
        self.places: list[BucketPlaces] = []
        self.numel = self.numel_unpadded = 0
        self.num_optimizer_shards = group.size()
        """megatron-core 0.19's optimizer compares it with its own number of ranks."""
        for weights in buckets:
            self._append(weights)

    def get_unpacked_index_map(self) -> dict[Any, tuple[int, int, int]]:
        """What megatron-core 0.17's optimizer alone reads: the same here, because we have no 4-bit weights."""
        return self.param_index_map

    def _append(self, weights: list[Any]) -> None:
        layout = BucketLayout.of(weights, self.data_parallel_world_size)
        values = weights[0].new_empty((), requires_grad=False).expand(layout.num_elements)
        if self._holds_weights:
            values = torch.zeros_like(values, memory_format=torch.contiguous_format)
        for weight, (start, end) in layout.places.items():
            if self._holds_weights:
                there = values[start:end].view(weight.shape)
                there.copy_(weight.detach())
                weight.data = there
            self.param_index_map[weight] = self.numel + start, self.numel + end, len(self.buckets)
        shape_only = values.new_empty((), dtype=self.grad_dtype).expand(layout.num_elements)
        more: dict[str, Any] = {"param_index_map": self.param_index_map, "params_with_extra_main_grads": []}
        self.buckets.append(_ParamAndGradBucket(
            weights, values, shape_only, self.numel, layout.stop, self.gradient_scaling_factor, len(self.buckets),
            **(more if _ASKS_FOR_PLACES else {})))
        self.places.append(layout.places)
        self.numel += layout.num_elements
        self.numel_unpadded += layout.stop


class ShardedGradients(DistributedDataParallel):
    """megatron's DDP for one chunk, which keeps no gradients but this rank's shards."""

    def __init__(
        self, settings: TransformerConfig, config: DistributedDataParallelConfig, chunk: nn.Module,
        specs: Iterable[BucketSpec], weight_shards: WeightShards | None = None,
    ) -> None:  # fmt: skip
        """``specs``: those of ``chunk`` in the order of its forward pass.  ``weight_shards``: if ranks keep only shards
        of the weights, too."""
        trained = [weight for weight in chunk.parameters() if weight.requires_grad]
        for weight in trained:
            weight.requires_grad_(False)
        super().__init__(settings, config, chunk)  # without trained weights it allocates no buffers
        for weight in trained:
            weight.requires_grad_(True)
        self.forward_begins: Callable[[int, Images], None] = lambda *_: None
        """Called before the forward pass of a microbatch, with its number in the step and what images do there."""
        self.backward_begins: Callable[[int], None] = lambda _: None
        self.backward_ends: Callable[[], None] = lambda: None
        self.bucket_begins: Callable[[int, int, bool], None] = lambda *_: None
        """Called when the backward pass of one of a bucket's modules begins: with the number of the microbatch in whose
        forward pass it ran, the bucket's place in ``specs``, and whether it is the bucket's last module to begin."""
        self.use_begins: Callable[[int, bool], None] = lambda *_: None
        """With shards of weights: called when the first module of one of their ``specs`` begins its forward pass,
        or its backward pass, with the bucket's place, and whether it is the backward pass."""
        self.gradient_buckets: tuple[GradientBucket, ...] = ()
        self.weight_shards = weight_shards
        self._microbatch = 0
        if trained:
            self._build(config, list(specs), trained)
        for place, spec in enumerate(weight_shards.specs if weight_shards else ()):
            self._watch_use(spec.modules[0], place)

    def _build(self, config: DistributedDataParallelConfig, specs: list[BucketSpec], trained: list[Any]) -> None:
        owned = zip(specs, owned_weights(specs, trained), strict=True)
        found = [(spec, weights) for spec, weights in owned if weights]
        buffer: Any = _ShardedBuffer(
            config, self.intra_dp_cp_group, [weights for _, weights in found], self.weight_shards is None)
        self.params_with_grad = buffer.params
        buffers: Any = [buffer]
        self.buffers = buffers  # torch's modules have a method of this name, which megatron's DDP hides
        # megatron's order: the first to be gathered is last
        groups = list(partition_buckets([buffer]))
        self.bucket_groups = groups[::-1]
        self.param_to_bucket_group = {weight: group for group in groups for weight in group.params}
        self.gradient_buckets = tuple(GradientBucket(group, spec, places)
                                      for group, (spec, _), places in zip(groups, found, buffer.places, strict=True))
        for weight in buffer.params:
            node = weight.expand_as(weight).grad_fn.next_functions[0][0]
            node.register_hook(_adder(weight))
            self.grad_accs.append(node)
        for place, one in enumerate(self.gradient_buckets):
            for module in one.spec.modules:
                is_last = module is one.spec.modules[0]
                _watch_backward(module, lambda place=place, is_last=is_last: partial(
                    self.bucket_begins, self._microbatch, place, is_last))

    def _watch_use(self, module: nn.Module, place: int) -> None:
        module.register_forward_pre_hook(lambda *_: self.use_begins(place, False))
        _watch_backward(module, lambda: partial(self.use_begins, place, True))

    def start(self, microbatch: int, images: Images) -> None:
        """Call before each forward pass of training, and with shards of weights before any other.  ``images``: what
        images do in it on this rank."""
        self._microbatch = microbatch
        self.forward_begins(microbatch, images)

    def start_param_sync(self, *unused: Any, **settings: Any) -> None:
        """Gather the weights that other ranks have updated.  Shards of weights are gathered when a bucket is used."""
        if self.weight_shards is None:
            super().start_param_sync(*unused, **settings)
        else:
            self.weight_shards.weights_change()

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        output: Tensor = super().forward(*inputs, **named)
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(partial(self._begin_backward, self._microbatch))
        return output

    def _begin_backward(self, microbatch: int, _: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        self.backward_begins(microbatch)
        engine.queue_callback(self.backward_ends)


def _watch_backward(module: nn.Module, prepared: Callable[[], Callable[[], None]]) -> None:
    """Call a function whenever the backward pass of ``module`` begins: before any of its nodes runs, and after those of
    the modules that used its output.  ``prepared`` returns that function, in each forward pass."""

    def follow(_module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        once, passed = [prepared()], set(map(id, _tensors(inputs)))
        for tensor in _tensors(output):
            if tensor.requires_grad and id(tensor) not in passed:
                tensor.register_hook(lambda _: once.pop()() if once else None)

    module.register_forward_hook(follow)


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples: what layers take and return."""
    for value in values if isinstance(values, tuple) else (values,):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _adder(weight: Any) -> Callable[..., None]:
    """A hook that adds autograd's gradient of ``weight`` to its buffer, unless our backward passes have done so."""

    def add(*_: Any) -> None:
        if weight.grad is not None and not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    return add
