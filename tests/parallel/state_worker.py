"""Saves and loads training checkpoints on two ranks in many layouts and writes what it saw as JSON.

Launched by tests/run/checkpoint/test_restore.py: ``state_worker DIRECTORY``.  In the last
scenario rank 1 kills itself in the middle of a save, so the launch fails after the JSON was written.
"""

import dataclasses
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mm.device.device import Device

Device.pick("cpu")  # before megatron is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from mm.checkpoint.directories import LATEST_FILE, find_checkpoint  # noqa: E402
from mm.checkpoint.source import open_to_train  # noqa: E402
from mm.checkpoint.tensor_io import Files  # noqa: E402
from mm.checkpoint.training_files import Retention  # noqa: E402
from mm.checkpoint.training_manifest import CheckpointManifest  # noqa: E402
from mm.config.model import ModelConfig  # noqa: E402
from mm.model.load import fill  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.run.checkpoint import restore as state  # noqa: E402
from mm.run.progress import BestSoFar  # noqa: E402
from mm.weights.views import Stored  # noqa: E402
from tests.parallel.state_background import background_fails, in_background  # noqa: E402
from tests.parallel.state_layouts import CHAINS, DISTRIBUTED, DP2, PP2, SAME_LAYOUT, TP2, WEIGHT_SHARDS  # noqa: E402
from tests.parallel.state_run import Layout, Run, different, mesh_key, problems_of  # noqa: E402
from tests.workload import NO_COPIES, REMAINDERS  # noqa: E402


@contextmanager
def counted(file_prefix: str = "") -> Iterator[list[int]]:
    """The bytes of each read of a tensor on this rank, from files whose names begin so."""
    sizes: list[int] = []
    read = Files.read

    def noted(files: Files, stored: Stored, start: int, into: memoryview) -> None:
        if stored.file.startswith(file_prefix):
            sizes.append(len(into))
        read(files, stored, start, into)

    Files.read = noted
    try:
        yield sizes
    finally:
        Files.read = read


def optimizer_reads(directory: Path) -> dict[str, float]:
    """How often all ranks together read each byte of optimizer state, in checkpoints of ``resume`` and ``reshard``."""
    found = {}
    bf16, distributed = dataclasses.replace(Layout(), precision="bf16"), dataclasses.replace(DP2, precision="bf16")
    for name, saved, after in (
        ("dp2", "reshard/remainders/1", bf16), ("dp2-distributed", "resume/dp2-distributed-bf16", distributed),
        ("dp2-distributed to dp2", "resume/dp2-distributed-bf16", bf16),
        ("dp2-distributed to pp2", "resume/dp2-distributed", PP2), ("tp2 to pp2", "resume/tp2", PP2),
    ):
        manifest = CheckpointManifest.read(find_checkpoint(directory / saved)[0])
        with counted("optimizer_") as sizes:
            Run(after, seed=2).load(directory / saved)
        counts: list = [None] * dist.get_world_size()
        dist.all_gather_object(counts, sum(sizes))
        found[name] = sum(counts) / sum(
            piece.stored.num_bytes for piece in manifest.pieces if piece.kind not in ("weight", "random"))
    return found


def resume(directory: Path, layout: Layout) -> dict:
    """Four steps in one go, and two steps, save, load into a fresh run, two steps."""
    first = Run(layout)
    first.train(2)
    first.progress = dataclasses.replace(first.progress, best=BestSoFar(2.5, 1, 3, "these"))
    first.save(directory)
    expected_random = torch.rand(3)
    losses = first.train(2)
    second = Run(layout, seed=2).load(directory)
    is_random_equal = torch.equal(torch.rand(3), expected_random)
    at_load = dataclasses.asdict(second.progress)
    best = list(at_load.pop("best").values())
    return {
        "losses": losses,
        "resumed_losses": second.train(2),
        "different": different(first.local(), second.local()),
        "num_compared": len(first.local()),
        "is_random_equal": is_random_equal,
        "progress": at_load,
        "best": best,
    }


def reshard(directory: Path, layouts: tuple[Layout, ...]) -> list[dict]:
    """Train and save under the first layout; load and save again under each of the others in turn."""
    run = Run(layouts[0])
    run.train(2)
    expected, results = run.whole(), []
    run.save(directory / "0")
    losses = run.train(2)
    for index, layout in enumerate(layouts[1:]):
        run = Run(layout, seed=2).load(directory / str(index))
        found, notes = run.whole(), run.progress.notes
        if index + 2 < len(layouts):
            run.save(directory / str(index + 1))
        results.append({
            "different": different(expected, found),
            "num_compared": len(expected),
            "notes": notes,
            "losses": losses,
            "resumed_losses": run.train(2),
        })
    return results


def to_no_copies(directory: Path) -> dict:
    """A run that keeps no fp32 copies goes on from a checkpoint that has them."""
    run = Run(dataclasses.replace(DP2, precision="bf16", flags=(*DISTRIBUTED, *REMAINDERS)))
    run.train(2)
    run.save(directory)
    after = Run(dataclasses.replace(Layout(), precision="bf16", flags=NO_COPIES), seed=2).load(directory)
    expected, found = run.whole(), after.whole()
    kept = {name: tensor for name, tensor in expected.items() if not name.endswith(":master")}
    return {"different": different(kept, found), "notes": after.progress.notes,
            "losses": run.train(1), "resumed_losses": after.train(1)}


def refusals(directory: Path) -> dict[str, list[list[str]]]:
    """Loads that must not happen."""
    frozen = Layout(freeze=("vision",))
    run = Run(frozen)
    run.train(1)
    run.save(directory / "frozen")
    run.save(directory / "bare", save_optim=False, save_rng=False)
    found = {}
    trained = Run(Layout(), seed=2)
    found["other freezing"] = problems_of(lambda: trained.load(directory / "frozen"))
    found["no optimizer state"] = problems_of(lambda: trained.load(directory / "bare"))
    if run.mesh.rank == 0:
        (directory / "frozen" / LATEST_FILE).write_text("7")
    found["missing"] = problems_of(lambda: trained.load(directory / "frozen"))
    language = dataclasses.replace(Layout().model.language, rope_theta=5.0, layernorm_epsilon=0.5)
    other = Run(Layout(), model=dataclasses.replace(Layout().model, language=language))
    found["other model"] = problems_of(lambda: other.load(directory / "bare"))
    return found


def without_optimizer(directory: Path) -> dict:
    """--no-load-optim continues with new optimizer state, --finetune starts over; both take the weights, bf16 too."""
    saved = Run(Layout(freeze=("vision",), precision="bf16"))
    saved.train(2)
    saved.save(directory)
    weights = {name: tensor for name, tensor in saved.whole().items() if name.endswith(":weight")}
    results = {}
    for name, options in (("no_load_optim", {"load_optim": False}), ("finetune", {"finetune": True})):
        run = Run(dataclasses.replace(DP2, precision="bf16"), seed=2).load(directory, **options)
        found = run.whole()
        results[name] = {
            "different": different(weights, {name: found[name] for name in weights}),
            "stale_masters": [name for name in weights
                              if not torch.equal(found[name], found[name.replace(":weight", ":master")])],
            "moments": [name for name in found if "exp_avg" in name],
            "progress": dataclasses.astuple(run.progress)[:2],
        }
    return results


def damage(directory: Path) -> list[list[str]]:
    """One flipped bit in what one rank reads; all ranks must name it."""
    run = Run(TP2)
    folder = run.save(directory)
    if run.mesh.rank == 0:
        path = folder / "weights_tp01_pp00.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    dist.barrier()
    return problems_of(lambda: Run(TP2).load(directory))


def disk_full(directory: Path) -> dict:
    """Rank 1 may not write large files: the save fails everywhere and the old checkpoint stays."""
    run = Run(TP2)
    run.save(directory)
    run.train(1)
    if run.mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    problems = problems_of(lambda: run.save(directory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(path.name for path in directory.iterdir())
    resumed = Run(TP2).load(directory).progress
    run.save(directory)  # and now there is room
    return {"problems": problems, "left": left, "resumed": dataclasses.astuple(resumed)[:2],
            "later": dataclasses.astuple(Run(TP2).load(directory).progress)[:2]}


def retention(directory: Path) -> list[str]:
    """Four saves, one of them twice, with two kept."""
    run = Run(DP2)
    for iteration in (1, 2, 3, 4, 4):
        run.progress = state.TrainingProgress(iteration, 0)
        run.save(directory, retention=Retention(2))
    return sorted(path.name for path in directory.iterdir())


def from_hf(directory: Path) -> None:
    """Load the Hugging Face directories made by the test and save them untouched under two layouts."""
    for tied in (False, True):
        for name, layout in (("pp2", PP2),) if tied else (("tp2", TP2),):
            layout = dataclasses.replace(layout, tied=tied)
            run = Run(layout, model=converted_model(layout))
            source = directory / ("hf-tied" if tied else "hf")
            fill(run.setup.stage, run.setup.stage.weights, open_to_train(source, run.config), run.mesh)
            run.save(directory / f"{name}{'-tied' if tied else ''}")


def random_weights() -> dict[str, list[str]]:
    """Which random weights differ from those of another layout."""
    expected = {name: tensor for name, tensor in Run(PP2).whole().items() if name.endswith(":weight")}
    found = {}
    for name, run in (("tp2", Run(TP2)), ("dp2", Run(Layout())), ("seed", Run(TP2, seed=2))):
        found[name] = different(expected, {key: value for key, value in run.whole().items() if key in expected})
    return found


def converted_model(layout: Layout) -> ModelConfig:
    """The model of ``layout`` with transformers' default where its files say nothing."""
    vision = dataclasses.replace(layout.model.vision, tokens_per_second=4)
    return dataclasses.replace(layout.model, vision=vision)


def killed(directory: Path) -> None:
    """Rank 1 dies while it writes its part of the second checkpoint, which both ranks divide."""
    run = Run(Layout(flags=WEIGHT_SHARDS))
    run.save(directory)
    run.train(1)
    if run.mesh.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends the process in the middle of the file
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    run.save(directory)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=parallel.timedelta(minutes=2))
    results = {
        "resume": {name: resume(directory / "resume" / name, SAME_LAYOUT[name])
                   for name in sorted(SAME_LAYOUT, key=lambda name: str(mesh_key(SAME_LAYOUT[name])))},
        "reshard": {name: reshard(directory / "reshard" / name, layouts) for name, layouts in CHAINS.items()},
        "to_no_copies": to_no_copies(directory / "to_no_copies"),
        "refusals": refusals(directory / "refusals"),
        "without_optimizer": without_optimizer(directory / "without_optimizer"),
        "retention": retention(directory / "retention"),
        "background": {name: in_background(directory / "background" / name, SAME_LAYOUT[name])
                       for name in ("dp2-distributed-overlap", "tp2-bf16", "pp2-tied")},
        "background_fails": background_fails(directory / "background_fails", TP2),
        "damage": damage(directory / "damage"),
        "disk_full": disk_full(directory / "disk_full"),
        "random_weights": random_weights(),
        "optimizer_reads": optimizer_reads(directory),
    }
    from_hf(directory)
    if dist.get_rank() == 0:
        (directory / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    dist.barrier()
    killed(directory / "killed")
    os._exit(3)  # not reached


if __name__ == "__main__":
    main(Path(sys.argv[1]))
