"""The launcher of the scripts ends with its ranks, whatever they do."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.files import ROOT
from tests.launch import free_port

RANK = """#!/bin/sh
if [ "$RANK" = 1 ]; then touch stopped; kill -STOP $$; fi
while [ ! -e stopped ]; do sleep 0.1; done
sleep 1
exit 3
"""


def test_a_stopped_rank_gets_no_time_to_save(tmp_path: Path) -> None:
    """It hears no signal, also none that tells it that another rank has failed; ranks have 10 minutes to save."""
    (tmp_path / "rank.sh").write_text(RANK)
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
