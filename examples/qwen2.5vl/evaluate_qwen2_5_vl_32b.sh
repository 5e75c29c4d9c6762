#!/bin/bash
# Score Qwen2.5-VL-32B.  Default layout: 2 devices: PP 2.  Without flags the JSON's own benchmark is asked.
# Every variable can be set from the environment; flags (try --benchmark, --questions, --output) are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
device_environment

NPUS_PER_NODE=${NPUS_PER_NODE:-2}
NNODES=${NNODES:-1}

MM_MODEL=${MM_MODEL:-./examples/qwen2.5vl/evaluate_qwen2_5_vl_32b.json}
LOAD_PATH=${LOAD_PATH:-ckpt/mm_path/Qwen2.5-VL-32B-Instruct}

TP=${TP:-1}
PP=${PP:-2}

export HCCL_EXEC_TIMEOUT=${HCCL_EXEC_TIMEOUT:-7200} TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}

ask evaluate_vlm.py --bf16 --distributed-timeout-minutes 1000 "$@"
