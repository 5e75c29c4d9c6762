"""Trains the same model from a Hugging Face directory and from conversions of it, and writes what differs as JSON.

Launched by tests/test_converted.py on four ranks, TP2 x PP2: ``converted_worker DIR``.
"""

import dataclasses
import json
import sys
from pathlib import Path

from mm.device.device import Device

Device.pick("cpu")  # before megatron is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from checkpoint.formats.source import open_to_train  # noqa: E402
from mm.model.load import fill  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from tests.parallel.state_run import Layout, Run  # noqa: E402
from tests.parallel.state_worker import different, problems_of  # noqa: E402

NUM_STEPS = 2


def random_run(tied: bool, seed: int) -> Run:
    layout = Layout((3, 1), (0, 4), tp=2, tied=tied)
    vision = dataclasses.replace(layout.model.vision, tokens_per_second=4)  # transformers' default
    return Run(layout, seed, dataclasses.replace(layout.model, vision=vision))


def start_from(run: Run, directory: Path) -> None:
    """What ``--load`` does."""
    fill(run.parts.stage, run.parts.stage.weights, open_to_train(directory, run.config), run.mesh)


def trained(run: Run) -> dict:
    """Weights before and everything after the steps, and their losses."""
    before = run.local()
    losses = run.train(NUM_STEPS)
    return {"before": before, "losses": losses, "after": run.local()}


def compare(directory: Path, tied: bool) -> dict:
    reference = random_run(tied, seed=1)
    start_from(reference, directory / "hf")
    expected, found = trained(reference), {}
    for path in sorted(directory.glob("mm-*")):
        run = random_run(tied, seed=2)
        start_from(run, path)
        result = trained(run)
        found[path.name] = {
            "weights": different(expected["before"], result["before"]),
            "losses": [expected["losses"], result["losses"]],
            "after": different(expected["after"], result["after"]),
        }
    return {"directories": found, "without loading": different(expected["before"], random_run(tied, seed=2).local())}


def damaged(directory: Path) -> list[list[str]]:
    """A copy that differs is found by one rank and told by all."""
    run = random_run(False, seed=2)
    return problems_of(lambda: start_from(run, directory))


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=parallel.timedelta(minutes=2))
    results = {name: compare(directory / name, name == "tied") for name in ("untied", "tied")}
    results["damaged"] = damaged(directory / "damaged")
    if dist.get_rank() == 0:
        (directory / "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
