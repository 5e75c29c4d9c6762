"""Saves on two disks and loads from them, on two ranks that are two nodes: ``disks_worker DIRECTORY``.

A node is a working directory of its own: a relative path names another directory on each.  Started by
tests/training/test_disks.py, which reads the JSON.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from mm.device.device import Device

Device.pick("cpu")  # before megatron is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from mm.formats import checkpoints  # noqa: E402
from mm.formats import training_writer as writer  # noqa: E402
from mm.formats.training_writer import Retention  # noqa: E402
from mm.lock import LOCK_FILE, Claim  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.parallel.agreement import by_rank  # noqa: E402
from mm.training import disks as of_disks  # noqa: E402
from mm.training.disks import Disks, claim_others, find_disks, find_disks_once  # noqa: E402
from mm.training.each_disk import catch_up, check_held  # noqa: E402
from mm.training.gathered import finish_on_first  # noqa: E402
from mm.training.save import BegunSave  # noqa: E402
from tests.parallel.state_layouts import DISTRIBUTED, DP2, PP2, TP2, WEIGHT_SHARDS  # noqa: E402
from tests.parallel.state_run import Layout, Run, different, problems_of  # noqa: E402
from tests.workload import REMAINDERS  # noqa: E402

LAYOUTS = {
    "pp2": PP2,
    "pp2-tied": Layout((4, 0), (1, 3), tied=True),
    "pp2-tied-distributed-bf16": Layout((4, 0), (1, 3), tied=True, precision="bf16", flags=DISTRIBUTED),
    "dp2": Layout(precision="bf16"),
    "dp2-distributed": DP2,
    "dp2-weight-shards": Layout(flags=WEIGHT_SHARDS),
    "dp2-weight-shards-bf16-remainders": Layout(precision="bf16", flags=(*WEIGHT_SHARDS, *REMAINDERS)),
    "tp2": TP2,
}
OTHERS = {"pp2": TP2, "pp2-tied": Layout(tied=True), "dp2": PP2, "dp2-distributed": PP2,
          "dp2-weight-shards": PP2, "tp2": PP2}
"""A layout that needs files of both disks."""


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
            for path in Path("..", f"node{node}", "save", name, checkpoints.iteration_name(2)).iterdir():
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


def recovered(disks: Disks) -> dict:
    """A save of which one disk is late, which the next run completes; and disks that hold different iterations."""
    run, directory = Run(PP2), Path("save") / "late"
    run.train(1)
    run.save(directory, disks=disks)
    publish = writer.publish

    def dies(temporary: Path) -> Path:
        if run.mesh.rank:
            raise OSError("killed")
        return publish(temporary)

    run.train(1)
    writer.publish = dies
    problems = problems_of(lambda: run.save(directory, disks=disks))
    writer.publish = publish
    before = names_in(directory)
    notes = by_rank(run.mesh, catch_up([directory], run.mesh, disks))
    after = names_in(directory)
    check_held(directory / checkpoints.iteration_name(2), run.mesh, disks)
    run.train(1)
    run.save(directory, disks=disks)
    if run.mesh.rank:
        (directory / checkpoints.iteration_name(3)).rename(directory / "lost")
    lost = problems_of(lambda: check_held(directory / checkpoints.iteration_name(3), run.mesh, disks))
    return {"problems": problems, "before": before, "notes": notes, "after": after, "lost": lost}


def kept(disks: Disks) -> list[list[str]]:
    """An interval, the newest, and the best beside them: none deletes the others' checkpoints."""
    run, directory, retention = Run(PP2), Path("save") / "kept", Retention(2, 3)
    for _ in range(7):
        run.train(1)
        run.save(directory, retention, disks)
        if run.progress.iteration in (2, 4):
            run.save(directory / "best", Retention(1), disks)
    return [*names_in(directory), *names_in(directory / "best")]


def unequal(disks: Disks) -> dict:
    """Replicas of which one has a flipped sign, so that the disks would hold different files of one name."""
    run = Run(Layout())
    name, parameter = next(iter(run.stage.named_parameters()))
    if run.mesh.rank:
        parameter.data.neg_()
    problems = problems_of(lambda: run.save(Path("save") / "unequal", disks=disks))
    return {"name": name, "problems": problems, "left": names_in(Path("save") / "unequal")}


def claimed(disks: Disks) -> list[list[str]]:
    """Another run writes to the disk of rank 1."""
    mesh, save = Run(PP2).mesh, {"--save": "save"}
    with Claim() as other, Claim() as claim:
        if mesh.rank:
            other.add(save, print)
        problems = problems_of(lambda: claim_others("save", claim, mesh, disks, print))
        other.release()
        dist.barrier()
        claim_others("save", claim, mesh, disks, print)
        assert names_in(Path("save"))[1].count(LOCK_FILE) == 1
    return problems


def brought() -> dict:
    """The weights of both disks on rank 0's alone, as files of one disk."""
    run = Run(PP2)
    run.train(1)
    together = run.save(Path("..") / "together", save_optim=False, save_rng=False)
    disks = find_disks_once(Path("brought"), "--export-hf", run.mesh)
    before = names_in(Path("."))
    begun = BegunSave.begin(Path("brought"), run.progress, run.setup, {"seed": 1}, save_optim=False, save_rng=False)
    brought = finish_on_first(begun, run.setup, disks)
    is_equal = run.mesh.rank != 0 or all(
        path.read_bytes() == (brought / path.name).read_bytes() for path in together.iterdir())
    return {"before": before, "names": names_in(brought), "is_equal": is_equal}


def main(directory: str) -> None:
    parallel.start(Device.pick("cpu"), PP2.model, 1)
    rank, of_disks.WAIT_SECONDS = dist.get_rank(), 0.5
    node = Path(directory) / f"node{rank}"
    node.mkdir()
    os.chdir(node)
    os.environ["LOCAL_RANK"] = "0"
    mesh = Run(PP2).mesh
    found = {"refused": problems_of(lambda: find_disks("save", False, mesh)), "after_refusal": names_in(Path("."))}
    shared = find_disks("../shared", False, mesh)
    Path("linked").mkdir()
    Path("linked", "best").symlink_to(Path("../shared").resolve())
    found["linked"] = problems_of(lambda: find_disks("linked", True, mesh))
    disks = find_disks("save", True, mesh)
    found |= {"shared": [shared.of_ranks, os.listdir("../shared")], "disks": disks.of_ranks,
              "probes": names_in(Path("save"))}
    found["resume"] = {name: resumed(name, layout, disks) for name, layout in LAYOUTS.items()}
    found["elsewhere"] = {name: elsewhere(name, other) for name, other in OTHERS.items()}
    found |= {"recovered": recovered(disks), "kept": kept(disks), "brought": brought(),
              "claimed": claimed(disks), "unequal": unequal(disks)}
    if rank == 0:
        (Path(directory) / "results.json").write_text(json.dumps(found))
    parallel.stop()


if __name__ == "__main__":
    main(sys.argv[1])
