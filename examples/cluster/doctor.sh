#!/bin/bash
# Examine the nodes of a job with mm-doctor, where the script for fine-tuning stands:
#
#     bash examples/cluster/ssh.sh HOSTFILE examples/cluster/doctor.sh [FLAGS]
#     sbatch --nodes 4 examples/cluster/slurm.sh examples/cluster/doctor.sh [FLAGS]
#
# FLAGS are those of mm-doctor.  From the environment: MASTER_ADDR MASTER_PORT NNODES NODE_RANK, PYTHON, CANN_ENV,
# ATB_ENV.
source "$(dirname "${BASH_SOURCE[0]}")/../qwen2.5vl/common.sh"

device_environment
exec "$PYTHON" -m mm.doctor.cli --nnodes "${NNODES:-1}" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" \
    --master-port "$MASTER_PORT" "$@"
