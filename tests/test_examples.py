"""The shipped shell scripts, run as a user runs them; a recorder stands in for Python."""

import os
import shutil
import socket
import subprocess

import pytest

from mm.config.args import parse
from mm.config.evaluate import EvaluationConfig
from mm.config.generate import load_asking, read_inference
from mm.config.model import read_model
from mm.config.run import load_run
from mm.cost.stage_memory import num_model_params
from mm.generation.setup import placed
from mm.plan.dry_run import stage_report
from tests.files import EXAMPLES, ROOT

SIZES = {  # size -> (world size, TP, PP, DP, global batch, parameters)
    "3b": (8, 1, 1, 8, 256, 3_754_622_976),  # all but the parameters as in MindSpeed-MM's scripts
    "7b": (8, 1, 2, 4, 192, 8_292_166_656),
    "32b": (16, 2, 8, 1, 96, 33_452_718_336),
    "72b": (64, 2, 8, 4, 384, 73_410_777_344),
}
MICROBATCHES = {"3b": (8, 4), "7b": (4, 12), "32b": (2, 48), "72b": (1, 96), "tiny": (1, 32)}  # samples x number
STAND_IN = """#!/bin/bash
if [[ "$1" == -c ]]; then exit "${PACKAGES_STATUS:-0}"; fi
if [[ "${*: -1}" == --check ]]; then echo "checked" >&2; echo "note: the loss differs"; exit "${CHECK_STATUS:-0}"; fi
printf '%s\\0' "$@" > "$RECORD"
env > "$RECORD.env"
if [[ -f "${LOG_TEXT:-}" ]]; then cat "$LOG_TEXT"; fi
echo "to stderr" >&2
exit "${STATUS:-0}"
"""
LINE = (
    " [2026-01-31 09:59:{second:02d}] iteration {step:8d}/   10000 | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.000000E-05 | global batch size:   192 | "
    "tokens per sample: {tokens:.1f} | loss: 1.234500E+00 | loss scale: 1.0 | grad norm: 0.500 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def run_script(
    tmp_path, size: str, *flags: str, script: str = "finetune", **environment: str
) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Run a script with a recorder as its Python; return the outcome and what Python was given."""
    python, record = tmp_path / "python with space", tmp_path / "argv"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    inherited = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    outcome = subprocess.run(
        ["bash", str(EXAMPLES / f"{script}_qwen2_5_vl_{size}.sh"), *flags],
        env=inherited | {"PYTHON": str(python), "RECORD": str(record), "LOG_DIR": str(tmp_path / "logs"),
                         "SAVE_PATH": str(tmp_path / "save dir")} | environment,
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )
    argv = record.read_text().split("\0")[:-1] if record.exists() else []
    return outcome, argv


def recorded(tmp_path) -> dict[str, str]:
    """The environment that Python was given."""
    return dict(line.split("=", 1) for line in (tmp_path / "argv.env").read_text().splitlines() if "=" in line)


def train_flags(argv: list[str]) -> list[str]:
    return argv[argv.index("mm.train") + 1 :]


@pytest.mark.parametrize("size", SIZES)
def test_dry_run_of_every_size(tmp_path, monkeypatch, size):
    world_size, tp_size, num_stages, dp_size, batch_size, num_params = SIZES[size]
    outcome, argv = run_script(tmp_path, size, "--dry-run")
    assert outcome.returncode == 0, outcome.stderr
    assert argv[:2] == ["-m", "mm.train"]
    monkeypatch.chdir(ROOT)
    run = load_run(argv[2:], environment={})
    assert (run.world_size, run.tp_size, run.num_stages) == (world_size, tp_size, num_stages)
    assert (run.dp_size, run.global_batch_size, run.args.precision) == (dp_size, batch_size, "bf16")
    assert num_model_params(run) == num_params
    assert not run.notes, "flags and keys of our own files all have an effect"
    report = stage_report(run)
    assert f"{num_params:,} parameters" in report
    assert "ViT 0-31 (frozen), projector (frozen), embedding" in report


@pytest.mark.parametrize("size", MICROBATCHES)
def test_microbatches_of_several_samples(tmp_path, size):
    """MindSpeed-MM's scripts have one sample a microbatch, and as many more microbatches."""
    outcome, argv = run_script(tmp_path, size, "--dry-run")
    assert outcome.returncode == 0, outcome.stderr
    args = parse(argv[2:])
    num_samples, num_microbatches = MICROBATCHES[size]
    dp_size = SIZES[size][3] if size in SIZES else 1
    assert (args.micro_batch_size, args.global_batch_size) == (num_samples, num_samples * num_microbatches * dp_size)


@pytest.mark.parametrize(("environment", "samples", "global_batch_size"), [
    ({"MBS": "1"}, 1, 48),
    ({"GRAD_ACC_STEP": "5"}, 4, 80),
    ({"MBS": "1", "GRAD_ACC_STEP": "48"}, 1, 192),
    ({"GBS": "32"}, 4, 32),
    ({"GBS": "32", "MBS": "1"}, 1, 32),
    ({"GBS": "192", "TP": "2"}, 4, 192),
    ({"GBS": "80", "GRAD_ACC_STEP": "5"}, 4, 80),
])
def test_a_batch_of_the_user_wins(tmp_path, environment, samples, global_batch_size):
    outcome, argv = run_script(tmp_path, "7b", "--dry-run", **environment)
    assert outcome.returncode == 0, outcome.stderr
    args = parse(argv[2:])
    assert (args.micro_batch_size, args.global_batch_size) == (samples, global_batch_size)


@pytest.mark.parametrize(("environment", "what"), [
    ({"GBS": "8"}, "GBS is 8, which is not a multiple of MBS x DP = 4 x 4 = 16; set it to 16, or change MBS"),
    ({"GBS": "33", "MBS": "1"}, "GBS is 33, which is not a multiple of MBS x DP = 1 x 4 = 4; set it to 36, or"),
    ({"GBS": "81", "GRAD_ACC_STEP": "5"}, "GBS is 81, but MBS x GRAD_ACC_STEP x DP = 4 x 5 x 4 = 80; leave GBS or"),
    ({"GBS": "many"}, "GBS is 'many'; expected an integer"),
    ({"OVERLAP": "no"}, "OVERLAP is 'no'; expected 1 or 0"),
])
def test_settings_that_contradict_each_other_are_refused(tmp_path, environment, what):
    outcome, argv = run_script(tmp_path, "7b", **environment)
    assert (outcome.returncode, argv) == (2, [])
    assert what in outcome.stderr
    assert ("GRAD_ACC_STEP" in outcome.stderr) == ("GRAD_ACC_STEP" in environment)


@pytest.mark.parametrize("size", SIZES)
def test_reduction_and_gathering_overlap(tmp_path, size):
    def overlap(**environment: str) -> tuple[bool, bool, bool]:
        args = parse(run_script(tmp_path, size, "--dry-run", **environment)[1][2:])
        return args.use_distributed_optimizer, args.overlap_grad_reduce, args.overlap_param_gather

    assert overlap() == (True, True, True)
    assert overlap(OVERLAP="0") == (True, False, False)


@pytest.mark.parametrize("size", SIZES)
def test_scripts_launch_flags_that_parse(tmp_path, size):
    world_size = SIZES[size][0]
    outcome, argv = run_script(tmp_path, size, "--tensorboard-dir", "a b", MASTER_ADDR="10.0.0.1")
    assert outcome.returncode == 0, outcome.stderr
    launcher = argv[: argv.index("mm.train")]
    assert launcher[:2] == ["-m", "mm.launch"]
    per_node, nodes = (int(launcher[launcher.index(flag) + 1]) for flag in ("--nproc_per_node", "--nnodes"))
    assert per_node * nodes == world_size
    assert launcher[launcher.index("--master_port") + 1] == "6000"
    args = parse(train_flags(argv))
    assert (args.tensorboard_dir, args.save) == ("a b", str(tmp_path / "save dir"))
    assert (args.lr, args.lr_warmup_fraction, args.clip_grad) == (1e-5, 0.1, 0.0)
    log = next((tmp_path / "logs").glob("train_*.log"))
    assert log.read_text() == "to stderr\n"
    assert log.stat().st_mode & 0o777 == 0o440


@pytest.mark.parametrize("size", [*SIZES, "tiny"])
def test_the_same_command_resumes(tmp_path, size):
    """The trainer decides, at every start of its ranks, so the command is the same before and after the first save."""
    for number in range(2):
        argv = run_script(tmp_path, size, LOAD_PATH="base", MASTER_ADDR="10.0.0.1", MAX_RESTARTS=str(number))[1]
        assert argv[argv.index("--max_restarts") + 1] == str(number)
        args, saved = parse(train_flags(argv)), tmp_path / "save dir"
        assert (args.load, args.save, args.pretrained_checkpoint) == (str(saved), str(saved), "base")
        assert not (args.no_load_optim or args.no_load_rng or args.no_save_optim or args.no_save_rng)
        assert (args.save_interval, args.keep_last_checkpoints) == (100 if size == "tiny" else 500, 2)
        (saved / "iter_0000500").mkdir(parents=True, exist_ok=True)


def test_the_length_in_epochs(tmp_path):
    args = parse(train_flags(run_script(tmp_path, "7b", NUM_TRAIN_EPOCHS="1.5")[1]))
    assert (args.num_train_epochs, args.train_iters) == (1.5, 0)
    outcome, _ = run_script(tmp_path, "7b", NUM_TRAIN_EPOCHS="1.5", TRAIN_ITERS="7")
    assert outcome.returncode == 2 and "TRAIN_ITERS is 7 and NUM_TRAIN_EPOCHS 1.5; set one of them" in outcome.stderr


def test_a_save_of_the_user_is_where_to_resume(tmp_path):
    args = parse(train_flags(run_script(tmp_path, "7b", "--save", "a", "--lr", "1", "--save", "my own")[1]))
    assert (args.load, args.save) == ("my own", "my own")


def test_every_layout_variable_comes_from_the_environment(tmp_path):
    outcome, argv = run_script(tmp_path, "7b", NPUS_PER_NODE="4", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1",
                               MASTER_PORT="7000", TP="2", PP="2", MBS="3", GRAD_ACC_STEP="5", TRAIN_ITERS="7",
                               LOAD_PATH="weights here", MM_MODEL="m.json", MM_DATA="d.json", LR="2e-5")
    assert outcome.returncode == 0, outcome.stderr
    assert argv[argv.index("--node_rank") + 1] == "1"
    assert argv[argv.index("--master_port") + 1] == "7000"
    args = parse(train_flags(argv))
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.micro_batch_size) == (2, 2, 3)
    assert args.global_batch_size == 3 * 5 * 2
    assert (args.train_iters, args.pretrained_checkpoint, args.mm_model, args.mm_data, args.lr) == (
        7, "weights here", "m.json", "d.json", 2e-5)


def test_a_python_without_the_packages_is_refused(tmp_path):
    for script in ("finetune", "inference"):
        outcome, argv = run_script(tmp_path, "3b", script=script, PACKAGES_STATUS="1")
        assert (outcome.returncode, argv) == (2, [])
        assert "has no torch or no megatron-core" in outcome.stderr
        assert "source .venv/bin/activate" in outcome.stderr


def test_notes_of_the_rehearsal_are_shown_where_it_fails(tmp_path):
    """The training says them again, and its output is kept in the log."""
    assert "note: the loss differs" not in run_script(tmp_path, "3b")[0].stdout
    assert "note: the loss differs" in run_script(tmp_path, "3b", CHECK_STATUS="2")[0].stdout


def test_exit_status_passes_through(tmp_path):
    for status in ("0", "1", "2", "137"):
        outcome, _ = run_script(tmp_path, "3b", STATUS=status)
        assert outcome.returncode == int(status)
        for log in (tmp_path / "logs").iterdir():
            log.unlink()


def test_figures_at_the_end(tmp_path):
    """160 steps: the first 50 and the last 10 must not count.  870 ms at global batch 192 are 220.690 samples/s."""
    text = tmp_path / "log.txt"
    text.write_text("\n".join(
        LINE.format(second=step % 60, step=step, samples=192 * step, ms=870.0 if 50 < step <= 150 else 9999.0,
                    tokens=500.0 if 50 < step <= 150 else 1.0)
        for step in range(1, 161)
    ) + "\nsomething else\n")
    outcome, _ = run_script(tmp_path, "7b", LOG_TEXT=str(text))
    assert outcome.stdout.splitlines()[-3:] == [
        "Elapsed Time Per iteration: 870.0",
        "Average Samples per Second: 220.690",
        "Consumed Tokens per Second: 110345.000",
    ]


def test_figures_of_a_short_log_without_tokens(tmp_path):
    text = tmp_path / "log.txt"
    text.write_text("".join(
        LINE.format(second=1, step=step, samples=step, ms=ms, tokens=1).replace("tokens per sample: 1.0 | ", "") + "\n"
        for step, ms in ((1, 1000.0), (2, 500.0))
    ))
    outcome, _ = run_script(tmp_path, "3b", LOG_TEXT=str(text))
    assert outcome.stdout.splitlines()[-2:] == [
        "Elapsed Time Per iteration: 750.0",
        "Average Samples per Second: 341.333",
    ]


def test_log_without_iterations_keeps_the_status(tmp_path):
    """A run that failed has said why in its last line."""
    outcome, _ = run_script(tmp_path, "3b")
    assert "No iteration lines" in outcome.stdout and outcome.returncode == 0
    shutil.rmtree(tmp_path / "logs")
    outcome, _ = run_script(tmp_path, "3b", STATUS="2")
    assert (outcome.stdout, outcome.returncode) == ("to stderr\n", 2)


def test_peer_awk_cuts_the_same_step_time():
    """Users' own scripts take field 5 of the line, split at colons."""
    line = LINE.format(second=5, step=1, samples=192, ms=870.0, tokens=500.0)
    assert line.split(":")[4].split("|")[0].strip() == "870.0"


def test_hostfile_gives_rank_and_master(tmp_path):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("# two nodes\n10.255.255.1\n\nlocalhost\n")
    outcome, argv = run_script(tmp_path, "32b", HOSTFILE=str(hostfile))
    assert outcome.returncode == 0, outcome.stderr
    values = {flag: argv[argv.index(flag) + 1] for flag in ("--nnodes", "--node_rank", "--master_addr")}
    assert values == {"--nnodes": "2", "--node_rank": "1", "--master_addr": "10.255.255.1"}


@pytest.mark.parametrize(("environment", "what"), [
    ({"HOSTFILE": "hosts.txt"}, "belongs to this machine"),
    ({}, "need a common master"),
    ({"NNODES": "1"}, "not a multiple of TP x PP x CP"),
    ({"TP": "0", "MBS": "2.5"}, "TP is '0'; expected an integer of at least 1. MBS is '2.5'"),
    ({"TP": "x"}, "TP is 'x'"),
    ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS is '-1'; expected 0 to 9999"),
    ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536; expected at most 65535"),
    ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK is '2'; expected 0 to 1"),
])
def test_wrong_nodes_are_refused_before_launch(tmp_path, environment, what):
    (tmp_path / "hosts.txt").write_text("10.255.255.1\n10.255.255.2\n")
    if "HOSTFILE" in environment:
        environment = {"HOSTFILE": str(tmp_path / "hosts.txt")}
    outcome, argv = run_script(tmp_path, "32b", **environment)
    assert outcome.returncode == 2
    assert what in outcome.stderr
    assert argv == []


def test_a_port_in_use_is_refused_before_launch(tmp_path):
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        listener.listen()
        port = listener.getsockname()[1]
        outcome, argv = run_script(tmp_path, "3b", MASTER_PORT=str(port))
    assert outcome.returncode == 2
    assert f"MASTER_PORT {port} is in use" in outcome.stderr
    assert argv == []


def test_what_the_check_refuses_is_not_launched(tmp_path):
    outcome, argv = run_script(tmp_path, "3b", CHECK_STATUS="2")
    assert (outcome.returncode, outcome.stderr, argv) == (2, "checked\n", [])
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_launches_nothing(tmp_path, flag):
    outcome, argv = run_script(tmp_path, "3b", flag)
    assert outcome.returncode == 0
    assert argv[:2] == ["-m", "mm.train"]
    assert not (tmp_path / "logs").exists()


def test_environment_of_the_runtime(tmp_path):
    toolkit = tmp_path / "set_env.sh"
    toolkit.write_text('export FROM_TOOLKIT="yes$UNSET_VARIABLE"\nfalse\n')
    run_script(tmp_path, "72b", "--dry-run", CANN_ENV=str(toolkit), HCCL_CONNECT_TIMEOUT="7")
    expected = {"FROM_TOOLKIT": "yes", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CPU_AFFINITY_CONF": "2",
                "HCCL_CONNECT_TIMEOUT": "7", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    given = recorded(tmp_path)
    assert {name: given.get(name) for name in expected} == expected
    assert "WORLD_SIZE" not in given


@pytest.mark.parametrize("size", SIZES)
def test_one_hardware_queue_only_with_tensor_parallelism(tmp_path, size):
    run_script(tmp_path, size, "--dry-run")
    default_tp_size = SIZES[size][1]
    assert recorded(tmp_path).get("CUDA_DEVICE_MAX_CONNECTIONS") == ("1" if default_tp_size > 1 else None)
    run_script(tmp_path, size, "--dry-run", TP=str(3 - default_tp_size))
    assert recorded(tmp_path).get("CUDA_DEVICE_MAX_CONNECTIONS") == (None if default_tp_size > 1 else "1")
    run_script(tmp_path, size, "--dry-run", TP="2", CUDA_DEVICE_MAX_CONNECTIONS="8")
    assert recorded(tmp_path)["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


@pytest.mark.parametrize("size", SIZES)
def test_settings_of_the_allocators(tmp_path, size):
    """torch_npu's own variable where MindSpeed-MM's script sets it; what the user has set wins."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")
    grows = "expandable_segments:True"
    run_script(tmp_path, size, "--dry-run")
    assert [recorded(tmp_path).get(name) for name in names] == [grows, grows if size in ("32b", "72b") else None]
    run_script(tmp_path, size, "--dry-run", PYTORCH_CUDA_ALLOC_CONF="a:1", PYTORCH_NPU_ALLOC_CONF="b:2")
    assert [recorded(tmp_path)[name] for name in names] == ["a:1", "b:2"]
    run_script(tmp_path, size, "--dry-run", PYTORCH_ALLOC_CONF="c:3")
    assert recorded(tmp_path).keys().isdisjoint(names)


@pytest.mark.parametrize(("size", "num_stages"), [("3b", 1), ("7b", 1), ("32b", 2), ("72b", 4), ("tiny", 2)])
def test_scripts_that_ask_launch_flags_that_load(tmp_path, monkeypatch, size, num_stages):
    monkeypatch.chdir(ROOT)
    outcome, argv = run_script(tmp_path, size, "--prompt", "a b", script="inference", LOAD_PATH=str(tmp_path))
    assert outcome.returncode == 0, outcome.stderr
    launcher, flags = argv[: argv.index("inference_vlm.py")], argv[argv.index("inference_vlm.py") + 1 :]
    assert (launcher[:2] == ["-m", "mm.launch"]) == (num_stages > 1)
    asking = load_asking(flags, environment={"WORLD_SIZE": str(num_stages), "RANK": "0"})
    assert asking.args.prompt == "a b" and asking.inference is not None
    model, notes = placed(asking.inference.model, 1, asking.args.pipeline_model_parallel_size, num_stages)
    assert (model, notes, asking.notes) == (asking.inference.model, (), ())


def test_wrong_sizes_of_a_script_that_asks_are_refused(tmp_path):
    outcome, argv = run_script(tmp_path, "7b", script="inference", TP="x")
    assert (outcome.returncode, argv) == (2, []) and "TP is 'x'" in outcome.stderr


@pytest.mark.parametrize("size", list(SIZES))
def test_scripts_that_evaluate(tmp_path, size):
    """As many devices as MindSpeed-MM's, where it has the script; the JSON is the model of the training."""
    outcome, argv = run_script(tmp_path, size, "--benchmark", "mmmu", script="evaluate")
    assert outcome.returncode == 0, outcome.stderr
    json_file = argv[argv.index("--mm-model") + 1]
    assert "evaluate_vlm.py" in argv and json_file == f"./examples/qwen2.5vl/evaluate_qwen2_5_vl_{size}.json"
    num_stages = int(argv[argv.index("--pipeline-model-parallel-size") + 1])
    assert num_stages == {"3b": 1, "7b": 1, "32b": num_stages, "72b": 4}[size] and argv[-2:] == ["--benchmark", "mmmu"]
    found = read_inference(ROOT / json_file, EvaluationConfig).value
    trained = read_model(EXAMPLES / f"model_{size}.json").value
    assert found.evaluation_dataset == "ai2d_test" and found.model.num_stages == num_stages
    assert (found.model.language.hidden_size, found.model.vision.num_layers, found.model.language.num_layers) == (
        trained.language.hidden_size, trained.vision.num_layers, trained.language.num_layers)
