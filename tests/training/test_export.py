"""A failed export cleans up."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mm.config.command_line import flag_name
from mm.conversion.convert import check_target
from mm.errors import AgreedError, UserError
from mm.lock import Claim
from tests.formats.test_training import write_small


@pytest.mark.parametrize("end", ["", "/"])
@pytest.mark.parametrize("name", ["export_hf", "export_merged_hf"])
def test_a_failed_export_removes_its_temporary_checkpoint(one_rank: Any, tmp_path: Path, name: str, end: str) -> None:
    """A run without --save writes its weights only for the export, beside the target, which must stay empty."""
    from mm.training.saver import Saver

    class Failing(Saver):
        def __init__(self) -> None:
            targets = {"export_hf": None, "export_merged_hf": None, name: f"{tmp_path / 'hf'}{end}"}
            args = SimpleNamespace(**targets, async_save=False)
            run, setup = SimpleNamespace(args=args), SimpleNamespace(mesh=one_rank)
            super().__init__(run, setup, Claim(), print, None, None, lambda _: nullcontext())  # type: ignore[arg-type]
            self.seen: list[bool] = []

        def _save_weights(self, directory: str, flag: str, *others: Any) -> Path:
            assert flag == flag_name(name)
            write_small(Path(directory), 3)
            return Path(directory) / "iter_0000003"

        def _export(self, source: Path, target: str, is_merged: bool) -> None:
            check_target(Path(target).resolve(), num_bytes=0)
            self.seen.append(source.is_dir())
            raise UserError("the disk is full")

    failing = Failing()
    with pytest.raises(AgreedError, match="the disk is full"):
        failing.export(SimpleNamespace(iteration=3), True)  # type: ignore[arg-type]
    assert failing.seen == [True] and list(tmp_path.iterdir()) == []
