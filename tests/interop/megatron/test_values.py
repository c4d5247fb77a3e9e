"""Claims about what is read beside the weights of Megatron's files: counts, scales, steps, copies, sizes, by value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtmega import config
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.state import Progress, ScaleState
from dtmega.cli.convert import to_checkpoint
from dtmega.cli.convert.to_checkpoint import Training
from dtmega.config.families.bert import BertKeys
from dtmega.config.families.gpt import GPTKeys
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.interop.megatron import adam, folder, parts, ranks, recipe, vocabulary
from dtmega.interop.megatron.folder import Contents
from tests.interop.megatron.test_folder import Memory, changed, file_of, moments, written, written_bloom
from tests.megatron_files import Layout

ONE = Layout(1, 1)
RUN = {"global_batch_size": 8, "consumed_train_samples": 80}
OF_2019 = {"batch_size": 4, "world_size": 6, "model_parallel_size": 3}


@pytest.mark.parametrize(
    ("args", "iteration", "updates", "moved", "expected"),
    [
        (RUN, 10, 10, None, Progress(10, 80)),
        ({"global_batch_size": 8}, 10, 10, None, Progress(10, 80)),
        (OF_2019, 10, 10, None, Progress(10, 4 * (6 // 3) * 10)),
        # Steps that a range left out: without float16 the scheduler counts their samples, too.
        (RUN, 10, 8, 64, Progress(10, 80, 2)),
        # Of steps that overflowed it does not (optimizer_param_scheduler.py: step(increment) if update_successful).
        (RUN | {"fp16": True}, 10, 8, 64, Progress(10, 80, 2, 2, 16)),
        (RUN | {"fp16": True}, 10, 10, 64, Progress(10, 80)),
    ],
)
def test_the_counts_of_a_run_are_those_of_its_arguments_updates_and_scheduler(
    args: dict[str, Any], iteration: int, updates: int, moved: int | None, expected: Progress
):
    scheduler = None if moved is None else {"num_steps": moved}
    assert folder._progress(args, iteration, {updates}, scheduler) == (expected, updates, "")


@pytest.mark.parametrize(
    ("args", "steps", "message"),
    [
        (RUN, {9, 10}, "the ranks made different numbers of updates, 9, 10"),
        (RUN, {11}, "Adam has made 11 updates, but the run only 10 iterations"),
        ({}, {10}, "do not say how many samples"),
        ({"batch_size": 4, "world_size": 6}, {10}, "do not say how many samples"),
    ],
)
def test_counts_that_contradict_each_other_are_not_known(args: dict[str, Any], steps: set[int], message: str):
    progress, updates, why = folder._progress(args, 10, steps, None)
    assert (progress, updates) == (Progress(), 0)
    assert message in why


@pytest.mark.parametrize("scheduler", ["opt_param_scheduler", "lr_scheduler"])
def test_a_scheduler_is_known_by_its_name_of_either_year(tmp_path: Path, scheduler: str):
    written(tmp_path, layout=ONE, adam=moments("gpt"), args={"fp16": True}, masters=True, dtype=torch.float16)

    def skipped(content: Any) -> None:
        content["iteration"] = 9  # of which 7 were updates
        content["args"].consumed_train_samples = 72
        for name in ("opt_param_scheduler", "lr_scheduler"):
            content.pop(name, None)
        content[scheduler] = {"num_steps": 56}

    changed(file_of(tmp_path, "mp_rank_00"), skipped)
    found = folder.open_folder(tmp_path)
    assert (found.progress, found.updates) == (Progress(9, 72, 2, 2, 16), 7)
    assert found.loss_scale == ScaleState(scale=65536.0, growth=3, hysteresis=2)
    assert found.order == "megatron-lm"


def rename(content: Any) -> None:
    optimizer = content["optimizer"]
    optimizer["optimizer_state_dict"] = optimizer.pop("optimizer")
    optimizer["fp32_from_fp16"] = optimizer.pop("fp32_from_fp16_params")


def test_the_optimizer_of_2019_has_other_names_for_the_same(tmp_path: Path):
    found = []
    for year in ("2019", "2022"):
        path = tmp_path / year
        written(path, layout=ONE, adam=moments("gpt"), args={"fp16": True}, masters=True, dtype=torch.float16)
        if year == "2019":
            changed(file_of(path, "mp_rank_00"), rename)
        read = adam.read_adam(ranks.open_grid(path / "iter_0000007")[0, 0])
        found.append({"masters": read.masters, **read.moments})
    then, today = found
    n = len(moments("gpt"))
    assert {kind: len(held) for kind, held in then.items()} == dict.fromkeys(("masters", *adam.MOMENTS), n)
    for kind, held in today.items():
        assert all(torch.equal(then[kind][place].read(), part.read()) for place, part in held.items())


def test_a_checkpoint_of_ours_has_the_counts_and_the_scale_of_theirs(tmp_path: Path):
    source, first, second = (Memory({"head.weight": torch.full((2, 3), value)}) for value in (1.0, 2.0, 3.0))
    progress, scale = Progress(9, 72, 2, 2, 16), ScaleState(1024.0, 3, 2)
    training = Training({"exp_avg": first, "exp_avg_sq": second}, progress, 7, scale, {"optim": {"lr": 0.5}})
    to_checkpoint.write(str(tmp_path / "out"), source, GPTKeys(), training=training)
    made = open_checkpoint(str(tmp_path / "out"))
    state = state_of(made)
    assert (state.progress, state.updates, state.loss_scale) == (progress, 7, scale)
    assert state.config["optim"] == {"lr": 0.5}
    prefixes = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    assert [made.read(f"{prefix}/head.weight")[0, 0].item() for prefix in prefixes] == [1.0, 2.0, 3.0]


def set_step(content: Any, number: int, step: float) -> None:
    content["optimizer"]["state"][number]["step"] = torch.tensor(step)


def test_a_step_that_is_another_of_one_parameter_or_of_one_group_is_not_known(tmp_path: Path):
    written(tmp_path / "a", layout=ONE, adam=moments("gpt"))
    changed(file_of(tmp_path / "a", "mp_rank_00"), lambda content: set_step(content, 3, 6.0))
    assert folder.open_folder(tmp_path / "a").notes == (
        "weights only: the optimizer has 2 different numbers of updates, expected one",
    )
    written(tmp_path / "b", layout=ONE, adam=moments("gpt"), fused_adam=True)
    changed(file_of(tmp_path / "b", "mp_rank_00"), lambda c: c["optimizer"]["param_groups"][1].update(step=6))
    assert "2 different numbers of updates" in folder.open_folder(tmp_path / "b").notes[0]
    written(tmp_path / "c", layout=ONE, adam=moments("gpt"))
    changed(file_of(tmp_path / "c", "mp_rank_00"), lambda content: set_step(content, 3, 6.5))
    with pytest.raises(ValueError, match="expected a number of updates"):
        folder.open_folder(tmp_path / "c")


def in_zero(path: Path, change: Callable[[Any], object]) -> None:
    changed(path / "global_step7" / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", change)


def longer(content: Any) -> None:
    """The last parameter of a group said to be one element longer, in a vector without padding behind it."""
    states = content["optimizer_state_dict"]
    address = [*states["param_slice_mappings"][0].values()][-1]
    address.numel = len(states["single_partition_of_fp32_groups"][0]) - address.start + 1


def other_step(content: Any) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] = 6


def test_deepspeeds_partitions_agree_in_their_step_and_are_as_long_as_they_say(tmp_path: Path):
    for name, change in (("step", other_step), ("long", longer)):
        written_bloom(tmp_path / name, adam=moments("bloom"), dtype=torch.bfloat16)
        in_zero(tmp_path / name, change)
    assert "2 different numbers of updates" in folder.open_folder(tmp_path / "step").notes[0]
    with pytest.raises(ValueError, match="is not in its vector"):
        folder.open_folder(tmp_path / "long")


def test_a_checkpoint_of_deepspeeds_has_its_order_of_samples_and_a_version_of_2_at_least(tmp_path: Path):
    written_bloom(tmp_path, adam=moments("bloom"), dtype=torch.bfloat16)
    assert folder.open_folder(tmp_path).order == "megatron-deepspeed"
    for path in (tmp_path / "global_step7").glob("mp_rank_*"):
        changed(path, lambda content: content.update(checkpoint_version=1.0))
    with pytest.raises(ValueError, match=r"checkpoint_version=1\.0, expected 2 or 3"):
        folder.open_folder(tmp_path)


@dataclass(frozen=True)
class Held:
    """A part in memory."""

    tensor: Tensor
    where: str = "file"

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self) -> Tensor:
        return self.tensor


NORM = "encoder.layers.0.input_layernorm.weight"
DENSE = "encoder.layers.0.mlp.dense_4h_to_h.weight"
UP = "encoder.layers.0.mlp.dense_h_to_4h.bias"


def test_copies_are_as_far_apart_as_the_two_that_are_furthest_and_their_mean_is_of_all():
    copies = [torch.tensor(values) for values in ([1.0, 2.0], [1.0, 2.5], [0.25, 4.0])]
    whole = parts.WholeTensors({NORM: [*map(Held, copies)]}, average=True)
    # From the first, by the largest value of any.
    assert parts.drifted_copies(whole) == [parts.Drift(NORM, (4.0 - 2.0) / 4.0)]
    assert torch.equal(whole.read(NORM), torch.stack(copies).mean(0))


def test_of_copies_that_are_apart_one_that_is_not_a_number_is_the_worst():
    names = [NORM, NORM.replace("0", "1"), NORM.replace("0", "2")]
    apart = (1e-5, math.nan, 1e-4)
    held = {
        name: [Held(torch.ones(2).double()), Held(torch.tensor([1.0, 1.0 - by]).double())]
        for name, by in zip(names, apart, strict=True)
    }
    drifts = parts.drifted_copies(parts.WholeTensors(held))
    assert [drift.name for drift in drifts] == [names[1], names[2], names[0]]
    with pytest.raises(ValueError, match="expected at most"):
        parts.drift_note(drifts, average=False)


def test_a_slice_of_what_is_cut_over_ranks_is_that_of_the_whole():
    rows, columns = torch.arange(12.0), torch.arange(24.0).view(2, 12)
    held = {UP: [Held(part) for part in rows.chunk(3)], DENSE: [Held(part) for part in columns.chunk(3, 1)]}
    whole = parts.WholeTensors(held)
    for start in range(12):
        for stop in range(start + 1, 13):
            assert torch.equal(whole.read(UP, (slice(start, stop),)), rows[start:stop])
            assert torch.equal(whole.read(DENSE, (slice(0, 1), slice(start, stop))), columns[:1, start:stop])


def test_parts_of_two_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"is \[2\] of torch.float32 in file, but \[2\] of torch.float16 in file"):
        parts.WholeTensors({NORM: [Held(torch.ones(2)), Held(torch.ones(2).half())]})


def contents(vocab_size: int = 0, **args: Any) -> Contents:
    return Contents(Path("there"), args, parts.WholeTensors({}), {}, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("size", "rows", "args", "multiple"),
    [
        # megatron/tokenizer/tokenizer.py, _vocab_size_with_padding: the least multiple of divisor x tp.
        (50257, 50304, {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 1}, 128),
        (50257, 50688, {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 4}, 512),
        (50257, 50688, {"make_vocab_size_divisible_by": 128, "model_parallel_size": 4}, 512),
        (50257, 60000, {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 4}, 60000),
        (50257, 50304, {}, 50304),
        (50257, 50257, {}, 1),
        (50257, 50257, {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 1}, 1),
    ],
)
def test_rows_of_padding_are_of_the_multiple_that_the_run_had(
    size: int, rows: int, args: dict[str, Any], multiple: int
):
    model, _ = vocabulary.without_padding(GPTKeys(vocab_size=rows), contents(**args), size)
    assert (model.vocab_size, model.pad_vocab_to_multiple) == (size, multiple)
    assert model.padded_vocab_size == rows


def test_the_ids_of_a_t5_are_those_of_its_tokenizer_and_the_marks_behind_them():
    tokenizer = load_tokenizer("stdlib-wordpiece")
    assert vocabulary.count_ids(contents(), tokenizer) == tokenizer.vocab_size
    # Megatron's `_BertWordPieceTokenizer` adds [BOS], [EOS] and the sentinels.
    assert vocabulary.count_ids(contents(vocab_extra_ids=10), tokenizer) == tokenizer.vocab_size + 2 + 10


def test_an_embedding_with_a_row_too_few_is_refused():
    with pytest.raises(ValueError, match="has an embedding of 99 rows, too few for 100 ids"):
        vocabulary.without_padding(GPTKeys(vocab_size=99), contents(), 100)
    assert vocabulary.without_padding(GPTKeys(vocab_size=100), contents(), 100)[0].vocab_size == 100


def virtual(content: Any) -> None:
    content["args"].virtual_pipeline_model_parallel_size = 2


def once_more(content: Any) -> None:
    content["model"]["language_model"]["encoder"]["final_layernorm.bias"] = torch.ones(8)


def test_files_of_other_stages_than_the_arguments_say_and_a_tensor_of_two_stages_are_refused(tmp_path: Path):
    written(tmp_path / "a", layout=ONE)
    changed(file_of(tmp_path / "a", "mp_rank_00"), virtual)
    with pytest.raises(ValueError, match="virtual_pipeline_model_parallel_size=2 in its arguments, but the files"):
        folder.open_folder(tmp_path / "a")
    written(tmp_path / "b", layout=Layout(1, 2))
    changed(file_of(tmp_path / "b"), once_more)
    with pytest.raises(ValueError, match=r"'encoder\.final_layernorm\.bias' is in .*000/.* and in .*001/"):
        folder.open_folder(tmp_path / "b")


def test_heads_that_the_ranks_of_an_older_file_cannot_share_are_refused(tmp_path: Path):
    written(tmp_path, layout=Layout(2, 1), version=1.0, legacy=True, old_names=True)
    for rank in ("mp_rank_00", "mp_rank_01"):
        changed(file_of(tmp_path, rank), lambda content: setattr(content["args"], "num_attention_heads", 3))
    with pytest.raises(ValueError, match="expected a number that 2 ranks share, got 3"):
        folder.open_folder(tmp_path)


def test_a_run_counted_in_samples_goes_on_by_them_and_not_by_the_steps_that_were_worked_out():
    args = {"train_samples": 800, "lr_decay_samples": 700, "train_iters": 100, "lr_decay_iters": 90}
    args |= {"no_load_optim": True, "finetune": True, "load": "there", "seq_length": 10}
    toml, _ = recipe.config_of_args(args, GPTKeys(), "megatron-lm")
    assert "samples = 800" in toml
    assert "decay = 700" in toml
    assert 'unit = "samples"' in toml
    assert "steps = " not in toml.partition("[train]")[2].partition("[")[0]
    assert "init_from" not in toml
    assert "order_samples = 800" in toml
    by_steps, _ = recipe.config_of_args({"train_iters": 100, "global_batch_size": 8}, GPTKeys(), "megatron-lm")
    assert "order_samples = 800" in by_steps


@pytest.mark.parametrize("model", [BertKeys(), GPTKeys()])
def test_only_of_next_tokens_is_their_order_of_samples_known(model: config.Model):
    toml, _ = recipe.config_of_args({"train_samples": 800}, model, "megatron-lm")
    assert ('order = "megatron-lm"' in toml) == (model.name == "gpt")
