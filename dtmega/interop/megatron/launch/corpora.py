"""Set the corpora, the split, the tokenizer, the vocabulary size and the evaluation from a command's flags."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from dtmega.interop.megatron.launch.architecture import FAMILY_OF_SCRIPT
from dtmega.interop.megatron.launch.draft import Draft

# Family of a script -> Megatron's default tokenizer.
TOKENIZERS = {"gpt": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase", "t5": "BertWordPieceLowerCase"}
# Script -> objective, for scripts that do not train the family's default objective.
OBJECTIVE_OF_SCRIPT = {"pretrain_prefix_lm": "prefix-lm", "pretrain_t5": "separate-spans"}
# Megatron's name for a WordPiece tokenizer -> prefix in dtmega's tokenizer spec.
WORDPIECE_OF = {"BertWordPieceLowerCase": "bert", "BertWordPieceCase": "bert-cased"}
OF_DIRECTORY = ("PretrainedFromHF", "HuggingFaceTokenizer", "HFTokenizer")


def set_vocabulary(draft: Draft) -> None:
    """Set the tokenizer, the vocabulary size, and the multiple to which the size is padded."""
    kind = draft.value("tokenizer-type") or TOKENIZERS[FAMILY_OF_SCRIPT[draft.command.script]]
    _set_size(draft, kind)
    _set_tokenizer(draft, kind)


def _set_size(draft: Draft, kind: str) -> None:
    """Set the vocabulary size and the multiple to which the size is padded."""
    size = None
    flag = ""
    for flag in ("pad-vocab-size-to", "vocab-size"):
        if draft.has(flag):
            size = draft.number(flag)
            break
    else:
        flag = ""
    if size is not None and flag:
        draft.keys["model.vocab_size"] = size
    elif flag:
        draft.lack("model.vocab_size", draft.unknown(f"--{flag}") or "expected a number", f"--{flag}")
    else:
        hint = " (50257 with GPT-2's own files)" if kind == "GPT2BPETokenizer" else ""
        draft.lack("model.vocab_size", f"the size of the tokenizer, which no flag gives{hint}")
    if flag == "pad-vocab-size-to" or draft.has("no-pad-vocab-size"):
        return
    multiple, tp = draft.number("make-vocab-size-divisible-by"), draft.number("tensor-model-parallel-size")
    if multiple is not None and tp is not None:
        draft.keys["model.pad_vocab_to_multiple"] = multiple * tp


def _set_tokenizer(draft: Draft, kind: str) -> None:
    vocabulary = draft.value("vocab-file")
    directory = draft.value("tokenizer-name-or-path")
    if draft.unknown("--tokenizer-type"):
        draft.lack("data.tokenizer", draft.unknown("--tokenizer-type"), "--tokenizer-type")
    elif kind in WORDPIECE_OF and vocabulary:
        draft.keys["data.tokenizer"] = f"{WORDPIECE_OF[kind]}:{vocabulary}"
        if draft.unknown("--vocab-file"):
            draft.lack("data.tokenizer", draft.unknown("--vocab-file"), "--vocab-file")
    elif kind == "GPT2BPETokenizer":
        # tiktoken's gpt2 has the same vocabulary as GPT-2's own files.
        draft.keys["data.tokenizer"] = "gpt2"
        draft.read |= {"--vocab-file", "--merge-file"}
    elif kind in OF_DIRECTORY and directory:
        draft.keys["data.tokenizer"] = f"{directory}/tokenizer.json"
        if draft.unknown("--tokenizer-name-or-path"):
            draft.lack("data.tokenizer", draft.unknown("--tokenizer-name-or-path"), "--tokenizer-name-or-path")
    else:
        draft.lack("data.tokenizer", f"the vocabulary of {kind}", "--tokenizer-type")


def set_data(draft: Draft) -> None:
    """Set the objective, the corpora and their split."""
    if draft.command.script in OBJECTIVE_OF_SCRIPT:
        draft.keys["data.objective"] = OBJECTIVE_OF_SCRIPT[draft.command.script]
    if "data.split" in draft.keys and not draft.unknown("--split"):
        draft.keys["data.split"] = _split(draft.keys["data.split"])
    paths = draft.command.values.get("--data-path", [])
    groups = {split: _groups(draft, split) for split in ("train", "valid", "test")}
    if draft.unknown("--data-path"):
        draft.lack("data.path", draft.unknown("--data-path"), "--data-path")
    elif groups["train"]:
        _set_mixtures(draft, groups)
    elif len(paths) == 1:
        draft.keys["data.path"] = paths[0]
    elif paths and len(paths) % 2 == 0:
        draft.keys["data.path"] = paths[1::2]
        draft.set_numbers("data.weights", paths[::2], "--data-path")
    elif "data.path" not in draft.lacking:
        draft.lack("data.path", "--data-path", "--data-path" if paths else "")


def _split(text: str) -> str:
    """Convert a split to three shares: `90,10` becomes `90,10,0`, and `949/50/1` becomes `949,50,1`.

    Source: get_train_valid_test_split_ (`megatron/data/dataset_utils.py`).
    """
    shares = [share.strip() for share in text.replace("/", ",").strip("'\" ").split(",")]
    if not all(shares):
        return text.replace("/", ",")
    return ",".join([*shares, *["0"] * (3 - len(shares))])


def _groups(draft: Draft, split: str) -> list[str]:
    """A split's mixtures, such as `mix: 0.3 0:0.95 data/a, 0.7 0:1 data/b`, from a flag or the file that it names."""
    flag = f"--{split}-weighted-split-paths"
    path = draft.value(f"{split}-weighted-split-paths-path")
    if path is None:
        return draft.command.values.get(flag, [])
    text = draft.command.files.get(path)
    try:
        # The file has one line, with each mixture in double quotes.
        return shlex.split(text if text is not None else Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = draft.unknown(f"{flag}-path") or f"cannot be read here: {error}"
        key = {"train": "data.path", "valid": "data.validation", "test": "data.test"}[split]
        draft.lack(key, reason, f"{flag}-path")
        draft.keys.pop("data.split", None)
        return []


def _set_mixtures(draft: Draft, groups: Mapping[str, list[str]]) -> None:
    """Set the mixtures of corpora that the splits are read from.

    Args:
        groups: mixtures as returned by `_groups`, keyed by split.
    """
    draft.keys["data.train"] = groups["train"][0]
    # A mixture gives a document range for each corpus, so --split is ignored, as in Megatron.
    draft.keys.pop("data.split", None)
    if "--split" in draft.command.values:
        draft.notes["--split"] = "replaced by the ranges in --train-weighted-split-paths"
    if groups["valid"]:
        draft.keys["data.validation"] = groups["valid"]
    if groups["test"]:
        draft.keys["data.test"] = groups["test"][0]
    if groups["test"][1:]:
        flag = next(flag for flag in draft.command.values if flag.startswith("--test-weighted-split-paths"))
        draft.refuse(flag, f"only one test set is supported, so these are left out: {'; '.join(groups['test'][1:])}")


def set_evaluation(draft: Draft) -> None:
    """Set the keys for validation, checkpoints and initial weights."""
    if draft.number("eval-iters") == 0:
        draft.keys.pop("eval.steps", None)
        draft.keys["eval.interval"] = 0
    # Megatron deletes no checkpoint.
    draft.keys["checkpoint.keep"] = 0
    save, load = draft.value("save"), draft.value("load")
    if save and not draft.unknown("--save"):
        draft.keys["checkpoint.dir"] = save
    elif save:
        draft.notes["--save"] = draft.unknown("--save")
    if not draft.has("save-interval"):
        draft.keys["checkpoint.interval"] = 0
    if draft.has("finetune") or draft.has("no-load-optim"):
        flag = "--finetune" if draft.has("finetune") else "--no-load-optim"
        draft.lack("model.init_from", f"the weights of {load}, converted", flag)
        draft.notes["--load"] = "see [model] init_from"
    elif load and load != save:
        draft.refuse("--load", "convert Megatron's checkpoint first, then name the result in [model] init_from")
