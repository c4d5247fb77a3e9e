"""Write docs/from-megatron.md: `python tools/flags_page.py`."""

from __future__ import annotations

from pathlib import Path

from dtmega import config
from dtmega.declared import Kinds
from dtmega.megatron.flags import FLAGS, Flag

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from-megatron.md"
OPENING = """\
# Coming from Megatron

<!-- Written by tools/flags_page.py from dtmega/megatron/flags.py. -->

`dtmega from-megatron` reads a launch script, or a line of arguments in quotes, and prints the TOML that says the same.
The script is read as text and never run. What is not carried over is named on stderr with the reason, and what the TOML
still lacks stands in it as a comment:

    python -m dtmega from-megatron examples/pretrain_bert_distributed.sh > bert.toml
    python -m dtmega from-megatron 'pretrain_gpt.py --num-layers 24 --hidden-size 1024 ...' > gpt.toml

## Checkpoints

    python -m dtmega convert --from hf gpt2-medium --to megatron checkpoints/gpt2 --tp 2 --pp 2
    python -m dtmega convert --from dtmega runs/bert --to megatron checkpoints/bert --tp 2 --dtype float16

write weights for `--load checkpoints/gpt2` of a run on `--tensor-model-parallel-size 2` and
`--pipeline-model-parallel-size 2`: a folder `release`, from which Megatron's loader starts at iteration 0 with a new
optimizer. GPT, BERT (LayerNorms first) and T5 in Megatron's own form are for Megatron-LM from v2.1 (2021) on, BLOOM is
for BigScience's Megatron-DeepSpeed without `--deepspeed`. The vocabulary gets rows of zeros up to a multiple of 128 for
each tensor-parallel rank, Megatron's default of `--make-vocab-size-divisible-by`; there they are in the softmax. Its
loader compares `--tokenizer-type`: `GPT2BPETokenizer` for GPT, `PretrainedFromHF` for BLOOM, `BertWordPieceLowerCase`
for BERT and T5, or `BertWordPieceCase` with `--tokenizer bert-cased:VOCAB`. Of T5 on several stages the decoder begins
where the encoder's share of them ends (`--pipeline-model-parallel-split-rank`), half for stacks of one depth.

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
    kinds = Kinds.of(config.Config.model_fields[section])
    if key == kinds.tells:
        return kinds.default
    defaults = dict.fromkeys(str(field.default) for field in kinds.owners(key).values())
    return " or ".join("empty" if default in ("", "[]") else default for default in defaults)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
