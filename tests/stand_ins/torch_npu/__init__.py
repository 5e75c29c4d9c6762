"""Stand-in for torch_npu on machines without an NPU: the operators that mm calls, in plain torch on any device.

Signatures are those of ../torch_npu_signatures.json; argument rules and limits those of torch_npu 2.13 (texts in its
``_op_plugin_docs.py``; pages of the operators in github.com/Ascend/op-plugin, docs/context, and ops/atb for those of
ATB).  What the real operator refuses or silently computes otherwise, this does too; a use of it that mm has not is
refused here.  Nothing of mm is imported.  Importing it makes ``torch.npu`` known, as importing the real package does.
"""

from itertools import pairwise

import torch
from torch import Tensor

from torch_npu import npu

torch.npu = npu

_MAX_VARLEN_SEGMENTS = 1024
_MAX_VARLEN_TOKENS = 2**20
_MAX_BATCH = 2 * 2**20
_MAX_HEADS = 256
_MAX_HEAD_DIM = 768
_COMPRESSED_MASK = (2048, 2048)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def npu_fusion_attention(
    query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, keep_prob=1.0,
    pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None, actual_seq_qlen=None,
    actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, softmax_layout="", sink=None,
    dropout_mask=None, seed=0, offset=0,
):  # fmt: skip
    """softmax(scale * q k^T, masked) v; returns the seven outputs: the first, and with TND the largest score and the
    sum of exponentials of each query, eight times [T, N, 8]."""
    _refuse_unused("npu_fusion_attention", {
        "pse": pse, "padding_mask": padding_mask, "prefix": prefix, "sink": sink, "dropout_mask": dropout_mask,
        "softmax_layout": softmax_layout or None, "keep_prob": None if keep_prob == 1.0 else keep_prob,
    })  # fmt: skip
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _FLOATS:
        raise RuntimeError(f"q, k, v must share one of {_FLOATS}: {query.dtype}, {key.dtype}, {value.dtype}")
    _check_mask(atten_mask, sparse_mode)
    row_max = total = query.new_empty(0, dtype=torch.float32)
    if input_layout == "TND":
        segments = _segments(query, key, value, head_num, actual_seq_qlen, actual_seq_kvlen)
        out, row_max, total = _varlen(query, key, value, segments, atten_mask, sparse_mode, scale)
    elif input_layout in ("BSND", "BNSD"):
        if actual_seq_qlen is not None or actual_seq_kvlen is not None:
            raise RuntimeError(f"actual_seq_qlen and actual_seq_kvlen belong to TND, not to {input_layout}")
        out = _batched(query, key, value, head_num, input_layout, atten_mask, sparse_mode, scale)
    else:
        raise NotImplementedError(f"the stand-in for npu_fusion_attention has no layout {input_layout}")
    return out, row_max, total, query.new_empty(0), seed, offset, 0


def npu_fusion_attention_grad(
    query, key, value, dy, head_num, input_layout, *, pse=None, padding_mask=None, atten_mask=None, softmax_max=None,
    softmax_sum=None, softmax_in=None, attention_in=None, scale_value=1.0, keep_prob=1.0, pre_tockens=2147483647,
    next_tockens=2147483647, inner_precise=0, seed=0, offset=0, numels=0, prefix=None, actual_seq_qlen=None,
    actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, softmax_layout="", sink=None,
):  # fmt: skip
    """Gradients of q, k and v (and of what is not given) by the statistics and output of the forward pass; TND only."""
    _refuse_unused("npu_fusion_attention_grad", {
        "pse": pse, "padding_mask": padding_mask, "prefix": prefix, "sink": sink, "softmax_in": softmax_in,
        "softmax_layout": softmax_layout or None, "keep_prob": None if keep_prob == 1.0 else keep_prob,
        "input_layout": None if input_layout == "TND" else input_layout,
    })  # fmt: skip
    _check_mask(atten_mask, sparse_mode)
    if dy.shape != query.shape or attention_in.shape != query.shape or not dy.is_contiguous():
        raise RuntimeError(f"dy and attention_in must be like q, and contiguous: {dy.shape}, {attention_in.shape}")
    for statistic in (softmax_max, softmax_sum):
        if statistic.shape != (*query.shape[:2], 8) or statistic.dtype != torch.float32:
            raise RuntimeError(f"statistics must be float32 [T, N, 8], not {statistic.dtype} {tuple(statistic.shape)}")
    segments = _segments(query, key, value, head_num, actual_seq_qlen, actual_seq_kvlen)
    statistics = softmax_max[..., :1], softmax_sum[..., :1]
    tensors = query, key, value, dy, attention_in
    gradients = _gradients(tensors, statistics, segments, atten_mask, sparse_mode, scale_value)
    nothing = query.new_empty(0)
    return (*gradients, nothing, nothing)


def _gradients(tensors, statistics, segments, mask, sparse_mode, scale):
    query, key, value, dy, attention_in = tensors
    gradients = [torch.zeros_like(one, dtype=torch.float32) for one in (query, key, value)]
    for rows, keys in segments:
        q, k, v, upstream, out = (one.float().transpose(0, 1) for one in
                                  (query[rows], key[keys], value[keys], dy[rows], attention_in[rows]))
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = _masked(q @ k.transpose(-1, -2) * scale, mask, sparse_mode)
        row_max, total = (one[rows].transpose(0, 1) for one in statistics)
        probabilities = (scores - row_max).exp() / total
        inner = (upstream * out).sum(-1, keepdim=True)
        of_scores = probabilities * (upstream @ v.transpose(-1, -2) - inner) * scale
        found = of_scores @ k, of_scores.transpose(-1, -2) @ q, probabilities.transpose(-1, -2) @ upstream
        for gradient, one, place in zip(gradients, found, (rows, keys, keys), strict=True):
            gradient[place] += one.unflatten(0, (gradient.shape[1], -1)).sum(1).transpose(0, 1)
    return [one.to(query.dtype) for one in gradients]


def _refuse_unused(operator, arguments):
    for name, given in arguments.items():
        if given is not None:
            raise NotImplementedError(f"the stand-in for {operator} has no {name}")


def _segments(query, key, value, head_num, q_ends, kv_ends):
    """Rows of queries and of keys, segment by segment, after checks of the real operator."""
    _check_shapes(query, key, value, head_num, 3, head_axis=1)
    if not 1 <= query.shape[0] <= _MAX_VARLEN_TOKENS:
        raise RuntimeError(f"TND takes 1 to {_MAX_VARLEN_TOKENS} tokens, not {query.shape[0]}")
    for name, ends, tensor in (("actual_seq_qlen", q_ends, query), ("actual_seq_kvlen", kv_ends, key)):
        if not isinstance(ends, list | tuple) or any(type(end) is not int for end in ends):
            raise TypeError(f"{name} must be a list of Python ints, not {type(ends).__name__}")
        if not 1 <= len(ends) <= _MAX_VARLEN_SEGMENTS:
            raise RuntimeError(f"{name} must hold 1 to {_MAX_VARLEN_SEGMENTS} numbers, not {len(ends)}")
        if ends[0] == 0 or any(a > b for a, b in pairwise(ends)) or ends[-1] != tensor.shape[0]:
            raise RuntimeError(f"{name} must be running sums without the leading 0, up to {tensor.shape[0]}: {ends}")
    if len(q_ends) != len(kv_ends):
        raise RuntimeError(f"{len(q_ends)} query segments but {len(kv_ends)} key segments")
    return [(slice(*q), slice(*kv)) for q, kv in zip(pairwise([0, *q_ends]), pairwise([0, *kv_ends]), strict=True)]


def _varlen(query, key, value, segments, mask, sparse_mode, scale):
    """Output, largest score and sum of exponentials."""
    found = []
    for rows, keys in segments:
        q, k, v = (one.float().transpose(0, 1) for one in (query[rows], key[keys], value[keys]))
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = _masked(q @ k.transpose(-1, -2) * scale, mask, sparse_mode)
        row_max = scores.amax(-1, keepdim=True)
        exponentials = (scores - row_max).exp()
        total = exponentials.sum(-1, keepdim=True)
        parts = exponentials / total @ v, row_max.expand(-1, -1, 8), total.expand(-1, -1, 8)
        found.append([part.transpose(0, 1) for part in parts])
    out, row_max, total = (torch.cat(parts).contiguous() for parts in zip(*found, strict=True))
    return out.to(query.dtype), row_max, total


def _batched(query, key, value, head_num, layout, mask, sparse_mode, scale):
    _check_shapes(query, key, value, head_num, 4, head_axis=layout.index("N"))
    if not 1 <= query.shape[0] <= _MAX_BATCH or query.shape[0] != key.shape[0]:
        raise RuntimeError(f"the batch must be the same and 1 to {_MAX_BATCH}: {query.shape[0]} and {key.shape[0]}")
    if layout == "BNSD":
        return _attend(query, key, value, mask, sparse_mode, scale)
    return _attend(*(x.transpose(1, 2) for x in (query, key, value)), mask=mask, sparse_mode=sparse_mode,
                   scale=scale).transpose(1, 2)


def _check_shapes(query, key, value, head_num, num_dims, head_axis):
    if not query.dim() == key.dim() == value.dim() == num_dims:
        raise RuntimeError(f"the layout has {num_dims} axes: {query.shape}, {key.shape}, {value.shape}")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1] or query.shape[-1] > _MAX_HEAD_DIM:
        raise RuntimeError(f"head_dim must agree and be at most {_MAX_HEAD_DIM}: {query.shape}, {key.shape}")
    heads, kv_heads = query.shape[head_axis], key.shape[head_axis]
    if heads != head_num or heads > _MAX_HEADS or heads % kv_heads:
        raise RuntimeError(f"{heads} query heads (head_num {head_num}, at most {_MAX_HEADS}) for {kv_heads} key heads")


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sparse_mode: int, scale: float) -> Tensor:
    """[B, N, S, D]; scores and softmax in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = _masked(q.float() @ k.float().transpose(-1, -2) * scale, mask, sparse_mode)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def _masked(scores: Tensor, mask: Tensor | None, sparse_mode: int) -> Tensor:
    """[..., num_queries, num_keys]; without a mask sparse_mode has no effect: full attention."""
    if mask is None:
        return scores
    return scores.masked_fill(_expanded(mask, sparse_mode, *scores.shape[-2:]), float("-inf"))


def _check_mask(mask: Tensor | None, sparse_mode: int) -> None:
    if sparse_mode not in (0, 2, 3):
        raise NotImplementedError(f"the stand-in for npu_fusion_attention has no sparse_mode {sparse_mode}")
    if mask is None:
        return
    if mask.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"atten_mask must be bool or uint8, not {mask.dtype}")
    if sparse_mode == 0:
        return
    causal = torch.ones(_COMPRESSED_MASK, dtype=torch.bool, device=mask.device).triu(1)
    if mask.shape != _COMPRESSED_MASK or not torch.equal(mask.bool(), causal):
        raise RuntimeError(f"sparse_mode {sparse_mode} wants a {_COMPRESSED_MASK} mask, True above the diagonal")


def _expanded(mask: Tensor, sparse_mode: int, num_queries: int, num_keys: int) -> Tensor:
    """The mask that the operator applies; True hides a key."""
    if sparse_mode == 0:
        if mask.shape[-2:] != (num_queries, num_keys):
            raise RuntimeError(f"atten_mask {tuple(mask.shape)} for {num_queries} queries and {num_keys} keys")
        return mask.bool()
    shift = num_keys - num_queries if sparse_mode == 3 else 0
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=mask.device).triu(1 + shift)


def _check_rows(operator: str, x: Tensor) -> None:
    """Nothing says that the operator takes an empty tensor."""
    if not x.numel():
        raise RuntimeError(f"{operator} of an empty tensor: {tuple(x.shape)}")


def npu_rms_norm(input, gamma, epsilon=1e-06):
    """Returns (normed, 1 / root mean square in float32); statistics in float32."""
    _check_rows("npu_rms_norm", input)
    if input.dtype != gamma.dtype or input.dtype not in _FLOATS:
        raise RuntimeError(f"input and gamma must share one of {_FLOATS}: {input.dtype}, {gamma.dtype}")
    if input.shape[input.dim() - gamma.dim() :] != gamma.shape:
        raise RuntimeError(f"gamma {tuple(gamma.shape)} must match the last axes of {tuple(input.shape)}")
    axes = tuple(range(-gamma.dim(), 0))
    scale = torch.rsqrt(input.float().square().mean(axes, keepdim=True) + epsilon)
    return (input.float() * scale * gamma.float()).to(input.dtype), scale


def npu_swiglu(input, dim=-1):
    """silu(first half) * second half, of a tensor that is contiguous and not empty."""
    if not input.is_contiguous() or not input.numel():
        raise RuntimeError(f"must be contiguous and hold something: {tuple(input.shape)}, strides {input.stride()}")
    if input.shape[dim] % 2:
        raise RuntimeError(f"axis {dim} of {tuple(input.shape)} must be even")
    gate, up = input.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def _npu_matmul_add_fp32(x, weight, C):
    """C += x^T weight, summed in float32; ATB's LinearParam with transposeA and enAccum, which returns nothing.

    The real one raises OSError where ATB is missing.
    """
    if x.dtype != weight.dtype or x.dtype not in (torch.float16, torch.bfloat16) or C.dtype != torch.float32:
        raise RuntimeError(f"takes float16 or bfloat16 and a float32 C: {x.dtype}, {weight.dtype}, {C.dtype}")
    if not x.dim() == weight.dim() == 2 or x.shape[0] != weight.shape[0] or C.shape != (x.shape[1], weight.shape[1]):
        raise RuntimeError(f"C {tuple(C.shape)} is not x^T weight of {tuple(x.shape)}, {tuple(weight.shape)}")
    if 0 in (*x.shape, *weight.shape):
        raise RuntimeError(f"takes no empty tensor: {tuple(x.shape)}, {tuple(weight.shape)}")
    if not C.is_contiguous():
        raise RuntimeError("at_tensor is not contiguous")
    C.addmm_(x.float().t(), weight.float())


def npu_rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):
    """input * r1 + rotate_half(input) * r2, for BNSD, BSND and SBND, recognised by the shape of the tables."""
    _check_rows("npu_rotary_mul", input)
    if rotary_mode != "half" or rotate is not None:
        raise NotImplementedError("the stand-in for npu_rotary_mul has rotary_mode 'half' only")
    if not input.dim() == r1.dim() == r2.dim() == 4:
        raise RuntimeError(f"takes 4-D tensors: {input.shape}, {r1.shape}, {r2.shape}")
    if not input.dtype == r1.dtype == r2.dtype or input.dtype not in _FLOATS:
        raise RuntimeError(f"all three must share one of {_FLOATS}: {input.dtype}, {r1.dtype}, {r2.dtype}")
    head_dim = input.shape[-1]
    if not npu.is_jit_compile_false() and head_dim != 128:
        raise RuntimeError(f"with jit_compile the last axis must be 128, not {head_dim}")
    if head_dim >= 896 or head_dim % 2:
        raise RuntimeError(f"the last axis must be even and below 896, not {head_dim}")
    fits = all(given in (1, full) for given, full in zip(r1.shape, input.shape, strict=True))
    if r1.shape != r2.shape or not fits or r1.shape[-1] != head_dim:
        raise RuntimeError(f"tables {r1.shape}, {r2.shape} do not broadcast to {input.shape}")
    # the axis along which the tables run is the sequence; batch and heads are the other two
    sequence = max(range(3), key=lambda axis: r1.shape[axis])
    if any(input.shape[axis] >= 1000 for axis in range(3) if axis != sequence):
        raise RuntimeError(f"batch and heads must be below 1000: {tuple(input.shape)}")
    first, second = input.chunk(2, dim=-1)
    return input * r1 + torch.cat((-second, first), dim=-1) * r2
