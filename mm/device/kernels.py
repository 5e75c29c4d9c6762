"""The operators that differ between kinds of device, as plain functions: their types, the forms in plain torch that any
device can use, and ``torch.compile`` for kernel functions (``pointwise.py``).

A device's file has forms of its own, and chooses among all of them.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mm.device import pointwise
from mm.device.attention import Kernel, PartialAttention
from mm.device.pointwise import SUMMED_ROWS, Heads, KernelFunction

Accumulate = Callable[[Tensor, Tensor, Tensor, bool], None]
"""``accumulate(buffer, gradient, x, overwrites)``: buffer += gradient^T x, summed in fp32 for all dtypes.
If it overwrites: buffer = gradient^T x.

Gradient [rows, output] and x [rows, input] share one dtype: bf16, fp16 or fp32; ``buffer`` [output, input] is fp32 or
of that dtype.  The product of 16-bit rows is never rounded to their dtype on its way into an fp32 buffer, or stored on
its own."""
Fuse = Callable[[KernelFunction], KernelFunction]
"""Turns a kernel function into one kernel, like ``compiled``; tests pass functions that count."""


@dataclass(frozen=True)
class AddNormKernels:
    """A sum of rows together with its norm: ``pointwise.add_norm_fusable`` and its gradient."""

    forward: KernelFunction
    gradient: KernelFunction


@dataclass(frozen=True)
class LogitKernels:
    """Cross entropy without its matrix products."""

    sums: KernelFunction
    """``pointwise.logit_sums``, which also gives what to keep, or ``logit_sums_fusable``: the logits are kept."""
    gradient: KernelFunction
    is_fused: bool
    """Whether the only tensors of the logits' shape are logits and their gradient, both in the logits' dtype."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The largest logit of each row and the sum of e^(logit - largest), fp32 [rows, 1], and what to keep."""
        return (*self.sums(logits), logits) if self.is_fused else self.sums(logits)

    def kept(self, logits: Tensor, row_max: Tensor) -> Tensor:
        """What ``forward`` would keep of these logits."""
        return logits if self.is_fused else pointwise.exponentials(logits, row_max)


@dataclass(frozen=True)
class Kernels:
    """One device's operators."""

    attention: Kernel
    partial_attention: PartialAttention
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [..., n], weight [n], epsilon): statistics in fp32."""
    add_norm: AddNormKernels | None
    """None: a sum and its norm are separate operators."""
    logits: LogitKernels
    swiglu: Callable[..., Tensor]
    """(x [..., 2n] = [gate; up], bias) -> silu(gate) * up [..., n].  The bias, if any, is already added to x, and its
    gradient is summed here; the same holds for rope."""
    rope: Callable[..., Heads]
    """(qkv, cos, sin, bias) -> rotated queries, rotated keys, values, as in ``pointwise``."""
    accumulate: Accumulate
    rounded_at_random: KernelFunction = pointwise.rounded_at_random
    overwrites: bool = True
    """Whether ``accumulate`` can overwrite a buffer as cheaply as add to it, so that the buffer need not be zeroed
    first.  ATB's product can only add."""


def plain_accumulate(buffer: Tensor, gradient: Tensor, x: Tensor, overwrites: bool = False) -> None:
    """An ``Accumulate`` that casts the rows to the dtype of the buffer: the CPU multiplies only equal dtypes."""
    gradient, x = gradient.to(buffer.dtype), x.to(buffer.dtype)
    if overwrites:
        torch.mm(gradient.t(), x, out=buffer)
    else:
        buffer.addmm_(gradient.t(), x)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


EAGER_LOGITS = LogitKernels(pointwise.logit_sums, pointwise.logit_gradient, is_fused=False)


def eager_kernels() -> tuple[None, LogitKernels, Callable[..., Tensor], Callable[..., Heads]]:
    """``add_norm``, ``logits``, ``swiglu`` and ``rope`` of ``Kernels`` for eager execution."""
    return (None, EAGER_LOGITS, pointwise.swiglu_of(pointwise.swiglu, pointwise.swiglu_gradient),
            pointwise.rope_of(pointwise.rope, pointwise.rope_gradient))


def fused_kernels(fuse: Fuse) -> tuple[AddNormKernels, LogitKernels, Callable[..., Tensor], Callable[..., Heads]]:
    """The same four, from functions that ``fuse`` turns into one kernel each."""
    rope = pointwise.split_heads(fuse(pointwise.rope_fusable))
    swiglu_gradient = pointwise.join_blocks(fuse(pointwise.swiglu_gradient_fusable))
    rope_gradient = pointwise.join_heads(fuse(pointwise.rope_gradient_fusable))
    return (AddNormKernels(fuse(pointwise.add_norm_fusable), fuse(pointwise.add_norm_gradient_fusable)),
            LogitKernels(fuse(pointwise.logit_sums_fusable), fuse(pointwise.logit_gradient_fusable), is_fused=True),
            pointwise.swiglu_of(fuse(pointwise.swiglu), swiglu_gradient), pointwise.rope_of(rope, rope_gradient))


# Compiled kernel functions

MAX_GRAPHS = 64
"""Most graphs of one function: one for each width and dtype, and as many again in inference mode; dynamo's default is
8."""
MAX_SHAPES = 4096
"""Most sets of shapes of one function whose kernel is remembered; beyond that, all are forgotten."""
_NEVER = 10**6
"""More operations than any kernel function has."""


class _Call(NamedTuple):
    """One call of a kernel by dynamo."""

    kernel: Callable[..., Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]


def compiled(function: KernelFunction) -> KernelFunction:
    """Compile ``function`` to one kernel with ``torch.compile``, once for each width and dtype, for any number of rows.

    On every call torch.compile checks whether a kernel that it has still fits, which takes the host 40 to 60
    microseconds.  Here it checks the first call of each set of shapes; later ones go straight to the kernel it chose.
    Arguments are detached and made contiguous, so that the layout of a gradient causes no other compilation.  Calls
    with one row or none run eagerly, because torch would compile these numbers in.
    """
    options = _options(function)
    latest = threading.local()  # backward passes run in threads of their own

    def backend(graph: Any, examples: Any) -> Callable[..., Any]:
        inductor: Any = torch._dynamo.lookup_backend("inductor")
        kernel = inductor(graph, examples, config_patches=options)

        def record(*inputs: Any) -> Any:
            outputs = kernel(*inputs)
            latest.call = _Call(kernel, inputs, outputs)
            return outputs

        return record

    run = torch.compile(function, dynamic=False, fullgraph=True, backend=backend)
    direct: dict[Any, Callable[[Sequence[Tensor]], Any]] = {}

    def call(*arguments: Any) -> Any:
        arguments = tuple(one.detach().contiguous() if isinstance(one, Tensor) else one for one in arguments)
        tensors = [one for one in arguments if isinstance(one, Tensor)]
        if len(tensors[0]) < 2:
            return function(*arguments)
        key = tuple((one.shape, one.dtype, one.device) if isinstance(one, Tensor) else one for one in arguments)
        if (known := direct.get(key)) is not None:  # one look-up: another thread may empty the table
            return known(tensors)
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        latest.call = None
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
            result = run(*arguments)
        made: _Call | None = latest.call
        latest.call = None  # it holds tensors
        shortcut = None if made is None else _direct_call(made, tensors, result)
        if shortcut is not None:
            if len(direct) >= MAX_SHAPES:
                direct.clear()
            direct[key] = shortcut
        return result

    call.__qualname__ = f"compiled.{function.__qualname__}"
    return call


def compile_fault(device: torch.device) -> str | None:
    """Why kernel functions cannot be compiled for ``device``; None if they can.

    A compiler, Python's headers or Triton may be missing, so one function is tried on a few numbers.
    """
    x = torch.linspace(-1, 1, 64, device=device).view(4, 16)
    try:
        found = compiled(pointwise.swiglu)(x)
    except Exception as error:  # whatever is missing, the message tells the user
        return f"{type(error).__name__}: {error}"
    expected = pointwise.swiglu(x)
    if torch.allclose(found, expected, atol=1e-5):
        return None
    return f"the compiled SwiGLU of {x.tolist()} is {found.tolist()}"


def _options(function: KernelFunction) -> dict[str, Any]:
    """Inductor's options to compile ``function`` to one kernel, and its column sums to a second one."""
    from torch._inductor import config

    options: dict[str, Any] = {
        # Inductor may write the heads one by one
        "force_pointwise_cat": function in (pointwise.rope_fusable, pointwise.rope_gradient_fusable)
    }
    if function is pointwise.add_norm_gradient_fusable:
        # By default Inductor sums columns together with the work on rows only if there are many rows, which it guards,
        # and makes four times as many partial sums.
        wanted = {"mix_order_reduction_non_strict_mode": True, "mix_order_reduction_split_size": SUMMED_ROWS}
        options |= {f"triton.{name}": value for name, value in wanted.items() if hasattr(config.triton, name)}
    if function is pointwise.logit_sums_fusable:
        options["split_reductions"] = False  # with few rows in the first call it would split every row, also later
    if function in (pointwise.swiglu_gradient_fusable, pointwise.rope_gradient_fusable):
        # Inductor would first write in fp32 what is both summed and returned, because that takes many operations, and
        # add partial sums in two steps.
        wanted = {"realize_reads_threshold": _NEVER, "realize_opcount_threshold": _NEVER,
                  "realize_acc_reads_threshold": _NEVER, "split_reductions": False}  # fmt: skip
        options |= {name: value for name, value in wanted.items() if hasattr(config, name)}
    return options



def _direct_call(made: _Call, tensors: Sequence[Tensor], result: Any) -> Callable[[Sequence[Tensor]], Any] | None:
    """A function of ``tensors`` that calls only the kernel, derived from one call, which dynamo ``made`` and which
    returned ``result``.

    The kernel may take the arguments in another order, and numbers that follow from their shapes.  None if it takes or
    returns anything else.
    """
    kernel, is_several = made.kernel, isinstance(result, tuple)
    wanted = result if is_several else (result,)
    numbers = [one for one in made.inputs if not isinstance(one, Tensor)]
    order = [place for one in made.inputs for place in _places(one, [*tensors, *numbers])]
    made_at = [_places(one, made.outputs) for one in wanted if one is not None]
    if len(order) < len(made.inputs) or not all(made_at):
        return None
    places = iter(made_at)
    results = [None if one is None else next(places)[0] for one in wanted]

    def shortcut(given: Sequence[Tensor]) -> Any:
        values = [*given, *numbers]
        outputs = kernel(*[values[place] for place in order])
        found = tuple(None if place is None else outputs[place] for place in results)
        return found if is_several else found[0]

    return shortcut


def _places(value: Any, among: Sequence[Any]) -> list[int]:
    """The first index of ``value``, as an identical object, in ``among``; empty if it is not there."""
    return [index for index, other in enumerate(among) if other is value][:1]
