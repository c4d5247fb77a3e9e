"""Write docs/from-megatron.md: `python tools/flags_page.py`."""

from __future__ import annotations

from pathlib import Path

from dtmega import config
from dtmega.config.schema import SectionClasses
from dtmega.interop.megatron.flags import FLAGS, Flag

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from-megatron.md"
OPENING = """\
# Coming from Megatron

<!-- Written by tools/flags_page.py from dtmega/interop/megatron/flags.py. -->

`dtmega from-megatron` reads a launch script, or a line of arguments in quotes, and prints the TOML that says the same.
The script is read as text and never run. What is not carried over is named on stderr with the reason, and what the TOML
still lacks stands in it as a comment:

    python -m dtmega from-megatron examples/pretrain_bert_distributed.sh > bert.toml
    python -m dtmega from-megatron 'pretrain_gpt.py --num-layers 24 --hidden-size 1024 ...' > gpt.toml

## Checkpoints

    python -m dtmega convert --from megatron checkpoints/gpt --to dtmega weights/gpt --vocab-size 50257
    python -m dtmega convert --from megatron bloom/global_step95000 --to hf export/bloom --tokenizer tokenizer.json

read what Megatron-LM saved since 2019 (`iter_.../mp_rank_*`, `release`; GPT, BERT, its T5; files with and without
`checkpoint_version`, torch's older format too) and BLOOM's layer files by Megatron-DeepSpeed, on any number of tensor
ranks, stages and virtual stages; of a GPT also megatron-core's distributed checkpoints (`torch_dist`;
`zarr` is refused). Nothing in the pickles runs: they are decoded as data, and what else they ask for is
refused. Shards that are missing, there twice, or disagree are refused by name, and a refusal leaves no output.

- Weights are the fp32 masters, where there are any. To dtmega come Adam's moments, step and samples too, if they are
  whole (of ZeRO's partitions every file, bf16 only), and the line is printed that goes on from there: with
  `--checkpoint.resume OUT --checkpoint.allow_changed_data true`, since nothing in the files says what data they saw.
  `[model] init_from` starts a new run with the weights.
- `OUT/config.toml` is made of the arguments in the files, without their layout; for a GPT or BLOOM that goes on it has
  the order of samples of theirs. Files without arguments need `--config NAME.toml`, of which [model] counts.
- The vocabulary without padding is in BLOOM's files only; else `--vocab-size N` or `--tokenizer SPEC` says it, or the
  padded size is kept. Of a T5 `--tokenizer bert:VOCAB` counts `[BOS]`, `[EOS]` and the sentinels, as theirs does.
- LayerNorms and biases of which each tensor rank has a copy can drift apart. It is reported; from 1e-3 of a tensor's
  largest value on it is refused, unless `--average-copies` takes the mean.
- To hf: a BERT with their default GELUs (tanh in the feed-forward, erf in the head) and their T5 have no class there.

    python -m dtmega convert --from hf gpt2-medium --to megatron checkpoints/gpt2 --tp 2 --pp 2
    python -m dtmega convert --from dtmega runs/bert --to megatron checkpoints/bert --tp 2 --dtype float16

And back: these write weights for `--load checkpoints/gpt2` of a run on `--tensor-model-parallel-size 2` and
`--pipeline-model-parallel-size 2`: a folder `release`, from which Megatron's loader starts at iteration 0 with a new
optimizer. GPT, BERT (LayerNorms first) and T5 in Megatron's own form are for Megatron-LM from v2.1 (2021) on, BLOOM is
for BigScience's Megatron-DeepSpeed without `--deepspeed`. The vocabulary gets rows of zeros up to a multiple of 128 for
each tensor-parallel rank, Megatron's default of `--make-vocab-size-divisible-by`; there they are in the softmax. Its
loader compares `--tokenizer-type`: `GPT2BPETokenizer` for GPT, `PretrainedFromHF` for BLOOM, `BertWordPieceLowerCase`
for BERT and T5, or `BertWordPieceCase` with `--tokenizer bert-cased:VOCAB`. Of T5 on several stages the decoder begins
where the encoder's share of them ends (`--pipeline-model-parallel-split-rank`), half for stacks of one depth.

## The same samples in the same order

A GPT's or BLOOM's run of theirs goes on here on the samples that it would have read next: sample g of training is entry
g of their order, on every layout.

    [data]
    path = ["data/a", "data/b"]      # the .bin/.idx of theirs
    weights = [0.3, 0.7]
    split = "969,30,1"
    order = "megatron-lm"            # or "megatron-deepspeed" (BigScience's), or "megatron-core"
    order_samples = 220_000_000      # their --train-samples, or --train-iters x --global-batch-size
    [run]
    seed = 1234                      # theirs
    [batch]
    global_batch_size = 2048         # theirs, as [eval] interval and steps are, for the order of validation

Documents are then the sequences of the `.idx`, as they are there. The three differ in the rounding of `split` (of 200
documents "333,333,334" gives 66, 67 and 67 to train, valid and test, or with megatron-core 67, 66 and 67), in the share
of the last epoch below which it is shuffled apart (0.80, with BigScience's 0.95), and in the samples that each corpus
of a blend is asked for. The order of a longer run is another one from its first sample on. So `order_samples` is the
number that their run was started for, which the name of their index caches has
(`data/a_train_indexmap_220000000ns_2048sl_1234s_doc_idx.npy`; of a blend's corpora it is their share, and 0.5 % more).
Such caches, and megatron-core's with a description, are used as they are where they fit; if only others lie there, one
line says so, and the order is computed: 10^8 samples take a minute or two, once per node. A checkpoint of theirs that
was converted with its moments goes on after as many samples as it has seen.

Each validation here reads the first samples of the order of validation; theirs goes on where the last one ended. BERT's
and T5's order comes of a compiled generator, and is refused.

## Groups and flags

`python -m dtmega groups --world 16 --mesh.tp 2 --mesh.pp 4` lists the ranks of every group as Megatron's
`initialize_model_parallel` does.

Every flag of a pre-training, with Megatron's default, the key here and its default. A flag that is left out counts with
Megatron's default: where ours is another, the TOML says it. No key: the reason.
"""


def page() -> str:
    """The whole text."""
    parts = [OPENING]
    for title, flags in FLAGS.items():
        rows = ["| flag | default | key | default here | |", "| --- | --- | --- | --- | --- |"]
        parts.append("\n".join([f"\n## {title}\n", *rows, *map(_row, flags)]) + "\n")
    return "".join(parts)


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    keys = ", ".join(f"`[{section}] {key}`" for section, _, key in (key.partition(".") for key in flag.keys))
    cells = [names, flag.default or "", keys, ", ".join(map(_default, flag.keys)), flag.why]
    return f"| {' | '.join(cells)} |"


def _default(name: str) -> str:
    """The default of section.key, in each of the classes that a section may have."""
    section, _, key = name.partition(".")
    kinds = SectionClasses.of(config.Config.model_fields[section])
    if key == kinds.discriminator:
        return kinds.default
    defaults = dict.fromkeys(str(field.default) for field in kinds.declarations(key).values())
    return " or ".join("empty" if default in ("", "[]") else default for default in defaults)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
