"""The test-suites of the originals, said again: each of their rows, and the test here that says it.

Three tables: `MPU` and `TESTS` have the rows of megatron/mpu/tests and tests/ of BigScience's Megatron-DeepSpeed,
`BUGS` the findings of Megatron-LM#7452 (silent numerical bugs where several kinds of parallelism meet), by its numbers.
A row names tests of any file of this folder as "file::test". Those of this file are measured below, in the originals'
shapes and at their tolerances, in fp64 where fp32 cannot hold one, on tp meshes of 1, 2 and 4 of four ranks: at tp 2
the groups are {0, 2} and {1, 3}, which no default would find, each with a batch of its own.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from dtmega import config, mesh, plans
from dtmega.data.objectives.objective import IGNORED
from dtmega.interop.megatron.translate import translate
from dtmega.models.bert import Bert
from dtmega.models.bloom import Bloom
from dtmega.models.gpt import GPT
from dtmega.models.initial import init_weights
from dtmega.models.llama import Llama
from dtmega.models.model import Model
from dtmega.models.t5 import T5
from dtmega.plans import bert, bloom, gpt, llama, parallelize_hf, plan_for, t5
from dtmega.plans.loss import vocab_parallel_cross_entropy
from dtmega.plans.styles import Column, Row
from dtmega.training.recompute import recompute
from tests import ranks

HERE = Path(__file__).resolve().parent


class Claim(NamedTuple):
    """A row of the originals.

    Attributes:
        asserts: what it says there, with its tolerance.
        tests: those here that say as much or more, "file::test".
        without: why there is no such feature here.
    """

    asserts: str
    tests: tuple[str, ...] = ()
    without: str = ""


def said(asserts: str, *tests: str) -> Claim:
    return Claim(asserts, tests)


def refused(asserts: str, without: str, *tests: str) -> Claim:
    """A row on what is not here: its refusal is tested, or there is nothing that could be asked for."""
    return Claim(asserts, tests, without)


MPU = {
    "test_initialize_model_parallel, src_rank": said(
        "group sizes; tp = rank % TP, dp = rank // TP; the group's first rank is rank - tp; exact",
        "originals::test_a_rank_is_where_the_original_puts_it",
        "mesh::test_ranks_are_grouped_as_megatron_groups_them",
        "mesh::test_a_group_is_the_ranks_that_differ_in_its_axes_only",
        "megatron::test_groups_are_listed_as_the_original_lists_them",
    ),
    "test_broadcast_data": refused(
        "five keys of any shape have the same values on all ranks, a float key is left out; exact",
        "nothing is broadcast: each rank reads its samples, and one that reads others is stopped",
        "parity::test_ranks_that_should_share_a_batch_and_do_not_are_stopped_at_the_start",
        "loader::test_tensors_are_contiguous_int64_of_the_micro_batch_size",
    ),
    "test_cross_entropy": said(
        "loss and full gradient are F.cross_entropy's: b13 s17 V = 11 TP, logits x 1000; 1e-6",
        "originals::test_a_row_holds_at_its_tolerance",
        "loss::test_over_a_cut_vocabulary_loss_and_full_gradient_are_those_of_whole_logits",
    ),
    "test_parallel_embedding": said(
        "loss and gradient shard are nn.Embedding's: b17 s23 V48 h16; 1e-12",
        "plans::test_vocab_parallel_embedding_and_its_gradient_are_those_of_one_process",
    ),
    "test_initialize_affine_weight": said(
        "column and row shards are slices of the master weight; 1e-6",
        "originals::test_what_the_original_says_of_bits_is_so",
        "definition::test_initial_values_are_those_of_the_definition",
    ),
    "column / row linear": said(
        "dW, db, dX from the closed form, b7, 13 TP inputs, 17 TP outputs; 1e-6",
        "originals::test_a_row_holds_at_its_tolerance",
        "plans::test_column_and_row_linears_have_the_gradients_of_the_closed_forms",
    ),
    "self-attention / transformer layer": said(
        "TP = n against TP = 1: loss, QKV weight's gradient, input's gradient, 3 heads a rank, hd7; 5e-6 / 5e-5",
        "plans::test_attention_and_block_are_those_of_one_process",
        "bert_plan::test_both_losses_and_every_gradient_equal_one_process",
    ),
    "set_rng_state / tracker / seed": refused(
        "a state is restored; interleaved streams are the separate ones; initial_seed == seed + 2718 + tp",
        "no generator has a state: a mask is a function of seed, site, sample and place",
        "plans::test_dropout_masks_are_bit_equal_to_those_of_one_process",
        "definition::test_dropout_masks_are_independent_over_seeds_sites_samples_heads_positions_and_channels",
        "layers::test_a_dropout_mask_is_the_same_when_batch_and_sequence_are_cut_in_any_order",
        "loader::test_the_global_generators_are_not_moved",
    ),
}
TESTS = {
    "test_activations": said(
        "the four gated units are their formulas",
        "layers::test_a_gated_feed_forward_is_the_original_with_values_and_gates_side_by_side",
    ),
    "test_model: gpt, rotary": said(
        "changing token i leaves outputs before i bitwise equal, and changes all from i on",
        "originals::test_what_the_original_says_of_bits_is_so",
        "bloom::test_changing_a_token_leaves_earlier_outputs_bit_equal_and_changes_the_later_ones",
        "llama::test_changing_a_token_leaves_earlier_outputs_bit_equal_and_changes_the_later_ones",
        "llama::test_the_frequencies_of_llama_3_1_are_those_of_transformers",
    ),
    "test_model: prefix_lm (reset on and off)": said(
        "a target's change leaves earlier outputs equal, an input's changes all of its document, other rows stay; "
        "no loss in the prefix",
        "originals::test_what_the_original_says_of_bits_is_so",
        "prefix::test_attention_and_loss_are_masked_as_in_the_original",
        "definition::test_in_a_prefix_a_token_sees_those_behind_it_and_weighted_losses_are_those_of_the_definition",
    ),
    "test_model: fused LN == F.layer_norm": refused(
        "equal in bf16, exact",
        "the norm is F.layer_norm; of an fp32 stream its output is rounded once",
        "layers::test_a_norm_of_the_fp32_stream_rounds_its_output_once",
    ),
    "test_model: fused softmax == torch's": refused(
        "assert_close for each mask type, the same zeros",
        "no softmax kernel of our own: each attention kernel under each mask is the textbook's",
        "attention::test_every_kernel_gives_the_textbook_result_under_every_rule",
        "attention::test_gradients_are_those_of_the_textbook",
    ),
    "test_model: packed segments, padding": said(
        "a segment does not see another one; padding gives no NaN",
        "originals::test_what_the_original_says_of_bits_is_so",
        "attention::test_a_packed_document_is_attended_as_if_it_stood_alone",
        "bloom::test_a_document_in_a_packed_row_gives_the_logits_it_gives_alone",
        "bert::test_padding_changes_nothing_of_the_text_before_it",
    ),
    "test_tensor_parallel: alibi, embedding": said(
        "logits at TP 1 and TP 2 allclose, atol 5e-3 in fp16",
        "originals::test_a_row_holds_at_its_tolerance",
        "plans::test_loss_and_every_gradient_of_bloom_equal_one_process",
        "plans::test_logits_are_whole_and_trimmed_and_have_a_gradient",
    ),
    "test_tensor_parallel: invalid id": said("its own error", "plans::test_what_cannot_be_is_refused_with_the_reason"),
    "test_tensor_parallel: 5121 % 2, 5121 % 128": refused(
        "a vocabulary that TP or make-vocab-size-divisible-by does not divide is refused",
        "any vocabulary is cut as it comes; padding never enters the softmax",
        "plans::test_what_cannot_be_is_refused_with_the_reason",  # a rank without any row
        "loss::test_over_a_cut_vocabulary_loss_and_full_gradient_are_those_of_whole_logits",  # V = 131
        "resume::test_on_another_layout_the_first_loss_is_the_same_and_the_rest_follows_within_the_rounding_of_fp32",
        "megatron::test_the_padding_of_the_vocabulary_follows_their_tensor_parallel_size",
    ),
    "test_training: kill switch": said(
        "log line", "switches::test_a_kill_switch_saves_and_exits_and_lets_no_run_begin"
    ),
    "test_training: base, alibi": said(
        "train, save, resume: log lines",
        "resume::test_on_the_same_layout_every_later_number_and_every_weight_is_equal_to_the_bit",
    ),
    "test_training: glu, prefix": said(
        "log lines; here the numbers of one process", "parity::test_a_layout_gives_the_numbers_of_one_process"
    ),
    "test_training: cl, bnb, t0": refused(
        "log lines",
        "no lengths that grow, no 8-bit moments, no packed multitask data",
        "originals::test_what_is_not_here_is_named_with_its_reason",
        "originals::test_a_program_for_another_model_is_refused",
    ),
    "test_training: mode 2 data": said(
        "weighted split paths: log lines; here the samples of each range at its weight",
        "mixture::test_a_run_reads_the_parts_of_its_mixtures_at_their_weights",
        "megatron::test_weighted_split_paths_are_mixtures_of_the_same_words",
        "switches::test_each_validation_set_has_a_loss_of_its_own_by_its_name",
    ),
    "test_training: skip iterations": said(
        "log line; here samples are consumed and counted",
        "loop::test_every_number_of_every_line_is_that_of_the_plain_loop",
    ),
    "test_checkpoints: 21 pairs of TP_PP_DP": said(
        "log lines only; here losses, gradient norms and weights",
        "resume::test_on_another_layout_the_first_loss_is_the_same_and_the_rest_follows_within_the_rounding_of_fp32",
        "parity::test_a_run_stopped_on_one_layout_goes_on_with_its_numbers_on_another",
    ),
    "test_dataloaders": said(
        "what is masked and what is predicted",
        "masking::test_labels_are_the_tokens_that_are_hidden_and_nothing_else_is_changed",
        "masking::test_of_hidden_tokens_80_percent_are_masks_10_random_ones_and_10_stay",
        "pairs::test_a_pair_is_two_neighbours_in_the_order_that_its_label_says_cut_to_its_target",
    ),
    "test_preprocessing": said(
        "files byte-equal to references; with any number of workers the same",
        "indexed::test_what_the_writer_writes_is_the_layout_to_the_byte",
        "indexed::test_a_document_of_several_sequences_is_one_entry_of_the_index_to_the_byte",
        "tokenize::test_the_output_is_the_same_for_any_number_of_workers",
    ),
    "fused_kernels/tests": said(
        "attention near that of transformers' BERT and GPT-2, mean 1e-3; here logits and all gradients",
        "bert::test_logits_loss_and_every_gradient_equal_hugging_face",
        "gpt::test_logits_and_every_gradient_equal_hugging_face",
    ),
    "not tested there: parity at 1e-6": said(
        "loss and gradients of each layout are those of one process",
        "plans::test_loss_and_every_gradient_of_bloom_equal_one_process",
        "pipelining::test_every_gradient_is_that_of_one_process",
        "t5_layouts::test_loss_gradients_and_weights_of_a_layout_are_those_of_one_process",
        "contract::test_every_loss_gradient_and_weight_is_that_of_one_process",
    ),
    "not tested there: resume": said(
        "equal to the bit, also after a signal",
        "resume::test_on_the_same_layout_every_later_number_and_every_weight_is_equal_to_the_bit",
        "train::test_a_run_stopped_by_sigterm_goes_on_with_the_bits_it_would_have_had",
    ),
    "not tested there: copies over TP": said(
        "bitwise equal after N steps, compared while it trains; one that drifts is named",
        "parity::test_a_layout_gives_the_numbers_of_one_process",  # [train] drift_interval = 1
        "parity::test_a_replica_that_drifts_stops_the_run_and_is_named",
        "t5_layouts::test_after_twenty_steps_on_four_stages_all_copies_are_equal_to_the_bit",
    ),
    "not tested there: initial values and masks whatever TP is": said(
        "to the bit",
        "originals::test_what_the_original_says_of_bits_is_so",
        "parity::test_a_layout_gives_the_numbers_of_one_process",
        "plans::test_dropout_masks_are_bit_equal_to_those_of_one_process",
    ),
    "not tested there: transformers as the oracle": said(
        "loss and every gradient",
        "bloom::test_loss_and_every_gradient_equal_hugging_face",
        "t5::test_logits_loss_and_every_gradient_equal_hugging_face",
        "llama::test_logits_loss_and_every_gradient_equal_those_of_transformers",
    ),
}
# Its text could be found but for findings 9 and 13 and its Appendix B.
BUGS = {
    1: said(
        "label smoothing over a cut vocabulary takes each rank's columns for all",
        "originals::test_a_row_holds_at_its_tolerance",
        "loss::test_over_a_cut_vocabulary_loss_and_full_gradient_are_those_of_whole_logits",
        "plans::test_loss_and_every_gradient_of_bloom_equal_one_process",
    ),
    2: said(
        "labels together with logits that are whole on each rank: loss + log(TP), wrong gradients",
        "originals::test_a_row_holds_at_its_tolerance",
        "hf_plans::test_logits_of_a_forward_with_labels_are_computed_by_what_is_done_to_them",
    ),
    3: refused(
        "several predictions a token: divided by local numbers of tokens where the ranks have other numbers",
        "one prediction a token; sums are divided by the count of the global batch",
        "parity::test_ranks_have_other_numbers_of_masked_tokens_and_some_samples_have_padding",
        "parallelize::test_loss_and_gradients_of_a_step_are_torchs_of_the_sum_over_the_given_number_of_tokens",
        "originals::test_what_is_not_here_is_named_with_its_reason",
    ),
    4: said(
        "recompute over another TP group than the module's mixes replicas",
        "originals::test_a_row_holds_at_its_tolerance",
    ),
    5: said(
        "the mask of padding is cut over another TP group than the hidden state (there, for a mixture's router)",
        "originals::test_a_row_holds_at_its_tolerance",
        "originals::test_what_is_not_here_is_named_with_its_reason",
    ),
    6: said(
        "queries, keys and values of cross-attention are cut over another TP group",
        "originals::test_a_row_holds_at_its_tolerance",
    ),
    7: refused(
        "embeddings of images and text are cut over another TP group",
        "no images; the sequence of embeddings is cut over the group of the table",
        "originals::test_a_row_holds_at_its_tolerance",
        "originals::test_a_program_for_another_model_is_refused",
    ),
    8: refused(
        "what attention sinks learn is left out of the gradient norm that clips, on all TP ranks but one",
        "a model with sinks is refused over tp; T5's bias of relative places is cut by heads too, and counts",
        "originals::test_models_that_nobody_knows_how_to_cut_are_refused_over_tp",
        "t5_layouts::test_loss_gradients_and_weights_of_a_layout_are_those_of_one_process",
        "parity::test_a_layout_gives_the_numbers_of_one_process",
    ),
    10: refused(
        "a router's loss is scaled by a count that the ranks have added up in place",
        "a loss of routers is refused",
        "hf_files::test_the_coefficient_of_a_routers_loss_alone_is_no_reason_to_refuse",
        "originals::test_what_is_not_here_is_named_with_its_reason",
    ),
    11: refused(
        "the norm behind a gated delta rule is whole on each TP rank, its gradient a part",
        "a model with that rule is proven wrong over tp, and refused; gradients of whole norms of heads are added up",
        "originals::test_models_that_nobody_knows_how_to_cut_are_refused_over_tp",
        "hf_plans::test_loss_logits_every_gradient_and_three_steps_of_tp_2_equal_one_process",  # qwen3
        "hf_plans::test_verify_plan_finds_each_plan_that_is_wrong_without_an_error",
    ),
    12: said(
        "a checkpoint of one PP size fills the later stages of another one with the first layers",
        "resume::test_on_another_layout_the_first_loss_is_the_same_and_the_rest_follows_within_the_rounding_of_fp32",
        "pipelining::test_stages_hold_each_parameter_once_under_its_own_name_but_the_tied_one_twice",
    ),
}
EVERY = {f"{name}": claim for name, claim in (MPU | TESTS).items()} | {f"#{n}": claim for n, claim in BUGS.items()}


@functools.cache
def functions(file: str) -> dict[str, bool]:
    """The tests of a file: does `make test` run it?"""
    tree = ast.parse((HERE / f"test_{file}.py").read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {f.name: "pytest.mark.full" not in [ast.unparse(d) for d in f.decorator_list] for f in found}


@pytest.mark.parametrize("name", EVERY)
def test_a_row_has_a_test_that_make_test_runs(name: str):
    claim = EVERY[name]
    assert claim.tests
    for test in claim.tests:
        file, _, function = test.partition("::")
        assert functions(file).get(function), f"no test {test} that always runs"


# ------------------------------------------------------------------------------------------- what is measured here

B, S, T, V, HEADS = 2, 24, 8, 131, 4
SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": 32, "n_heads": HEADS}
MODELS: dict[str, Callable[[], Model]] = {
    "bloom": lambda: Bloom(config.Bloom(**SIZES, n_layers=1)),
    "gpt": lambda: GPT(config.GPT(**SIZES, n_layers=1, max_position_embeddings=S)),
    "llama": lambda: Llama(config.Llama(**SIZES, n_layers=1, n_kv_heads=2)),
    "bert": lambda: Bert(config.Bert(**SIZES, n_layers=1, max_position_embeddings=S)),
    "t5": lambda: T5(config.T5(**SIZES, n_layers=1, n_decoder_layers=1)),
}
PLANS: dict[str, Callable[..., Any]] = {
    "bloom": bloom.plan,
    "gpt": gpt.plan,
    "llama": llama.plan,
    "bert": bert.plan,
    "t5": t5.plan,
}


def whole(family: str) -> Any:
    """A model with values of whole parameters by their names, norms and biases too."""
    model = MODELS[family]()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    model.init_buffers(seed=1)
    return model


def cut(model: Any, tp: DeviceMesh, family: str) -> list[str]:
    table = PLANS[family](model.cfg)
    partial = plans.apply_plan(model, tp, table)
    plans.shard_buffers(model, tp, table)
    return partial


def batch(family: str, seed: int) -> dict[str, Tensor]:
    """Two samples, of which the second one has padding where the family pads."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(S).repeat(B, 1)
    found = {
        "tokens": torch.randint(V, (B, S), generator=generator),
        "labels": torch.randint(V, (B, S), generator=generator),
        "sample_ids": torch.arange(B),
        "places": places,
    }
    if family == "bert":
        ends = torch.tensor([[S], [1]])  # nothing but the first token is text
        found["labels"][places >= ends] = IGNORED
        found |= {"token_types": (places > 9).long(), "swapped": torch.tensor([1, 0])}
        found["document_ids"] = (places >= ends).long()
    if family == "t5":
        decoder_places, ends, decoder_ends = places[:, :T], torch.tensor([[S], [15]]), torch.tensor([[T], [3]])
        found["labels"] = found["labels"][:, :T].where(decoder_places < decoder_ends, IGNORED)
        found |= {"decoder_tokens": torch.randint(V, (B, T), generator=generator), "decoder_places": decoder_places}
        found["document_ids"] = (places >= ends).long()
        found["decoder_document_ids"] = (decoder_places >= decoder_ends).long()
    return found


def far(ours: Tensor, truth: Tensor) -> float:
    """The largest absolute difference, as the originals measure."""
    return (ours - truth).abs().max().item()


def gradients(model: Any, total: Tensor, partial: list[str], tp: DeviceMesh) -> dict[str, Tensor]:
    """The gradients of whole parameters, by name."""
    model.zero_grad()
    total.backward()
    plans.sum_partial_gradients(model, partial, tp)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def cross_entropy(tp: DeviceMesh, seed: int, label_smoothing: float = 0.0) -> dict[str, float]:
    """b13 s17 V = 11 TP, logits x 1000."""
    generator, n, me = torch.Generator().manual_seed(seed), tp.size(), tp.get_local_rank()
    logits = (torch.randn(13, 17, 11 * n, generator=generator, dtype=torch.float64) * 1000).requires_grad_()
    target = torch.randint(11 * n, (13, 17), generator=generator)
    shard = logits.detach().chunk(n, -1)[me].requires_grad_()
    losses = vocab_parallel_cross_entropy(shard, target, tp.get_group(), label_smoothing=label_smoothing)
    flat = logits.flatten(0, 1), target.flatten()
    expected = F.cross_entropy(*flat, reduction="none", label_smoothing=label_smoothing).view(13, 17)
    losses.mean().backward()
    expected.mean().backward()
    assert shard.grad is not None
    assert logits.grad is not None
    return {"loss": far(losses, expected), "gradient": far(shard.grad, logits.grad.chunk(n, -1)[me])}


def smoothed(tp: DeviceMesh, seed: int) -> dict[str, float]:
    return cross_entropy(tp, seed, label_smoothing=0.1)


def linears(tp: DeviceMesh, seed: int) -> dict[str, float]:
    """With loss = sum(y * g): dW = g^T x, db = sum g, dX = g W; b7, 13 TP inputs and 17 TP outputs."""
    generator, n, me = torch.Generator().manual_seed(seed), tp.size(), tp.get_local_rank()
    x, g = (torch.randn(7, 1, size * n, generator=generator, dtype=torch.float64) for size in (13, 17))
    found = {}
    for kind, style in (("column", Column(False).entering()), ("row", Row(False))):
        linear = nn.Linear(13 * n, 17 * n).double()
        weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
        for t in (weight, bias):
            dist.broadcast(t, group=tp.get_group(), group_src=0)
        linear.load_state_dict({"weight": weight, "bias": bias})
        parallelize_module(linear, tp, style, src_data_rank=None)
        cut_in, cut_out = (x, g.chunk(n, 2)[me]) if kind == "column" else (x.chunk(n, 2)[me], g)
        mine = cut_in.clone().requires_grad_()
        y = linear(mine)
        (y * cut_out).sum().backward()
        assert isinstance(linear.weight.grad, DTensor)
        assert isinstance(linear.bias.grad, DTensor)
        assert mine.grad is not None
        dx = g @ weight
        found |= {
            f"{kind} dW": far(linear.weight.grad.full_tensor(), torch.einsum("bso,bsi->oi", g, x)),
            f"{kind} db": far(linear.bias.grad.full_tensor(), g.sum((0, 1))),
            f"{kind} dX": far(mine.grad, dx if kind == "column" else dx.chunk(n, 2)[me]),
        }
    return found


def logits_of_fp16(tp: DeviceMesh, seed: int) -> dict[str, float]:
    """The deviation of logits in fp16, with ALiBi and with learned positions."""
    found = {}
    for family in ("bloom", "gpt"):
        truth, model = (whole(family).half().eval() for _ in range(2))
        cut(model, tp, family)
        tokens = batch(family, seed)["tokens"]
        found[family] = far(model(tokens).float(), truth(tokens).float())
    return found


def labels_and_whole_logits(tp: DeviceMesh, seed: int) -> dict[str, float]:
    """The loss of labels is the cross-entropy of the logits that the same model gives out whole, and has its gradients.

    The gradients are relative to the largest in each.
    """
    found: dict[str, float] = {}
    for family in ("bloom", "llama"):
        model, rows = whole(family), batch(family, seed)
        partial = cut(model, tp, family)
        loss = model(**rows)["lm"]
        logits = model(rows["tokens"])
        expected = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        found[f"{family} loss"] = abs(loss.item() / expected.item() - 1)
        of_loss, of_logits = (gradients(model, total, partial, tp) for total in (loss, expected))
        errors = [far(of_loss[name], g) / g.abs().max().clamp(min=1e-3).item() for name, g in of_logits.items()]
        found[f"{family} gradients"] = max(errors)
    return found


def group_of_the_table(tp: DeviceMesh, seed: int) -> dict[str, float]:
    """Loss and gradients, recomputed in backward, on groups that each have a batch of their own."""
    found: dict[str, float] = {}
    for family in ("bloom", "bert", "t5"):
        truth, model, rows = whole(family), whole(family), batch(family, seed)
        partial = cut(model, tp, family)
        recompute(model, config.Recompute(mode="full"))
        ours, expected = (sum(each(**rows).values()) for each in (model, truth))
        assert isinstance(ours, Tensor)
        assert isinstance(expected, Tensor)
        found[f"{family} loss"] = abs(ours.item() / expected.item() - 1)
        of_truth = gradients(truth, expected, [], tp)
        errors = {}
        for name, g in gradients(model, ours, partial, tp).items():
            errors[name] = far(g, of_truth[name]) / of_truth[name].abs().max().clamp(min=1e-3).item()
        found[f"{family} gradients"] = max(errors.values())
    return found


# Row -> what measures it, and the largest deviation that it may have.
ROWS: dict[str, tuple[Callable[[DeviceMesh, int], dict[str, float]], float]] = {
    "test_cross_entropy": (cross_entropy, 1e-6),
    "column / row linear": (linears, 1e-6),
    "test_tensor_parallel: alibi, embedding": (logits_of_fp16, 5e-3),
    "#1": (smoothed, 1e-6),
    "#2": (labels_and_whole_logits, 1e-5),
    "#4 to #7": (group_of_the_table, 1e-5),
}


def initial_values(tp: DeviceMesh, seed: int) -> dict[str, bool]:
    """Tell whether the shards of a model that is drawn after it was cut are slices of the master's."""
    found = {}
    for family in ("llama", "t5"):
        truth, model = MODELS[family](), MODELS[family]()
        cut(model, tp, family)
        for each in (truth, model):
            init_weights(each, seed)
        pairs = zip(model.named_parameters(), truth.parameters(), strict=True)
        found |= {f"{family} {n}": isinstance(p, DTensor) and torch.equal(p.full_tensor(), q) for (n, p), q in pairs}
    return found


def who_sees_whom(tp: DeviceMesh, seed: int) -> dict[str, bool]:
    """The logits of causal models, prefixes and documents that a change of one token of the first sample changes."""
    found: dict[str, bool] = {}
    prefix = torch.zeros(B, S).bool()
    prefix[:, :9] = True
    documents = torch.zeros(B, S, dtype=torch.int64)
    documents[:, 12:] = 1
    prefixes = prefix.clone()
    prefixes[:, 12:16] = True
    with_prefix, packed = {"prefix": prefix}, {"prefix": prefixes, "document_ids": documents}
    # What is changed -> where, what else there is, and where logits change.
    changes: dict[str, tuple[int, dict[str, Tensor], range]] = {
        "a token": (10, {}, range(10, S)),
        "a target": (15, with_prefix, range(15, S)),
        "an input": (3, with_prefix, range(S)),
        "an input of the first document": (3, packed, range(12)),
        "an input of the second document": (14, packed, range(12, S)),
        "a target of the second document": (20, packed, range(20, S)),
    }
    for family in ("bloom", "gpt", "llama"):
        model, tokens = whole(family).eval(), batch(family, seed)["tokens"]
        cut(model, tp, family)
        for what, (place, rows, expected) in changes.items():
            others = tokens.clone()
            others[0, place] = (others[0, place] + 1) % V
            with torch.no_grad():
                changed = (model(tokens, **rows) != model(others, **rows)).any(-1)
            truth = torch.zeros(B, S).bool()
            truth[0, expected.start : expected.stop] = True
            found[f"{family}: {what}"] = torch.equal(changed, truth)
    return found


def no_nan(tp: DeviceMesh, seed: int) -> dict[str, bool]:
    """Tell which gradients are finite, of a sample of padding but for one token."""
    model, rows = whole("bert"), batch("bert", seed)
    partial = cut(model, tp, "bert")
    found = gradients(model, sum(model(**rows).values()), partial, tp)  # pyright: ignore[reportArgumentType]
    return {name: bool(g.isfinite().all()) for name, g in found.items()}


BITS: dict[str, Callable[[DeviceMesh, int], dict[str, bool]]] = {
    "initial values": initial_values,
    "who sees whom": who_sees_whom,
    "padding": no_nan,
}


def places(tp: int) -> dict[str, Any]:
    """The place of this rank on a mesh of all ranks, as the trainer makes it."""
    n = dist.get_world_size()
    world = mesh.start(torch.device("cpu"), mesh.resolve(config.Mesh(tp=tp, dp_shard=n // tp), n))
    return {
        "tp": (world.coordinate("tp"), tp),
        "data": (world.data_rank, world.data_size),
        "group of tp": dist.get_process_group_ranks(world.groups["tp"]),
        "group of data": dist.get_process_group_ranks(world.groups["data"]),
    }


def everything() -> dict[int, dict[str, Any]]:
    """All that is measured on this rank of four, by tp."""
    found: dict[int, dict[str, Any]] = {}
    for tp in TP:
        here = init_device_mesh("cpu", (tp, 4 // tp), mesh_dim_names=("tp", "dp"))
        replica = here.get_local_rank("dp")
        found[tp] = {"places": places(tp)}
        found[tp] |= {name: measure(here["tp"], 1 + replica) for name, (measure, _) in ROWS.items()}
        found[tp] |= {name: measure(here["tp"], 1 + replica) for name, measure in BITS.items()}
    return found


TP = (1, 2, 4)


@functools.cache
def on_four() -> list[dict[int, dict[str, Any]]]:
    return ranks.run(4, everything)


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("row", ROWS)
def test_a_row_holds_at_its_tolerance(row: str, tp: int):
    _, tolerance = ROWS[row]
    for found in on_four():
        assert {name: e for name, e in found[tp][row].items() if not e < tolerance} == {}


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("what", BITS)
def test_what_the_original_says_of_bits_is_so(what: str, tp: int):
    for found in on_four():
        assert [name for name, so in found[tp][what].items() if not so] == []


@pytest.mark.parametrize("tp", TP)
def test_a_rank_is_where_the_original_puts_it(tp: int):
    n = 4
    for rank, found in enumerate(on_four()):
        first = rank - rank % tp
        assert found[tp]["places"] == {
            "tp": (rank % tp, tp),
            "data": (rank // tp, n // tp),
            "group of tp": [*range(first, first + tp)],
            "group of data": [*range(rank % tp, n, tp)],
        }


# ---------------------------------------------------------------------------------------------- what is not here


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--curriculum-learning", "lengths that grow break token counts"),
        ("--use-bnb-optimizer", "moments are fp32"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1"),
        ("--calculate-per-token-loss", "--calculate-per-token-loss"),
        ("--num-experts 8", "--num-experts 8"),
        ("--moe-aux-loss-coeff 1e-2", "--moe-aux-loss-coeff 1e-2"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp"),
    ],
)
def test_what_is_not_here_is_named_with_its_reason(flag: str, reason: str):
    (line,) = translate(f"pretrain_gpt.py --num-layers 2 {flag}").left_out
    assert line.startswith(flag.split()[0])
    assert reason in line


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("pretrain_vlm.py", "trains a model that is not built here"),
        ("finetune_t0_non_causal_decoder.py", "has no command with a pretrain_"),
    ],
)
def test_a_program_for_another_model_is_refused(program: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        translate(f"{program} --num-layers 2")


def with_sinks() -> Any:
    cfg = transformers.GptOssConfig(vocab_size=V, hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    with torch.device("meta"):
        return transformers.GptOssForCausalLM(cfg)


def with_a_delta_rule() -> str:
    """The words with which it is refused over these ranks."""
    sizes: dict[str, Any] = {"vocab_size": V, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    cfg = transformers.Qwen3NextConfig(layer_types=["linear_attention", "full_attention"], **sizes)
    with torch.device("meta"):
        model = transformers.Qwen3NextForCausalLM(cfg)
    tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return ranks.message(parallelize_hf, model, tp)


def test_models_that_nobody_knows_how_to_cut_are_refused_over_tp():
    with pytest.raises(ValueError, match="no plan for model_type 'gpt_oss'"):
        plan_for(with_sinks())
    for words in ranks.run(2, with_a_delta_rule):
        assert words.startswith("the plan that transformers brings for 'qwen3_next' is wrong:")
