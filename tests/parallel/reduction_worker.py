"""Compares gradients summed in bf16 with those in fp32, on two ranks, and writes the errors as JSON.

Launched by tests/run/test_reduction.py: ``reduction_worker OUTPUT.json``.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from mm.device.device import Device

Device.pick("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from mm.parallel import mesh as parallel  # noqa: E402
from tests.parallel.state_run import Layout, Run  # noqa: E402

LAYOUTS = {
    "dp2-distributed": Layout(flags=("--use-distributed-optimizer",)),
    "dp2-shards": Layout(flags=("--data-parallel-sharding-strategy", "optim_grads")),
    "tp2": Layout(tp=2),
    "tp2-sequence": Layout(tp=2, flags=("--sequence-parallel",)),
    "tp2-whole-encoder": Layout(tp=2, whole_encoder=True),
    "pp2-tied": Layout((4, 0), (1, 3), tied=True),
}


def compare(layout: Layout) -> dict:
    """The error relative to the gradients in fp32, by norm of all, and the dtypes of both runs' buffers."""
    runs = [Run(dataclasses.replace(layout, precision="bf16", flags=(*layout.flags, *flags)))
            for flags in ((), ("--grad-reduce-in-bf16",))]  # fmt: skip
    models: list[list[Any]] = [list(run.setup.models) for run in runs]
    dtypes = [sorted({str(buffer.grad_dtype) for model in of_run for buffer in model.buffers}) for of_run in models]
    expected, reduced = (run.gradients() for run in runs)
    sums = torch.zeros(2, dtype=torch.float64)
    for one, other in zip(expected, reduced, strict=True):
        sums += torch.stack([(one.double() - other.double()).square().sum(), one.double().square().sum()])
    dist.all_reduce(sums)
    return {"error": float((sums[0] / sums[1]).sqrt()), "dtypes": dtypes}


def main(output: str) -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=parallel.timedelta(minutes=2))
    found = {name: compare(layout) for name, layout in LAYOUTS.items()}
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(found), encoding="utf-8")
    parallel.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
