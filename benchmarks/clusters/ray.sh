#!/bin/bash
# launch/ray_train.py and launch/tokenize_ray.py on a Ray of two nodes. Called by benchmarks/clusters.sh.
# PYTHON needs the extra `ray`.
. benchmarks/clusters/nodes.sh

export RAY_ADDRESS=10.77.0.1:6379 RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN
export RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=600
RAY_AUTH_TOKEN=$(cat /proc/sys/kernel/random/uuid)

# start_ray NODE OPTION ...: `ray start` gives a node 30 s, which a busy machine may need three times.
start_ray() {
    local attempt options=(--num-cpus 1 --num-gpus 0 --object-store-memory 100000000 --disable-usage-stats)
    for attempt in 1 2 3; do
        on_node "$1" "$PYTHON" -m ray.scripts.scripts start --node-ip-address "10.77.0.$1" "${@:2}" "${options[@]}" \
            >>"$work/ray.log" 2>&1 && return
        echo "   Ray has not started on node$1 (attempt $attempt)"
    done
    tail -n 5 "$work/ray.log"
    return 1
}

parent_of() { sed 's/.*) . \([0-9]*\) .*/\1/' "/proc/$1/stat"; }

RANK='^[^ ]*python[^ ]* [^ ]*/train.py '
DRIVER='^[^ ]*python[^ ]* launch/ray_train.py '

# train KEY ...: train on both nodes by launch/ray_train.py; $code is its exit code.
train() {
    code=0
    on_node 1 "$PYTHON" launch/ray_train.py --ranks 2 --storage "$work/storage" -- "${MODEL[@]}" --run.dir "$work/run" \
        "$@" >>"$work/ray.log" 2>&1 || code=$?
    echo "   exit code $code, after $(wc -l <"$work/run/starts.jsonl") starts; $(cat "$work/run/exit.json")"
}

expect() { [ "$code" = "$1" ] || failed=1; }

# harm: kill a rank in step 25 or later, a worker of Ray after step 45, and stop the run after step 65.
harm() {
    wait_for 1200 has_step "$work/run" 25
    kill -KILL "$(process 2 "$RANK")"
    wait_for 1200 has_step "$work/run" 45
    kill -KILL "$(parent_of "$(process 1 "$RANK")")"
    wait_for 1200 has_step "$work/run" 65
    kill -TERM "$(process 1 "$DRIVER")"
}

make_nodes
STEPS=(--train.steps 100 --checkpoint.interval 10)
train_truth 2 "${STEPS[@]}"
start_ray 1 --head --port 6379 --include-dashboard false --temp-dir "$work/ray"
start_ray 2 --address "$RAY_ADDRESS"

echo "one rank on each of two nodes: a rank is killed, then a worker of Ray, then the driver gets SIGTERM"
harm &
train "${STEPS[@]}"
expect 75
echo "the same command again"
train "${STEPS[@]}"
expect 0
compare "$work/run" "$work/truth"

echo "a refused configuration"
train "${STEPS[@]}" --model.n_layers 3
expect 2

# is_writing PREFIX: whether a task writes a part; the names of its temporary files contain its number.
is_writing() { compgen -G "$work/$1.part-*.bin.*.tmp" >/dev/null; }

# kill_writer PREFIX: kill a process of Ray that writes a part.
kill_writer() {
    wait_for 1200 is_writing "$1"
    local files=("$work/$1".part-*.bin.*.tmp)
    local number=${files[0]##*.bin.}
    kill -KILL "${number%%-*}" && echo "   killed: the writer of $(basename "${files[0]%%.bin*}")"
}

echo "tokenising in parts; a process of Ray is killed while it writes one"
"$PYTHON" - "$work/text.jsonl" <<'PYTHON'
import json, pathlib, sys, sysconfig

sources = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
with open(sys.argv[1], "w") as file:
    file.writelines(json.dumps({"text": text}) + "\n" for text in texts * 4)
PYTHON
TEXT=(--input "$work/text.jsonl" --tokenizer stdlib-8k --append-eod --output)
"$PYTHON" -m dtmega tokenize "${TEXT[@]}" "$work/whole" >>"$work/ray.log" 2>&1
for parts in 1 3 12; do
    kill_writer "by$parts" &
    on_node 1 "$PYTHON" launch/tokenize_ray.py --parts "$parts" "${TEXT[@]}" "$work/by$parts" >>"$work/ray.log" 2>&1 ||
        failed=1
    wait $! || failed=1
    for suffix in bin idx meta.json; do
        cmp "$work/by$parts.$suffix" "$work/whole.$suffix" || failed=1
    done
    echo "   in $parts: $(sha256sum <"$work/by$parts.bin"), in one go: $(sha256sum <"$work/whole.bin")"
done
exit "$failed"
