"""Launchers for several machines: what each machine is given, and how signals, mistakes and lost connections end it."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.files import ROOT
from tests.launch import warm_python

CLUSTER = ROOT / "examples" / "cluster"
REPORT = """\
echo "node $NODE_RANK of $NNODES, master $MASTER_ADDR, TP ${TP:-}, args:$(printf ' <%s>' "$@")"
"""
WAITING = """\
trap 'echo saved; exit 143' TERM
touch "$FOLDER/began.$NODE_RANK"
[[ $NODE_RANK != ${MISTAKE:-none} ]] || exit 2
while true; do sleep 0.05; done
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)
    return path


def ssh_command(folder: Path, text: str, *words: str) -> tuple[list[str], dict[str, str]]:
    """``ssh.sh`` on two machines, which are this one: in place of ssh a shell runs the command."""
    (folder / "hosts").write_text("# two\nfirst 8\n\nsecond\n")
    script = executable(folder / "a script.sh", text)
    shell = executable(folder / "shell", '[[ $1 == first || $1 == second ]] && exec bash -c "$2"\n')
    environment = {**os.environ, "SSH": str(shell), "FOLDER": str(folder)}
    return ["bash", str(CLUSTER / "ssh.sh"), str(folder / "hosts"), "TP=2", str(script), *words], environment


def until(folder: Path, *names: str) -> None:
    end = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < end, f"{names} did not appear"
        time.sleep(0.02)


def test_ssh_gives_each_machine_its_place_and_every_word(tmp_path: Path) -> None:
    command, environment = ssh_command(tmp_path, REPORT, "--dry-run", "a b", "$HOME'\"")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == [
        f"[node {rank}] node {rank} of 2, master first, TP 2, args: <--dry-run> <a b> <$HOME'\">" for rank in (0, 1)]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_lets_every_machine_save(tmp_path: Path, sent: int) -> None:
    """With SIGKILL the launcher is gone at once, and the end of its connections ends the scripts."""
    command, environment = ssh_command(tmp_path, WAITING.replace("echo saved", 'touch "$FOLDER/saved.$NODE_RANK"'))
    with subprocess.Popen(command, env=environment) as launched:
        until(tmp_path, "began.0", "began.1")
        launched.send_signal(sent)
        assert launched.wait(60) == (-9 if sent == signal.SIGKILL else 143)
    until(tmp_path, "saved.0", "saved.1")


def test_a_mistake_on_one_machine_ends_all(tmp_path: Path) -> None:
    command, environment = ssh_command(tmp_path, WAITING)
    done = subprocess.run(command, env={**environment, "MISTAKE": "1"}, capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.returncode == 143 and done.stdout == "[node 0] saved\n"


def slurm(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``slurm.sh`` with stand-ins for Slurm's commands: two tasks, one after another.

    The list of nodes is longer than a pipe holds, so whoever stops reading it ends its writer.
    """
    folder.mkdir(exist_ok=True)
    executable(folder / "scontrol", '[[ "$*" == "show hostnames n[1-20000]" ]] && printf "n%d\\n" {1..20000}\n')
    executable(folder / "srun", '[[ $1 == --ntasks-per-node=1 ]] || exit 9\nshift\n'
                                'for id in 0 1; do SLURM_NODEID=$id "$@" || exit; done\n')
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_NNODES": "2",
                   "SLURM_JOB_NODELIST": "n[1-20000]", "SLURM_JOB_ID": "41234", "PYTHON": str(warm_python())}
    return subprocess.run(["bash", str(CLUSTER / "slurm.sh"), *words], cwd=ROOT, env=environment, capture_output=True,
                          text=True, check=False)


def test_slurm_gives_each_machine_its_place(tmp_path: Path) -> None:
    script = executable(tmp_path / "script.sh", REPORT + 'echo "port $MASTER_PORT"\n')
    done = slurm(tmp_path / "bin", str(script), "a b")
    assert done.stdout.splitlines() == [
        line for rank in (0, 1)
        for line in (f"node {rank} of 2, master n1, TP , args: <a b>", "port 21234")]
    assert slurm(tmp_path / "bin").returncode == 2


def test_volcano_gives_each_machine_its_place(tmp_path: Path) -> None:
    job: Any = YAML(typ="safe", pure=True).load((CLUSTER / "volcano.yaml").read_text())
    (task,) = job["spec"]["tasks"]
    (container,) = task["template"]["spec"]["containers"]
    assert job["spec"]["minAvailable"] == task["replicas"] and {"env", "svc"} == set(job["spec"]["plugins"])
    volumes = {one["name"] for one in task["template"]["spec"]["volumes"]}
    assert volumes == {one["name"] for one in container["volumeMounts"]}
    given = {one["name"]: one["value"] for one in container["env"]}
    assert (ROOT / given["SCRIPT"]).exists()
    script = executable(tmp_path / "script.sh", REPORT)
    name = task["name"].upper()
    environment = {**os.environ, **given, "SCRIPT": str(script), f"VC_{name}_NUM": "2", "VC_TASK_INDEX": "1",
                   f"VC_{name}_HOSTS": "job-worker-0.job,job-worker-1.job"}
    done = subprocess.run([*container["command"], *container["args"]], env=environment, capture_output=True, text=True,
                          check=True)
    assert done.stdout == "node 1 of 2, master job-worker-0.job, TP , args: <>\n"
