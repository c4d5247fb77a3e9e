#!/bin/bash
# torchrun on one node, for schedulers that start the same command on each node and decide by its exit code.
#
#     launch/node.sh runs/bloom-560m --config bloom-560m.toml --mesh.dp_replicate 2
#
# The first argument is the run directory, the others are those of train.py. torchrun's own options are read from PET_*:
# PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT. SIGTERM, SIGINT and SIGHUP are passed
# on as SIGTERM. torchrun exits with 1 whatever has happened, so this script exits with the code in the exit.json that
# this attempt has written; without one with 76 after a signal, 137 if a rank was killed, else with torchrun's code.
run=$1
shift
before=$(cat "$run/exit.json" 2>/dev/null)
starts=$(cat "$run/starts.jsonl" 2>/dev/null)

"${PYTHON:-python}" -m torch.distributed.run --shutdown-timeout 240 -m dtmega train --run.dir "$run" "$@" &
torchrun=$!
trap 'signalled=yes; kill -TERM "$torchrun" 2>/dev/null' TERM INT HUP
while :; do
    wait "$torchrun" # until it ends, or a signal comes
    code=$?
    kill -0 "$torchrun" 2>/dev/null || break
done
[ "$code" = 0 ] && exit 0

# The first rank writes the file last. On another node than the first, that may be after the end of this torchrun.
end=$((SECONDS + 60))
[ "${PET_NODE_RANK:-0}" = 0 ] && end=$SECONDS
while :; do
    after=$(cat "$run/exit.json" 2>/dev/null)
    [ -n "$after" ] && [ "$after" != "$before" ] && exit "$(sed -n 's/^{"code": \([0-9]*\),.*/\1/p' "$run/exit.json")"
    [ "$SECONDS" -ge "$end" ] && break
    sleep 1
done
[ -n "$signalled" ] && exit 76
[ ! -e "$run/exit.json" ] && [ "$(cat "$run/starts.jsonl" 2>/dev/null)" != "$starts" ] && exit 137
exit "$code"
