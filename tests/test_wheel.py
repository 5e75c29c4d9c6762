"""The wheel works without the source tree: built, installed into an empty environment, and its commands run there."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

import pytest

from mm.requirements import DISTRIBUTION
from mm.version import VERSION
from tests.files import ROOT


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with the packages of this one, but not the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files beside the source
    for name in ("mm", "checkpoint", "demo"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
        "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", str(folder / "env"))
    run(str(folder / "env/bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    (packages,) = folder.glob("env/lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    return folder


def run(*command: str, cwd: Path = Path("/")) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_command_runs(environment: Path) -> None:
    programs = sorted((environment / "env/bin").glob("mm-*"))
    assert [one.name for one in programs] == sorted(one.name for one in distribution(DISTRIBUTION).entry_points)
    assert all(VERSION in run(str(one), "--version") for one in programs)
    python = str(environment / "env/bin/python")
    found = run(python, "-c", "import mm, checkpoint; print(mm.__path__, checkpoint.__path__)")
    assert found.count(str(environment / "env/lib")) == 2 and str(ROOT) not in found


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
