#!/bin/bash
# Fine-tune the tiny checkpoint of `make demo` in fp32.  Default layout: 2 CPU processes: PP 2, DP 1, global batch 32.
# Every variable can be set from the environment; flags (try --dry-run) are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NPUS_PER_NODE=${NPUS_PER_NODE:-2}
NNODES=${NNODES:-1}

MM_DATA=${MM_DATA:-./examples/qwen2.5vl/data_tiny.json}
MM_MODEL=${MM_MODEL:-./examples/qwen2.5vl/model_tiny.json}
LOAD_PATH=${LOAD_PATH:-runs/demo/checkpoint}
SAVE_PATH=${SAVE_PATH:-runs/tiny}

TP=${TP:-1}
PP=${PP:-2}
CP=${CP:-1}
# data_tiny.json packs: a microbatch has as many samples as SEQ_LENGTH x MBS tokens hold; these two give the global batch.
MBS=${MBS:-1}
GRAD_ACC_STEP=${GRAD_ACC_STEP:-32}
SEQ_LENGTH=${SEQ_LENGTH:-2560}
TRAIN_ITERS=${TRAIN_ITERS:-800}
SAVE_INTERVAL=${SAVE_INTERVAL:-100}
KEEP_CHECKPOINTS=${KEEP_CHECKPOINTS:-2}
LR=${LR:-2.0e-3}
derive_sizes

# model_tiny.json has the sizes of the model, common.sh the flags of every training; the others are here.
training_args
GPT_ARGS+=(
    --device "${DEVICE:-cpu}"
    --clip-grad 1.0
    --num-workers 0
)
OUTPUT_ARGS+=(--log-dir "$LOG_DIR")
launch "$@"
