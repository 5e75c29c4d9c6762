"""Trains a few steps with validations in every layout, and writes the metrics of each case as JSON.

Launched by test_validation.py on four ranks and by test_questions.py on two: ``validation_worker DIR``, where DIR has
what they have written, and ``cases.json``: by name, the number of ranks and command lines.  A case with fewer ranks
leaves the others out.
"""

import json
import os
import sys
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path

from mm.device.device import Device

DEVICE = Device.pick("cpu")  # before megatron is imported

import torch.distributed as dist  # noqa: E402

from mm.config.run import load_run  # noqa: E402
from mm.errors import UserError  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.parallel.health.rendezvous import Rendezvous  # noqa: E402
from mm.parallel.health.watchdog import Watchdog  # noqa: E402
from mm.run.loop import Trainer  # noqa: E402
from mm.run.preflight import check  # noqa: E402
from tests.files import json_lines  # noqa: E402


def train(parts: list[list[str]], rendezvous: Rendezvous) -> dict:
    """Run the command lines of one case in turn; each continues where the previous one ended."""
    runs = [load_run(argv, dist.get_world_size(), {}) for argv in parts]
    run = runs[0]
    mesh = parallel.start(DEVICE, run.model, run.tp_size, cp_size=run.cp_size, is_ring=run.is_ring)
    problems: tuple[str, ...] = ()
    with Watchdog(rendezvous, None) as watchdog:
        watchdog.place(mesh)
        trainer = Trainer(run, check(run) if mesh.rank == 0 else None, DEVICE, mesh, watchdog)
        for trainer.run in runs:
            trainer.samples = None
            try:
                trainer.run_steps()
            except UserError as error:
                problems += error.problems
        trainer.reporter.close(trainer.progress.iteration, "the test ends")
        states = {name: sha256(state.numpy().tobytes()).hexdigest() for name, state in DEVICE.random_states().items()}
        of_ranks: list = [None] * mesh.world_size
        dist.all_gather_object(of_ranks, (problems, states))
        parallel.stop_mesh()
    return {"rows": json_lines(Path(run.args.log_dir) / "metrics.jsonl"), "problems": [one for one, _ in of_ranks],
            "states": [one for _, one in of_ranks]}


def store_of(name: str) -> dist.Store:
    """A connection to the keys of one case."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore(name, store)


def main(directory: Path) -> None:
    rank = int(os.environ["RANK"])
    cases: dict[str, dict] = json.loads((directory / "cases.json").read_text())
    results = {}
    for name, case in cases.items():
        if rank < case["num_ranks"]:
            rendezvous = Rendezvous(rank, case["num_ranks"], partial(store_of, name))
            dist.init_process_group("gloo", store=store_of(name), rank=rank,
                                    world_size=case["num_ranks"], timeout=timedelta(minutes=5))
            results[name] = train(case["runs"], rendezvous)
            dist.destroy_process_group()
    if rank == 0:
        (directory / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
