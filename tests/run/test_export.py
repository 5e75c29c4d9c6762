"""Weights that a run writes only for an export: under a name of their own, and gone afterwards."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mm.checkpoint.convert import check_target
from mm.checkpoint.source import Kind
from mm.errors import AgreedError, UserError
from mm.lock import Claim
from tests.checkpoint.test_training_manifest import write_small


@pytest.mark.parametrize("save", [None, "save", "hf.checkpoint"])
@pytest.mark.parametrize("end", ["", "/"])
@pytest.mark.parametrize("name", ["export_hf", "export_merged_hf"])
def test_a_failed_export_removes_its_temporary_checkpoint(
    one_rank: Any, tmp_path: Path, name: str, end: str, save: str | None
) -> None:  # fmt: skip
    """And nothing else: neither the target, which must stay empty, nor checkpoints, whatever their directory is called.
    """
    from mm.parallel.activity import Journal
    from mm.run.checkpoint.disks import Disks
    from mm.run.checkpoint.save import Saver

    class Failing(Saver):
        def __init__(self) -> None:
            targets = {"export_hf": None, "export_merged_hf": None, name: f"{tmp_path / 'hf'}{end}"}
            args = SimpleNamespace(**targets, async_save=False, save=save and str(tmp_path / save))
            args.check_weights_interval = None
            stage, run = SimpleNamespace(journal=Journal()), SimpleNamespace(args=args)
            setup: Any = SimpleNamespace(mesh=one_rank, stage=stage)
            super().__init__(run, setup, Claim(), print, lambda _: nullcontext(), Disks.one(one_rank), 3, None)
            self.seen: list[Path] = []

        def _begin(self, directory: Path, *_: Any, **__: Any) -> Any:
            write_small(directory, 3)
            return SimpleNamespace(finish=lambda _: directory / "iter_0000003")

        def _convert(self, source: Path, target: str, *_: Any) -> None:
            check_target(Path(target).resolve(), num_bytes=0)
            assert source.is_dir()
            self.seen.append(source.parent)
            raise UserError("the disk is full")

    for folder in ("hf.checkpoint", "save"):
        write_small(tmp_path / folder, 1, run_id="another")
    before, failing = sorted(tmp_path.rglob("*")), Failing()
    for _ in range(2):
        with pytest.raises(AgreedError, match="the disk is full"):
            failing.export(SimpleNamespace(iteration=3, base=None), True)  # type: ignore[arg-type]
    assert sorted(tmp_path.rglob("*")) == before and len({*failing.seen}) == 2
    assert all(one.parent == tmp_path / (save or "") for one in failing.seen)


@pytest.mark.parametrize(("precision", "is_used"), [("fp32", True), ("bf16", False)])
def test_an_export_without_steps_takes_the_checkpoint_only_in_the_dtype_of_the_run(
    precision: str, is_used: bool
) -> None:
    """Else the weights, which were loaded in the run's dtype, are saved for the export."""
    from mm.run.sources import Sources
    from mm.run.start import exportable

    view = SimpleNamespace(stored=SimpleNamespace(dtype=torch.float32))
    trained: Any = SimpleNamespace(kind=Kind.TRAINING, path=Path("save/iter_0000003"), views=(view, view))
    run: Any = SimpleNamespace(args=SimpleNamespace(load="save", precision=precision),
                               model=SimpleNamespace(lora=SimpleNamespace(is_on=False)))
    assert exportable(run, Sources(trained)) == (trained.path if is_used else None)
