"""The launcher of the scripts: it ends with its ranks, whatever they do, and its exit status says how."""

import os
import re
import subprocess
import time
from pathlib import Path

from mm.process import free_port
from tests.files import ROOT
from tests.launch import warm_python

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


WAITING_RANK = """
import pathlib, time

while not pathlib.Path("over").exists():
    time.sleep(0.1)
"""


def test_of_two_launches_with_one_port_the_later_says_so_and_the_other_goes_on(tmp_path: Path) -> None:
    """Both begin at the same time, so both have found the port free before."""
    port = free_port()
    (tmp_path / "rank.py").write_text(WAITING_RANK)
    command = [warm_python(), "-m", "mm.launch", "--nproc_per_node", "1", "--master_addr", "localhost", "--master_port",
               str(port), "rank.py"]  # fmt: skip
    launches = []
    for name in ("a", "b"):
        with (tmp_path / name).open("w") as said:
            launches.append(subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
                                             stdout=said, stderr=said))  # fmt: skip
    try:
        until = time.monotonic() + 300
        while all(one.poll() is None for one in launches) and time.monotonic() < until:
            time.sleep(0.1)
        (later,) = (number for number, one in enumerate(launches) if one.poll() is not None)
        said = (tmp_path / "ab"[later]).read_text()
        assert launches[later].returncode == 2 and "Traceback" not in said, said
        assert said.splitlines()[-1] == (
            f"error: MASTER_PORT {port} (--master_port) is in use on this machine, perhaps by another run that began "
            f"at the same time; set another one on every node of this run, such as MASTER_PORT={port + 1}")
        (tmp_path / "over").touch()
        assert launches[1 - later].wait(300) == 0
    finally:
        for one in launches:
            one.kill()
