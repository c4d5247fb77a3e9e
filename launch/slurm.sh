#!/bin/bash
# A training run on SLURM that saves before its time limit, requeues itself, and goes on until the run is finished.
#
#     . .venv/bin/activate
#     sbatch --nodes 2 launch/slurm.sh runs/bloom-560m --config bloom-560m.toml --mesh.dp_replicate 2
#
# The first argument is the run directory, the others are those of train.py. SLURM starts the script in the folder and
# with the environment in which it was submitted. Options of sbatch on the command line win over those below.
# docs/clusters.md explains the choices.
#
#SBATCH --job-name=dtmega --nodes=1 --ntasks-per-node=1 --exclusive --mem=0
#SBATCH --gpus-per-node=8 --time=24:00:00
#SBATCH --signal=TERM@300 --requeue
#SBATCH --open-mode=append --output=%x-%j.log

# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0  # the network between the nodes, as `ip link` names it
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
MAX_LOST=${MAX_LOST:-3}                      # requeues in a row after a hang or a lost node, without a new step
MAX_RESTARTS=${MAX_RESTARTS:-3}              # restarts by torchrun, in place, as after a worker that was killed
MIN_NODES=${MIN_NODES:-$SLURM_JOB_NUM_NODES} # fewer, with sbatch --no-kill: go on without a node that is lost

run=${1:?the run directory}
shift
restarts=${SLURM_RESTART_COUNT:-0}
export DTMEGA_ATTEMPT=$SLURM_JOB_ID-$restarts # exit.json and starts.jsonl repeat it

# How an attempt has ended: its exit code; "lost" if it started and left no exit.json; "absent" if it did not start, or
# if another attempt has written exit.json.
ending() {
    if grep -qs "\"attempt\": \"$1\"" "$run/exit.json"; then
        sed -n 's/^{"code": \([0-9]*\),.*/\1/p' "$run/exit.json"
    elif [ ! -e "$run/exit.json" ] && grep -qs "\"attempt\": \"$1\"" "$run/starts.jsonl"; then
        echo lost
    else
        echo absent
    fi
}

# The newest step in metrics.jsonl, whose last line may be damaged.
newest_step() {
    local found
    found=$(tail -n 9 "$run/metrics.jsonl" 2>/dev/null | sed -n 's/^{"step": \([0-9]*\),.*/\1/p' | tail -n 1)
    echo "${found:-0}"
}

# Count an attempt with this ending. `lost` counts hangs and lost nodes since the run came to `step`.
count() {
    local now
    now=$(newest_step)
    if [ "$now" -gt "$step" ]; then
        step=$now lost=0
    elif [ "$1" != 75 ] && [ "$1" != 76 ]; then
        lost=$((lost + 1))
    fi
}

# Each start counts the attempt before it, because a node that is lost may end this script, too. SLURM then requeues the
# job by itself. The file keeps the counts.
mkdir -p "$run"
counts=$run/slurm-$SLURM_JOB_ID.counts
if [ "$restarts" -gt 0 ] && read -r lost step <"$counts"; then
    count "$(ending "$SLURM_JOB_ID-$((restarts - 1))")"
else
    lost=0 step=$(newest_step)
fi
echo "$lost $step" >"$counts"
if [ "$lost" -gt "$MAX_LOST" ]; then
    echo "slurm.sh: $lost attempts in a row have hung or lost a node, without a step after step $step: not started"
    exit 77
fi

# One torchrun on each node. `exec`, because the signal would end a shell in between.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# shellcheck disable=SC2016  # each node expands its own variables
on_each_node='exec torchrun --rdzv-conf is_host=$((SLURM_NODEID == 0)) --local-addr $SLURMD_NODENAME "$@"'
srun --kill-on-bad-exit=0 --no-kill --cpu-bind=none bash -c "$on_each_node" torchrun \
    --nnodes "$MIN_NODES:$SLURM_JOB_NUM_NODES" --nproc-per-node "$RANKS_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$first_node:$((20000 + SLURM_JOB_ID % 10000))" --rdzv-id "$DTMEGA_ATTEMPT" \
    --max-restarts "$MAX_RESTARTS" --shutdown-timeout 240 \
    -m dtmega train --run.dir "$run" "$@"

# srun exits with 1 or 143 whatever has happened, so the file decides.
end=$(ending "$DTMEGA_ATTEMPT")
count "$end"
case $end in
    75 | 76) again=yes ;;
    77 | lost) again=$([ "$lost" -le "$MAX_LOST" ] && echo yes) ;;
    *) again='' ;;
esac
echo "slurm.sh: attempt $DTMEGA_ATTEMPT: $end at step $step${again:+, requeued}"
if [ -z "$again" ] || ! scontrol requeue "$SLURM_JOB_ID"; then
    rm -f "$counts"
fi
[[ $end =~ ^[0-9]+$ ]] || end=1
exit "$end"
