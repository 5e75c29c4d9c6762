"""The strategies and states of which ``kept_worker`` counts the bytes."""

from tests.workload import NO_COPIES, OFFLOADED, REMAINDERS, ROUNDED_MOMENTS

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STATES = {
    "fp32": ("fp32", ()), "bf16": ("bf16", ()), "fp16": ("fp16", ("--initial-loss-scale", "1024")),
    "rounded moments": ("bf16", ROUNDED_MOMENTS), "remainders": ("bf16", REMAINDERS),
    "no copies": ("bf16", (*NO_COPIES, *ROUNDED_MOMENTS)), "reduced in bf16": ("bf16", ("--grad-reduce-in-bf16",)),
    "offloaded": ("bf16", OFFLOADED),
}  # fmt: skip
"""The precision and the flags of each kind of states."""
