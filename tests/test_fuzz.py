"""Damaged files of every kind lead to data or to a message: a small share of ``python -m benchmarks.fuzz``."""

import json
import subprocess
from pathlib import Path

from tests.files import ROOT
from tests.launch import warm_python

NUM_MUTATIONS = 600


def test_damaged_files_of_every_kind_are_accepted_or_refused(tmp_path: Path) -> None:
    """The driver itself counts a traceback, a hang, a crash, much memory and a write outside as findings."""
    words = ["--mutations", str(NUM_MUTATIONS), "--seed", "7", "--output", str(tmp_path / "found.json")]
    done = subprocess.run([str(warm_python()), "-m", "benchmarks.fuzz", *words], cwd=ROOT, capture_output=True,
                          text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads((tmp_path / "found.json").read_text())["kinds"]
    assert abs(sum(one["accepted"] + one["refused"] for one in found.values()) - NUM_MUTATIONS) <= len(found)
    assert sum(one["accepted"] for one in found.values()) > 50 and sum(one["refused"] for one in found.values()) > 50


def test_what_a_command_must_not_do_is_found(tmp_path: Path) -> None:
    """Each reader below does one of them."""
    program = """
import os, sys, time
from pathlib import Path
from benchmarks.fuzz import driver
from benchmarks.fuzz.kind import Kind
from mm.errors import UserError

driver.MOST_SECONDS, driver.LATEST_SECONDS, driver.MOST_BYTES = 0.5, 3.0, 1 << 26

def changed(content, rng): return b"changed"
def fails(): raise KeyError("x")
def hangs(): time.sleep(1000)
def computes():
    while True: pass
def crashes(): os.kill(os.getpid(), 11)
def takes(): b"x" * (driver.MOST_BYTES + (1 << 20))
def writes(): Path("../outside/made").write_text("x")
def refuses(): raise UserError("no name")
def names(): raise UserError("file is damaged")

for number, bad in enumerate((fails, hangs, computes, crashes, takes, writes, refuses, names)):
    def write(original, beside):
        (original / "file").write_text("content")
        return lambda: Path("file").read_text() == "content" or bad()
    kind = Kind(bad.__name__, write, {"file": changed}, damages_folder=False, words=("x",))
    found = driver.run(kind, Path(sys.argv[1]) / bad.__name__, range(3, 4), 0)
    print(bad.__name__, *(one["outcome"] for one in found.findings), found.refused, sep="|")
"""
    done = subprocess.run([str(warm_python()), "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
                          timeout=300, check=False)
    assert done.stdout.splitlines() == [
        "fails|traceback|0", "hangs|hang|0", "computes|hang|0", "crashes|ended with -11|0", "takes|memory|0",
        "writes|write outside of the target|0", "refuses|message without the file|0", "names|1"], done.stderr
