"""Files and names in MindSpeed-MM's layout that no converter writes are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mm.checkpoint.directories import LATEST_FILE
from mm.checkpoint.mindspeed import MindSpeedDirectory
from mm.errors import UserError


def directory(root: Path, latest: str, file: str) -> Path:
    """A directory of one file, without a manifest."""
    (root / file).parent.mkdir(parents=True)
    (root / LATEST_FILE).write_text(latest)
    save_file({"text_decoder.decoder.final_layernorm.weight": torch.zeros(1)}, root / file)
    return root


@pytest.mark.parametrize(("latest", "file", "problem"), [
    ("", "release/mp_rank_00/model.safetensors", "contains '', but .* has no such directory; write the name"),
    ("..", "release/mp_rank_00/model.safetensors", "holds no mp_rank_\\* directories"),
    ("release", "release/mp_rank_00/model3000000.safetensors", "is not a weight file"),
    ("release", "release/mp_rank_00_3000000/model.safetensors", "is not named mp_rank_TT or mp_rank_TT_PPP"),
])
def test_names_that_no_converter_writes(latest: str, file: str, problem: str, tmp_path: Path) -> None:
    """The numbers would otherwise count millions of virtual chunks or stages."""
    with pytest.raises(UserError, match=problem):
        MindSpeedDirectory.open(directory(tmp_path, latest, file))
