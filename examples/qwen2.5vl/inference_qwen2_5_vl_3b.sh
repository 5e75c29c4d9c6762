#!/bin/bash
# Ask Qwen2.5-VL-3B.  Default layout: 1 device.  Without flags the JSON's own prompt is asked.
# Every variable can be set from the environment; flags (try --prompt, --chat, --prompts) are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
device_environment

NPUS_PER_NODE=${NPUS_PER_NODE:-1}
NNODES=${NNODES:-1}

MM_MODEL=${MM_MODEL:-./examples/qwen2.5vl/inference_qwen2_5_vl_3b.json}
LOAD_PATH=${LOAD_PATH:-ckpt/mm_path/Qwen2.5-VL-3B-Instruct}

TP=${TP:-1}
PP=${PP:-1}

ask --bf16 "$@"
