#!/bin/bash
# Ask the tiny model of `make demo`.  Default layout: 2 CPU processes: PP 2.  Without flags the JSON's own prompt is asked.
# Every variable can be set from the environment; flags (try --prompt, --chat, --prompts) are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NPUS_PER_NODE=${NPUS_PER_NODE:-2}
NNODES=${NNODES:-1}

MM_MODEL=${MM_MODEL:-./examples/qwen2.5vl/inference_qwen2_5_vl_tiny.json}
LOAD_PATH=${LOAD_PATH:-runs/demo/checkpoint}

TP=${TP:-1}
PP=${PP:-2}

ask --device "${DEVICE:-cpu}" "$@"
