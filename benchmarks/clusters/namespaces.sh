#!/bin/bash
# torchrun on two nodes with one rank each: a killed worker, a dead cable, a folder that one node does not see. Called
# by benchmarks/clusters.sh.
. benchmarks/clusters/nodes.sh

second=() # what node2 runs before torchrun

# on_both RUN OPTION ... -- KEY ...: start torchrun on both nodes.
on_both() {
    local run=$1 node options=() first=()
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    agents=()
    for node in 1 2; do
        [ "$node" = 1 ] || first=("${second[@]}")
        on_node "$node" "${first[@]}" torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \
            --rdzv-endpoint node1:29500 --rdzv-conf "is_host=$((node == 1))" --local-addr "node$node" "${options[@]}" \
            -m dtmega train "${MODEL[@]}" --run.dir "$work/$run" --train.steps "$STEPS" "${@:2}" \
            >"$work/$run-$node.log" 2>&1 &
        agents+=($!)
    done
}

# finish RUN: wait for both agents, and say how the run ended.
finish() {
    local agent codes=()
    for agent in "${agents[@]}"; do
        wait "$agent" && codes+=(0) || codes+=($?)
    done
    echo "   torchrun: ${codes[*]}; exit.json: $(sed 's/, "time".*/}/' "$work/$1/exit.json")"
    if [ -e "$work/$1/starts.jsonl" ]; then
        echo "   started at step $(sed 's/^{"step": \([0-9]*\),.*/\1/' "$work/$1/starts.jsonl" | paste -sd ' ')"
    fi
}

killed() {
    echo "-- the worker of node2 is killed after a third of the steps; --max-restarts 3"
    on_both killed --max-restarts 3 -- --checkpoint.interval 20
    wait_for 600 has_step "$work/killed" $((STEPS / 3))
    kill -KILL "$(pgrep --parent "$(pgrep --parent "${agents[1]}")")"
    finish killed
    compare "$work/killed" "$work/truth"
}

cable() {
    echo "-- the cable is dead for $1 s after a third of the steps; --max-restarts 3"
    on_both "cable$1" --max-restarts 3 -- --checkpoint.interval 20
    wait_for 600 has_step "$work/cable$1" $((STEPS / 3))
    ip -n "${nodes}2" link set cable down
    sleep "$1"
    return_node 2
    finish "cable$1"
    compare "$work/cable$1" "$work/truth"
}

hidden() {
    echo "-- node2 does not see the run directory"
    mkdir "$work/hidden"
    # shellcheck disable=SC2016  # for the inner shell
    second=(bash -c 'mount -t tmpfs none "$0" && exec "$@"' "$work/hidden")
    on_both hidden --max-restarts 0 --
    second=()
    finish hidden
}

make_nodes
STEPS=${STEPS:-1000} # of each run
echo "-- $STEPS steps without a stop, two ranks on one node"
train_truth 2 --train.steps "$STEPS" --checkpoint.interval 0
killed
cable 15
hidden
exit "$failed"
