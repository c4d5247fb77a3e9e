#!/bin/bash
# Tokenise a corpus on SLURM: a job array with a task for each part, then a job that merges the parts.
#
#     . .venv/bin/activate
#     bash launch/slurm_tokenize.sh 12 data/big.jsonl data/tokenizer.json data/mine --append-eod
#
# The arguments are the number of parts, the input, the tokenizer and the output; others are passed to `tokenize`. If
# tasks fail, correct the cause and give the same command again: parts that are whole are skipped. CPUS is the number of
# processes of a task. Options of sbatch can be given in the environment (SBATCH_PARTITION, SBATCH_ACCOUNT, ...).
set -eu
CPUS=${CPUS:-8}
parts=$1 input=$2 tokenizer=$3 output=$4
shift 4

# The number of parts is written out, so that `scontrol requeue` or `sbatch --array 7` of one task is part 7 of 12, too.
part=$(printf '%q ' python -m dtmega tokenize --input "$input" --tokenizer "$tokenizer" --output "$output" \
    --workers "$CPUS" "$@")
job=$(sbatch --parsable --job-name tokenize --array "0-$((parts - 1))" --ntasks 1 --cpus-per-task "$CPUS" --requeue \
    --open-mode append --output '%x-%A-%a.log' --wrap "exec $part --part \$SLURM_ARRAY_TASK_ID/$parts")
together=$(printf '%q ' python -m dtmega merge --input "$output.part-*" --output "$output")
merge=$(sbatch --parsable --job-name merge --dependency "afterok:$job" --kill-on-invalid-dep yes --ntasks 1 \
    --output '%x-%j.log' --wrap "exec $together")
echo "$parts parts: job $job; merge: job $merge"
