"""The wheel works without the source tree: built, installed into an empty environment, and its commands run there."""

import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from mm.environment import DISTRIBUTION, VERSION, declared
from tests.bare import bare_environment, bare_variables, copied_source
from tests.files import ROOT

VERSIONS = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--version"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, path
"""
"""Runs programs in one process: several of them import torch."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with the packages of this one, but not the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = copied_source(folder / "source")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
        "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    python = bare_environment(folder / "env") / "bin/python"
    run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    return folder


def run(*command: str, cwd: Path = Path("/")) -> str:
    done = subprocess.run(command, cwd=cwd, env=bare_variables(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_command_runs(environment: Path) -> None:
    programs = sorted((environment / "env/bin").glob("mm-*"))
    assert [one.name for one in programs] == sorted(one.name for one in distribution(DISTRIBUTION).entry_points)
    python = str(environment / "env/bin/python")
    printed = " ".join(run(python, "-c", VERSIONS, *map(str, programs)).split())  # argparse breaks lines
    rest = rf" {re.escape(VERSION)} \(Python 3\.[^)]*, torch \d[^)]*, transformers \d[^)]*\)"
    assert re.fullmatch(" ".join(one.name.replace("-", "[-.]") + rest for one in programs), printed), printed
    found = run(python, "-c", "import mm, checkpoint; print(mm.__path__, checkpoint.__path__)")
    assert found.count(str(environment / "env/lib")) == 2 and str(ROOT) not in found
    assert "No problems" in run(python, "-c", "from mm.report import Report; print(Report('x', ()).html())")


def test_the_commands_do_their_work(environment: Path) -> None:
    """On files that they make themselves."""
    programs = environment / "env/bin"
    run(str(programs / "mm-data"), "mock", "--output", "mock", "--num-samples", "4", cwd=environment)
    assert (environment / "mock/data.jsonl").exists()
    run(str(programs / "python"), "-m", "demo.tiny_checkpoint", "hf", cwd=environment)
    run(str(programs / "mm-convert"), "Qwen2_5_VLConverter", "hf_to_mm", "--cfg.hf_config.hf_dir", "hf", "--cfg.mm_dir",
        "mm", "--cfg.parallel_config.vit_pp_layers", "[[5,3]]", "--cfg.parallel_config.llm_pp_layers", "[[0,4]]",
        "--cfg.parallel_config.tp_size", "2", cwd=environment)
    assert (environment / "mm").is_dir()
    answer = run(str(programs / "mm-generate"), "--load", "hf", "--device", "cpu", "--max-new-tokens", "2", "--prompt",
                 "What?", cwd=environment)
    assert answer.strip()
    report = run(str(programs / "mm-doctor"), "--no-trial", "--device", "cpu", "--directory", str(environment))
    assert f"imports: {len(declared())} packages" in report and " 0 fault" in report


def test_the_doctor_in_a_python_without_any_package(environment: Path) -> None:
    """It reports each of them; the other checks need the packages of the command line."""
    empty = environment / "empty"
    run(sys.executable, "-m", "venv", "--without-pip", str(empty))
    (wheel,) = environment.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", str(empty / "bin/python"), "install", "--quiet", "--no-deps",
        "--no-index", "--no-compile", str(wheel))
    done = subprocess.run([str(empty / "bin/mm-doctor"), "--directory", str(empty)], cwd="/", env=bare_variables(),
                          capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stderr, done.stderr
    for requirement in declared():
        assert f"fault    {requirement.name}: not installed" in done.stdout, done.stdout
        assert f"-m pip install '{requirement.name}'" in done.stdout
    assert "Traceback" not in done.stdout
