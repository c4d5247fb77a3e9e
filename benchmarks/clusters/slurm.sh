#!/bin/bash
# launch/slurm.sh and slurm_tokenize.sh on a SLURM of two nodes with two ranks each. Called by benchmarks/clusters.sh.
# shellcheck disable=SC2317  # functions are called by name
. benchmarks/clusters/nodes.sh
export RANKS_PER_NODE=2

start_slurm() {
    local S=$work/slurm node
    mkdir "$S" "$S/state"
    dd if=/dev/urandom of="$S/munge.key" bs=1024 count=1 status=none
    chmod 400 "$S/munge.key"
    cat >"$S/slurm.conf" <<CONF
ClusterName=dtmega
SlurmctldHost=node1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket=$S/munge.socket,cred_expire=10
StateSaveLocation=$S/state
SlurmdSpoolDir=$S/spool.%n
SlurmctldPidFile=$S/slurmctld.pid
SlurmdPidFile=$S/slurmd.%n.pid
SlurmctldLogFile=$S/slurmctld.log
SlurmdLogFile=$S/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc=$S/jobs
ReturnToService=2
SlurmdTimeout=20
KillWait=10
MinJobAge=3600
NodeName=node1 NodeHostname=node1 NodeAddr=10.77.0.1 CPUs=2
NodeName=node2 NodeHostname=node2 NodeAddr=10.77.0.2 CPUs=2
PartitionName=all Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF=$S/slurm.conf
    on_node 1 munged --key-file="$S/munge.key" --socket="$S/munge.socket" --pid-file="$S/munged.pid" \
        --log-file="$S/munged.log" --seed-file="$S/munge.seed"
    on_node 1 slurmctld -i
    on_node 1 slurmd -N node1
    on_node 2 slurmd -N node2
    wait_for 60 nodes_are_idle
}

nodes_are_idle() { [ "$(on_node 1 sinfo --noheader --Node --states idle | wc -l)" = 2 ]; }

# submit RUN OPTION ... -- KEY ...: submit launch/slurm.sh with these options and keys; prints the job's number.
submit() {
    local run=$1 options=()
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    on_node 1 sbatch --parsable --chdir "$work" --nodes 2 --gpus-per-node 0 "${options[@]}" launch/slurm.sh "$run" \
        "${MODEL[@]}" "${@:2}"
}

field() { on_node 1 scontrol show job --oneliner "$1" | grep -o " $2=[^ ]*" | cut -d= -f2; }
ended() { [[ $(field "$1" JobState) =~ ^(COMPLETED|FAILED|TIMEOUT|CANCELLED)$ ]]; }
runs() { [ "$(field "$1" JobState)" = RUNNING ]; }
is_waiting() { [ "$(field "$1" JobState)" = PENDING ]; }

# finish JOB STATE: wait for a job, and say how it ended. It should end in this state.
finish() {
    wait_for 2400 ended "$1" && [ "$(field "$1" JobState)" = "$2" ] || failed=1
    sed -n 's/^slurm.sh/   &/p' "$work/dtmega-$1.log"
    echo "   job $1: $(field "$1" JobState), exit code $(field "$1" ExitCode), $(field "$1" Restarts) requeues"
}

# The sources of Python's own library, a file in each line.
write_corpus() {
    "$PYTHON" - "$work/corpus.jsonl" <<'PYTHON'
import json, os, sys
from pathlib import Path

with open(sys.argv[1], "w") as corpus:
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        corpus.write(json.dumps({"text": path.read_text(errors="replace")}) + "\n")
PYTHON
}

# submit_array PARTS: sets `jobs` to the numbers of the array and of the job that merges.
submit_array() {
    local said
    said=$(CPUS=1 on_node 1 bash "$OLDPWD/launch/slurm_tokenize.sh" "$1" corpus.jsonl stdlib-8k "of-$1" --append-eod)
    read -ra jobs <<<"$(grep -o 'job [0-9]*' <<<"$said" | cut -d ' ' -f 2 | paste -sd ' ')"
}

# array PARTS [KILL]: tokenise by launch/slurm_tokenize.sh. With KILL, a task is killed, and the command given again.
array() {
    local output=$work/of-$1 file jobs
    cd "$work"
    submit_array "$1"
    if [ $# -gt 1 ]; then
        wait_for 300 runs "${jobs[0]}_0"
        on_node 1 scancel --full --signal KILL "${jobs[0]}_0"
        wait_for 600 ended "${jobs[1]}"
        echo "   task 0 is killed; the merge: $(field "${jobs[1]}" JobState)"
        submit_array "$1"
    fi
    wait_for 600 ended "${jobs[1]}"
    cd - >/dev/null
    echo "   $1 parts, merged: $(field "${jobs[1]}" JobState), $(stat -c %s "$output.bin") bytes"
    for file in bin idx; do
        cmp "$output.$file" "$work/whole.$file" && echo "   .$file is byte-identical to that of one process" || failed=1
    done
}

tokenised() {
    echo "-- tokenising by an array, in 1, 3 and 12 parts"
    write_corpus
    "$PYTHON" -m dtmega tokenize --input "$work/corpus.jsonl" --tokenizer stdlib-8k --output "$work/whole" \
        --append-eod >"$work/whole.log"
    array 1
    array 3
    array 12 kill
}

# limit JOB MINUTES: change the job's limit.
limit() { on_node 1 scontrol update JobId="$1" TimeLimit="$2"; }

signalled() {
    echo "-- warned five minutes before its limit, after a third of its steps, and requeued"
    job=$(submit signalled --time 60 -- --train.steps "$STEPS" --checkpoint.interval 0)
    wait_for 1200 has_step "$work/signalled" $((STEPS / 3))
    limit "$job" $(($(on_node 1 squeue --noheader --job "$job" --format %M | cut -d : -f 1) + 3))
    wait_for 300 is_waiting "$job"
    limit "$job" 60
    finish "$job" COMPLETED
    compare "$work/signalled" "$work/truth"
}

# The signal URG does nothing, as if none came.
timed_out() {
    echo "-- not warned before its limit of a minute; then submitted again"
    job=$(submit timed_out --time 60 --signal URG@10 -- --train.steps "$STEPS" --checkpoint.interval 20)
    wait_for 1200 has_step "$work/timed_out" $((STEPS / 3))
    limit "$job" 1
    finish "$job" TIMEOUT
    job=$(submit timed_out --time 60 -- --train.steps "$STEPS" --checkpoint.interval 20)
    finish "$job" COMPLETED
    compare "$work/timed_out" "$work/truth"
}

lost_node() {
    echo "-- node2 is lost after a third of its steps, and comes back"
    job=$(submit lost_node --time 60 -- --train.steps "$STEPS" --checkpoint.interval 20)
    wait_for 1200 has_step "$work/lost_node" $((STEPS / 3))
    lose_node 2
    wait_for 300 is_waiting "$job"
    return_node 2
    on_node 2 slurmd -N node2
    finish "$job" COMPLETED
    compare "$work/lost_node" "$work/truth"
}

fewer_nodes() {
    echo "-- node2 is lost after a third of its steps, and the job goes on without it (MIN_NODES=1, --no-kill)"
    job=$(MIN_NODES=1 submit fewer_nodes --no-kill --time 60 -- --train.steps "$STEPS" --checkpoint.interval 20 \
        --run.timeout_s 30)
    wait_for 1200 has_step "$work/fewer_nodes" $((STEPS / 3))
    lose_node 2
    finish "$job" COMPLETED
    compare "$work/fewer_nodes" "$work/truth" 1e-5
}

make_nodes
start_slurm
STEPS=${STEPS:-1000} # of each run
echo "-- $STEPS steps without a stop, four ranks on one node"
train_truth 4 --train.steps "$STEPS" --checkpoint.interval 0
[ $# -gt 0 ] || set -- signalled timed_out lost_node fewer_nodes tokenised
for experiment in "$@"; do
    "$experiment"
done
exit "$failed"
