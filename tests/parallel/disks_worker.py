"""Saves on two disks and loads from them, on two ranks that are two nodes: ``disks_worker DIRECTORY``.

A node is a working directory of its own: a relative path names another directory on each.  Started by
tests/run/checkpoint/test_disks.py, which reads the JSON.
"""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from mm.device.device import Device

Device.pick("cpu")  # before megatron is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from mm.checkpoint import directories  # noqa: E402
from mm.checkpoint import training_files as writer  # noqa: E402
from mm.checkpoint.training_files import Retention  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.run.checkpoint import disks as of_disks  # noqa: E402
from mm.run.checkpoint.disks import Disks, find_disks  # noqa: E402
from mm.run.sources import Checked, Sources  # noqa: E402
from mm.run.start import open_sources  # noqa: E402
from tests.parallel.state_layouts import DISTRIBUTED, PP2, TP2, WEIGHT_SHARDS  # noqa: E402
from tests.parallel.state_run import Layout, Run, different, problems_of  # noqa: E402
from tests.workload import REMAINDERS  # noqa: E402

LAYOUTS = {
    "pp2-tied-distributed-bf16": Layout((4, 0), (1, 3), tied=True, precision="bf16", flags=DISTRIBUTED),
    "dp2": Layout(precision="bf16"),
    "dp2-weight-shards": Layout(precision="bf16", flags=(*WEIGHT_SHARDS, *REMAINDERS)),
    "tp2": TP2,
}
OTHERS = {"dp2": PP2, "tp2": PP2}
"""A layout that may need files of both disks."""


def names_in(folder: Path) -> list[list[str]]:
    """What each rank's disk holds there."""
    mesh_of_all: list = [None] * dist.get_world_size()
    dist.all_gather_object(mesh_of_all, sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [])
    return mesh_of_all


def resumed(name: str, layout: Layout, disks: Disks) -> dict:
    """Two steps, a save on both disks, two steps; and the same from the save.  The parts are gathered afterwards."""
    first = Run(layout)
    first.train(2)
    saved = first.save(Path("save") / name, disks=disks)
    expected_random = torch.rand(3)
    losses = first.train(2)
    second = Run(layout, seed=2).load(Path("save") / name)
    is_random_equal = torch.equal(torch.rand(3), expected_random)
    return {"files": names_in(saved), "losses": losses, "resumed_losses": second.train(2),
            "different": different(first.local(), second.local()), "is_random_equal": is_random_equal}


def gather(name: str) -> Path:
    """Copy both parts into one directory, checking that files of the same name are the same."""
    if dist.get_rank() == 0:
        target = Path("..") / "gathered" / name
        target.mkdir(parents=True)
        for node in range(2):
            for path in Path("..", f"node{node}", "save", name, directories.iteration_name(2)).iterdir():
                copy = target / path.name
                assert not copy.exists() or copy.read_bytes() == path.read_bytes(), path
                copy.write_bytes(path.read_bytes())
    dist.barrier()
    return Path("..") / "gathered" / name


def elsewhere(name: str, other: Layout) -> dict:
    """Another layout, from the parts and from the gathered directory."""
    layout = LAYOUTS[name]
    expected = Run(layout).load(Path("save") / name).whole()
    problems = problems_of(lambda: Run(other, seed=2).load(Path("save") / name))
    run = Run(replace(other, precision=layout.precision), seed=2).load(gather(name))
    return {"problems": problems, "different": different(expected, run.whole()), "num_compared": len(expected)}


def interrupted(disks: Disks) -> dict:
    """A save that fails on rank 0's disk after the other has it, and the next one."""
    run, directory = Run(PP2), Path("save") / "late"
    run.train(1)
    run.save(directory, disks=disks)
    publish = writer.publish

    def dies(temporary: Path) -> Path:
        if not run.mesh.rank:
            raise OSError("killed")
        return publish(temporary)

    run.train(1)
    writer.publish = dies
    problems = problems_of(lambda: run.save(directory, disks=disks))
    writer.publish = publish
    before = names_in(directory)
    run.save(directory, Retention(1), disks)
    after = names_in(directory)
    return {"problems": problems, "before": before, "after": after, "mixed": mixed(directory, run, disks)}


def mixed(directory: Path, run: Run, disks: Disks) -> list[list[list[str]]]:
    """What a start says when rank 1's disk lacks the checkpoint of rank 0, or has another one of its iteration."""
    newest, started = directory / directories.iteration_name(2), cast(Any, SimpleNamespace(args=run.args))
    said = [problems_of(lambda: disks.check_same(newest, run.mesh))]
    for is_there in (False, True):
        if run.mesh.rank and is_there:
            shutil.copytree(Path("save") / "tp2" / newest.name, newest)
        elif run.mesh.rank:
            shutil.rmtree(newest)
        said.append(problems_of(lambda: open_sources(started, None, newest, run.mesh, disks, print)))
    return said


def used(disks: Disks) -> list[list[str]]:
    """What a start says when only rank 1's disk holds a checkpoint of another run."""
    directory, rank = Path("save") / "used", dist.get_rank()
    if rank:
        name = directories.iteration_name(2)
        shutil.copytree(Path("save") / "tp2" / name, directory / name)
    run = Run(PP2)
    started = cast(Any, SimpleNamespace(args=replace(run.args, save=str(directory)), model=PP2.model,
                                        data=SimpleNamespace(model_name_or_path="none")))
    checked = None if rank else Checked(started, sources=Sources(None))
    return problems_of(lambda: open_sources(started, checked, None, run.mesh, disks, print))


def unequal(disks: Disks) -> dict:
    """Replicas of which one has a flipped sign, so that the disks would hold different files of one name."""
    run = Run(Layout())
    name, parameter = next(iter(run.stage.named_parameters()))
    if run.mesh.rank:
        parameter.data.neg_()
    problems = problems_of(lambda: run.save(Path("save") / "unequal", disks=disks))
    return {"name": name, "problems": problems, "left": names_in(Path("save") / "unequal")}


def main(directory: str) -> None:
    parallel.start(Device.pick("cpu"), PP2.model, 1)
    rank, of_disks.WAIT_SECONDS = dist.get_rank(), 0.5
    node = Path(directory) / f"node{rank}"
    node.mkdir()
    os.chdir(node)
    os.environ["LOCAL_RANK"] = "0"
    run = Run(PP2)

    def find(**changes: object) -> Disks:
        return find_disks(replace(run.args, **changes), run.mesh)

    found = {"refused": problems_of(lambda: find(save="save")),
             "refused_export": problems_of(lambda: find(export_hf="hf")),
             "shared": [find(save="../shared", save_on_each_node=True).of_ranks, os.listdir("../shared")]}
    disks = find(save="save", save_on_each_node=True)
    found |= {"disks": disks.of_ranks, "probes": names_in(Path("save"))}
    found["resume"] = {name: resumed(name, layout, disks) for name, layout in LAYOUTS.items()}
    found["elsewhere"] = {name: elsewhere(name, other) for name, other in OTHERS.items()}
    found |= {"interrupted": interrupted(disks), "unequal": unequal(disks), "used": used(disks)}
    if rank == 0:
        (Path(directory) / "results.json").write_text(json.dumps(found))
    parallel.stop()


if __name__ == "__main__":
    main(sys.argv[1])
