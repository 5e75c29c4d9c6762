"""docs/ascend.md names no command, flag, file, version or setting that is not there."""

import re
import shlex
import subprocess

import pytest

from mm.config.args import Arguments
from mm.config.command_line import flag_name
from mm.config.parse import fields_of
from tests.files import ROOT
from tests.launch import run_ranks, warm_python
from tests.test_examples import recorded, run_script

PAGE = ROOT / "docs" / "ascend.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
COMMON = "examples/qwen2.5vl/common.sh"
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
OF_THE_MACHINE = ("npu-smi info", "mkdir -p runs/npu", "source /usr/local/Ascend/")
SETTINGS = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", TEXT, flags=re.MULTILINE)
PATH = re.compile(r"^(?:examples|tests|mm|docs|benchmarks)/[\w./]*$|^[\w]+\.py$")


def commands(start: str) -> list[str]:
    return [command for command in COMMANDS if start in command]


def test_every_command_is_of_a_kind_that_is_checked_below():
    kinds = ("python3.11 -m venv", "-m pip install", "-m benchmarks.step", "bash examples/", *OF_THE_MACHINE)
    assert COMMANDS and [command for command in COMMANDS if not any(kind in command for kind in kinds)] == []


def test_what_is_installed_is_in_the_range_of_setup_py():
    installed = dict(re.findall(r"pip install (torch(?:-npu)?)==([\d.]+)", TEXT))
    assert installed.keys() == {"torch", "torch-npu"} and len(set(installed.values())) == 1
    number = tuple(map(int, installed["torch"].split(".")))
    for package in ("torch", "torch_npu"):
        ((lowest, above),) = re.findall(rf'"{package}>=([\d.]+)(?:a0)?,<([\d.]+)"', SETUP)
        assert tuple(map(int, lowest.split("."))) <= number < tuple(map(int, above.split(".")))
    (extra,) = re.findall(r"'\.\[(\w+)\]'", " ".join(COMMANDS))
    assert f'"{extra}": [' in SETUP


@pytest.mark.parametrize("command", commands("benchmarks.step"))
def test_the_benchmark_has_the_flags(command: str):
    words = shlex.split(command)
    assert words[:2] == [".venv/bin/python", "-m"]
    printed = run_ranks(0, *words[2:], "--help")
    assert [word for word in words if word.startswith("--") and word not in printed] == []


@pytest.mark.parametrize("command", commands("bash examples/"))
def test_the_script_runs_with_the_variables(command: str, tmp_path):
    done = subprocess.run(["bash", "-c", f"{command} --dry-run"], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={"PATH": "/usr/bin:/bin", "PYTHON": str(warm_python())})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Training  20 steps" in done.stdout
    script = re.search(r"examples/\S+", command)[0]
    sources = "".join((ROOT / path).read_text() for path in (script, COMMON))
    for name in re.findall(r"\b([A-Z_]+)=", command):
        assert f"{{{name}:-" in sources


def test_the_scripts_set_what_the_table_says(tmp_path):
    run_script(tmp_path, "32b", "--dry-run")
    found = recorded(tmp_path)
    assert SETTINGS and [(name, found.get(name)) for name, _ in SETTINGS] == SETTINGS


def test_the_table_has_every_variable_of_the_scripts():
    exported = re.findall(r"^ +export ([A-Z_]+)=", (ROOT / COMMON).read_text(), re.MULTILINE)
    assert exported and set(exported) <= {name for name, _ in SETTINGS}


def test_every_flag_exists():
    known = {flag_name(name) for name in fields_of(Arguments)}
    named = set(re.findall(r"`(--[\w-]+)", PROSE))
    assert named and named <= known


def test_every_file_exists():
    quoted = {word for word in re.findall(r"`([^`\s]+)`", PROSE) if PATH.match(word)} - {"_op_plugin_docs.py"}
    assert len(quoted) > 3 and all((ROOT / path).exists() for path in quoted)


def test_the_readme_says_that_no_npu_has_run_it():
    assert "No NPU has run it yet; [`docs/ascend.md`](docs/ascend.md)" in (ROOT / "README.md").read_text()
    assert "**No NPU has run this code yet.**" in TEXT

