"""Every command of README.md does what the text says, as far as a machine without accelerators can tell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from demo import digits
from demo import run as demo

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.strip()]
SIZE_SCRIPT = re.compile(r"bash examples/qwen2\.5vl/finetune_qwen2_5_vl_(3b|7b|32b|72b)\.sh\b")


def run(command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip


def runnable(command: str) -> str:
    """The command as it can run here: with this Python, and planned instead of carried out where that takes long."""
    if command.startswith("make "):
        return command.replace("make ", "make -n ", 1)
    if SIZE_SCRIPT.search(command):
        return command if command.endswith("--dry-run") else f"{command} --dry-run"
    if command.startswith(".venv/bin/python "):
        return command.replace(".venv/bin/python", f"'{sys.executable}'", 1)
    raise AssertionError(f"README.md has a command that this test cannot run: {command}")


def test_there_are_commands():
    assert {"make demo", "make test"} <= set(COMMANDS)
    assert any(SIZE_SCRIPT.search(command) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command: str):
    done = run(runnable(command))
    assert done.returncode == 0, done.stdout + done.stderr
    if SIZE_SCRIPT.search(command):
        assert "stage" in done.stdout


@pytest.mark.parametrize(("target", "module"), [("demo", "demo.run"), ("test", "pytest"), ("lint", "ruff")])
def test_make_sets_up_its_own_environment_first(target: str, module: str, tmp_path: Path):
    done = run(f"make -n {target} VENV='{tmp_path}/venv'")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    order = ("-m venv", "torch==2.13.0", "--editable", f"-m {module}")
    places = [next(index for index, line in enumerate(lines) if part in line) for part in order]
    assert places == sorted(places), done.stdout


def test_make_sets_up_again_only_when_setup_py_changes(tmp_path: Path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    setup, stamp = tmp_path / "setup.py", tmp_path / ".venv/.ready"
    stamp.parent.mkdir()
    for path, time in ((setup, 1000), (stamp, 2000)):
        path.touch()
        os.utime(path, (time, time))
    assert "pip" not in run(f"make -n -C '{tmp_path}' test").stdout
    os.utime(setup, (3000, 3000))
    assert "pip" in run(f"make -n -C '{tmp_path}' test").stdout


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_link_leads_somewhere(link: str):
    assert (ROOT / link).exists()


def test_the_numbers_are_the_demo_s():
    text = " ".join(README.split())
    assert f"{1797 - digits.NUM_HELD_OUT:,} scanned" in text
    assert f"answers {digits.NUM_HELD_OUT} held-out" in text
    assert f"unless {demo.MINIMUM_ACCURACY:.0%}".replace("%", " %") in text
    assert f"{demo.MAXIMUM_LOGITS_DIFFERENCE:.0e}".replace("e-0", "e-") in text
