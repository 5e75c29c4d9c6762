"""The launcher of the scripts: it ends with its ranks, whatever they do, and its exit status says how."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.files import ROOT
from tests.launch import free_port, warm_python

STOPPED_RANK = """#!/bin/sh
if [ "$RANK" = 1 ]; then touch stopped; kill -STOP $$; fi
while [ ! -e stopped ]; do sleep 0.1; done
sleep 1
exit 3
"""


def test_a_stopped_rank_gets_no_time_to_save(tmp_path: Path) -> None:
    """It hears no signal, also none that tells it that another rank has failed; ranks have 10 minutes to save."""
    (tmp_path / "rank.sh").write_text(STOPPED_RANK)
    (tmp_path / "rank.sh").chmod(0o755)
    command = [sys.executable, "-m", "mm.launch", "--nproc_per_node", "2", "--master_addr", "localhost",
               "--master_port", str(free_port()), "--no_python", "./rank.sh"]  # fmt: skip
    with (tmp_path / "said").open("w") as said:
        launcher = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=said,
                                    stderr=said, start_new_session=True)  # fmt: skip
        try:
            assert launcher.wait(300) == 1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    text = (tmp_path / "said").read_text()
    assert "exitcode  : 3 " in text and "exitcode  : -9 " in text, text


FAILING_RANK = """
import json, os, pathlib, sys, time

report = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":  # reports the error first, and ends late
    file = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    message = {"message": "no room", "extraInfo": {"timestamp": str(int(time.time()) - 60)}}
    file.write_text(json.dumps({"message": message}))
    report.touch()
    time.sleep(60)
while not report.exists():
    time.sleep(0.01)
sys.exit(2)
"""


def test_a_failure_is_no_stop_though_torchrun_ends_the_other_ranks_by_sigterm(tmp_path: Path) -> None:
    """And the folder where ranks report errors is removed."""
    (tmp_path / "rank.py").write_text(FAILING_RANK)
    words = [warm_python(), "-m", "mm.launch", "--nproc_per_node", "2", "--master_addr", "localhost", "--master_port",
             str(free_port()), tmp_path / "rank.py", tmp_path / "report"]  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1 and "exitcode  : -15" in done.stderr and "no room" in done.stderr, done.stderr
    reported = re.search(r"error_file: (\S+/torchelastic_\w+)/", done.stderr)
    assert reported is not None and not Path(reported[1]).exists()
