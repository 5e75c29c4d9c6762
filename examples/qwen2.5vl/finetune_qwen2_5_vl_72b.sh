#!/bin/bash
# Fine-tune Qwen2.5-VL-72B.  Default layout: 4 nodes x 16 devices: TP 2, PP 8, DP 4, global batch 384.
# Every variable can be set from the environment; flags (try --dry-run) are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-2}
expandable_segments PYTORCH_NPU_ALLOC_CONF
device_environment

NPUS_PER_NODE=${NPUS_PER_NODE:-16}
NNODES=${NNODES:-4}
# One address per line, the master first; where the file is missing, MASTER_ADDR, NNODES and NODE_RANK count.
HOSTFILE=${HOSTFILE:-examples/qwen2.5vl/hostfile.txt}
nodes_from_hostfile "$HOSTFILE"

MM_DATA=${MM_DATA:-./examples/qwen2.5vl/data_72b.json}
MM_MODEL=${MM_MODEL:-./examples/qwen2.5vl/model_72b.json}
LOAD_PATH=${LOAD_PATH:-ckpt/mm_path/Qwen2.5-VL-72B-Instruct}
SAVE_PATH=${SAVE_PATH:-save_dir}

TP=${TP:-2}
PP=${PP:-8}
CP=${CP:-1}
# One sample a microbatch, as in MindSpeed-MM.  By --dry-run the states leave 23 GiB of 64; the 7 microbatches in flight
# on stage 1 keep 13 GiB of activations when all samples have 1,024 tokens, and twice that would not fit.  With more
# memory MBS=2 GRAD_ACC_STEP=48 gives the same result (common.sh says why) with larger matrix products.
MBS=${MBS:-1}
GRAD_ACC_STEP=${GRAD_ACC_STEP:-96}
SEQ_LENGTH=${SEQ_LENGTH:-1024}
TRAIN_ITERS=${TRAIN_ITERS:-10000}
SAVE_INTERVAL=${SAVE_INTERVAL:-500}
KEEP_CHECKPOINTS=${KEEP_CHECKPOINTS:-2}
LR=${LR:-1.0e-5}
derive_sizes

# model_72b.json has the sizes of the model, common.sh the flags of every training; the others are here.
training_args
published_args
launch "$@"
