"""Adam whose states are kept in 16 bits or in host memory between steps; torch's fused kernel computes in fp32, a
block of elements at a time.

Moments may be in bf16.  The fp32 copy of a bf16 weight may be left out, or be stored as the weight and a remainder
(``mm.weights.shard``).  While a block is updated, all of its states are in fp32, and on the device.

States in host memory pass through the device.  While one block is updated and copied back, the next one arrives, so
two are on the device at a time::

    to the device    block 1 | block 2           | block 3           |
    Adam                     | block 1 |         | block 2 |         | block 3 |
    to the host                        | block 1 |         | block 2 |         | block 3

The results equal those of the same kernel with states on the device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mm.checkpoint.pipelined_write import host_segment, places_in_segments
from mm.config.args import KeptCopy
from mm.cost.stage_memory import offloaded
from mm.device.device import Device
from mm.device.pointwise import ROUNDED_AT_ONCE
from mm.parallel.zero.weight_shards import placeholder
from mm.weights.shard import REMAINDER, joined, split

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
"""The fp32 copy of a weight, where it is not the tensor in the parameter groups."""


@dataclass(frozen=True)
class KeptStates:
    """How the states of a trained weight are kept between steps."""

    moments: Mapping[str, torch.dtype]
    """fp32 or bf16, by ``MOMENTS``."""
    copy: KeptCopy = "fp32"
    host_share: float = 0.0
    """Share of the elements whose states are in host memory."""

    @property
    def is_usual(self) -> bool:
        """Whether megatron's own optimizer keeps them so."""
        return self.copy == "fp32" and set(self.moments.values()) == {torch.float32} and not self.host_share

    def besides(self, has_copy: bool) -> dict[str, torch.dtype]:
        """What is kept beside a weight that is in 16 bits (``has_copy``) or in fp32."""
        copies = {"fp32": {MASTER: torch.float32}, "remainder": {REMAINDER: torch.int16}, "none": {}}
        return {**(copies[self.copy] if has_copy else {}), **self.moments}


def host_memory(device: Device, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Flat tensors of zeros in host memory, pinned on an accelerator; ``sizes``: their numbers of elements and dtypes.
    Raises UserError if this node has too little memory."""
    sizes_bytes = [num_elements * dtype.itemsize for num_elements, dtype in sizes]
    places, segments_bytes = places_in_segments(sizes_bytes)
    needs = (f"--optimizer-cpu-offload keeps {sum(segments_bytes):,} bytes of this rank's optimizer states in host "
             f"memory")
    cure = ("give the ranks of this node more memory, lower --optimizer-offload-fraction, or shard the states over "
            "more ranks (--data-parallel-sharding-strategy optim)")
    segments = [host_segment(device.runtime, num_bytes, needs, cure).zero_() for num_bytes in segments_bytes]
    return [segments[segment][start : start + num_bytes].view(dtype)
            for (segment, start), num_bytes, (_, dtype) in zip(places, sizes_bytes, sizes, strict=True)]


class HostStatesPass:
    """Moves blocks from host memory through the device and back."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._coming, self._going = device.runtime.side_stream(), device.runtime.side_stream()
        self._leaving: list[Callable[[], Tensor]] = []
        """Waits for the last block that was copied back; blocks are copied back in order."""

    def through(self, blocks: Sequence[Sequence[Tensor]], compute: Callable[[int, list[Tensor]], None]) -> None:
        """Call ``compute`` for each block, with its number and copies on the device, which are then copied back to the
        tensors in host memory.  ``wait`` waits for that."""
        coming = self._fetched(blocks[0]) if blocks else []
        for number, block in enumerate(blocks):
            self._coming.join()
            self._going.join()  # the previous block's memory is free
            here = coming
            coming = self._fetched(blocks[number + 1]) if number + 1 < len(blocks) else []
            compute(number, here)
            self._going.record_event()
            with self._going.after_event():
                self._leaving = [self._device.runtime.start_copying_back(one, host)
                                 for one, host in zip(here, block, strict=True)] or self._leaving
        self._going.join()

    def wait(self) -> None:
        """Wait until what has been computed so far has arrived in host memory."""
        for arrived in self._leaving:
            arrived()

    def _fetched(self, block: Sequence[Tensor]) -> list[Tensor]:
        """Copies of ``block``, which will be on the device after ``join``."""
        copies = [torch.empty(host.shape, dtype=host.dtype, device=self._device.torch_device) for host in block]
        self._coming.record_event()
        with self._coming.after_event():
            for copy, host in zip(copies, block, strict=True):
                copy.copy_(host, non_blocking=True)
        return copies


@dataclass(frozen=True)
class _Piece:
    """A flat range of one weight, at most one block long."""

    weight: Tensor
    """What the model computes with; or an fp32 copy of it, which megatron copies to it."""
    states: Mapping[str, Tensor]
    """As they are kept between steps: the moments, and the weight's fp32 copy or remainder."""
    is_on_host: bool
    """Whether the states are in host memory."""
    gradient: Tensor
    step: Tensor
    """A copy of the weight's count of updates, which the kernel increases."""

    @property
    def on_host(self) -> list[Tensor]:
        return list(self.states.values()) if self.is_on_host else []

    def with_states(self, states: Sequence[Tensor]) -> "_Piece":
        return replace(self, states=dict(zip(self.states, states, strict=True)))

    def numbers(self) -> Tensor:
        """The fp32 weight: the master copy if one is kept, otherwise a new tensor."""
        if MASTER in self.states:
            return self.states[MASTER]
        return joined(self.weight, self.states[REMAINDER]) if REMAINDER in self.states else self.weight.float()

    def moments(self) -> list[Tensor]:
        """The moments in fp32: the kept tensors themselves, or in new memory."""
        return [self.states[moment].float() for moment in MOMENTS]


class BlockAdam(torch.optim.AdamW):
    """torch's fused AdamW with states in fp32 or 16 bits, on the device or in host memory.

    The first moment is rounded to the nearest number: it forgets a tenth of itself in each step, and its error with it.
    The second one, with a beta of 0.999, changes by less than half of bf16's spacing in a step, so the nearest number
    would often be the one it had before.  It is rounded stochastically, and right on average; so is a bf16 weight of
    which nothing else is kept, for the same reason.  The direction depends only on the weight, its second moment and
    the step (``mm.device.pointwise``), so a resumed run rounds the same way.
    """

    def __init__(
        self, base: torch.optim.AdamW, kept: KeptStates, weights: Mapping[Tensor, Tensor], device: Device
    ) -> None:
        """Takes the place of ``base``, whose parameter groups it shares.

        ``weights``: the 16-bit weight of each copy in the groups, if this optimizer fills them itself; else megatron
        fills them from the copies.  Copies that are not kept in fp32, or not on the device, give up their memory and
        only stand for their weights: torch accepts no fp32 gradient on a 16-bit tensor.  Raises UserError if there is
        too little host memory.
        """
        super().__init__([torch.empty(0)])  # slices of a buffer, which megatron's groups hold, would be refused here
        self.param_groups = base.param_groups
        self.kept = kept
        self.weights = weights
        self._rounded_at_random = device.kernels.rounded_at_random
        self._host_pass = HostStatesPass(device)
        self._host = self._host_states(device)
        for copy, weight in weights.items():
            assert weight.numel() == copy.numel() and weight.itemsize == 2, (weight.dtype, weight.shape)
            if kept.copy == "fp32" and copy not in self._host:
                self.state[copy][MASTER] = copy.detach()
                continue
            if kept.copy == "fp32":
                self.state[copy][MASTER] = device.runtime.start_copying_back(copy.detach(), self._host[copy][MASTER])()
            copy.data = placeholder(copy)
            if kept.copy == "remainder":
                self.state[copy][REMAINDER] = self.new_state(copy, REMAINDER)

    def _host_states(self, device: Device) -> dict[Tensor, dict[str, Tensor]]:
        """Host memory for states, by parameter and kind, for the parameters that ``kept.host_share`` selects."""
        trained = [parameter for group in self.param_groups for parameter in group["params"]]
        chosen = [trained[index] for index in offloaded([one.numel() for one in trained], self.kept.host_share)]
        wanted = [(parameter, kind, dtype) for parameter in chosen
                  for kind, dtype in self.kept.besides(parameter in self.weights).items()]
        memory = host_memory(device, [(parameter.numel(), dtype) for parameter, _, dtype in wanted])
        found: dict[Tensor, dict[str, Tensor]] = {parameter: {} for parameter in chosen}
        for (parameter, kind, _), flat in zip(wanted, memory, strict=True):
            found[parameter][kind] = flat.view(parameter.shape)
        return found

    def new_state(self, parameter: Tensor, kind: str) -> Tensor:
        """Memory for a state of ``parameter``, in the place and dtype in which it is kept; zeros unless used before."""
        if parameter in self._host:
            return self._host[parameter][kind]
        dtype = self.kept.besides(parameter in self.weights)[kind]
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)

    def wait(self) -> None:
        """Wait until all states updated so far are where they are kept."""
        self._host_pass.wait()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update.  ``grad_scale`` and ``found_inf`` are obeyed as by torch's own fused optimizers."""
        assert closure is None, "megatron computes the loss beforehand"
        blocks: list[tuple[Mapping[str, Any], list[_Piece]]] = []
        last: dict[Tensor, _Piece] = {}
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            pieces = {parameter: list(self._pieces(parameter)) for parameter in trained}
            blocks += [(group, block) for block in _blocks([piece for some in pieces.values() for piece in some])]
            last |= {parameter: some[-1] for parameter, some in pieces.items()}
        self._host_pass.through([[state for piece in block for state in piece.on_host] for _, block in blocks],
                              lambda number, states: self._update(*blocks[number], states))
        for parameter, piece in last.items():
            self.state[parameter]["step"].copy_(piece.step)

    def _pieces(self, parameter: Tensor) -> Iterator[_Piece]:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None, "chosen among those with a gradient"
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in MOMENTS:
                state[moment] = self.new_state(parameter, moment)
        kinds = [kind for kind in (MASTER, REMAINDER, *MOMENTS) if kind in state]
        weight = self.weights.get(parameter, parameter)
        flat = [one.detach().view(-1).split(ROUNDED_AT_ONCE) for one in (weight, gradient, *map(state.get, kinds))]
        for weights, gradients, *states in zip(*flat, strict=True):
            yield _Piece(weights, dict(zip(kinds, states, strict=True)), parameter in self._host, gradients,
                         state["step"].clone())

    def _update(self, group: Mapping[str, Any], block: Sequence[_Piece], from_host: Sequence[Tensor]) -> None:
        """``from_host``: copies on the device of the states that are in host memory, which are updated in place."""
        arrived = iter(from_host)
        block = [piece.with_states([next(arrived) for _ in piece.on_host]) if piece.is_on_host else piece
                 for piece in block]
        numbers, moments = [piece.numbers() for piece in block], [piece.moments() for piece in block]
        beta1, beta2 = group["betas"]
        adamw(
            numbers, [piece.gradient for piece in block], [first for first, _ in moments],
            [second for _, second in moments], [], [piece.step for piece in block],
            fused=True, grad_scale=getattr(self, "grad_scale", None), found_inf=getattr(self, "found_inf", None),
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip
        for piece, updated, (first, second) in zip(block, numbers, moments, strict=True):
            self._keep(piece, updated, first, second)

    def _keep(self, piece: _Piece, updated: Tensor, first: Tensor, second: Tensor) -> None:
        """Store the fp32 results in the forms in which they are kept."""
        step, (kept_first, kept_second) = piece.step.view(1), (piece.states[moment] for moment in MOMENTS)
        if kept_first is not first:
            kept_first.copy_(first)
        if kept_second is not second:
            kept_second.copy_(self._rounded_at_random(second, updated, step))
        if MASTER in piece.states:
            rounded, found_inf = updated.to(piece.weight.dtype), getattr(self, "found_inf", None)
            # a weight loaded with its remainder may be the other of two equally near numbers: a bad step must keep it
            piece.weight.copy_(rounded if found_inf is None else torch.where(found_inf == 1, piece.weight, rounded))
        elif REMAINDER in piece.states:
            split(updated, piece.weight, piece.states[REMAINDER])
        elif piece.weight is not updated:
            # equal weights with equal updates, which Adam's first steps make, must not all be rounded alike
            salts = (updated.view(torch.int32) ^ second.view(torch.int32)).view(torch.float32)
            piece.weight.copy_(self._rounded_at_random(updated, salts, step))

    def take_weights(self) -> None:
        """Reset what is kept beside the weights to the weights just loaded: copies equal them, remainders are 0."""
        self.wait()
        for copy, weight in self.weights.items():
            if MASTER in self.state[copy]:
                self.state[copy][MASTER].view(-1).copy_(weight.view(-1))
            elif REMAINDER in self.state[copy]:
                self.state[copy][REMAINDER].zero_()


def fills_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` fills the 16-bit weights itself; otherwise megatron fills them from fp32 copies."""
    return isinstance(optimizer, BlockAdam) and bool(optimizer.weights)


def _blocks(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in order, together at most ``ROUNDED_AT_ONCE`` long."""
    block, size = list[_Piece](), 0
    for piece in pieces:
        if block and size + piece.gradient.numel() > ROUNDED_AT_ONCE:
            yield block
            block, size = [], 0
        block.append(piece)
        size += piece.gradient.numel()
    if block:
        yield block
