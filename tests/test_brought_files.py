"""Scripts of MindSpeed-MM's form run as they stand, and the names of its programs are here."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from mm.checkpoint import convert
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage
from mm.config.run import load_run
from mm.errors import UserError
from mm.process import free_port
from tests.files import EXAMPLES, ROOT
from tests.launch import warm_python
from tests.scoring.tables import encoded, peer_json, write_table
from tests.scoring.test_results import sheet
from tests.tiny_inputs import write_inputs

MACHINES = """\
#!/bin/bash
source /usr/local/Ascend/no_such_toolkit/set_env.sh
export CUDA_DEVICE_MAX_CONNECTIONS=1
export TASK_QUEUE_ENABLE=2

NPUS_PER_NODE=2
MASTER_ADDR=localhost
MASTER_PORT={port}
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))

"""
SIZES = """
TP=1
PP=2
CP=1
MBS=1
GRAD_ACC_STEP=4
DP=$(($WORLD_SIZE/$TP/$PP/$CP))
GBS=$(($MBS*$GRAD_ACC_STEP*$DP))

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \\
    --nnodes $NNODES \\
    --node_rank $NODE_RANK \\
    --master_addr $MASTER_ADDR \\
    --master_port $MASTER_PORT
"

"""
"""The beginning of every script of MindSpeed-MM's, and what follows its paths."""

SCRIPT = MACHINES + """\
MM_DATA="{inputs}/data.json"
MM_MODEL="{inputs}/model_2.json"
MM_TOOL="./mindspeed_mm/tools/tools.json"
LOAD_PATH="{inputs}/mm"
SAVE_PATH="{inputs}/save_dir"
""" + SIZES + """\
GPT_ARGS="
    --use-mcore-models --tensor-model-parallel-size ${{TP}} --pipeline-model-parallel-size ${{PP}} \\
    --context-parallel-size ${{CP}} --context-parallel-algo ulysses_cp_algo \\
    --micro-batch-size ${{MBS}} --global-batch-size ${{GBS}} \\
    --tokenizer-type NullTokenizer --vocab-size 152064 --seq-length 512 --make-vocab-size-divisible-by 1 \\
    --normalization RMSNorm --use-fused-rmsnorm --swiglu --use-fused-swiglu --no-masked-softmax-fusion \\
    --lr 1.0e-5 --lr-decay-style cosine --weight-decay 0 --train-iters 4 --lr-warmup-fraction 0.1 --clip-grad 0.0 \\
    --adam-beta1 0.9 --adam-beta2 0.999 --no-gradient-accumulation-fusion --seed 42 \\
    --load $LOAD_PATH --use-flash-attn --variable-seq-lengths \\
    --use-distributed-optimizer \\
    --no-load-optim --no-load-rng --no-save-optim --no-save-rng --num-workers 1 --swap-attention --use-deter-comp \\
    --distributed-timeout-minutes 20 \\
"

MM_ARGS="
    --mm-data $MM_DATA \\
    --mm-model $MM_MODEL \\
    --mm-tool $MM_TOOL
"

OUTPUT_ARGS="
    --log-interval 1 --save-interval 10000 --eval-interval 10000 --eval-iters 5000 \\
    --save $SAVE_PATH \\
    --ckpt-format torch --log-tps \\
"
logfile=brought
mkdir -p {inputs}/logs
torchrun $DISTRIBUTED_ARGS pretrain_vlm.py \\
    $GPT_ARGS \\
    $MM_ARGS \\
    $OUTPUT_ARGS \\
    --distributed-backend nccl \\
    2>&1 | tee {inputs}/logs/train_${{logfile}}.log
chmod 440 {inputs}/logs/train_${{logfile}}.log
find $SAVE_PATH -type d -exec chmod 750 {{}} \\;
find $SAVE_PATH -type f -exec chmod 640 {{}} \\;
STEP_TIME=`grep "elapsed time per iteration" {inputs}/logs/train_${{logfile}}.log | awk -F ':' '{{print$5}}' | \
awk -F '|' '{{print$1}}' | head -n 150 | tail -n 100 | awk '{{sum+=$1}} END {{if (NR != 0) printf("%.1f",sum/NR)}}'`
SAMPLES_PER_SECOND=`awk 'BEGIN{{printf "%.3f\\n", '${{GBS}}'*1000/'${{STEP_TIME}}'}}'`
echo "Elapsed Time Per iteration: $STEP_TIME"
echo "Average Samples per Second: $SAMPLES_PER_SECOND"
LOG_TOKENS_PER_SECOND=`grep "tokens per sample" {inputs}/logs/train_${{logfile}}.log`
if [ "$LOG_TOKENS_PER_SECOND" ]; then
    AVERAGE_TOKENS=`grep "tokens per sample" {inputs}/logs/train_${{logfile}}.log | \
awk -F 'tokens per sample:' '{{print$2}}' | awk -F '|' '{{print$1}}' | head -n 150 | tail -n 100 | \
awk '{{sum+=$1}} END {{if (NR != 0) printf("%.1f",sum/NR)}}'`
    TOKENS_PER_SECOND=`awk 'BEGIN{{printf "%.3f\\n", '${{SAMPLES_PER_SECOND}}'*'${{AVERAGE_TOKENS}}'}}'`
    echo "Consumed Tokens per Second: $TOKENS_PER_SECOND"
fi
"""
"""In the form of MindSpeed-MM's scripts: torchrun by name, its flags, its awk lines."""


def run(command: list[str], cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
                          timeout=200, check=False)  # fmt: skip


def run_script(text: str, inputs: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    """As after ``source .venv/bin/activate``, where torchrun is in the folder ``programs``."""
    script = inputs / "brought.sh"
    script.write_text(text.format(inputs=inputs, port=free_port()))
    return run(["bash", str(script)], PATH=f"{programs}:{os.environ['PATH']}")


def warm_programs(directory: Path) -> Path:
    """A folder with a torchrun that runs in forks of the warm process."""
    torchrun = directory / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(f'#!/bin/sh\nexec {warm_python()} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    return torchrun.parent


def trained_by_the_peer(inputs: Path) -> None:
    """``inputs/hf`` as a checkpoint of the peer's training at iteration 2, on two stages."""
    layout, storage = Layout(((5, 3),), ((0, 4),), 1), Storage(Format.TORCH)
    convert.hf_to_mm(inputs / "hf", inputs / "mm", layout, storage).run()
    (inputs / "mm" / "manifest.json").unlink()
    (inputs / "mm" / "release").rename(inputs / "mm" / "iter_0000002")
    (inputs / "mm" / "latest_checkpointed_iteration.txt").write_text("2")
    for path in inputs.glob("mm/*/*/*.pt"):
        content = torch.load(path, weights_only=True)
        torch.save(content | {"iteration": 2, "args": Namespace(consumed_train_samples=6)}, path)


def test_a_brought_script_runs_to_its_figures(tmp_path: Path) -> None:
    """It goes on from the peer's own checkpoint with new optimizer state, at the iteration and sample named there."""
    trained_by_the_peer(write_inputs(tmp_path))
    done = run_script(SCRIPT, tmp_path, warm_programs(tmp_path))
    log = (tmp_path / "logs" / "train_brought.log").read_text()
    assert log.count("elapsed time per iteration (ms):") == 2, done.stdout + done.stderr
    assert "iteration 2\n" in log and "MindSpeed-MM trained it: optimizer state and random states start fresh" in log
    assert re.search(r"iteration +3/ +4 \| consumed samples: +10 \|", log)
    assert "note: loss: every target token of the global batch has the same weight" in log
    assert "settings have no effect here; the same command with --check lists them" in log
    assert "--use-deter-comp" not in log
    figures = done.stdout.splitlines()[-3:]
    for line, name in zip(figures, ("Elapsed Time Per iteration", "Average Samples per Second",
                                    "Consumed Tokens per Second"), strict=True):
        assert re.fullmatch(rf"{name}: \d+\.\d+", line) and float(line.rpartition(" ")[2]) > 0, figures
    assert (tmp_path / "save_dir" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"


FSDP = (SCRIPT.replace("NPUS_PER_NODE=2", "NPUS_PER_NODE=8").replace("PP=2", "PP=1").replace("model_2", "model_72b")
        .replace("    --use-distributed-optimizer \\\n", "    --bf16 \\\n    --use-torch-fsdp2 \\\n"
                 "    --fsdp2-config-path {inputs}/fsdp2_config.yaml \\\n    --use-cpu-initialization \\\n"
                 "    --init-model-with-meta-device \\\n    --no-initialization \\\n"
                 "    --untie-embeddings-and-output-weights \\\n")
        .replace("--ckpt-format torch ", "--ckpt-format torch_dist "))
"""The same with what MindSpeed-MM's script for the 72B on FSDP2 has otherwise."""


def test_a_brought_script_for_fsdp2_has_lists_that_do_not_count(tmp_path: Path) -> None:
    """One stage, as there, although ``model_72b.json`` has lists of eight numbers."""
    write_inputs(tmp_path)
    (tmp_path / "mm").symlink_to("hf")
    (tmp_path / "fsdp2_config.yaml").write_text("sharding_size: 8\n")
    shutil.copy(EXAMPLES / "model_72b.json", tmp_path)
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\n')
    torchrun.chmod(0o755)
    run_script(FSDP, tmp_path, torchrun.parent)
    words = (tmp_path / "words").read_text().split("\n")[:-1]
    flags = words[words.index("pretrain_vlm.py") + 1 :]
    started = load_run(flags, environment={"WORLD_SIZE": "8", "RANK": "0"})
    assert (started.num_stages, started.dp_size, started.shards_weights) == (1, 8, True)
    towers = started.model.vision, started.model.language
    assert [tower.pipeline_num_layers for tower in towers] == [((32,),), ((80,),)]
    assert [note for note in started.notes if "the pipeline_num_layers lists have 8 stages" in note]
    at = flags.index("--pipeline-model-parallel-size")
    with pytest.raises(UserError, match="needs one pipeline stage"):  # without the flag, the lists count
        load_run(flags[:at] + flags[at + 2 :], environment={"WORLD_SIZE": "8", "RANK": "0"})


INFERENCE = MACHINES + """\
MM_MODEL="{inputs}/inference.json"
LOAD_PATH="{inputs}/mm"
""" + SIZES + """\
GPT_ARGS="
    --use-mcore-models --tensor-model-parallel-size ${{TP}} --pipeline-model-parallel-size ${{PP}} \\
    --micro-batch-size ${{MBS}} --global-batch-size ${{GBS}} \\
    --tokenizer-type NullTokenizer --vocab-size 152064 --seq-length 1024 --make-vocab-size-divisible-by 1 \\
    --normalization RMSNorm --use-fused-rmsnorm --swiglu --use-fused-swiglu --seed 42 \\
    --load $LOAD_PATH --variable-seq-lengths --use-flash-attn --no-load-optim --no-load-rng
"

MM_ARGS="
    --mm-model $MM_MODEL
"

OUTPUT_ARGS="
    --log-interval 1 --save-interval 10000 --eval-interval 10000 --eval-iters 5000 \\
"

torchrun $DISTRIBUTED_ARGS inference_vlm.py \\
    $GPT_ARGS \\
    $MM_ARGS \\
    $OUTPUT_ARGS \\
    --distributed-backend nccl
"""
"""In the form of MindSpeed-MM's scripts that ask the model."""


def test_a_brought_script_asks_the_peers_checkpoint(tmp_path: Path) -> None:
    """On two stages with the ViT on both; the answer is that of one process from the Hugging Face directory."""
    trained_by_the_peer(write_inputs(tmp_path))
    inference = json.loads((EXAMPLES / "inference_qwen2_5_vl_tiny.json").read_text())
    inference["tokenizer"]["from_pretrained"] = str(tmp_path / "hf")
    inference |= {"device": "npu", "dtype": "bf16", "image_path": str(tmp_path / "1_0.png")}
    (tmp_path / "inference.json").write_text(json.dumps(inference))
    done = run_script(INFERENCE, tmp_path, warm_programs(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no effect: " in done.stderr
    alone = run([str(warm_python()), "-m", "mm.generate", "--load", str(tmp_path / "hf"), "--device", "cpu",
                 "--mm-model", str(tmp_path / "inference.json")])
    assert alone.returncode == 0 and len(alone.stdout) > 1, alone.stderr
    assert done.stdout == alone.stdout


EVALUATE = INFERENCE.replace("inference.json", "evaluate.json").replace("inference_vlm.py", "evaluate_vlm.py").replace(
    "--variable-seq-lengths", "--vocab-size 1 --variable-seq-lengths --distributed-timeout-minutes 1000")


def test_a_brought_script_scores_the_peers_checkpoint(tmp_path: Path) -> None:
    """On two stages with the ViT on both; the files are those of one process from the Hugging Face directory."""
    trained_by_the_peer(write_inputs(tmp_path))
    write_table(tmp_path / "AI2D_TEST.tsv", [
        {"index": str(number), "image": encoded(number), "question": "Which?", "A": "sun", "B": "moon", "answer": "B"}
        for number in range(3)])
    evaluate = peer_json(str(tmp_path / "AI2D_TEST.tsv"), str(tmp_path / "results"), str(tmp_path / "hf"))
    evaluate["generation_config"]["max_new_tokens"] = 6
    (tmp_path / "evaluate.json").write_text(json.dumps(evaluate))
    done = run_script(EVALUATE, tmp_path, warm_programs(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    alone = run([str(warm_python()), "-m", "mm.evaluate", "--load", str(tmp_path / "hf"), "--device", "cpu",
                 "--mm-model", str(tmp_path / "evaluate.json"), "--output", str(tmp_path / "alone")])
    assert alone.returncode == 0, alone.stderr
    start = "qwen2_vl_7b_ai2d_test"
    for name in (f"{start}_acc.csv", f"{start}_PREV.json", "predictions.jsonl", "scores.json"):
        assert (tmp_path / "results" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
    for name in (f"{start}.xlsx", f"{start}_acc.xlsx"):  # which contain the time of writing
        assert sheet(tmp_path / "results" / name) == sheet(tmp_path / "alone" / name)
    assert not done.stdout.startswith("error") and done.stdout == alone.stdout


LLAVA = [
    {"id": "1", "image": "1.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat is it?"},
                                                    {"from": "gpt", "value": "A cat, 猫."}]},
    {"id": "2", "image": "lost.jpg", "conversations": [{"from": "human", "value": "<image>"},
                                                       {"from": "gpt", "value": "?"}]},
    {"id": "3", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
]
CONVERTER = ROOT / "examples" / "qwen2vl" / "llava_instruct_2_mllm_demo_format.py"


def test_llava_records_as_the_peer_converts_them(tmp_path: Path) -> None:
    """Pictures that are missing leave their record out, ids are kept, and an output that exists is refused."""
    folder = tmp_path / "data" / "COCO2017" / "train2017"
    folder.mkdir(parents=True)
    (folder / "1.jpg").write_bytes(b"x")
    source = tmp_path / "data" / "llava_instruct_150k.json"
    source.write_text(json.dumps(LLAVA))
    done = run([sys.executable, str(CONVERTER)], cwd=tmp_path)
    target = tmp_path / "data" / "mllm_format_llava_instruct_data.json"
    assert done.returncode == 0, done.stderr
    assert "2 records; 1 left out" in done.stdout
    assert json.loads(target.read_text()) == [
        {"id": "1", "images": ["./data/COCO2017/train2017/1.jpg"],
         "messages": [{"role": "user", "content": "<image>\nWhat is it?"}, {"role": "assistant",
                                                                           "content": "A cat, 猫."}]},
        {"id": "3", "images": [],
         "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]},
    ]
    again = run([str(warm_python()), str(CONVERTER)], cwd=tmp_path)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1) and "exists; rename or remove it" in again.stderr


@pytest.mark.parametrize(("records", "flags", "what"), [
    ([{"id": 9, "conversations": [{"from": "system", "value": "x"}]}], [], "LLaVA's records: 'system'"),
    (LLAVA[:2], [], "none of the 2 records has its image"),
    ("{", [], "Expecting property name"),
    ([], ["--llava_json_path", "none.json"], "none.json"),
])
def test_llava_mistakes_are_reported(tmp_path: Path, records: object, flags: list[str], what: str) -> None:
    (tmp_path / "in.json").write_text(records if isinstance(records, str) else json.dumps(records))
    done = run([str(warm_python()), str(CONVERTER), "--llava_json_path", "in.json", "--coco_path", "coco",
                "--output_json_path", "out.json", *flags], cwd=tmp_path)
    assert done.returncode == 2 and what in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out.json").exists()
