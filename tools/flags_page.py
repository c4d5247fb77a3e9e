"""Write docs/from-megatron.md: `python tools/flags_page.py`."""

from __future__ import annotations

from pathlib import Path

from dtmega import config
from dtmega.config.schema import SectionClasses
from dtmega.interop.megatron.launch.flags import FLAGS
from dtmega.interop.megatron.launch.row import Flag

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from-megatron.md"
OPENING = """\
# Coming from Megatron

<!-- Written by tools/flags_page.py from the flags in dtmega/interop/megatron/launch/. -->

`dtmega from-megatron` translates a launch script, or a command in quotes, into a TOML file. The script is followed as
text, with bash's grammar, and never run. It needs the extra `megatron`.

    python -m dtmega from-megatron examples/pretrain_bert_distributed.sh > bert.toml
    python -m dtmega from-megatron 'pretrain_gpt.py --num-layers 24 --hidden-size 1024 ...' > gpt.toml

The exit code is 0 if the translation is whole, and 1 if it leaves something open. It is 2, and nothing is written, if
the text is not bash, has no command, or depends on a condition that only a running shell would know.

- **What is open:** a flag that changes the model, the optimizer, the schedule, the data or the precision and has no key
  here, an unknown flag, a flag without its value, a flag whose value is not known, and a setting that no flag gives.
  Each is a line of `[run] untranslated` with its line in the script and the reason, and on stderr. A run refuses the
  configuration and prints these lines until they are settled and deleted. `--allow-missing FLAG` (or `SECTION.KEY`)
  settles one at once.
- **What is not known:** variables of the environment, arguments of the script, the output of other programs, files
  outside the script's folder. `--set NAME=VALUE` gives a variable, `--set 1=VALUE` an argument, and `--set '#=0'` says
  that there are none. Both branches of a condition that is not known are followed; what differs afterwards depends on
  it. If the command does, too, the condition is named with its line and its variables.
- **Several commands:** if they differ, `--command N` chooses one.
- **Query-key layer scaling**, which changes float16 only, was Megatron-LM's default until November 2023. If no flag
  tells the version, `--original megatron-lm`, `megatron-deepspeed` or `megatron-core` does.
- **Llama:** a GPT with rotary positions, SwiGLU, RMSNorm, no biases and no dropout is our `llama`, with grouped
  queries, `--qk-layernorm`, `--window-size`, and tied or untied weights. What differs from it is refused by name:
  partial or interleaved rotary positions, `--apply-layernorm-1p`, `--squared-relu`.
- **Experts:** a Llama with `--num-experts` is our `moe` ([its flags](#experts)). The weights of experts and the losses
  of routers are those of megatron-core's formulas (0.16.1), with the same coefficients. What counts over a microbatch
  is refused by name, because the layout would change it: `aux_loss` with more than one sequence, `global_aux_loss`,
  `sinkhorn`, capacity. So is what a `moe` does not have: dense layers after the first ones, gates of shared experts,
  jitter, upcycling, the experts of the forks for DeepSpeed.
- **DeepSpeed's JSON** is read if the script writes it, or if it lies in the script's folder. It sets the loss scale and
  the limit of the gradient's norm, as DeepSpeed reads them.

Of 142 public scripts, 123 give the flags and values that bash gives them; `benchmarks/scripts.md` lists all.

## Checkpoints

    python -m dtmega convert --from megatron checkpoints/gpt --to dtmega weights/gpt --vocab-size 50257
    python -m dtmega convert --from megatron bloom/global_step95000 --to hf export/bloom --tokenizer tokenizer.json

These commands read checkpoints from any number of tensor ranks, stages and virtual stages:

- those that Megatron-LM has saved since 2019 (`iter_.../mp_rank_*`, `release`), of GPT, BERT and its T5, with and
  without `checkpoint_version`, in torch's older format too;
- the layer files of BLOOM by Megatron-DeepSpeed;
- the distributed checkpoints of megatron-core, saved by any number of ranks (`torch_dist`; `zarr` is refused), of a GPT
  and of Llama: grouped queries, rotary positions, SwiGLU, RMSNorm, the scaling of Llama 3.1, `--qk-layernorm` and
  `--window-size`. Variants such as `--apply-layernorm-1p`, `--squared-relu`, `--rotary-percent 0.5`, `--num-experts`
  and `--multi-latent-attention` are refused by name.

Nothing in the pickles runs: they are decoded as data, and other contents are refused. Shards that are missing,
duplicated or contradictory are refused by name, and a refusal leaves no output.

- **Weights** are the fp32 masters, if the files have them.
- **To continue the run:** with `--to dtmega`, Adam's moments, step and samples are converted too if they are complete
  (all files of ZeRO's partitions, bf16 only; of megatron-core's distributed optimizer those saved with
  `--dist-ckpt-optim-fully-reshardable`). The command then prints the line that continues the run, with
  `--checkpoint.resume OUT --checkpoint.allow_changed_data true`, because the files do not say which data the run has
  read. To start a new run with the weights instead, use `[model] init_from`.
- **`OUT/config.toml`** is made from the arguments in the files, without their layout. To continue a GPT or BLOOM, it
  also sets Megatron's order of samples. If the files have no arguments, give `--config NAME.toml`; only its [model]
  section is read.
- **Vocabulary:** only BLOOM's files have its size without padding. For other files give `--vocab-size N` or
  `--tokenizer SPEC`; otherwise the padded size is kept. For a T5, `--tokenizer bert:VOCAB` counts `[BOS]`, `[EOS]` and
  the sentinels, as Megatron does.
- **Copies:** each tensor rank has copies of LayerNorms and some biases, which can drift apart. Such drift is reported.
  If it reaches 1e-3 of a tensor's largest value, the checkpoint is refused, unless `--average-copies` takes the mean.
- **To hf:** transformers has no class for Megatron's T5, nor for a BERT with Megatron's default GELUs (tanh in the
  feed-forward, erf in the head).

To convert in the other direction:

    python -m dtmega convert --from hf gpt2-medium --to megatron checkpoints/gpt2
    python -m dtmega convert --from dtmega runs/bert --to megatron checkpoints/bert --tp 2 --dtype float16

Each command writes weights in a folder `release` for `--load`, from which Megatron's loader starts at iteration 0 with
a new optimizer. Two formats exist, because Megatron-LM has had two implementations of its models:

- **`--format core`**, the default for GPT and Llama: for the models of megatron-core, which are Megatron-LM's own since
  core 0.8 (2024) and its only ones since core 0.18. The files are a distributed checkpoint, today's default of
  `--ckpt-format`; core 0.8 needs `--use-dist-ckpt`. megatron-core 0.16.1 itself loads them strictly and computes the
  logits of transformers. The empty states that modules of Transformer Engine ask for are included.
- **`--format legacy`** for GPT, BERT (with LayerNorms first) and Megatron's own T5: for Megatron-LM from v2.1 (2021)
  on; from core 0.8 to 0.17 with `--use-legacy-models` (and from 0.9 on `--ckpt-format torch`). Later versions do not
  refuse such files: they start from random weights.
- **`--format legacy`** for BLOOM: for BigScience's Megatron-DeepSpeed without `--deepspeed`. megatron-core has no
  ALiBi, so it cannot hold a BLOOM. Its own BERT and T5 are not written.

What to know about both:

- **Layout:** `core` takes no `--tp` and `--pp`: Megatron-LM loads the same files on any number of ranks. `legacy` needs
  those of the run, `--tensor-model-parallel-size` and `--pipeline-model-parallel-size`.
- **Vocabulary:** it is padded with rows of zeros to a multiple of 128, Megatron's default of
  `--make-vocab-size-divisible-by`; in `legacy`, for each tensor-parallel rank. A run that pads `core` to another
  multiple gets further rows of zeros. In Megatron these rows take part in the softmax.
- **Tokenizer:** Megatron's loader compares `--tokenizer-type` if the run has a `--vocab-file`. Use `GPT2BPETokenizer`
  for GPT, `HuggingFaceTokenizer` for Llama, `PretrainedFromHF` for BLOOM, and `BertWordPieceLowerCase` for BERT and T5,
  or `BertWordPieceCase` with `--tokenizer bert-cased:VOCAB`.
- **T5 on several stages:** the decoder begins where the encoder's share of the stages ends
  (`--pipeline-model-parallel-split-rank`), in the middle if both stacks have the same depth.
- **Flags of a Llama:** `--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear`,
  `--untie-embeddings-and-output-weights` unless its head is tied, `--group-query-attention --num-query-groups N`,
  `--rotary-base`, `--norm-epsilon`, for Llama 3.1 `--use-rope-scaling --rope-scaling-factor`, for Qwen3
  `--qk-layernorm --kv-channels`, and for a window of W tokens `--window-size W-1,0`. With
  `--use-checkpoint-args` the loader takes most of them from the files.

## The same samples in the same order

A GPT or BLOOM run that Megatron began can continue here with the samples that it would have read next. On every layout,
sample g of training is entry g of Megatron's order.

    [data]
    path = ["data/a", "data/b"]      # Megatron's .bin/.idx files
    weights = [0.3, 0.7]
    split = "969,30,1"
    order = "megatron-lm"            # or "megatron-deepspeed" (BigScience's), or "megatron-core"
    order_samples = 220_000_000      # --train-samples, or --train-iters x --global-batch-size
    [run]
    seed = 1234                      # --seed
    [batch]
    global_batch_size = 2048         # --global-batch-size; with [eval] interval and steps, sets the order of validation

With these orders a document is a sequence of the `.idx`, as in Megatron. The three orders differ in

- the rounding of `split`: of 200 documents, "333,333,334" gives 66, 67 and 67 to train, valid and test, or 67, 66 and
  67 with megatron-core;
- the share of the last epoch below which that epoch is shuffled separately: 0.80, or 0.95 with BigScience's;
- the number of samples that each corpus of a blend provides.

A longer run has a different order from its first sample on. So `order_samples` is the number of samples that the
Megatron run was started for. The names of its index caches contain it
(`data/a_train_indexmap_220000000ns_2048sl_1234s_doc_idx.npy`; for each corpus of a blend, its share plus 0.5 %). These
caches, and those of megatron-core with a description, are used if they fit. If there are caches but none fits, one line
says so, and the order is computed: 10^8 samples take a minute or two, once per node. A checkpoint that was converted
with its moments continues after the samples that it has seen.

Here each validation reads the first samples of the validation order; in Megatron it continues where the last one ended.
BERT's and T5's order comes from a compiled generator, and is refused.

## Groups and flags

`python -m dtmega groups --world 16 --mesh.tp 2 --mesh.pp 4` lists the ranks of every group as Megatron's
`initialize_model_parallel` does.

The tables list every flag of Megatron-LM (up to August 2026) and of its forks for DeepSpeed, with Megatron's default,
the key here, and the key's default. If a script leaves a flag out, Megatron's default counts: the TOML sets the key if
its default here differs. For a flag without a key, the remark gives the reason. A name that ends with `*` stands for
all flags that begin like it.
"""


def page() -> str:
    """The text of the page."""
    parts = [OPENING]
    for title, flags in FLAGS.items():
        rows = ["| flag | default | key | default here | remark |", "| --- | --- | --- | --- | --- |"]
        parts.append("\n".join([f"\n## {title}\n", *rows, *map(_row, flags)]) + "\n")
    return "".join(parts)


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    keys = ", ".join(f"`[{section}] {key}`" for section, _, key in (key.partition(".") for key in flag.keys))
    cells = [names, flag.default or "", keys, ", ".join(map(_default, flag.keys)), flag.why]
    return f"| {' | '.join(cells)} |"


def _default(name: str) -> str:
    """The default of `section.key`; if families have different ones, all of them."""
    section, _, key = name.partition(".")
    kinds = SectionClasses.of(config.Config.model_fields[section])
    if key == kinds.discriminator:
        return kinds.default
    defaults = dict.fromkeys(str(field.default) for field in kinds.declarations(key).values())
    return " or ".join("empty" if default in ("", "[]") else default for default in defaults)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
