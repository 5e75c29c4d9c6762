"""The layouts and flags with which checkpoints are saved and resumed (``state_worker.py``)."""

import dataclasses

from tests.parallel.state_run import Layout
from tests.workload import NO_COPIES, OFFLOADED, REMAINDERS
from tests.workload import ROUNDED_MOMENTS as ROUNDED

DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAP = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather")
REDUCED = ("--grad-reduce-in-bf16",)
SHARDS = ("--data-parallel-sharding-strategy", "optim_grads")
WEIGHT_SHARDS = ("--data-parallel-sharding-strategy", "optim_grads_params")
WHOLE = Layout(tp=2, whole_encoder=True)
"""Its encoder is whole on both tensor-parallel ranks."""
TP2, PP2, DP2 = Layout(tp=2), Layout((3, 1), (0, 4)), Layout(flags=DISTRIBUTED)
GROUPS = ("--lr-scale-modules", "image_encoder", "--lr-mult", "0.1", "--weight-decay-exclude-modules", "mlp")
FROZEN = {"freeze": ("vision",), "freeze_layers": ("", "1-2"), "freeze_modules": ("fc2", "norm")}
VIRTUAL = ((2, 1), (1, 0)), ((0, 0), (1, 3))
SAME_LAYOUT = {
    "dp2": Layout(),
    "dp2-distributed": DP2,
    "dp2-distributed-overlap": Layout(flags=OVERLAP),
    "dp2-distributed-bf16": Layout(precision="bf16", flags=DISTRIBUTED),
    "dp2-shards-bf16-remainders-reduced-in-bf16": Layout(
        precision="bf16", flags=(*SHARDS, *OVERLAP[1:], *REMAINDERS, *REDUCED)),
    "cp2-shards-fp16": Layout(cp=2, precision="fp16", flags=(*SHARDS, "--initial-loss-scale", "1024")),
    "dp2-weight-shards-bf16-remainders-reduced-in-bf16": Layout(
        precision="bf16", tied=True, flags=(*WEIGHT_SHARDS, *OVERLAP[1:], *REMAINDERS, *REDUCED)),
    "cp2-weight-shards-fp16": Layout(
        cp=2, precision="fp16", flags=(*WEIGHT_SHARDS, "--initial-loss-scale", "1024"), **FROZEN),
    "dp2-distributed-bf16-remainders-rounded": Layout(precision="bf16", flags=(*OVERLAP, *REMAINDERS, *ROUNDED)),
    "pp2-tied-bf16-no-copies-rounded": Layout((4, 0), (1, 3), tied=True, precision="bf16",
                                              flags=(*NO_COPIES, *ROUNDED)),
    "dp2-bf16-offloaded": Layout(precision="bf16", flags=OFFLOADED),
    "dp2-weight-shards-bf16-remainders-half-offloaded": Layout(
        precision="bf16", flags=(*WEIGHT_SHARDS, *REMAINDERS, *OFFLOADED, "--optimizer-offload-fraction", "0.5")),
    "dp2-fp16": Layout(precision="fp16", flags=("--initial-loss-scale", "1024", "--loss-scale-window", "2")),
    "dp2-vision-and-more-frozen": Layout(flags=DISTRIBUTED, **FROZEN),
    "tp2": TP2,
    "tp2-bf16": Layout(tp=2, precision="bf16"),
    "tp2-whole-encoder-sequence": Layout(tp=2, whole_encoder=True, flags=(*DISTRIBUTED, "--sequence-parallel")),
    "pp2": PP2,
    "pp2-tied": Layout((4, 0), (1, 3), tied=True),
    "pp2-vpp2-overlap": Layout(*VIRTUAL, tied=True, flags=OVERLAP),
    "pp2-nothing-trained-on-first": Layout((4, 0), (0, 4), freeze=("vision", "projector")),
}
CHAINS = {
    "untied": (TP2, PP2, DP2, Layout(*VIRTUAL)),
    "shards": (DP2, Layout(flags=WEIGHT_SHARDS), Layout(flags=SHARDS), PP2, Layout(flags=WEIGHT_SHARDS), DP2),
    "tied": tuple(dataclasses.replace(one, tied=True) for one in (DP2, PP2, TP2, Layout(*VIRTUAL))),
    # what bf16 holds is exact in fp32
    "remainders": tuple(dataclasses.replace(one, precision="bf16", flags=(*one.flags, *flags))
                        for one, flags in ((DP2, REMAINDERS), (Layout(), ()), (WHOLE, REMAINDERS), (PP2, REMAINDERS),
                                           (Layout(), REMAINDERS), (DP2, ()))),
    "offloaded": tuple(dataclasses.replace(one, precision="bf16", flags=(*one.flags, *flags)) for one, flags in (
        (DP2, OFFLOADED), (Layout(), ()), (Layout(), OFFLOADED), (PP2, (*OFFLOADED, *REMAINDERS)), (DP2, ()))),
    "whole encoder": (WHOLE, TP2, WHOLE, PP2, WHOLE),
    "groups": tuple(dataclasses.replace(one, flags=(*one.flags, *GROUPS)) for one in (PP2, DP2)),
    "frozen": tuple(dataclasses.replace(one, **FROZEN) for one in (PP2, DP2)),
}
