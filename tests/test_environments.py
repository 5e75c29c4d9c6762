"""Environments in which commands must run nevertheless, or end with one line that says what to do."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.files import ROOT, json_lines
from tests.launch import warm_python
from tests.tiny_inputs import flags_of, write_data, write_inputs

SECRET = "hf_9mQ2xY7secret"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("environments"))


def run(words: list[str], packages: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command whose Python finds ``packages`` first."""
    path = os.pathsep.join((str(packages), os.environ["PYTHONPATH"]))
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=os.environ | {"PYTHONPATH": path} | variables,
                          capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["mm.train", "mm.launch"])
def test_an_extension_that_torch_cannot_load_gets_a_hint(module: str, inputs: Path, tmp_path: Path) -> None:
    """As torch_npu without CANN's environment: torch imports it by its entry point, and it misses a library."""
    described = tmp_path / "torch_npu-2.13.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Name: torch_npu\nVersion: 2.13.0\n")
    (described / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    (tmp_path / "torch_npu.py").write_text("import ctypes\nctypes.CDLL('libascendcl.so')\n")
    words = ["--check", *flags_of(inputs, "npu", 1)] if module == "mm.train" else []
    done = run([module, *words], tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr.startswith(
        "error: torch cannot load its extension torch_npu (OSError: libascendcl.so: cannot open shared object file: ")
    assert 'for Ascend: "source /usr/local/Ascend/cann/set_env.sh"' in done.stderr and done.stderr.count("\n") == 1


def test_a_run_needs_neither_torchvision_nor_a_home_and_writes_no_secret(inputs: Path, tmp_path: Path) -> None:
    """A torchvision of another device fails when it is imported; nobody, root included, can write into /proc."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms is missing')")
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.28.0\n")
    flags = flags_of(inputs, "plain", 1, "--num-workers", "0", "--load", str(inputs / "hf"), "--exit-interval", "1")
    done = run(["mm.train", *flags], tmp_path, HOME="/proc/self/none", HF_TOKEN=SECRET, WANDB_API_KEY=SECRET)
    assert done.returncode == 0, done.stderr
    written = [path for path in (inputs / "plain").rglob("*") if path.is_file()]
    assert len(written) > 4 and not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert SECRET not in done.stdout + done.stderr
    assert [row["iteration"] for row in json_lines(inputs / "plain" / "logs" / "metrics.jsonl")] == [1]


def test_a_name_on_the_hub_is_refused_and_nobody_is_asked(inputs: Path, tmp_path: Path) -> None:
    """The hub is a socket here, and transformers may go online."""
    write_data(tmp_path, inputs / "samples.json", {"model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct"})
    with socket.create_server(("localhost", 0)) as hub:
        done = run(["mm.train", "--check", *flags_of(inputs, "hub", 1, "--mm-data", str(tmp_path / "data.json"))],
                   tmp_path, HF_HUB_OFFLINE="0", HF_ENDPOINT=f"http://localhost:{hub.getsockname()[1]}")
        hub.settimeout(0)
        with pytest.raises(BlockingIOError):
            hub.accept()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (f"error: {tmp_path}/data.json: model_name_or_path (a Hugging Face directory) is "
                           f"'Qwen/Qwen2.5-VL-3B-Instruct', which is not a directory\n")


def test_a_master_that_nobody_knows_is_named_with_this_machine(tmp_path: Path) -> None:
    program = ("import sys\nfrom mm import launch\nlaunch._NAME_SECONDS = 0.0\nsys.exit(launch.main(['--nnodes', '2', "
               "'--node_rank', '1', '--master_addr', 'no-such-host.invalid', '-m', 'mm.train']))")
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run([warm_python(), tmp_path / "program.py"], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(
        f"error: {socket.gethostname()} does not know the host no-such-host.invalid (--master_addr): "), done.stderr
    assert "`getent hosts no-such-host.invalid`" in done.stderr and done.stderr.count("\n") == 1
