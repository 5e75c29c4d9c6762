#!/bin/bash
# Train on the machines of a hostfile with one of the scripts for fine-tuning, over ssh:
#
#     bash examples/cluster/ssh.sh HOSTFILE [NAME=VALUE ...] SCRIPT [FLAGS]
#     bash examples/cluster/ssh.sh hosts.txt TP=8 PP=4 examples/qwen2.5vl/finetune_qwen2_5_vl_72b.sh
#
# HOSTFILE has one address per line; the first one is the master.  Every machine has this directory under the same
# path, and accepts ssh without a password.  The NAMEs are variables of the script.  Each line of output begins with the
# number of its node.
#
# Ctrl-C and SIGTERM end the script on every machine as SIGTERM would: it saves first.  So does a lost connection.  If a
# machine reports a mistake (status 2), the others are ended, too.  The exit status is the first that is not 0.
# SSH: the command to use in place of ssh, with its options.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../hosts.sh"

(($# >= 2)) || fail "usage: bash examples/cluster/ssh.sh HOSTFILE [NAME=VALUE ...] SCRIPT [FLAGS]"
hostfile=$1
shift
[[ -r "$hostfile" ]] || fail "$hostfile cannot be read; expected a file with one address per line"
read_hosts "$hostfile"
settings=()
while [[ "${1:-}" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; do
    settings+=("$1")
    shift
done
[[ -f "${1:-}" ]] || fail "${1:-nothing} is given as the script; expected one of examples/qwen2.5vl/finetune_*.sh"
read -r -a ssh <<<"${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=30}"

# The script runs beside a process that waits for the end of its input, which is the end of the connection.
# shellcheck disable=SC2016
watched='exec 3<&0; "$@" 3<&- & script=$!; { cat <&3 >/dev/null; kill -TERM "$script"; } 2>/dev/null & watcher=$!
    status=0; wait "$script" || status=$?; kill "$watcher" 2>/dev/null; exit "$status"'

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
inputs=()

# end_all: close the connections' inputs, which ends the scripts.
end_all() {
    local input
    for input in ${inputs[@]+"${inputs[@]}"}; do exec {input}>&-; done
    inputs=()
}

# start RANK SCRIPT FLAGS...: run the script on a machine; the end of its input ends it.
start() {
    local rank=$1 words command
    shift
    words=(env "NNODES=${#nodes[@]}" "NODE_RANK=$rank" "MASTER_ADDR=${nodes[0]}"
        ${settings[@]+"${settings[@]}"} bash "$@")
    printf -v command 'cd %q && exec bash -c %q ssh %s' "$PWD" "$watched" "$(printf '%q ' "${words[@]}")"
    mkfifo "$scratch/input.$rank"
    set -m  # in a process group of its own, which Ctrl-C does not reach
    {
        end_all  # those of the others, which this process has inherited
        set +e
        "${ssh[@]}" "${nodes[$rank]}" "$command" <"$scratch/input.$rank" 2>&1 | sed -u "s/^/[node $rank] /"
        echo "${PIPESTATUS[0]}" >"$scratch/status.$rank"
    } &
    set +m
    exec {input}>"$scratch/input.$rank"
    inputs+=("$input")
}

trap end_all INT TERM
for rank in "${!nodes[@]}"; do start "$rank" "$@"; done
while [[ -n "$(jobs -rp)" ]]; do
    wait -n || true
    if grep -qx 2 "$scratch"/status.* 2>/dev/null; then end_all; fi
done
for rank in "${!nodes[@]}"; do
    read -r status <"$scratch/status.$rank"
    ((status == 0)) || exit "$status"
done
