"""Links, and permissions of written files and directories; test_interrupted.py tests atomicity."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mm.conversion import convert
from mm.conversion.convert import Options
from mm.errors import UserError
from mm.formats.atomic import PLAIN_MODES, Output
from mm.formats.layout import Layout
from mm.formats.safetensors import safetensors_file
from tests.checkpoint.models import SmallModel

LEFT = (".hf.mm-convert", ".hf.mm-convert.journal", ".hf.mm-convert.old")
ONE_WORKER = Options(num_workers=1)


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
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", Layout(((2, 0),), ((1, 2),), 2)).run(ONE_WORKER)
    written = list((tmp_path / "mm").rglob("*"))
    folders = [tmp_path / "mm", *(path for path in written if path.is_dir())]
    assert len(folders) == 6 and modes(folders) == {0o750 & ~umask}
    assert modes([path for path in written if path.suffix == ".safetensors"]) == {0o640 & ~umask}

    convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back").run(ONE_WORKER)
    assert modes([tmp_path / "back"]) == {0o777 & ~umask}
    files = list((tmp_path / "back").iterdir())
    assert len(files) == 5 and modes(files) == {0o666 & ~umask}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_link_under_a_temporary_name_is_not_followed(tmp_path, name, is_folder):
    SmallModel(2).save(tmp_path / "from")
    convert.hf_to_mm(tmp_path / "from", tmp_path / "mm", Layout(((2,),), ((3,),), 1)).run(ONE_WORKER)
    precious = tmp_path / "precious"
    if is_folder:
        precious.mkdir()
    else:
        precious.write_text("kept")
    (tmp_path / name).symlink_to(precious)
    with pytest.raises(UserError, match=rf"{name}: is a link, which mm-convert never makes; remove it"):
        convert.mm_to_hf(tmp_path / "mm", tmp_path / "from", tmp_path / "hf").run(ONE_WORKER)
    assert list(precious.iterdir()) == [] if is_folder else precious.read_text() == "kept"
    assert not (tmp_path / "hf").exists()


def test_a_pipe_in_place_of_the_journal_is_refused_at_once(tmp_path):
    (path,) = (tmp_path / name for name in LEFT if name.endswith(".journal"))
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        Output.begin(tmp_path / "hf", "0", PLAIN_MODES)


@pytest.mark.parametrize("line", [b"{", b"[]", b"null", b'{"file": []}', b'{"file": [], "crc32": {}}',
                                  b'{"file": "a", "crc32": 1}', b"\xff", b"[" * 200_000], ids=lambda line: line[:12])
def test_a_damaged_journal_line_counts_as_not_done(tmp_path, line):
    begun = Output.begin(tmp_path / "hf", "this conversion", PLAIN_MODES)
    file = safetensors_file("one.safetensors", [("weight", torch.float32, (2,))])
    for one in (file, replace(file, name="two.safetensors")):
        begun.create(one)
        begun.finish(one, {"weight": 0})
    begun.close()
    journal = tmp_path / ".hf.mm-convert.journal"
    lines = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join([lines[0], line, lines[2]]) + b"\n")
    resumed = Output.begin(tmp_path / "hf", "this conversion", PLAIN_MODES)
    assert resumed.finished == {"two.safetensors": {"weight": 0}}
    resumed.close()
