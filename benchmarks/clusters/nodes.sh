#!/bin/bash
# shellcheck disable=SC2034  # `failed` is read by the file that sources this one
# Two nodes on one machine: network namespaces with a virtual cable between them. To be sourced.
#
# `on_node 1 COMMAND ...` runs a command on node1, which has its own host name and network. The nodes share all folders.
# Everything that runs on the nodes ends, and the nodes with their folder $work are deleted, when the script ends.
set -eu
PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}")
PATH=$(dirname "$PYTHON"):/usr/sbin:$PATH # torchrun is beside Python
export PYTHON PATH PYTHONPATH=$PWD OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=cable
work=$(mktemp -d /tmp/dtmega-clusters.XXXXXX)
chmod 755 "$work"
nodes=dtmega$$- # names of the namespaces, without their numbers
failed=0

# The small model that is trained. Its batch of 8 can be divided among 1, 2 and 4 ranks.
MODEL=(--config bloom.toml --model.n_layers 2 --model.n_heads 4 --model.hidden_size 64 --data.seq_len 64
    --precision.params float32 --eval.interval 0 --eval.sample_tokens 0 --log.interval 0 --run.device cpu)

remove_nodes() {
    local node
    for node in 1 2; do
        ip netns pids "$nodes$node" | xargs --no-run-if-empty kill -KILL || true
        ip netns delete "$nodes$node"
    done
    sleep 1
    rm -rf "$work"
}

make_nodes() {
    trap remove_nodes EXIT
    trap 'exit 1' INT TERM
    printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 node1' '10.77.0.2 node2' >"$work/hosts"
    ip netns add "${nodes}1"
    ip netns add "${nodes}2"
    ip -n "${nodes}1" link add cable type veth peer name cable netns "${nodes}2"
    local node
    for node in 1 2; do
        ip -n "$nodes$node" address add "10.77.0.$node/24" dev cable
        ip -n "$nodes$node" link set lo up
        ip -n "$nodes$node" link set cable up
    done
}

# `nsenter`, because `ip netns exec` hides the control groups, without which slurmd ends.
# shellcheck disable=SC2016  # the inner shell has arguments of its own
on_node() {
    nsenter --net="/run/netns/$nodes$1" unshare --uts --mount bash -c \
        'hostname "node$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"' "$1" "$work/hosts" "${@:2}"
}

# Cut the cable, and kill everything that runs on the node, as when a machine loses its power.
lose_node() {
    ip -n "$nodes$1" link set cable down
    ip netns pids "$nodes$1" | xargs --no-run-if-empty kill -KILL
}

return_node() { ip -n "$nodes$1" link set cable up; }

# wait_for SECONDS COMMAND ...: until the command succeeds.
wait_for() {
    local end=$((SECONDS + $1))
    until "${@:2}" >/dev/null 2>&1; do
        if [ "$SECONDS" -ge "$end" ]; then
            echo "   not in $1 s: ${*:2}"
            return 1
        fi
        sleep 0.5
    done
}

# process NODE PATTERN: the first process on a node with such a command line.
process() {
    local pid
    for pid in $(ip netns pids "$nodes$1"); do
        if tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q "$2"; then
            echo "$pid"
            return
        fi
    done
    return 1
}

# has_step RUN STEP: whether the run has come to this step.
has_step() { [ "$(tail -n 1 "$1/metrics.jsonl" | sed -n 's/^{"step": \([0-9]*\),.*/\1/p')" -ge "$2" ]; }

# train_truth RANKS KEY ...: the same training without a stop, on one node, in $work/truth.
train_truth() {
    local ranks=$1
    shift
    on_node 1 torchrun --nproc-per-node "$ranks" --master-addr node1 --master-port 29500 -m dtmega train "${MODEL[@]}" \
        --run.dir "$work/truth" "$@" >"$work/truth.log" 2>&1 || { cat "$work/truth.log" && exit 1; }
}

# compare RUN TRUTH [TOLERANCE]: losses and gradient norms of two runs, equal to the bit or up to a relative tolerance.
compare() {
    "$PYTHON" - "$1" "$2" "${3:-0}" <<'PYTHON' || failed=1 # of the file that sources this one
import json, sys
from pathlib import Path

runs = []
for folder in sys.argv[1:3]:
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    runs.append([(line["step"], line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line])
found, truth = runs
same = sum(a == b for a, b in zip(truth, found))
largest = max(abs(a[1] - b[1]) / a[1] for a, b in zip(truth, found))
print(f"   {same} of {len(truth)} losses and gradient norms equal to the bit; losses differ by at most {largest:.0e}")
tolerance = float(sys.argv[3])
good = largest <= tolerance if tolerance else same == len(truth)
sys.exit(not (good and len(truth) == len(found)))
PYTHON
}
