#!/bin/bash
# Fine-tune Qwen2.5-VL-3B.  Default layout: 8 devices: DP 8, global batch 256.
# Every variable can be set from the environment; flags (try --dry-run) are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
device_environment

NPUS_PER_NODE=${NPUS_PER_NODE:-8}
NNODES=${NNODES:-1}

MM_DATA=${MM_DATA:-./examples/qwen2.5vl/data_3b.json}
MM_MODEL=${MM_MODEL:-./examples/qwen2.5vl/model_3b.json}
LOAD_PATH=${LOAD_PATH:-ckpt/mm_path/Qwen2.5-VL-3B-Instruct}
SAVE_PATH=${SAVE_PATH:-save_dir}

TP=${TP:-1}
PP=${PP:-1}
CP=${CP:-1}
# 8 x 4 microbatches of packed samples instead of MindSpeed-MM's 1 x 32: the same 32 samples, so the same result
# (common.sh says why), with fewer and larger matrix products.
MBS=${MBS:-8}
GRAD_ACC_STEP=${GRAD_ACC_STEP:-4}
SEQ_LENGTH=${SEQ_LENGTH:-1024}
TRAIN_ITERS=${TRAIN_ITERS:-10000}
SAVE_INTERVAL=${SAVE_INTERVAL:-500}
KEEP_CHECKPOINTS=${KEEP_CHECKPOINTS:-2}
LR=${LR:-1.0e-5}
derive_sizes

# model_3b.json has the sizes of the model, common.sh the flags of every training; the others are here.
training_args
published_args
launch "$@"
