"""A conversion killed at any point leaves nothing that looks complete, and the same command completes it."""

import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.verify import verify_directory
from mm.checkpoint import convert
from mm.checkpoint.convert import Conversion
from mm.checkpoint.directories import MEGATRON_MODES, unfinished
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage, Structure
from mm.errors import UserError
from tests.files import flip
from tests.killed import run_killed
from tests.mm_convert.models import SmallModel, files

LAYOUT = Layout(((1, 1, 0),), ((0, 1, 2),), 2)
KINDS = [Storage(), Storage(Format.TORCH, Structure.CANONICAL)]
CALLS = ("pwrite", "fsync", "rename", "open", "mkdir", "unlink", "rmdir")
"""System calls that change the disk; the process is killed just before one of them."""


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "hf"
    SmallModel(2).save(directory)
    return directory


@pytest.fixture(scope="module")
def expected(hf, tmp_path_factory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("whole") / "mm"
    convert.hf_to_mm(hf, target, LAYOUT).run(num_workers=1)
    return files(target)


def run_and_die(run: Callable[[], None], after: int) -> bool:
    """As ``run_killed``, before the system call number ``after`` from 0 on."""
    return run_killed(run, after + 1, CALLS)


def num_calls(hf: Path, folder: Path, kind: Storage = KINDS[0]) -> int:
    """Number of system calls in a full run."""
    with pytest.MonkeyPatch.context() as patch:
        calls = Counter[str]()

        def counting(name: str, call: Callable[..., object]) -> Callable[..., object]:
            def counted(*args, **kwargs):
                calls[name] += 1
                return call(*args, **kwargs)
            return counted

        for name in CALLS:
            patch.setattr(os, name, counting(name, getattr(os, name)))
        convert.hf_to_mm(hf, folder / "count", LAYOUT, kind).run(num_workers=1)
    return calls.total()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_killed_at_random_moments(kind, hf, tmp_path):
    convert.hf_to_mm(hf, tmp_path / "whole" / "mm", LAYOUT, kind).run(num_workers=1)
    expected = files(tmp_path / "whole" / "mm")
    moments, total = random.Random(0), num_calls(hf, tmp_path / "count", kind)
    num_deaths = 0
    for attempt in range(10):
        target = tmp_path / str(attempt) / "mm"
        conversion = convert.hf_to_mm(hf, target, LAYOUT, kind)
        while run_and_die(lambda conversion=conversion: conversion.run(num_workers=1), moments.randrange(total)):
            num_deaths += 1
            is_whole = target.exists() and files(target) == expected
            assert is_whole or not target.exists()
        assert files(target) == expected
        verify_directory(target, str(hf), None, 1)
        assert list(target.parent.iterdir()) == [target]
    assert num_deaths >= 10


def test_a_finished_file_that_has_changed_since_is_written_again(hf, expected, tmp_path):
    target, moment, finished = tmp_path / "mm", 0, list[Path]()
    while not finished:
        moment += 5
        assert run_and_die(lambda: convert.hf_to_mm(hf, target, LAYOUT).run(num_workers=1), moment)
        finished = sorted((tmp_path / ".mm.mm-convert").rglob("*.safetensors"))
    flip(finished[0], -1)
    convert.hf_to_mm(hf, target, LAYOUT).run(num_workers=1)
    assert files(target) == expected


def test_killed_at_each_of_the_last_steps(hf, expected, tmp_path):
    """Replacing an older target, from the last weight file on: the old or the new target exists, or a rerun fixes
    it."""
    older = Layout(((2,),), ((3,),), 1)

    def over_an_older_one(name: str) -> Conversion:
        target = tmp_path / name / "mm"
        convert.hf_to_mm(hf, target, older).run(num_workers=1)
        return convert.hf_to_mm(hf, target, LAYOUT)

    first = moment = num_calls(hf, tmp_path) - 30
    has_died = True
    while has_died:
        conversion = over_an_older_one(str(moment))
        before = files(conversion.target)
        has_died = run_and_die(lambda conversion=conversion: conversion.run(num_workers=1, overwrite=True), moment)
        if has_died:
            found = files(conversion.target) if conversion.target.exists() else None
            assert found in (None, before, expected)
            conversion.run(num_workers=1, overwrite=True)
        assert files(conversion.target) == expected
        assert list(conversion.target.parent.iterdir()) == [conversion.target]
        moment += 1
    assert 30 <= moment - 1 - first < 60


def test_finished_files_are_kept(hf, expected, tmp_path, capsys):
    target = tmp_path / "mm"
    conversion = convert.hf_to_mm(hf, target, LAYOUT)
    assert run_and_die(lambda: conversion.run(num_workers=1), num_calls(hf, tmp_path) - 20)
    finished = {path: path.stat().st_ino for path in (tmp_path / ".mm.mm-convert").rglob("*.safetensors")}
    assert finished
    conversion.run(num_workers=1)
    assert f"note: an earlier run finished {len(finished)} of 6 files" in capsys.readouterr().out
    assert all((target / path.relative_to(tmp_path / ".mm.mm-convert")).stat().st_ino == inode
               for path, inode in finished.items())
    assert files(target) == expected


def test_another_conversion_starts_over(hf, tmp_path):
    target = tmp_path / "mm"
    conversion = convert.hf_to_mm(hf, target, LAYOUT)
    assert run_and_die(lambda: conversion.run(num_workers=1), num_calls(hf, tmp_path / "count") // 2)
    other = Layout(((2,),), ((3,),), 1)
    convert.hf_to_mm(hf, target, other).run(num_workers=1)
    convert.hf_to_mm(hf, tmp_path / "direct", other).run(num_workers=1)
    assert files(target) == files(tmp_path / "direct")


def test_two_at_the_same_time(hf, tmp_path):
    conversion = convert.hf_to_mm(hf, tmp_path / "mm", LAYOUT)
    with unfinished(tmp_path / "mm", "another", MEGATRON_MODES), pytest.raises(UserError, match="Another mm-convert"):
        conversion.run(num_workers=1)
    conversion.run(num_workers=1)


def test_a_conversion_resumes_after_a_full_disk(hf, expected, tmp_path):
    """The child's file size limit is below the largest file."""
    conversion = convert.hf_to_mm(hf, tmp_path / "mm", LAYOUT)
    sizes = sorted(file.num_bytes for file in conversion.files)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-1] - 1, sizes[-1] - 1))
        status = 1
        try:
            conversion.run(num_workers=1)
        except UserError as error:
            status = 3 if "the same command again" in str(error) else 4
        finally:
            os._exit(status)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 3
    assert not (tmp_path / "mm").exists()
    conversion.run(num_workers=1)
    assert files(tmp_path / "mm") == expected
