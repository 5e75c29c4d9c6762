#!/bin/bash
# Fine-tune Qwen2.5-VL-32B.  Default layout: 2 nodes x 8 devices: TP 2, PP 8, DP 1, global batch 96.
# Every variable can be set from the environment; flags (try --dry-run) are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

expandable_segments PYTORCH_NPU_ALLOC_CONF
device_environment

NPUS_PER_NODE=${NPUS_PER_NODE:-8}
NNODES=${NNODES:-2}
# One address per line, the master first; where the file is missing, MASTER_ADDR, NNODES and NODE_RANK count.
HOSTFILE=${HOSTFILE:-examples/qwen2.5vl/hostfile.txt}
nodes_from_hostfile "$HOSTFILE"

MM_DATA=${MM_DATA:-./examples/qwen2.5vl/data_32b.json}
MM_MODEL=${MM_MODEL:-./examples/qwen2.5vl/model_32b.json}
LOAD_PATH=${LOAD_PATH:-ckpt/mm_path/Qwen2.5-VL-32B-Instruct}
SAVE_PATH=${SAVE_PATH:-save_dir}

TP=${TP:-2}
PP=${PP:-8}
CP=${CP:-1}
# 2 x 48 microbatches of packed samples instead of MindSpeed-MM's 1 x 96: the same 96 samples, so the same result
# (common.sh says why), with larger matrix products.  More samples would not fit 64 GiB, for up to 8 microbatches are in
# flight on a stage, and 48 leave the 8 stages idle for 7/55 of the time, where 24 would for 7/31.
MBS=${MBS:-2}
GRAD_ACC_STEP=${GRAD_ACC_STEP:-48}
SEQ_LENGTH=${SEQ_LENGTH:-1024}
TRAIN_ITERS=${TRAIN_ITERS:-10000}
SAVE_INTERVAL=${SAVE_INTERVAL:-500}
KEEP_CHECKPOINTS=${KEEP_CHECKPOINTS:-2}
LR=${LR:-1.0e-5}
derive_sizes

# model_32b.json has the sizes of the model, common.sh the flags of every training; the others are here.
training_args
published_args
launch "$@"
