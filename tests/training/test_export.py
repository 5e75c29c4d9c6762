"""What an export leaves behind when it fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mm.errors import AgreedError, UserError
from tests.checkpoint.formats.test_training import write_small


def test_an_export_that_fails_removes_the_checkpoint_that_it_was_made_of(one_rank: Any, tmp_path: Path) -> None:
    """A run without --save writes the weights for the export alone."""
    from mm.training.run import Trainer

    class Failing(Trainer):
        def __init__(self) -> None:
            args = SimpleNamespace(export_hf=str(tmp_path / "hf"), export_merged_hf=None, train_iters=3)
            self.run, self.mesh, self.reports = SimpleNamespace(args=args), one_rank, False  # type: ignore[assignment]
            self.progress, self.checkpoint = SimpleNamespace(iteration=3), None  # type: ignore[assignment]
            self.seen: list[bool] = []

        def _save(self, directory: str, *, weights_only: bool = False, keep_last: int | None = None) -> Path:
            write_small(Path(directory), 3)
            return Path(directory) / "iter_0000003"

        def _export(self, source: Path, target: str, is_merged: bool) -> None:
            self.seen.append(source.is_dir())
            raise UserError("the disk is full")

    failing = Failing()
    with pytest.raises(AgreedError, match="the disk is full"):
        failing.export()
    assert failing.seen == [True] and list(tmp_path.iterdir()) == []
