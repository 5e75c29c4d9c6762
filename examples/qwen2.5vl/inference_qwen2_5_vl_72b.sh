#!/bin/bash
# Ask Qwen2.5-VL-72B.  Default layout: 4 devices: PP 4.  Without flags the JSON's own prompt is asked.
# Every variable can be set from the environment; flags (try --prompt, --chat, --prompts) are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
device_environment

NPUS_PER_NODE=${NPUS_PER_NODE:-4}
NNODES=${NNODES:-1}

MM_MODEL=${MM_MODEL:-./examples/qwen2.5vl/inference_qwen2_5_vl_72b.json}
LOAD_PATH=${LOAD_PATH:-ckpt/mm_path/Qwen2.5-VL-72B-Instruct}

TP=${TP:-1}
PP=${PP:-4}

ask --bf16 "$@"
