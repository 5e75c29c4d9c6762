"""Saves in the background on two ranks; a part of ``state_worker.py``."""

import resource
import time
from dataclasses import replace
from pathlib import Path

from mm.checkpoint import directories as files
from mm.checkpoint.training_files import ALL_KEPT
from mm.run.checkpoint.save import BackgroundSaves, BegunSave
from tests.parallel.state_run import DEVICE, Layout, Run, different, problems_of


def in_background(directory: Path, layout: Layout) -> dict:
    """Two saves share one copy and are written while training goes on; then as many that wait, of the same state."""
    run, saves = Run(layout), BackgroundSaves(DEVICE)
    run.train(1)
    run.save(directory / "waits")
    for name in ("first", "second"):
        begun = BegunSave.begin(directory / name, run.progress, run.setup, {"seed": 1})
        saves.begin(begun, ALL_KEPT, run.mesh)
    memory_bytes = saves.copy_bytes
    before = run.local()
    run.train(1)
    changed = different(before, run.local())
    visible = [name for name in ("first", "second") if (directory / name / files.iteration_name(1)).exists()]
    saves.commit(run.mesh)
    assert not saves.is_writing and saves.iteration is None
    later = BegunSave.begin(directory / "first", run.progress, run.setup, {"seed": 1})
    saves.begin(later, ALL_KEPT, run.mesh)
    saves.commit(run.mesh)
    return {"num_changed": len(changed), "visible": visible, "memory_bytes": memory_bytes,
            "memory_bytes_later": saves.copy_bytes}


def background_fails(directory: Path, layout: Layout) -> dict:
    """Rank 1 may not write large files during the first of two saves: its commit fails everywhere, the second's not."""
    run, saves = Run(layout), BackgroundSaves(DEVICE)
    run.save(directory)
    run.train(1)
    if run.mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    saves.begin(BegunSave.begin(directory, run.progress, run.setup, {}), ALL_KEPT, run.mesh)
    run.train(1)
    while saves.is_writing:
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    progress = replace(run.progress, iteration=1)
    saves.begin(BegunSave.begin(directory / "best", progress, run.setup, {}), ALL_KEPT, run.mesh)
    saved = list[Path]()
    problems = problems_of(lambda: saves.commit(run.mesh, saved.append))
    return {"problems": problems, "left": sorted(path.name for path in directory.iterdir()),
            "saved": [str(path.relative_to(directory)) for path in saved], "is_pending": saves.iteration is not None}
