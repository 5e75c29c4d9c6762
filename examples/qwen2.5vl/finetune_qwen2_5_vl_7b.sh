#!/bin/bash
# Fine-tune Qwen2.5-VL-7B.  Default layout: 8 devices: PP 2, DP 4, global batch 192.
# Every variable can be set from the environment; flags (try --dry-run) are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
device_environment

NPUS_PER_NODE=${NPUS_PER_NODE:-8}
NNODES=${NNODES:-1}

MM_DATA=${MM_DATA:-./examples/qwen2.5vl/data_7b.json}
MM_MODEL=${MM_MODEL:-./examples/qwen2.5vl/model_7b.json}
LOAD_PATH=${LOAD_PATH:-ckpt/mm_path/Qwen2.5-VL-7B-Instruct}
SAVE_PATH=${SAVE_PATH:-save_dir}

TP=${TP:-1}
PP=${PP:-2}
CP=${CP:-1}
# 4 x 12 microbatches of packed samples instead of MindSpeed-MM's 1 x 48: the same 48 samples, so the same result
# (common.sh says why), with larger matrix products.  12 microbatches leave the two stages idle for 1/13 of the time.
MBS=${MBS:-4}
GRAD_ACC_STEP=${GRAD_ACC_STEP:-12}
SEQ_LENGTH=${SEQ_LENGTH:-1024}
TRAIN_ITERS=${TRAIN_ITERS:-10000}
SAVE_INTERVAL=${SAVE_INTERVAL:-500}
KEEP_CHECKPOINTS=${KEEP_CHECKPOINTS:-2}
LR=${LR:-1.0e-5}
derive_sizes

# model_7b.json has the sizes of the model, common.sh the flags of every training; the others are here.
training_args
published_args
launch "$@"
