"""MindSpeed-MM's YAML for FSDP2 (``--fsdp2-config-path``): compared with the run, which ``optim_grads_params`` shards.

The file itself sets nothing: what it asks for beyond the flags is refused, and the message names the flag.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.flags import Arguments
from mm.config.foreign import Fixed, Inert, Row, rows
from mm.config.read_yaml import read_yaml
from mm.config.schema import STRICT, read_settings

Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fsdp2Config:
    """The keys that must agree with the flags."""

    sharding_size: int | Literal["auto"] | None = Field("auto", title="a number of ranks, or auto")
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None


ROWS: Mapping[str, Row] = {
    "sub_modules_to_wrap": Inert("each layer, the projector, the word embedding and the output layer is a unit"),
    "ignored_modules": Inert("all weights are sharded, those of the ViT too"),
    **rows(Inert("--overlap-param-gather gathers one unit ahead"),
           "num_to_forward_prefetch num_to_backward_prefetch"),
    "cast_forward_inputs": Inert("the inputs of a layer have the weights' dtype"),
    "recompute_modules": Inert("--recompute-granularity, or the model JSON, decides"),
    "reshard_after_forward": Fixed((True, None), "a unit's weights are freed after each use"),
    "offload_to_cpu": Fixed((False, None), "weights stay on the device; remove it, and for optimizer states in host "
                                           "memory add --optimizer-cpu-offload"),
}


def fsdp2_notes(path: str, args: Arguments, num_copies: int) -> tuple[str, ...]:
    """Notes on keys without effect in the file at ``path``.

    ``num_copies``: ranks that hold the same weights.  Raises UserError with every problem of the file, or with
    everything in it that contradicts ``args``.
    """
    return read_settings(path, Fsdp2Config, {"": ROWS}, lambda config: _contradictions(config, args, num_copies),
                         read_yaml).notes


def _contradictions(config: Fsdp2Config, args: Arguments, num_copies: int) -> Iterator[str]:
    if config.sharding_size not in ("auto", None, num_copies):
        yield (f"sharding_size is {config.sharding_size}, but weights are sharded over all {num_copies} ranks that "
               f"hold the same ones (data x context parallel); write auto")
    if config.param_dtype not in (None, args.precision):
        yield (f"param_dtype is {config.param_dtype}, but the run is in {args.precision}; change it, or give "
               f"--bf16 or --fp16")
    reduced = "bf16" if args.grad_reduce_in_bf16 else "fp32"
    if config.reduce_dtype not in (None, reduced):
        yield (f"reduce_dtype is {config.reduce_dtype}, but gradients are reduced in {reduced}; change it, or "
               f"{'remove' if reduced == 'bf16' else 'give'} --grad-reduce-in-bf16")
