"""The whole program on an environment broken on purpose: it finds each breakage, and names its cure."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.files import ROOT

BROKEN: Mapping[str, tuple[str, str, str]] = {
    "GLOO_SOCKET_IFNAME": ("fault", "export GLOO_SOCKET_IFNAME=ib7", "unset GLOO_SOCKET_IFNAME"),
    "NCCL_SOCKET_IFNAME": ("fault", "export NCCL_SOCKET_IFNAME==ib7", "unset NCCL_SOCKET_IFNAME"),
    "HCCL_CONNECT_TIMEOUT": ("fault", "export HCCL_CONNECT_TIMEOUT=20m", "export HCCL_CONNECT_TIMEOUT=1200"),
    "CUDA_VISIBLE_DEVICES": ("warning", "export CUDA_VISIBLE_DEVICES=", "unset CUDA_VISIBLE_DEVICES"),
    "OMP_NUM_THREADS": ("warning", "export OMP_NUM_THREADS=512", "export OMP_NUM_THREADS="),
    "python": ("warning", "export PYTHONOPTIMIZE=1", "unset PYTHONOPTIMIZE"),
    "TMPDIR": ("warning", "export TMPDIR={}/temporary", "mkdir -p '{}/temporary'"),
    "directory {}/checkpoints": ("fault", ":", "mkdir -p '{}/checkpoints'"),
    "package checkpoint": ("fault", "export PYTHONPATH={}/peer:$PYTHONPATH", "remove {}/peer from PYTHONPATH"),
    "megatron-core": ("warning", "export PYTHONPATH={}/Megatron-LM:$PYTHONPATH", "remove {}/Megatron-LM from"),
    "tqdm": ("fault", ":", "pip install"),
}
"""Name of a finding -> its level, the shell line that breaks something, and a part of the cure."""

def examined(folder: Path, *words: str) -> tuple[int, dict[str, list[str]]]:
    """Run ``mm-doctor words`` in a shell, after the lines that break; exit status, and level and cure by name."""
    lines = "\n".join(line.replace("{}", str(folder)) for _, line, _ in BROKEN.values())
    starts = "GLOO_", "NCCL_", "HCCL_", "CUDA_", "ASCEND_", "OMP_", "PYTHONOPTIMIZE", "TMPDIR"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(starts)}
    done = subprocess.run(
        ["bash", "-c", f"{lines}\nexec {sys.executable} -m mm.doctor.cli --device cpu \"$@\"", "bash", *words],
        cwd=folder / "here", text=True, capture_output=True, check=False, env=environment | {"PYTHONPATH": str(ROOT)})
    assert not done.stderr, done.stderr
    found = re.findall(r"^(warning|fault) +(.+?): .*\n {9}cure: (.*)$", done.stdout, re.MULTILINE)
    return done.returncode, {name: [level, cure] for level, name, cure in found}


def test_breakages_are_found_and_their_cures_named(tmp_path: Path) -> None:
    files = {"peer/checkpoint/__init__.py": "", "Megatron-LM/megatron/core/__init__.py": "",
             "here/tqdm.py": "import no_such_module\n"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    status, found = examined(tmp_path, "--no-trial", f"--directory={tmp_path}/checkpoints")
    assert status == 1
    for name, (expected, _, cure) in BROKEN.items():
        level, printed = found[name.replace("{}", str(tmp_path))]
        assert level == expected and cure.replace("{}", str(tmp_path)) in printed, (name, printed)
