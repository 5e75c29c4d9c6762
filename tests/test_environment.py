"""What a process runs in: variables of a launcher, imports, and machines on which commands end with one line."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mm import evaluate, generate, train
from mm.doctor import trial
from mm.environment import Launched, launcher_problems
from mm.plan import commands as planner_rank
from tests.files import EXAMPLES, ROOT, json_lines
from tests.launch import warm_python
from tests.tiny_inputs import flags_of, write_data, write_inputs

RIGHT = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost",
         "MASTER_PORT": "29500"}  # fmt: skip
HUGE = "9" * 5000
"""Python refuses to parse as many digits."""


def test_a_torchrun_environment_is_read() -> None:
    assert not list(launcher_problems(RIGHT, meets=True)) and not list(launcher_problems({}))
    assert Launched.here(RIGHT) == Launched(3, 4, 1, 2)
    assert Launched.here({"LOCAL_RANK": "2"}) == Launched(local_rank=2)  # chooses the device of a process alone
    assert not list(launcher_problems({"LOCAL_RANK": "2"}))


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("RANK", "4", "this rank's number, 0 to 3"), ("LOCAL_RANK", "2", "on its machine, 0 to 1"),
    ("LOCAL_WORLD_SIZE", "5", "on this machine, 1 to 4"), ("MASTER_PORT", "65536", "0 to 65535"),
    *((name, text, "") for name in RIGHT if name != "MASTER_ADDR" for text in ("x", "-1", "1.5", "", "²", HUGE)),
])  # fmt: skip
def test_a_variable_that_is_wrong_is_named(name: str, text: str, expected: str) -> None:
    (problem,) = launcher_problems({**RIGHT, name: text}, meets=True)
    assert problem.startswith(f"The environment variable {name} is '{text[:9]}") and expected in problem
    assert len(problem) < 200


TRAINING = [*(f"--mm-{kind}={EXAMPLES / f'{kind}_tiny.json'}" for kind in ("model", "data")), "--micro-batch-size=1",
            "--seq-length=8", "--train-iters=1", "--lr=1"]  # fmt: skip


@pytest.mark.parametrize(("main", "words"), [
    (train.main, [*TRAINING, "--check"]),
    (generate.main, ["--load", "mm", "--prompt", "What?"]),
    (evaluate.main, ["--load", "mm", "--benchmark", "mmmu"]),
    (trial.main, [os.devnull, "cpu"]),
    (planner_rank.main, ["x", "1", "1", *TRAINING]),
], ids=["train", "generate", "evaluate", "doctor", "plan"])  # fmt: skip
def test_each_command_refuses_a_wrong_variable(
    main: Callable[[list[str]], int], words: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in {**RIGHT, "RANK": "x", "LOCAL_RANK": "y", "WORLD_SIZE": HUGE}.items():
        monkeypatch.setenv(name, text)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "error: The environment variable RANK is 'x'; expected" in said and "Traceback" not in said


_PROGRAM = """
import gc
from mm.environment import without_collection

with without_collection():
    assert not gc.isenabled()
    import decimal
assert gc.isenabled() and gc.get_freeze_count() > 0
gc.unfreeze()
with without_collection():
    import decimal
assert gc.isenabled() and gc.get_freeze_count() == 0, "nothing was imported"
try:
    with without_collection():
        import no_such_module
except ImportError:
    assert gc.isenabled()
gc.disable()
with without_collection():
    import fractions
assert not gc.isenabled(), "as before"
"""


def test_collection_pauses_and_leaves_out_what_was_imported() -> None:
    """In a process of its own, because what is there afterwards is never collected."""
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True)


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
