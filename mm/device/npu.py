"""Ascend's NPUs: torch_npu's operators, ATB's accumulating matrix product, and messages by HCCL."""

import functools
import importlib
import importlib.util
import itertools
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from mm.device import pointwise
from mm.device.attention import (
    Gradients,
    Pairs,
    PartialAttention,
    PartialOutput,
    Segments,
    by_length,
    check_cover,
    pieces,
)
from mm.device.kernels import EAGER_LOGITS, Fuse, Kernels
from mm.device.platform import AcceleratorRuntime, KnownDevice, Links, MachineFinding, Platform, Variable
from mm.device.pointwise import Heads
from mm.device.shims import COMMON_SHIMS, Shim
from mm.environment import installed
from mm.errors import UserError

MAX_SEGMENTS = 1024
"""Most segments that one variable-length call of ``npu_fusion_attention`` takes (its documentation)."""
CAUSAL_MASK_SIDE = 2048
"""Side of the compressed mask for its ``sparse_mode`` 3, for any lengths (its documentation)."""
_CANN_VERSION_FILES = "*-linux/ascend_toolkit_install.info"
"""Files with a line ``version=...``, in the directory that Ascend's set_env.sh names (its installation guide)."""
_WITHOUT_BF16 = re.compile(r"Ascend310.*|Ascend910(A|B|ProA|ProB|PremiumA)?")
"""Ascend's inference devices and the first 910 (torch_npu's list of SoC versions): plain "Ascend910B" is a first 910,
"Ascend910B1" to "Ascend910B4" are A2."""


def torch_npu() -> Any:
    """Ascend's package, which has no types and is installed only on machines with an NPU."""
    return importlib.import_module("torch_npu")


# Attention


def npu_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    """A ``Kernel``: ``torch_npu.npu_fusion_attention``, for full attention with layout BSND by length if the segments
    prefer it (a batch is not limited to ``MAX_SEGMENTS``), otherwise with layout TND."""
    if not segments.lengths or (segments.prefers_batches(MAX_SEGMENTS) and not causal):
        return by_length(q, k, v, segments, _full)
    return _varlen(q, k, v, segments, causal)


def _full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch_npu().npu_fusion_attention(q, k, v, q.shape[2], "BSND", scale=q.shape[-1] ** -0.5)[0]


def _varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    check_cover(q, segments)
    starts = range(0, len(segments.lengths), MAX_SEGMENTS)
    calls = [segments.lengths[start : start + MAX_SEGMENTS] for start in starts]
    sizes = [sum(lengths) for lengths in calls]
    outputs = []
    for lengths, of_call in zip(calls, pieces(sizes, q, k, v), strict=True):
        ends = list(itertools.accumulate(lengths))
        outputs.append(
            torch_npu().npu_fusion_attention(
                *of_call, q.shape[1], "TND", scale=q.shape[-1] ** -0.5, actual_seq_qlen=ends, actual_seq_kvlen=ends,
                **_masking(q.device, causal))[0]
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _masking(device: torch.device, causal: bool) -> dict[str, Any]:
    """Without a mask the operator ignores ``sparse_mode`` and attends to everything."""
    return {"atten_mask": _causal_mask(device), "sparse_mode": 3} if causal else {}


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """The compressed mask of ``sparse_mode`` 3: True where a key is hidden.  4 MiB, the same for every call."""
    return torch.ones(CAUSAL_MASK_SIDE, CAUSAL_MASK_SIDE, dtype=torch.bool, device=device).triu(1)


def _partial_forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> PartialOutput:
    outputs, logarithms = [], []
    for rows, keys, lengths in _calls(pairs):
        out, row_max, total, *_ = torch_npu().npu_fusion_attention(
            q[rows], k[keys], v[keys], q.shape[1], "TND", scale=q.shape[-1] ** -0.5, **lengths,
            **_masking(q.device, pairs.causal))
        outputs.append(out)
        logarithms.append(row_max[..., 0] + total[..., 0].log())  # the operator repeats each number eight times
    return torch.cat(outputs), torch.cat(logarithms)


def _partial_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialOutput, pairs: Pairs
) -> Gradients:
    found = []
    for rows, keys, lengths in _calls(pairs):
        row_max = whole[1][rows].unsqueeze(-1).repeat(1, 1, 8)
        found.append(torch_npu().npu_fusion_attention_grad(
            q[rows], k[keys], v[keys], gradient[rows].contiguous(), q.shape[1], "TND", softmax_max=row_max,
            softmax_sum=torch.ones_like(row_max), attention_in=whole[0][rows], scale_value=q.shape[-1] ** -0.5,
            **lengths, **_masking(q.device, pairs.causal))[:3])
    q_gradients, k_gradients, v_gradients = zip(*found, strict=True)
    return torch.cat(q_gradients), torch.cat(k_gradients), torch.cat(v_gradients)


def _calls(pairs: Pairs) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Rows of queries, rows of keys, and arguments for lengths, for each call of at most ``MAX_SEGMENTS`` segments."""
    q_start = k_start = 0
    for first in range(0, len(pairs.queries.lengths), MAX_SEGMENTS):
        of_call = slice(first, first + MAX_SEGMENTS)
        q_ends, k_ends = (list(itertools.accumulate(one.lengths[of_call])) for one in (pairs.queries, pairs.keys))
        lengths = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": k_ends}
        yield slice(q_start, q_start + q_ends[-1]), slice(k_start, k_start + k_ends[-1]), lengths
        q_start, k_start = q_start + q_ends[-1], k_start + k_ends[-1]


# Other operators.  According to Ascend's documentation ``npu_swiglu`` and ``npu_fusion_attention`` refuse tensors
# without rows; it says nothing about the others.  A context-parallel rank may hold no rows; then it calls none of them.


def npu_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if not x.numel():
        return x * weight  # empty, yet both stay in the graph
    return torch_npu().npu_rms_norm(x, weight, epsilon=epsilon)[0]


def npu_swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    x = pointwise.biased(x, bias)
    if not x.numel():
        return x.chunk(2, dim=-1)[0]
    return torch_npu().npu_swiglu(x, dim=-1)


def npu_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A ``Rotation`` by ``npu_rotary_mul``: layout BSND with tables 1S1D, all in the dtype of the tables.

    Its own gradient would keep x for the backward pass (its documentation), so it is only called without autograd.
    """
    if not x.numel():
        return x
    tables = (cos[None, :, None], sin[None, :, None])
    return torch_npu().npu_rotary_mul(x[None].to(cos.dtype), *tables)[0].to(x.dtype)


def npu_rope(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    """A kernel function like ``mm.device.pointwise.rope``, but the values are copied, so ``qkv`` can be freed."""
    q, k, v = pointwise.split_and_rotate(qkv, cos, sin, npu_rotate)
    return q, k, v.clone()


def npu_rope_gradient(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, sums: bool
) -> tuple[Tensor, Tensor | None]:
    return pointwise.with_sum(pointwise.rotate_and_join(q, k, v, cos, -sin, npu_rotate), sums)


def npu_accumulate(buffer: Tensor, gradient: Tensor, x: Tensor, overwrites: bool = False) -> None:
    """An ``Accumulate``: ATB's accumulating product, which takes non-empty bf16 or fp16 rows.

    If it does not work here (``_matmul_add_fault``), the product is rounded to the rows' dtype before it is added.
    """
    if overwrites:
        buffer.zero_()
    if gradient.dtype == buffer.dtype:
        buffer.addmm_(gradient.t(), x)
    elif not gradient.numel() or not x.numel():
        return
    elif _matmul_add_fault(gradient.dtype, gradient.device) is None:
        torch_npu()._npu_matmul_add_fp32(gradient, x, buffer)
    else:
        buffer.add_(gradient.t() @ x)


@functools.cache
def _matmul_add_fault(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why ``_npu_matmul_add_fp32`` cannot be used for rows of ``dtype``; None if it can.  Warns once per process.

    It needs the ATB library (CANN's nnal package) and an Atlas A2 or A3, and ATB's documentation excludes float16 while
    torch_npu's own test uses it.  So it is tried once, on a small product whose result is checked.
    """
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    buffer = torch.ones(16, 16, device=device)
    try:
        torch_npu()._npu_matmul_add_fp32(ones, ones, buffer)
        found = buffer.unique().tolist()
        fault = None if found == [17.0] else f"its result for 1 + 16 was {found}"
    except (AttributeError, OSError, RuntimeError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        warnings.warn(
            f"torch_npu's _npu_matmul_add_fp32 does not work here for {dtype}, so weight gradients are rounded to "
            f"{dtype} before they are added in fp32, and steps are slower. Install CANN's nnal package and source its "
            f"atb/set_env.sh. The error was: {fault}",
            stacklevel=2,
        )
    return fault


def _kernels(_: Fuse | None) -> Kernels:
    partial = PartialAttention(_partial_forward, _partial_backward)
    rope = pointwise.rope_of(npu_rope, npu_rope_gradient)
    return Kernels(npu_attention, partial, npu_rms_norm, None, EAGER_LOGITS, npu_swiglu, rope, npu_accumulate,
                   overwrites=False)


# Checks of the machine, and settings before the first work on the device


def _fault() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; install the release that matches your torch"
    try:
        torch_npu()
    except (ImportError, OSError, RuntimeError) as error:  # CANN's libraries are not found, or torch does not fit
        return (f"torch_npu cannot be imported ({type(error).__name__}: {error}); source Ascend's set_env.sh, and "
                f"check that torch_npu is the release that matches your torch")
    if not torch_npu().npu.is_available():
        return "torch_npu finds no NPU; source Ascend's set_env.sh, and check npu-smi info"
    return None


def _versions() -> dict[str, str]:
    version = installed("torch_npu")
    found = {} if version is None else {"torch_npu": version}
    home = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    for file in Path(home).glob(_CANN_VERSION_FILES) if home else ():
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:  # only its owner may be allowed to read it
            found.setdefault("cann", f"unknown: {file}: {error.strerror}")
            continue
        for version in re.findall(r"^version=(.+)$", text, re.MULTILINE):
            found["cann"] = version
    return found


def _version_findings(versions: Mapping[str, str]) -> Iterator[MachineFinding]:
    ours, needed = versions.get("torch"), versions.get("torch_npu")
    if ours and needed and Version(ours).release[:2] != Version(needed).release[:2]:
        release = ".".join(map(str, Version(needed).release[:2]))
        yield True, (f"torch is {ours}, but torch_npu is {needed}, which needs a matching torch: "
                     f"`python -m pip install 'torch=={release}.*' --index-url https://download.pytorch.org/whl/cpu`")


def _prepare(index: int) -> None:
    """Redirect CUDA's names to the NPU, choose the device, and use CANN's prebuilt operators.

    With ``jit_compile`` on, CANN would compile operators for every new shape, and ``npu_rotary_mul`` would only take a
    head size of 128; the ViT's is 80.
    """
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    torch_npu().npu.set_device(index)
    refuse_old_npu(torch_npu().npu.get_device_name(index))
    torch_npu().npu.set_compile_mode(jit_compile=False)
    assert torch_npu().npu.is_jit_compile_false(), "set_compile_mode(jit_compile=False) had no effect"


def _switches() -> dict[str, bool]:
    return {"jit_compile": not torch_npu().npu.is_jit_compile_false()}


def refuse_old_npu(name: str) -> None:
    """Raise UserError for an NPU without bf16, which does not run the operators of A2 and A3."""
    if _WITHOUT_BF16.fullmatch(name):
        raise UserError(
            f"{name} has no bf16 and cannot run npu_fusion_attention; an Atlas A2 or A3 is needed (in torch_npu's "
            f"names Ascend910B1 to Ascend910B4, or Ascend910_93xx). Use another device, or --device cpu for a small "
            f"model"
        )


_tensor_type = torch.Tensor.type


def _type_as_on_cuda(tensor: Tensor, *args: Any, **options: Any) -> object:
    found = _tensor_type(tensor, *args, **options)
    return found.replace("torch.npu.", "torch.cuda.", 1) if isinstance(found, str) else found


NPU_SHIMS: tuple[Shim, ...] = (
    *COMMON_SHIMS,
    Shim("torch:Tensor.type", _type_as_on_cuda, "the optimizers accept torch.cuda.* type names only"),
)
"""Replacements for megatron-core besides those of ``transfer_to_npu``, which does not change ``Tensor.type``."""


# Its runtime


def _profiler(directory: str, name: str) -> Any:
    handler = torch_npu().profiler.tensorboard_trace_handler(directory, name)
    return torch_npu().profiler.profile(on_trace_ready=handler)


# Known types


def _known(
    label: str, names: str, tflops: float | None, memory_gib: int, reference: str, links: Links, memory_tib: float = 1.6
) -> KnownDevice:
    """``memory_tib``: memory bandwidth in TiB/s, from msmodeling's device profiles."""
    peak = None if tflops is None else tflops * 1e12
    return KnownDevice(label, names, peak, memory_gib * 2**30, reference, memory_tib * 2**40, links)


# From msmodeling's device profiles: an A2 has a full mesh of HCCS and 200 Gbit/s to other nodes; A3's switches connect
# 384 chips, each with two devices.
_A2, _A3 = Links(196e9, 25e9), Links(196e9, 196e9, node_size=16)


_CANN = "CANN's platform_config: cube cores x 8,192 FLOP x cube frequency"
_MSMODELING = "Huawei's msmodeling, device profile"
_KNOWN_DEVICES = (
    # Huawei's data sheets give fp16, which is 6 to 14% more: 376, 313 and 280 TFLOP/s for A2, 752 for both dies of A3.
    # Each die of a 910C (A3) is a separate device, with half of the chip's 128 GB.
    _known("Ascend910B1", r"Ascend910B1", 363.7, 64, f"{_CANN} (24, 1.85 GHz)", _A2),
    _known("Ascend910B2", r"Ascend910B2", 353.9, 64, f"{_MSMODELING} ATLAS_800_A2_376T_64G (24, 1.8 GHz)", _A2),
    _known("Ascend910B3", r"Ascend910B3", 294.9, 64, f"{_MSMODELING} ATLAS_800_A2_313T_64G (20, 1.8 GHz)", _A2),
    _known("Ascend910B4", r"Ascend910B4", 245.8, 32, f"{_MSMODELING} ATLAS_800_A2_280T_32G (20, 1.5 GHz)", _A2, 0.8),
    _known("Ascend910B4-1", r"Ascend910B4-1", 245.8, 64, f"{_MSMODELING} ATLAS_800_A2_280T_64G (20, 1.5 GHz)", _A2),
    _known("Ascend910_9391", r"Ascend910_9391", 363.7, 64, f"{_CANN} (24, 1.85 GHz)", _A3),
    _known("other Ascend910_93", r"Ascend910_93(62|72|81|82|92)", None, 64, "no number found for these types", _A3),
)
"""Peaks of the cube cores in bf16, as published."""


NPU = Platform(
    name="npu",
    backend="hccl",
    fault=_fault,
    versions=_versions,
    version_findings=_version_findings,
    device_files="/dev/davinci[0-9]*",
    num_devices=lambda: torch_npu().npu.device_count(),
    known_devices=_KNOWN_DEVICES,
    prepare=_prepare,
    shims=NPU_SHIMS,
    deterministic_variables={
        "HCCL_DETERMINISTIC": Variable("true", ("strict",), "HCCL's documentation"),
        "CLOSE_MATMUL_K_SHIFT": Variable("1", None, "MindSpeed's deterministic mode sets it"),
        "ATB_MATMUL_SHUFFLE_K_ENABLE": Variable("0", None, "Ascend's guides; ATB's own set_env.sh sets 1"),
    },
    switches=_switches,
    compiles_kernels=False,
    kernels=_kernels,
    sdpa_kv_heads=lambda *_: None,
    adam_obeys_scale=False,  # torch_npu's accepts both arguments and ignores them
    runtime=functools.partial(AcceleratorRuntime, "npu"),
    profiler=_profiler,
    starts_messages_ahead=True,  # HCCL waits in its own engines (SDMA)
    max_message_ctas=None,
)
