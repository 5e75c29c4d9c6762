"""Trains under deep layouts with lengths that change at every microbatch, and writes the losses.

Started by tests/parallel/test_stall.py: ``python -m tests.parallel.stall_worker DIRECTORY NUM_STEPS NAME...`` with
names of ``LAYOUTS``, which the ranks, forks of this process, train one after the other.  Each leaves
DIRECTORY/NAME.json.
"""

import json
import math
import os
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

from tests.parallel.state_run import LR, Layout, Run  # isort: skip  (picks the device, before megatron is imported)

import torch
import torch.distributed as dist

from mm.batch import BatchTotals, StepPlan
from mm.parallel.rendezvous import Rendezvous
from mm.parallel.watchdog import Watchdog
from mm.process import free_port
from mm.training.step import step
from tests.launch import fork_rank
from tests.tiny import microbatch, random_sample

NUM_MICROBATCHES = 8
STEP_SECONDS = 120.0
"""Time limit of a step, which normally takes some tenths of a second: a longer one stalls, and the watchdog reports it.
"""
DEEP_VISION, DEEP_LANGUAGE = ((1, 1, 1, 1), (0, 0, 0, 0)), ((0, 0, 0, 0), (1, 1, 1, 1))
LAYOUTS = {
    "pp4": Layout((2, 2, 0, 0), (0, 0, 2, 2)),
    "vpp2-pp4": Layout(DEEP_VISION, DEEP_LANGUAGE),
    "vpp2-pp2": Layout(((2, 1), (1, 0)), ((0, 0), (1, 3))),
    "pp8": Layout((1, 1, 1, 1, 0, 0, 0, 0), (0, 0, 0, 0, 1, 1, 1, 1)),
}


def num_ranks(name: str) -> int:
    return LAYOUTS[name].model.placement().num_stages


def plan_of(iteration: int, run: Run) -> StepPlan:
    """One sample a microbatch: a picture of any size in two of three, and any length of text."""
    draw = torch.Generator().manual_seed(iteration)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=draw))

    batch = []
    for _ in range(NUM_MICROBATCHES):
        grids = ((1, 2 + 2 * below(6), 2 + 2 * below(6)),) if below(3) else ()
        batch.append(microbatch([random_sample(draw, grids, 5 + below(60))]))
    return StepPlan(tuple(batch), BatchTotals.of(batch, run.config.vision))


def train(name: str, num_steps: int, directory: Path) -> int:
    """On one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    started, losses, lengths = time.monotonic(), [], []
    run = Run(LAYOUTS[name])
    with Watchdog(Rendezvous.of_launcher(10), STEP_SECONDS) as watchdog:
        watchdog.place(run.mesh)
        watchdog.follow(run.stage.journal, run.setup.communicator)
        for iteration in range(num_steps):
            plan = plan_of(iteration, run)
            lengths += [(one.num_tokens, one.num_patches) for one in plan.microbatches]
            with watchdog.step(iteration):
                losses.append(step(run.setup, plan, LR).loss)
    if run.mesh.rank == 0:
        seconds = time.monotonic() - started
        num_changes = sum(one != other for one, other in pairwise(lengths))
        found = {"losses": losses, "num_changes": num_changes, "num_microbatches": len(lengths), "seconds": seconds}
        (directory / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
        print(f"{name}: {num_steps} steps in {seconds:.1f} s, {num_changes} changes, last loss {losses[-1]:.3f}")
    return 0 if all(map(math.isfinite, losses)) else 1


def main(directory: Path, num_steps: int, names: list[str]) -> int:
    for name in names:
        port, count = free_port(), num_ranks(name)
        ranks = [fork_rank(rank, count, port, partial(train, name, num_steps, directory)) for rank in range(count)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        if any(statuses):
            print(f"{name}: the ranks ended with {statuses}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
