"""torchrun starts a run again after a rank has died, and the run ends as if nothing had happened.

When torchrun itself dies, its ranks end.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mm.process import free_port
from tests.files import EXAMPLES, ROOT
from tests.launch import warm_python
from tests.tiny_inputs import flags_of, metrics, write_inputs


def environment_of(inputs: Path, name: str, **variables: str) -> dict[str, str]:
    """The environment of the tiny script."""
    return os.environ | {
        "MM_MODEL": str(inputs / "model_2.json"), "MM_DATA": str(inputs / "data.json"), "LOAD_PATH": str(inputs / "hf"),
        "SAVE_PATH": str(inputs / name / "save"), "LOG_DIR": str(inputs / name / "logs"), "MBS": "2",
        "GRAD_ACC_STEP": "2", "SEQ_LENGTH": "512", "SAVE_INTERVAL": "2", "MASTER_PORT": str(free_port()), **variables,
    }  # fmt: skip


def launch(inputs: Path, name: str, max_restarts: int) -> str:
    """The tiny script on two replicas, with the worker in place of mm.train, whose ranks are forks of the warm
    process."""
    python = inputs / "python"
    python.write_text('#!/bin/bash\n'
                      '[[ "$2" == mm.launch ]] && set -- "${@/#mm.train/tests.restart_worker}"\n'
                      f'exec {warm_python()} "$@"\n')
    python.chmod(0o755)
    environment = environment_of(inputs, name, PYTHON=str(python), TRAIN_ITERS="6", MAX_RESTARTS=str(max_restarts),
                                 PP="1", MM_MODEL=str(inputs / "model_1.json"), GRAD_ACC_STEP="1")
    script = EXAMPLES / "finetune_qwen2_5_vl_tiny.sh"
    done = subprocess.run(["bash", str(script), "--deterministic-mode", "--eval-interval", "2"],
                          env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_that_is_restarted_twice_equals_an_undisturbed_one(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    data = json.loads((inputs / "data.json").read_text())
    data["dataset_param"]["basic_parameters"]["val_dataset"] = str(inputs / "samples.json")
    (inputs / "data.json").write_text(json.dumps(data))
    launch(inputs, "whole", 0)
    said = launch(inputs, "restarted", 2)
    found = re.findall(r"loaded a (.+) checkpoint from \S+, iteration (\d)", said)
    assert found == [("Hugging Face", "0"), ("training", "2"), ("training", "4")], said
    assert "holds a checkpoint: the run continues from it, not from" in said
    whole, restarted = metrics(inputs, "whole"), metrics(inputs, "restarted")
    assert [row["iteration"] for row in restarted] == [1, 2, 2, 3, 4, 4, 5, 6, 6], "each validation has a row"
    for key in ("loss", "validation_loss", "grad_norm", "lr", "consumed_samples", "num_tokens"):
        assert [row.get(key) for row in restarted] == [row.get(key) for row in whole], key
    for name in ("weights_tp00_pp00", "optimizer_tp00_pp00_dp00"):
        states = [(inputs / run / "save" / "iter_0000006" / f"{name}.safetensors").read_bytes()
                  for run in ("whole", "restarted")]
        assert states[0] == states[1], name


@pytest.mark.parametrize("name", ["Ctrl-C", "SIGTERM"])
def test_a_stopped_script_saves_and_ends_without_traceback(name: str, tmp_path: Path) -> None:
    """Ctrl-C as a terminal sends it: to the shell, torchrun, tee, all ranks and their workers.  SIGTERM as a container
    receives it: its first process alone.  Only Ctrl-C needs new processes, which share the script's session; forks of
    the warm process do not."""
    inputs = write_inputs(tmp_path)
    python = sys.executable if name == "Ctrl-C" else str(warm_python())
    environment = environment_of(inputs, "ended", PYTHON=python, TRAIN_ITERS="1000000")
    script = subprocess.Popen(["bash", str(EXAMPLES / "finetune_qwen2_5_vl_tiny.sh")], env=environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    latest = inputs / "ended" / "save" / "latest_checkpointed_iteration.txt"
    while script.poll() is None and not latest.is_file():
        time.sleep(0.1)
    if name == "Ctrl-C":
        os.killpg(script.pid, signal.SIGINT)
    else:
        script.terminate()
    said, _ = script.communicate(timeout=120)
    assert script.returncode == {"Ctrl-C": 130, "SIGTERM": 143}[name] and "Traceback" not in said, said
    (log,) = (inputs / "ended" / "logs").glob("train_*.log")
    for text in (said, log.read_text()):
        found = re.findall(rf"stopped by {name} after iteration (\d+) of 1000000: continue from it with --load", text)
        assert found == [latest.read_text().strip()], text
    assert "Elapsed Time Per iteration" in said


def test_ranks_and_data_workers_end_with_a_killed_launcher(tmp_path: Path) -> None:
    """All processes are real ones, with a shell between torchrun and its ranks."""
    inputs = write_inputs(tmp_path)
    flags = flags_of(inputs, "killed", 2, "--num-workers", "1", "--train-iters", "1000000")
    program = tmp_path / "rank.sh"
    program.write_text(f'#!/bin/sh\n{sys.executable} -m mm.train "$@"\nexit $?\n')
    program.chmod(0o755)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--local_addr", "localhost",
               "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--no_python", program, *flags]  # fmt: skip
    with (tmp_path / "said").open("w") as said:
        launcher = psutil.Popen(command, cwd=ROOT, stdout=said, stderr=said)
        rows = inputs / "killed" / "logs" / "metrics.jsonl"
        while launcher.poll() is None and not (rows.is_file() and rows.read_text().count("\n") > 1):
            time.sleep(0.1)
        others = launcher.children(recursive=True)
        names = [" ".join(one.cmdline()) for one in others]
        launcher.kill()
        launcher.wait()
    _, left = psutil.wait_procs(others, timeout=60)
    for one in left:
        one.kill()
    assert sum("-m mm.train" in name for name in names) == sum("rank.sh" in name for name in names) == 2, names
    assert any("forkserver" in name for name in names), names
    assert not left, [one.pid for one in left]
    assert "error: torchrun has died, so its rank " in (tmp_path / "said").read_text()


def test_a_rank_that_torchrun_did_not_start_outlives_its_parent(tmp_path: Path) -> None:
    program = ("import os, time\nfrom mm import process\nprocess._BEAT_SECONDS = 0.01\nprocess.end_with_launcher()\n"
               "parent = os.getppid()\nopen(os.environ['BEGUN'], 'w').close()\n"
               "while os.getppid() == parent: time.sleep(0.01)\ntime.sleep(0.5)\n"
               "print('still there')")
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"} | {"RANK": "0"}
    environment["BEGUN"] = str(tmp_path / "begun")
    script = '"$0" -c "$1" & while [ ! -e "$BEGUN" ]; do sleep 0.1; done'
    done = subprocess.run(["sh", "-c", script, sys.executable, program], cwd=ROOT, env=environment,
                          capture_output=True, text=True, check=True)  # it reads until the last that writes has ended
    assert done.stdout == "still there\n"
