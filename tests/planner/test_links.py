"""What ``mm-plan calibrate`` measures between ranks, also where some of them have nothing to do; and how ranks end."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.files import ROOT
from tests.launch import run_ranks
from tests.planner.links_worker import SECONDS


def test_ranks_that_take_no_part_do_not_count(tmp_path: Path) -> None:
    """The last of three ranks is in no pair."""
    run_ranks(3, "tests.planner.links_worker", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sums"].keys() == {"2", "3"}
    assert min(found["message"], *found["sums"].values()) >= 0.95 * SECONDS, found


def test_a_rank_ends_with_its_launcher() -> None:
    program = ("import threading; from mm.planner.rank import main\n"
               "print(main(['out', '1', '1']), [one.name for one in threading.enumerate()], flush=True)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"TORCHELASTIC_RUN_ID": "a run", "RANK": "0"})  # fmt: skip
    assert done.stdout.startswith("2 ") and "launcher's end" in done.stdout, done.stdout + done.stderr
