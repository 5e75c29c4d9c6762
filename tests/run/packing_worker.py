"""Trains the same steps with several samplers, or with a slow rank; writes the metrics and sample distribution of each
as JSON.

Launched by tests/run/test_packing.py on four ranks, PP2 x DP2: ``packing_worker DIR``, where DIR has what
``write_cases`` has written.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Semaphore

from mm.device.device import Device

DEVICE = Device.pick("cpu")  # before megatron is imported

import torch.distributed as dist  # noqa: E402

from mm.batch import StepPlan  # noqa: E402
from mm.config.run import load_run  # noqa: E402
from mm.data.loader.broadcast import StepBroadcast  # noqa: E402
from mm.data.loader.loader import ReadStep, StepLoader  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.parallel.health.rendezvous import Rendezvous  # noqa: E402
from mm.parallel.health.watchdog import Watchdog  # noqa: E402
from mm.run.loop import Trainer  # noqa: E402
from mm.run.preflight import check  # noqa: E402
from tests.files import json_lines  # noqa: E402

NUM_STEPS = 3
SLOW_RANK = 1
SLOW_DATA_SECONDS = 0.9
"""For a step."""


@dataclass(frozen=True)
class Result:
    """The result of one case."""

    metrics: list[dict]
    microbatches: list[list[list[list[int]]]]
    """Sample indices by step, replica and microbatch."""


@contextmanager
def slow_rank(name: str, trainer: Trainer) -> Iterator[None]:
    """In the case "slow data", one rank reads its samples slowly.

    It is the second replica's at the first stage.  A slow read begins when the trainer asks for it: begun during the
    step before, a long step on a busy machine would hide it.
    """
    read, ask, asked = StepLoader.__next__, StepBroadcast.__next__, Semaphore(0)

    def read_slowly(loader: StepLoader) -> ReadStep:
        asked.acquire()
        time.sleep(SLOW_DATA_SECONDS)
        return read(loader)

    def ask_for_a_step(owner: StepBroadcast) -> StepPlan:
        asked.release()
        return ask(owner)

    if trainer.mesh.rank == SLOW_RANK and name == "slow data":
        StepLoader.__next__, StepBroadcast.__next__ = read_slowly, ask_for_a_step
    yield
    StepLoader.__next__, StepBroadcast.__next__ = read, ask


def train(directory: Path, name: str) -> Result:
    """Train a whole run without export."""
    argv = json.loads((directory / f"{name}.argv.json").read_text())
    run = load_run(argv, dist.get_world_size(), {})
    mesh = parallel.start(DEVICE, run.model, run.tp_size)
    with Watchdog(Rendezvous.of_launcher(10), None) as watchdog:
        watchdog.place(mesh)
        trainer = Trainer(run, check(run) if mesh.rank == 0 else None, DEVICE, mesh, watchdog)
        data = trainer.feed(NUM_STEPS).plans
        own = [[sorted(microbatch.samples) for microbatch in plan.microbatches] for plan in data]
        data.close()
        with slow_rank(name, trainer):
            trainer.run_steps()
        trainer.reporter.close(trainer.progress.iteration, "the test ends")
        of_ranks: list = [None] * mesh.world_size
        dist.all_gather_object(of_ranks, (mesh.dp_rank, own))
        parallel.stop_mesh()
    by_replica = dict(of_ranks)
    return Result(json_lines(Path(run.args.log_dir) / "metrics.jsonl") if mesh.rank == mesh.world_size - 1 else [],
                  [[by_replica[replica][step] for replica in sorted(by_replica)] for step in range(NUM_STEPS)])


def main(directory: Path) -> None:
    names = json.loads((directory / "names.json").read_text())
    dist.init_process_group("gloo")
    results = {name: asdict(train(directory, name)) for name in names}
    if dist.get_rank() == dist.get_world_size() - 1:  # it writes the metrics
        (directory / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
