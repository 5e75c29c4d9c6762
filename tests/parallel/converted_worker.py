"""Trains the same model from a Hugging Face directory and from conversions of it, and writes what differs as JSON.

Also counts what replicas read of every kind of directory.  Launched by tests/test_converted.py on four ranks, TP2 x PP2
where nothing else is said: ``converted_worker DIR``.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

from mm.device.device import Device

Device.pick("cpu")  # before megatron is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from mm.checkpoint.adapters import open_adapters  # noqa: E402
from mm.checkpoint.source import Source, open_to_train  # noqa: E402
from mm.checkpoint.training_manifest import TrainingDirectory  # noqa: E402
from mm.model.load import fill  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.weights.fuse import local_shape  # noqa: E402
from mm.weights.shard import MemoryLayout  # noqa: E402
from mm.weights.table import Weight  # noqa: E402
from mm.weights.trained import saved_among  # noqa: E402
from tests.parallel.lora_cases import MIXED  # noqa: E402
from tests.parallel.state_run import Layout, Run  # noqa: E402
from tests.parallel.state_worker import converted_model, counted, different, problems_of  # noqa: E402

NUM_STEPS = 2
REPLICAS = {
    "dp4": Layout(freeze=("vision",)),
    "dp2-cp2": Layout(cp=2),
    "tp2-dp2": Layout(tp=2),
    "pp2-vpp2-dp2-bf16": Layout(((2, 1), (1, 0)), ((0, 0), (1, 3)), precision="bf16"),
}
"""Layouts in which several ranks hold the same shards."""


def random_run(tied: bool, seed: int) -> Run:
    layout = Layout((3, 1), (0, 4), tp=2, tied=tied)
    return Run(layout, seed, converted_model(layout))


def start_from(run: Run, directory: Path) -> None:
    """What ``--load`` does."""
    fill(run.setup.stage, run.setup.stage.weights, open_to_train(directory, run.config), run.mesh)


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
    """One rank finds a copy that differs, and all report it."""
    run = random_run(False, seed=2)
    return problems_of(lambda: start_from(run, directory))


def shares(run: Run, weights: list[Weight], alone: Callable[[Weight], Tensor], together: Callable[[], object],
           checked: Callable[[], object] = lambda: None) -> dict:
    """What ranks read and hold after ``together``, beside what each reads and holds that is ``alone``.

    ``checked`` reads what the first rank reads to check it.
    """
    expected, largest = {}, 0
    with counted() as sizes:
        for weight in weights:
            before = sum(sizes)
            expected[weight.name] = MemoryLayout.of(weight, run.mesh.tp_size).pad_whole(alone(weight))
            largest = max(largest, sum(sizes) - before)
    num_alone = sum(sizes)
    with counted() as sizes:
        if run.mesh.rank == 0:
            checked()
    num_checked = sum(sizes)
    with torch.no_grad():
        for name in expected:
            run.stage.get_parameter(name).fill_(torch.nan)
    with counted() as sizes:
        together()
    found = {name: run.stage.get_parameter(name).detach() for name in expected}
    counts: list = [None] * run.mesh.groups.dp_cp.size()
    dist.all_gather_object(counts, (sum(sizes) - num_checked, num_alone, largest), group=run.mesh.groups.dp_cp)
    results: list = [None] * run.mesh.world_size
    dist.all_gather_object(results, counts)
    return {"different": different(expected, found), "num_compared": len(expected), "counts": results}


def shares_of(run: Run, weights: list[Weight], source: Source) -> dict:
    """``shares`` of a load of ``source``."""
    mesh = run.mesh
    return shares(
        run, weights,
        lambda weight: source.read(weight, mesh.tp_size, mesh.tp_rank, run.stage.get_parameter(weight.name).dtype),
        lambda: fill(run.stage, weights, source, mesh),
        lambda: None if source.has_checksums else source.check())


def replicas(directory: Path, layout: Layout) -> dict:
    """What replicas read of a model of every kind, and of adapters."""
    model, found = converted_model(layout), {}
    run = Run(layout, model=model)
    for path in (directory / "hf", *sorted(directory.glob("mm-*"))):
        found[path.name] = shares_of(run, run.stage.weights, open_to_train(path, model))
    adapted = dataclasses.replace(model, lora=MIXED)
    saved = directory / f"adapters-{layout.tp}-{layout.cp}-{layout.precision}"
    run = Run(layout, model=adapted)
    run.save(saved)
    found["adapters"] = shares_of(run, saved_among(run.stage.weights, adapted), open_adapters(saved, adapted))
    return found


def from_masters(directory: Path) -> dict:
    """What replicas in fp32 read of the checkpoint of a run in bf16, whose fp32 copies become their weights."""
    first = Run(Layout(tp=2, precision="bf16", flags=("--use-distributed-optimizer",)))
    first.train(1)
    stored = TrainingDirectory.open(first.save(directory))
    run = Run(dataclasses.replace(first.layout, precision="fp32"), seed=2)
    place = (run.mesh.tp_size, run.mesh.tp_rank)

    def alone(weight: Weight) -> Tensor:
        shape = local_shape(weight, run.mesh.tp_size)
        return stored.read_state(weight, "master", *place, 0, math.prod(shape)).reshape(shape)

    return shares(run, run.stage.weights, alone, lambda: run.load(directory, load_optim=False, load_rng=False))


def damaged_for_one(directory: Path) -> list[list[str]]:
    """A damaged weight, which one of four replicas reads."""
    run = Run(REPLICAS["dp4"], model=converted_model(REPLICAS["dp4"]))
    return problems_of(lambda: start_from(run, directory))


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=parallel.timedelta(minutes=2))
    results = {name: compare(directory / name, name == "tied") for name in ("untied", "tied")}
    results["damaged"] = damaged(directory / "damaged")
    results["damaged for one"] = damaged_for_one(directory / "damaged-for-one")
    results["replicas"] = {name: replicas(directory / "untied", layout) for name, layout in REPLICAS.items()}
    tied = dataclasses.replace(REPLICAS["pp2-vpp2-dp2-bf16"], tied=True)
    results["replicas"]["tied"] = replicas(directory / "tied", tied)
    results["replicas"]["masters"] = {"training checkpoint": from_masters(directory / "masters")}
    if dist.get_rank() == 0:
        (directory / "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
