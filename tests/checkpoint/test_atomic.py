"""Permissions of written files and directories; test_interrupted.py tests atomicity."""

import os
from pathlib import Path

import pytest

from mm.checkpoint import convert
from mm.checkpoint.mindspeed_layout import Layout
from mm.errors import UserError
from tests.mm_convert.models import SmallModel


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(paths: list[Path]) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in paths}


def test_permissions_of_each_kind_of_target(umask, tmp_path):
    """Megatron's checkpoints are not readable by others; Hugging Face directories have default permissions."""
    SmallModel(2).save(tmp_path / "hf")
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", Layout(((2, 0),), ((1, 2),), 2)).run(num_workers=1)
    written = list((tmp_path / "mm").rglob("*"))
    folders = [tmp_path / "mm", *(path for path in written if path.is_dir())]
    assert len(folders) == 6 and modes(folders) == {0o750 & ~umask}
    assert modes([path for path in written if path.suffix == ".safetensors"]) == {0o640 & ~umask}

    convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back").run(num_workers=1)
    assert modes([tmp_path / "back"]) == {0o777 & ~umask}
    files = list((tmp_path / "back").iterdir())
    assert len(files) == 5 and modes(files) == {0o666 & ~umask}


@pytest.mark.parametrize("name", [".hf.mm-convert", ".hf.mm-convert.lock"])
def test_a_link_under_a_temporary_name_is_not_followed(tmp_path, name):
    SmallModel(2).save(tmp_path / "from")
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / name).symlink_to(precious)
    with pytest.raises(UserError, match=rf"{name}: is a link, which mm-convert never makes; remove it"):
        convert.hf_to_mm(tmp_path / "from", tmp_path / "hf", Layout(((2,),), ((3,),), 1)).run(num_workers=1)
    assert list(precious.iterdir()) == [] and not (tmp_path / "hf").exists()
