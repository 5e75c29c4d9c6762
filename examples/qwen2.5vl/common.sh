# What all scripts share: environment, nodes, launch, and of training scripts the figures at the end.
#
# A script that trains sets NPUS_PER_NODE, NNODES, TP, PP, CP, MBS and GRAD_ACC_STEP (each overridable from the
# environment), calls `derive_sizes`, fills the arrays GPT_ARGS, MM_ARGS and OUTPUT_ARGS by `training_args` (and
# `published_args`), adds what only its model needs, and ends with `launch "$@"`.
# One that asks the model sets NPUS_PER_NODE, NNODES, TP, PP, MM_MODEL and LOAD_PATH, and ends with `ask PROGRAM "$@"`.
#
# The global batch is MBS x GRAD_ACC_STEP x DP samples; GBS given alone decides GRAD_ACC_STEP.  How the batch is cut
# into microbatches does not change the result: samples are packed, never padded, each attends to itself alone, and the
# loss is divided by the target tokens of the global batch.  Only --calculate-per-microbatch-loss makes MBS count.
#
# TRAIN_ITERS is the length of the run in steps; NUM_TRAIN_EPOCHS, where set, gives it in passes over the samples.
#
# The same command resumes: where SAVE_PATH holds a checkpoint, training goes on from it with its optimizer, schedule,
# random states and data; else it starts from the weights in LOAD_PATH.  The trainer decides at each start, so ranks
# that torchrun starts again (MAX_RESTARTS, default 0: how often, after a rank has failed) lose no saved step.  Every
# SAVE_INTERVAL steps, and after SIGTERM, SIGUSR1 or Ctrl-C, a checkpoint is saved, and the last KEEP_CHECKPOINTS are kept; with the optimizer's state each
# takes 2 bytes for each weight and 12 more for each that is trained.  MindSpeed-MM's scripts save weights alone, and only
# at the end: add --no-save-optim --no-save-rng and set SAVE_INTERVAL to TRAIN_ITERS for that.
#
# Flags after the script's name are passed on; with --dry-run or --check of a training nothing is launched.  Else one
# process checks a training before several are launched, so that a mistake is reported once and ends the script with
# status 2.  All paths are relative to the repository root.
#
# MM_PLAN plans the run of the script instead of starting it: the words of mm-plan, without the flags of training, as in
# MM_PLAN="--device h200 --write best" or MM_PLAN="predict --calibration FILE".
#
# From the environment: MASTER_ADDR MASTER_PORT NODE_RANK, MAX_RESTARTS, GBS, OVERLAP, SAVE_PATH, LOG_DIR, PYTHON,
# CANN_ENV, ATB_ENV.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/hosts.sh

MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NODE_RANK=${NODE_RANK:-0}
MAX_RESTARTS=${MAX_RESTARTS:-0}
LOG_DIR=${LOG_DIR:-logs}
GIVEN_GRAD_ACC_STEP=${GRAD_ACC_STEP:-}
GIVEN_TRAIN_ITERS=${TRAIN_ITERS:-}
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python
    if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi

"$PYTHON" -c 'from importlib.util import find_spec as find; exit(not (find("torch") and find("megatron")))' ||
    fail "PYTHON is $PYTHON, which has no torch or no megatron-core: run \"source .venv/bin/activate\"" \
        "(\"make .venv/.ready\" makes that environment), or set PYTHON to the interpreter of another one"

# expandable_segments VARIABLE: let the allocator of a device grow its blocks in place, because shapes change with every
# microbatch.  PYTORCH_ALLOC_CONF, where given, speaks for every device; torch_npu refuses its own variable beside it.
expandable_segments() {
    [[ -n "${PYTORCH_ALLOC_CONF:-}" ]] || export "$1=${!1:-expandable_segments:True}"
}

# The Ascend toolkit where it is installed, and the settings of the devices' runtimes (those of others have no effect).
device_environment() {
    local file
    for file in "${CANN_ENV:-/usr/local/Ascend/cann/set_env.sh}" "${ATB_ENV:-/usr/local/Ascend/nnal/atb/set_env.sh}"; do
        if [[ -f "$file" ]]; then
            set +eu  # these scripts read unset variables
            # shellcheck disable=SC1090
            source "$file"
            set -eu
        fi
    done
    expandable_segments PYTORCH_CUDA_ALLOC_CONF
    export ASCEND_SLOG_PRINT_TO_STDOUT=${ASCEND_SLOG_PRINT_TO_STDOUT:-0}
    export ASCEND_GLOBAL_LOG_LEVEL=${ASCEND_GLOBAL_LOG_LEVEL:-3}
    export TASK_QUEUE_ENABLE=${TASK_QUEUE_ENABLE:-2}
    export COMBINED_ENABLE=${COMBINED_ENABLE:-1}
    export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}
    export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1200}
    export NPU_ASD_ENABLE=${NPU_ASD_ENABLE:-0}
    export ASCEND_LAUNCH_BLOCKING=${ASCEND_LAUNCH_BLOCKING:-0}
    export ACLNN_CACHE_LIMIT=${ACLNN_CACHE_LIMIT:-100000}
}

# nodes_from_hostfile FILE: MASTER_ADDR, NNODES and NODE_RANK from a file with one address per line, if it exists.
nodes_from_hostfile() {
    local hostfile=$1 address
    [[ -f "$hostfile" ]] || return 0
    local nodes own
    read_hosts "$hostfile"
    own=" $(hostname -I 2>/dev/null || true) $(hostname) localhost 127.0.0.1 "
    MASTER_ADDR=${nodes[0]}
    NNODES=${#nodes[@]}
    for NODE_RANK in "${!nodes[@]}"; do
        address=${nodes[$NODE_RANK]}
        if [[ "$own" == *" $address "* ]]; then
            echo "node $NODE_RANK of $NNODES ($address), master $MASTER_ADDR"
            return 0
        fi
    done
    fail "none of the addresses in $hostfile (${nodes[*]}) belongs to this machine ($own)"
}

# WORLD_SIZE, DP, GBS (or GRAD_ACC_STEP), LENGTH_ARGS and OVERLAP_ARGS from the variables of the script.
derive_sizes() {
    local name wrong=()
    for name in NPUS_PER_NODE NNODES TP PP CP MBS GRAD_ACC_STEP SAVE_INTERVAL KEEP_CHECKPOINTS MASTER_PORT \
        ${GBS:+GBS}; do
        [[ "${!name}" =~ ^[1-9][0-9]{0,8}$ ]] || wrong+=("$name is '${!name}'; expected an integer of at least 1.")
    done
    [[ "$MAX_RESTARTS" =~ ^[0-9]{1,4}$ ]] || wrong+=("MAX_RESTARTS is '$MAX_RESTARTS'; expected 0 to 9999.")
    ((${#wrong[@]} == 0)) || fail "${wrong[@]}"
    [[ "$NODE_RANK" =~ ^[0-9]{1,8}$ ]] && ((10#$NODE_RANK < NNODES)) ||
        fail "NODE_RANK is '$NODE_RANK'; expected 0 to $((NNODES - 1)), for NNODES is $NNODES"
    ((MASTER_PORT < 65536)) || fail "MASTER_PORT is $MASTER_PORT; expected at most 65535"
    WORLD_SIZE=$((NPUS_PER_NODE * NNODES))
    local replica=$((TP * PP * CP))
    if ((WORLD_SIZE % replica != 0)); then
        fail "$NNODES nodes x $NPUS_PER_NODE devices = $WORLD_SIZE, not a multiple of TP x PP x CP = $TP x $PP x $CP;" \
            "change NNODES, NPUS_PER_NODE, TP or PP"
    fi
    DP=$((WORLD_SIZE / replica))
    local of_all=$((MBS * DP))
    if [[ -n "${GBS:-}" && -z "$GIVEN_GRAD_ACC_STEP" ]]; then
        ((GBS % of_all == 0)) || fail "GBS is $GBS, which is not a multiple of MBS x DP = $MBS x $DP = $of_all;" \
            "set it to $(((GBS + of_all - 1) / of_all * of_all)), or change MBS"
        GRAD_ACC_STEP=$((GBS / of_all))
    fi
    GBS=${GBS:-$((GRAD_ACC_STEP * of_all))}
    ((GBS == GRAD_ACC_STEP * of_all)) || fail "GBS is $GBS, but MBS x GRAD_ACC_STEP x DP = $MBS x $GRAD_ACC_STEP x" \
        "$DP = $((GRAD_ACC_STEP * of_all)); leave GBS or GRAD_ACC_STEP out"
    LENGTH_ARGS=(--train-iters "$TRAIN_ITERS")
    if [[ -n "${NUM_TRAIN_EPOCHS:-}" ]]; then
        [[ -z "$GIVEN_TRAIN_ITERS" ]] || fail "TRAIN_ITERS is $TRAIN_ITERS and NUM_TRAIN_EPOCHS $NUM_TRAIN_EPOCHS;" \
            "set one of them"
        LENGTH_ARGS=(--num-train-epochs "$NUM_TRAIN_EPOCHS")
    fi
    # With one hardware queue the reduction of a gradient between tensor-parallel ranks starts before the matrix product
    # that hides it.  Without tensor parallelism the variable would only hold back the overlap of OVERLAP_ARGS.
    if ((TP > 1)); then export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}; fi
    # Reduce gradients during the backward pass and gather parameters during the forward pass; OVERLAP=0 turns both off.
    case "${OVERLAP:-1}" in
        1) OVERLAP_ARGS=(--overlap-grad-reduce --overlap-param-gather) ;;
        0) OVERLAP_ARGS=() ;;
        *) fail "OVERLAP is '$OVERLAP'; expected 1 or 0" ;;
    esac
}

# training_args: fill GPT_ARGS, MM_ARGS and OUTPUT_ARGS with the flags of every training, from the script's variables.
training_args() {
    GPT_ARGS=(
        --tensor-model-parallel-size "$TP"
        --pipeline-model-parallel-size "$PP"
        --context-parallel-size "$CP"
        --micro-batch-size "$MBS"
        --global-batch-size "$GBS"
        --seq-length "$SEQ_LENGTH"
        --lr "$LR"
        --lr-decay-style cosine
        --weight-decay 0
        "${LENGTH_ARGS[@]}"
        --lr-warmup-fraction 0.1
        --adam-beta1 0.9
        --adam-beta2 0.999
        --seed 42
        --use-distributed-optimizer
    )
    MM_ARGS=(
        --mm-data "$MM_DATA"
        --mm-model "$MM_MODEL"
    )
    OUTPUT_ARGS=(
        --log-interval 1
        --save-interval "$SAVE_INTERVAL"
        --keep-last-checkpoints "$KEEP_CHECKPOINTS"
        --save "$SAVE_PATH"
        --log-tps
    )
}

# published_args: add the flags of every training of a published size, as in MindSpeed-MM's scripts without those that
# have no effect here.
published_args() {
    GPT_ARGS+=(
        --context-parallel-algo ulysses_cp_algo
        --clip-grad 0.0
        --bf16
        "${OVERLAP_ARGS[@]}"
        --num-workers 8
        --distributed-timeout-minutes 20
    )
}

# launch FLAGS...: train with the script's arrays and FLAGS, show the figures, exit with the status of the training.
launch() {
    export LOAD_PATH  # so that a message about it names the variable
    local word before=
    for word in "$@"; do  # a --save of the user's is where to resume, too
        if [[ "$before" == --save ]]; then SAVE_PATH=$word; fi
        before=$word
    done
    local flags=("${GPT_ARGS[@]}" "${MM_ARGS[@]}" "${OUTPUT_ARGS[@]}"
        --load "$SAVE_PATH" --pretrained-checkpoint "$LOAD_PATH" "$@")
    [[ " $* " == *" --calculate-per-"* ]] || flags+=(--calculate-per-token-loss)
    local rehearse=(env -u WORLD_SIZE -u RANK -u LOCAL_RANK "$PYTHON" -m mm.train "${flags[@]}"
        --world-size "$WORLD_SIZE")
    local flag log status rehearsal words
    if [[ -n "${MM_PLAN:-}" ]]; then
        read -ra words <<<"$MM_PLAN"
        exec env -u WORLD_SIZE -u RANK -u LOCAL_RANK "$PYTHON" -m mm.plan.cli "${words[@]}" -- "${flags[@]}" \
            --world-size "$WORLD_SIZE"
    fi
    for flag in "$@"; do
        if [[ " --dry-run --check --help -h " == *" $flag "* ]]; then
            exec "${rehearse[@]}"
        fi
    done
    if ((NNODES > 1)) && [[ "$MASTER_ADDR" == localhost ]]; then
        fail "$NNODES nodes need a common master: write the addresses into ${HOSTFILE:-a hostfile}, or set" \
            "MASTER_ADDR, NNODES and NODE_RANK"
    fi
    if [[ "$NODE_RANK" == 0 ]] && (exec 3<>"/dev/tcp/localhost/$MASTER_PORT") 2>/dev/null; then
        fail "MASTER_PORT $MASTER_PORT is in use on this machine, perhaps by another run; set another one, such as" \
            "MASTER_PORT=$((MASTER_PORT + 1)) bash $0"
    fi
    # The training says the notes again, in its log; a rehearsal is seen where it fails.
    rehearsal=$("${rehearse[@]}" --check) || { status=$? && echo "$rehearsal" && exit "$status"; }
    mkdir -p "$LOG_DIR"
    log="$LOG_DIR/train_$(date +%Y%m%d_%H%M%S).log"
    launch_logged "$log" "${flags[@]}"
    chmod 440 "$log"
    report_speed "$log" "$GBS" "$status"
    exit "$status"
}

# launch_logged LOG FLAGS...: train on all devices, print and log the output; sets `status` to the training's exit status.
# A scheduler may signal this shell alone: it passes the signal on, and waits while the ranks save.  Ctrl-C reaches all
# processes by itself.  tee outlives the signals, because it writes what the ranks say after them.
launch_logged() {
    local log=$1 output tee launcher signal
    shift
    exec {output}> >(trap '' INT TERM USR1 && exec tee "$log")
    tee=$!
    "$PYTHON" -m mm.launch --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK" \
        --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --max_restarts "$MAX_RESTARTS" \
        -m mm.train "$@" >&"$output" 2>&1 {output}>&- &
    launcher=$!
    exec {output}>&-
    trap : INT
    for signal in TERM USR1; do
        # shellcheck disable=SC2064
        trap "kill -$signal $launcher 2>/dev/null || true" "$signal"
    done
    while true; do
        status=0
        wait "$launcher" || status=$?  # a signal interrupts it
        kill -0 "$launcher" 2>/dev/null || break
    done
    trap - INT TERM USR1
    wait "$tee" || true
}

# ask PROGRAM FLAGS...: put questions to the model of the script's variables, on NNODES x NPUS_PER_NODE devices.
ask() {
    local program=$1
    export LOAD_PATH
    shift
    local name wrong=() flags=(--mm-model "$MM_MODEL" --load "$LOAD_PATH"
        --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" "$@")
    for name in NPUS_PER_NODE NNODES TP PP MASTER_PORT; do
        [[ "${!name}" =~ ^[1-9][0-9]{0,8}$ ]] || wrong+=("$name is '${!name}'; expected an integer of at least 1.")
    done
    ((${#wrong[@]} == 0)) || fail "${wrong[@]}"
    if ((NPUS_PER_NODE * NNODES == 1)) || [[ " $* " == *" --help "* ]]; then exec "$PYTHON" "$program" "${flags[@]}"; fi
    exec "$PYTHON" -m mm.launch --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" \
        --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$program" "${flags[@]}"
}

# mean_of NAME LOG: mean of the numbers after `NAME:`, over lines 51 to 150 that have it (or the last 100 of fewer).
mean_of() {
    awk -v name="$1:" '
        (at = index($0, name)) && count < 150 { value[++count] = substr($0, at + length(name)) + 0 }
        END {
            first = count > 100 ? count - 99 : 1
            for (i = first; i <= count; i++) sum += value[i]
            if (count) printf "%.1f", sum / (count - first + 1)
        }' "$2"
}

# report_speed LOG GBS STATUS: the three figures of a run.  Of one that failed before its first step, the last line is
# what it said itself.
report_speed() {
    local log=$1 gbs=$2 status=$3 step_time tokens samples_per_second
    step_time=$(mean_of "elapsed time per iteration (ms)" "$log")
    if [[ -z "$step_time" ]]; then
        ((status == 0)) || return 0
        echo "No iteration lines in $log: fewer steps than --log-interval were trained, or another node, that of the" \
            "last rank, writes them"
        return 0
    fi
    samples_per_second=$(awk -v gbs="$gbs" -v ms="$step_time" 'BEGIN {if (ms) printf "%.3f", gbs * 1000 / ms}')
    echo "Elapsed Time Per iteration: $step_time"
    echo "Average Samples per Second: $samples_per_second"
    tokens=$(mean_of "tokens per sample" "$log")
    if [[ -n "$tokens" ]]; then
        echo "Consumed Tokens per Second: $(awk -v sps="$samples_per_second" -v tokens="$tokens" \
            'BEGIN {printf "%.3f", sps * tokens}')"
    fi
}
