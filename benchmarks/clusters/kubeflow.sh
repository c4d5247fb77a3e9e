#!/bin/bash
# The command of launch/kubeflow.yaml's container on two nodes, with the variables that Kubeflow Trainer sets, and
# without Kubernetes. Called by benchmarks/clusters.sh.
. benchmarks/clusters/nodes.sh

RANK='^[^ ]*python[^ ]* -u -m dtmega train '
CONTAINER='^[^ ]*bash launch/node.sh '

pod() {
    on_node "$1" env PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK=$(($1 - 1)) PET_MASTER_ADDR=node1 \
        PET_MASTER_PORT=29500 launch/node.sh "$work/run" "${MODEL[@]}" "${@:2}" >>"$work/pod$1.log" 2>&1
}

# train KEY ...: both pods, until they end; $codes are their exit codes.
train() {
    local first=0 second=0
    pod 2 "$@" &
    local other=$!
    pod 1 "$@" || first=$?
    wait "$other" || second=$?
    codes="$first $second"
    echo "   exit codes $codes; $(cat "$work/run/exit.json" 2>/dev/null)"
}

expect() { [ "$codes" = "$1" ] || failed=1; }

# at STEP SIGNAL PATTERN: signal a process on the second node when the run has come to this step.
at() {
    wait_for 1200 has_step "$work/run" "$1"
    kill "-$2" "$(process 2 "$3")"
}

make_nodes
STEPS=(--train.steps 80 --checkpoint.interval 10)
train_truth 2 "${STEPS[@]}"

echo "two pods of one rank; one is evicted: SIGTERM to the first process of its container"
at 25 TERM "$CONTAINER" &
train "${STEPS[@]}"
expect "75 75"

echo "all pods started again; one rank is killed"
at 55 KILL "$RANK" &
train "${STEPS[@]}"

echo "all pods started again"
train "${STEPS[@]}"
expect "0 0"
compare "$work/run" "$work/truth"

echo "a refused configuration"
train "${STEPS[@]}" --model.n_layers 3
expect "2 2"
exit "$failed"
