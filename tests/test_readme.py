"""Every command of README.md and of the first pages does what the text says, as far as a machine without accelerators
can tell."""

import os
import re
import subprocess
import sys
from importlib.metadata import distribution, metadata, requires
from pathlib import Path

import pytest

from demo import digits, even_odd, golden
from demo import run as demo
from mm.device.cuda import MIN_TORCH
from tests.files import ROOT
from tests.launch import warm_python
from tests.parallel.cases import CASES

README, START, TRAIN, INSTALL, PARITY = (
    (ROOT / page).read_text(encoding="utf-8")
    for page in ("README.md", "docs/start.md", "docs/train.md", "docs/install.md", "docs/parity.md"))
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README + START + TRAIN, flags=re.DOTALL | re.MULTILINE)
COMMANDS = list(dict.fromkeys(
    line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line.strip()))
TINY = [command for command in COMMANDS if "runs/tiny" in command]
"""They build on each other, and run in the order of the text."""
TINY_SCRIPT = re.compile(r"bash examples/qwen2\.5vl/finetune_qwen2_5_vl_tiny\.sh .*runs/tiny")
SIZE_SCRIPT = re.compile(r"bash examples/qwen2\.5vl/finetune_qwen2_5_vl_(3b|7b|32b|72b)\.sh\b")
INSTALLED = {program: f"'{Path(sys.executable).with_name(program)}'" for program in ("python", "mm-convert", "mm-data")}
"""The programs of the commands, as a shell calls them."""


def warm() -> dict[str, str]:
    """``INSTALLED`` in forks of the warm process; that the console scripts are installed is shown by other commands."""
    python = f"'{warm_python()}'"
    return {"python": python, "mm-convert": f"{python} -m checkpoint.cli", "mm-data": f"{python} -m mm.data_tool.cli"}


def run(command: str, cwd: Path = ROOT, python: str = sys.executable) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": python}
    return subprocess.run(["bash", "-c", command], cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip


def runnable(command: str, programs: dict[str, str]) -> str:
    """The command as it can run here: with ``programs``, and planned instead of carried out where that takes long."""
    if command.startswith("make "):
        return command.replace("make ", "make -n ", 1)
    if TINY_SCRIPT.search(command) or command.startswith("head "):
        return command
    if SIZE_SCRIPT.search(command):
        return command if command.endswith("--dry-run") else f"{command} --dry-run"
    for program, words in programs.items():
        if command.startswith(f".venv/bin/{program} "):
            return command.replace(f".venv/bin/{program}", words, 1)
    raise AssertionError(f"this test cannot run a command of the pages: {command}")


def test_there_are_commands():
    assert {"make demo", "make test"} <= set(COMMANDS)
    assert any(SIZE_SCRIPT.search(command) for command in COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in TINY])
def test_command_runs(command: str):
    """Scripts in forks of the warm process."""
    done = run(runnable(command, INSTALLED), python=str(warm_python()))
    assert done.returncode == 0, done.stdout + done.stderr
    if SIZE_SCRIPT.search(command):
        assert "stage" in done.stdout


def test_the_tiny_model_does_what_the_text_says(tmp_path: Path):
    """All commands on the tiny model, one after the other; converted weights come back bit for bit."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    output = {}
    for command in TINY:
        done = run(runnable(command, warm()), tmp_path, str(warm_python()))
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        program = re.search(r"Converter (\w+)|tiny_checkpoint|mm-data \w+|bash|head|mm\.\w+", command)
        assert program is not None, command
        output[program[1] or program[0]] = done.stdout
    assert list(output) == [
        "mm-data mock", "tiny_checkpoint", "mm-data check", "hf_to_mm", "resplit", "mm_to_hf", "verify", "diff", "show",
        "bash", "mm.generate", "head", "mm.evaluate"]
    assert len(re.findall("validation loss at iteration", output["bash"])) == 2
    assert {path.name for path in (tmp_path / "runs/tiny/adapter").iterdir()} >= {
        "adapter_config.json", "adapter_model.safetensors"}
    assert {"scores.json", "predictions.jsonl", "report.html"} <= {
        path.name for path in (tmp_path / "runs/tiny/scores").iterdir()}
    assert "tensors match those of runs/tiny/hf" in output["verify"]
    assert "vit_pp_layers [[8, 0, 0]], llm_pp_layers [[0, 2, 2]], tp_size 1" in output["show"]
    there, back = ({path.name: path.read_bytes() for path in (tmp_path / "runs/tiny" / name).iterdir()}
                   for name in ("hf", "back"))
    assert there.keys() == back.keys() and "model.safetensors" in there
    assert there == back


def test_the_number_of_layouts_is_that_of_the_parity_test():
    assert f"under each of {len(CASES)} layouts" in PARITY and f": {len(CASES)} hand-picked layouts" in README
    assert f"every gradient, {len(CASES)} layouts, in CI" in README


@pytest.mark.parametrize(("target", "module"), [
    ("demo", "demo.run"), ("test", "pytest"), ("quick", "pytest"), ("lint", "ruff"), ("lint", "basedpyright"),
])  # fmt: skip
def test_make_sets_up_its_own_environment_first(target: str, module: str, tmp_path: Path):
    done = run(f"make -n {target} VENV='{tmp_path}/venv'")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    order = ("-m venv", "--require-hashes --requirement req", "torch==2.13.0", "--editable", f"-m {module}")
    places = [next(index for index, line in enumerate(lines) if part in line) for part in order]
    assert places == sorted(places), done.stdout


@pytest.mark.parametrize("changed", ["setup.py", "requirements.lock"])
def test_make_sets_up_again_only_when_versions_change(tmp_path: Path, changed: str):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    setup, lock, stamp = tmp_path / "setup.py", tmp_path / "requirements.lock", tmp_path / ".venv/.ready"
    stamp.parent.mkdir()
    for path, time in ((setup, 1000), (lock, 1000), (stamp, 2000)):
        path.touch()
        os.utime(path, (time, time))
    assert "pip" not in run(f"make -n -C '{tmp_path}' test").stdout
    os.utime(tmp_path / changed, (3000, 3000))
    assert "pip" in run(f"make -n -C '{tmp_path}' test").stdout


def test_make_quick_runs_tests_that_exist():
    (command,) = [line for line in run("make -n quick").stdout.splitlines() if " -m pytest " in line]
    paths = re.findall(r"tests/\S+", command)
    assert paths and all((ROOT / path).exists() for path in paths)


def test_the_numbers_are_the_demo_s():
    text = " ".join(START.split())
    assert f"{1797 - digits.NUM_HELD_OUT:,} scanned" in text
    assert f"{digits.NUM_VIDEOS} short videos" in text
    assert f"about {digits.NUM_HELD_OUT} held-out images and {digits.NUM_HELD_OUT_VIDEOS} held-out videos" in text
    assert f"- {demo.MINIMUM_ACCURACY:.0%} of the answers about images" in text
    assert f"{demo.MINIMUM_VIDEO_ACCURACY:.0%} of those about videos" in text
    assert f"scores {digits.NUM_HELD_OUT} held-out answers before and after" in text
    assert f"{demo.MINIMUM_EVEN_ODD_ACCURACY:.0%} of those about even and odd with the adapters" in text
    assert f"(at most {even_odd.MAXIMUM_ACCURACY_BEFORE:.0%} without" in text
    assert f"own to {demo.MAXIMUM_LOGITS_DIFFERENCE:.0e}".replace("e-0", "e-") in text
    assert f"losses of the first {golden.NUM_STEPS} steps" in text
    assert f"losses.json`](../demo/golden_losses.json) to {golden.of_device('cpu').tolerance:.0e}".replace(
        "e-0", "e-") in text


def test_the_versions_are_those_of_the_package():
    always = [one for one in requires("qwen2_5_vl-3d") or [] if ";" not in one]
    ranges = dict(re.findall(r"^([a-z-]+)(\S+)$", "\n".join(always), re.MULTILINE))
    assert set(ranges["torch"].split(",")) == {">=2.7.1", "<2.16"}
    assert f"| torch | 2.7.1 to 2.15; on CUDA {MIN_TORCH.major}.{MIN_TORCH.minor} to 2.15 |" in INSTALL
    assert set(ranges["megatron-core"].split(",")) == {">=0.16", "<0.20"}
    assert "| megatron-core | 0.16 to 0.19 |" in INSTALL
    assert set(ranges["transformers"].split(",")) == {">=5.20.1", "<6"}
    assert "| transformers | 5.20.1 or later, below 6 |" in INSTALL
    assert metadata("qwen2_5_vl-3d")["Requires-Python"] == ">=3.10" and "| Python | 3.10 or later |" in INSTALL


def test_the_commands_are_the_console_scripts():
    scripts = {(one.name, one.value) for one in distribution("qwen2_5_vl-3d").entry_points}
    rows = re.findall(r"^\| `(mm-\w+)` \| `([\w.]+)` \|", INSTALL, re.MULTILINE)
    assert {(name, f"{module}:main") for name, module in rows} == scripts


def test_the_extras_are_the_package_s():
    (table,) = re.findall(r"\| extra \| for \|\n.*?\n\n", INSTALL, re.DOTALL)
    named = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.strip().splitlines()))
    assert sorted(named) == sorted(metadata("qwen2_5_vl-3d").get_all("Provides-Extra") or [])
