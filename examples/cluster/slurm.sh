#!/bin/bash
# Train on the nodes of a Slurm job with one of the scripts for fine-tuning:
#
#     sbatch --nodes 4 examples/cluster/slurm.sh examples/qwen2.5vl/finetune_qwen2_5_vl_72b.sh [FLAGS]
#
# Slurm starts the script once on each node, and the script starts a process for each device.  Its variables (TP, PP,
# SAVE_PATH and others) come from the environment of sbatch.  Add what your cluster asks for, such as --partition, --time
# and --gres.  Ten minutes before the time limit Slurm signals the scripts, which save and end; the same command resumes.
#SBATCH --job-name=qwen2_5_vl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@600
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

if (($# == 0)); then
    echo "usage: sbatch [--nodes N] examples/cluster/slurm.sh SCRIPT [FLAGS]" >&2
    exit 2
fi
export NNODES=$SLURM_NNODES
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # all, because a pipe to head could end scontrol, and this script
export MASTER_ADDR=${MASTER_ADDR:-${hosts%%$'\n'*}}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}  # jobs on one machine need different ones
# Without --kill-on-bad-exit: if a rank fails, those of the other nodes save what they have, and end by themselves.
# shellcheck disable=SC2016
exec srun --ntasks-per-node=1 bash -c 'export NODE_RANK=$SLURM_NODEID; exec bash "$@"' slurm "$@"
