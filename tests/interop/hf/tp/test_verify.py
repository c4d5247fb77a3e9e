"""Files hf/tp/{verify,tiny,command,parallel,regions,dropout}.py: what proves a plan, and what guards a cut model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtmega.__main__ import main as dtmega_main
from dtmega.interop.hf.tp import command, tiny
from dtmega.interop.hf.tp.generic import GlobalLinear
from dtmega.interop.hf.tp.parallel import cut_stage
from dtmega.interop.hf.tp.verify import Verification, deviation, verify
from dtmega.models.model import Model
from dtmega.plans import load_hf, parallelize_hf, plan_for, verify_plan
from tests import hf_models, ranks
from tests.hf_models import Case
from tests.ranks import message

LLAMA = Case("llama")
EXACT = 2e-5


# ---------------------------------------------------------------------------------------------- what finds a plan wrong


def wrongly(change: Callable[[Any], None]) -> Callable[[Any, DeviceMesh], Any]:
    def parallelize(model: Any, mesh: DeviceMesh) -> Any:
        model = parallelize_hf(model, mesh, loss_parallel=False)
        change(model)
        return model

    return parallelize


def other_logits_on_the_last_rank(model: Any) -> None:
    def add(module: Any, args: Any, out: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            out.logits = out.logits * (1 + 1e-4)

    model.register_forward_hook(add)


def without_masks(model: Any) -> None:
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )


def no_odd_length(model: Any) -> None:
    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] % 2:
            raise RuntimeError("odd")

    model.register_forward_pre_hook(refuse, with_kwargs=True)


def a_gradient_too_large(model: Any) -> None:
    model.model.norm.weight.register_hook(lambda grad: grad * (1 + 1e-4))


def a_gradient_that_is_nan(model: Any) -> None:
    model.model.norm.weight.register_hook(lambda grad: grad * torch.nan)


WRONG = (other_logits_on_the_last_rank, without_masks, no_odd_length, a_gradient_too_large, a_gradient_that_is_nan)


def proofs(mesh: DeviceMesh) -> dict[str, Verification]:
    model = hf_models.plain(LLAMA)
    found = {change.__name__: verify(model, mesh, wrongly(change)) for change in WRONG}
    return found | {"right": verify_plan(model, mesh)}


def native(mesh: DeviceMesh) -> dict[str, Any]:
    """A plan of transformers' own that forgets the sum after the feed-forward."""

    def planned(kept: bool) -> Any:
        model = hf_models.plain(Case("olmo2"))
        rows = {**model.config.base_model_tp_plan}
        if not kept:
            del rows["layers.*.mlp.up_proj"]
        model.config.base_model_tp_plan = rows
        return model

    def staged(kept: bool) -> str:
        stage = Model()
        stage.hf = planned(kept)
        return message(lambda: cut_stage(stage, stage.hf, mesh, True))

    wrong = planned(False)
    return {
        "cut": message(lambda: parallelize_hf(wrong, mesh)),
        "uncut": not any(isinstance(p, DTensor) for p in wrong.parameters()),
        "unproven": message(lambda: parallelize_hf(planned(False), mesh, verify_native=False)),
        "right": message(lambda: parallelize_hf(planned(True), mesh)),
        "stage": staged(False),
        "right stage": staged(True),
        # Of a family with a plan nothing is computed on DTensors, and no warning (an error here) says so.
        "generic": message(lambda: parallelize_hf(hf_models.plain(LLAMA), mesh, generic=True)),
    }


# ----------------------------------------------------------------------------------------- what the cut model does then


def masks(mesh: DeviceMesh, sequence_parallel: bool) -> dict[str, Any]:
    """The masks of each rank after the first attention of GPT-2, in two forwards, and the generator behind them."""
    model = hf_models.build(Case("gpt2"))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model = parallelize_hf(model, mesh, sequence_parallel)
    dropped: list[Any] = []
    model.transformer.h[0].attn.resid_dropout.register_forward_hook(lambda _, args, out: dropped.append(out == 0))
    torch.manual_seed(4)
    for _ in range(2):
        model(**hf_models.batch(Case("gpt2")))
    after = torch.rand(3)
    torch.manual_seed(dist.get_rank())
    unlike = message(lambda: model(**hf_models.batch(Case("gpt2"))))
    state = torch.random.get_rng_state()
    evaluated = message(lambda: model.eval()(**hf_models.batch(Case("gpt2"))))
    drawn = not torch.equal(state, torch.random.get_rng_state())
    return {"dropped": dropped[:2], "after": after, "unlike": unlike, "evaluated": evaluated, "drawn": drawn}


def asked(mesh: DeviceMesh) -> dict[str, Any]:
    """Options of a forward that stand in the config."""
    inputs = hf_models.batch(LLAMA)
    ours, truth = parallelize_hf(hf_models.build(LLAMA), mesh), hf_models.build(LLAMA)
    for model in (ours, truth):
        model.config.output_hidden_states = True
    states = [model(**inputs).hidden_states for model in (ours, truth)]
    found: dict[str, Any] = {"hidden": max((a - b).abs().max().item() for a, b in zip(*states, strict=True))}
    ours.config.output_hidden_states = False
    ours.config._attn_implementation = "eager"  # else transformers refuses it itself
    ours.config.output_attentions = True
    return found | {"attentions": message(lambda: ours(**inputs))}


def over_data() -> dict[str, Any]:
    """Two data ranks, and meshes that are refused."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "tp"))
    model = parallelize_hf(hf_models.build(LLAMA), mesh)
    inputs = hf_models.batch(LLAMA)
    first, _ = model(**inputs), model(**inputs)
    found: dict[str, Any] = {
        "wrapped": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
        "stale": message(lambda: first.logits + 1, error=RuntimeError),
    }
    different = hf_models.build(LLAMA)
    with torch.no_grad():
        different.model.norm.weight[3] += dist.get_rank()
    found["different"] = message(lambda: parallelize_hf(different, mesh))
    for names in (("dp",), ("tp", "dp_shard"), ("dp_replicate", "tp")):
        other = init_device_mesh("cpu", (2, 1)[: len(names)], mesh_dim_names=names)
        found[str(names)] = message(parallelize_hf, hf_models.plain(LLAMA), other)
    return found


def on_two() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {fn.__name__: fn(mesh) for fn in (proofs, native, asked)}
    found |= {f"masks {cut}": masks(mesh, cut) for cut in (True, False)}
    return found | {"over data": over_data()}


@pytest.fixture(scope="module")  # unlike a cache it keeps a failure too
def measured() -> list[dict[str, Any]]:
    return ranks.run(2, on_two)


def test_every_number_is_compared_plain_padded_and_at_an_odd_length_and_a_right_plan_is_right(measured):
    names = {name for name, _ in hf_models.plain(LLAMA).named_parameters(remove_duplicate=False)}
    for found in measured:
        right = found["proofs"]["right"]
        assert right.ok
        assert {*right.errors} == {
            (c, n) for c in ("plain", "padded", "odd length") for n in names | {"loss", "logits"}
        }
        assert all(0 <= e < EXACT for e in right.errors.values())


@pytest.mark.parametrize(
    ("change", "cases", "names"),
    [
        ("other_logits_on_the_last_rank", {"plain", "padded", "odd length"}, {"logits"}),
        ("without_masks", {"padded"}, None),
        ("no_odd_length", {"odd length"}, None),
        ("a_gradient_too_large", {"plain", "padded", "odd length"}, {"model.norm.weight"}),
        ("a_gradient_that_is_nan", {"plain", "padded", "odd length"}, {"model.norm.weight"}),
    ],
)
def test_what_is_wrong_on_one_rank_or_in_one_case_is_found_by_all(
    measured, change: str, cases: set[str], names: set[str] | None
):
    for found in measured:
        proof = found["proofs"][change]
        assert not proof.ok
        assert {case for case, _ in proof.wrong} == cases
        assert (
            {name for _, name in proof.wrong} == names
            or (names is None and ("padded", "loss") in proof.wrong)
            or (change == "no_odd_length" and proof.raised == ("odd length: the cut model raised RuntimeError: odd",))
        )


def test_a_plan_that_transformers_brings_is_proven_before_the_model_is_cut(measured):
    for found in measured:
        found = found["native"]
        for wrong in ("cut", "stage"):
            assert "the plan that transformers brings for 'olmo2' is wrong:\n" in found[wrong]
        assert found["uncut"]
        for fine in ("unproven", "right", "right stage", "generic"):
            assert found[fine] == "nothing was raised"


def test_ranks_drop_alike_where_they_have_the_same_tokens_and_each_its_own_where_they_have_not(measured):
    first, second = measured
    for cut in (True, False):
        one, other = first[f"masks {cut}"], second[f"masks {cut}"]
        assert [torch.equal(a, b) for a, b in zip(one["dropped"], other["dropped"], strict=True)] == [not cut] * 2
        assert not torch.equal(*one["dropped"])
        assert all(0.4 < mask.float().mean() < 0.6 for mask in one["dropped"])
        assert torch.equal(one["after"], other["after"])
        assert "needs the same random state on all ranks" in one["unlike"]
        assert (one["evaluated"], one["drawn"]) == ("nothing was raised", False)


def test_what_the_config_asks_of_a_forward_is_given_or_refused_too(measured):
    for found in measured:
        assert found["asked"]["hidden"] < 1e-4
        assert "probabilities of its own heads only" in found["asked"]["attentions"]


def test_over_data_ranks_each_block_is_wrapped_and_copies_that_differ_are_refused(measured):
    for found in measured:
        found = found["over data"]
        assert found["wrapped"] == ["", "model.layers.0", "model.layers.1"]
        assert "use them before the optimizer's step" in found["stale"]
        assert "'model.norm.weight'" in found["different"]
        assert "load the same weights on every rank" in found["different"]
        for names in (("dp",), ("tp", "dp_shard"), ("dp_replicate", "tp")):
            assert "expected a mesh ('tp'), ('dp_shard', 'tp') or" in found[str(names)]


# ------------------------------------------------------------------------------------------- deviations and their table


def test_a_deviation_is_relative_to_the_truth_and_to_all_gradients_where_the_truth_is_rounding():
    truth = torch.tensor([3.0, 4.0])
    assert deviation(truth + torch.tensor([0.0, 0.5]), truth, 100.0) == pytest.approx(0.1)
    assert deviation(truth * 1e-6 + 1e-6, truth * 1e-6, 100.0) == pytest.approx(2**0.5 * 1e-8)
    assert deviation(None, None, 1.0) == 0
    assert deviation(None, truth, 1.0) == deviation(truth, None, 1.0) == float("inf")
    assert deviation(torch.ones(1), truth, 1.0) == float("inf")


def test_a_table_says_what_is_wrong_by_its_worst_case():
    errors = {("plain", "loss"): EXACT, ("padded", "loss"): 1e-7, ("plain", "a"): 1.1 * EXACT, ("padded", "a"): 1e-9}
    found = Verification({**errors, ("plain", "b"): float("nan")}, raised=("plain: raised",))
    assert not found.ok
    assert {*found.wrong} == {("plain", "a"), ("plain", "b")}
    lines = str(found).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["loss", "2.0e-05", "ok"],
        ["a", "2.2e-05", "WRONG"],
        ["b", "nan", "WRONG"],
    ]
    assert lines[3:] == ["plain: raised", "3 of 5 comparisons within 2e-05"]


# ------------------------------------------------------------------------------------------------------ the small copy

BIG = {"hidden_size": 512, "num_hidden_layers": 9, "intermediate_size": 999, "attention_dropout": 0.5}
BIG |= {"num_attention_heads": 32, "vocab_size": 999, "max_position_embeddings": 999, "pad_token_id": 300}
SMALL: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "as many heads of keys": (
        "Llama",
        {**BIG, "num_key_value_heads": 32},
        2,
        {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64, "head_dim": 16},
    ),
    "fewer heads of keys": (
        "Llama",
        {**BIG, "num_key_value_heads": 8},
        2,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128},
    ),
    "fewer heads of keys than ranks": (
        "Llama",
        {**BIG, "num_key_value_heads": 2},
        4,
        {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128, "intermediate_size": 256},
    ),
    "one head of keys": (
        "Llama",
        {**BIG, "num_key_value_heads": 1},
        2,
        {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 64},
    ),
    "heads that are not the hidden size": (
        "Qwen3",
        {**BIG, "head_dim": 64, "num_key_value_heads": 8},
        2,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 16},
    ),
    "what is in every one": (
        "Mistral",
        {**BIG, "sliding_window": 999, "bos_token_id": 400, "eos_token_id": 401},
        2,
        {
            **{"vocab_size": 131, "max_position_embeddings": 64, "sliding_window": 6, "num_hidden_layers": 2},
            **{
                "bos_token_id": 0,
                "pad_token_id": 1,
                "eos_token_id": 2,
                "attention_dropout": 0.0,
                "dtype": torch.float32,
            },
        },
    ),
    "kinds of layers": (
        "Gemma2",
        {**BIG, "head_dim": 16},
        2,
        {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
    ),
    "one kind": ("Qwen2", BIG, 2, {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}),
    "a projection": (
        "OPT",
        {**BIG, "ffn_dim": 999, "word_embed_proj_dim": 256},
        2,
        {"word_embed_proj_dim": 32, "hidden_size": 64, "ffn_dim": 128},
    ),
    "no projection": ("OPT", {**BIG, "word_embed_proj_dim": 512}, 2, {"word_embed_proj_dim": 64, "hidden_size": 64}),
    "GPT-2's names": (
        "GPT2",
        {"n_embd": 512, "n_layer": 9, "n_head": 32, "n_inner": 999, "n_positions": 999, "resid_pdrop": 0.5},
        2,
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128, "n_positions": 64, "resid_pdrop": 0.0},
    ),
    "T5's names": (
        "T5",
        {"d_model": 512, "d_kv": 16, "d_ff": 999, "num_layers": 9, "num_heads": 32, "num_decoder_layers": 7},
        2,
        {
            **{"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "num_decoder_layers": 2},
            **{"decoder_start_token_id": 1, "dropout_rate": 0.0},
        },
    ),
}


@pytest.mark.parametrize("what", SMALL)
def test_a_clone_is_small_and_keeps_what_decides_how_tp_cuts(what: str):
    name, keys, tp, expected = SMALL[what]
    config = getattr(hf_models.transformers, f"{name}Config")(**keys)
    before = config.to_dict()
    small = tiny.tiny_config(config, tp)
    assert {key: getattr(small, key) for key in expected} == expected
    assert config.to_dict() == before


def test_a_clone_without_what_the_model_has_proves_nothing_and_is_refused():
    model = hf_models.plain(Case("olmo2"))
    model.model.layers[1].mlp = torch.nn.Bilinear(2, 2, 2)
    mesh = Mock(ndim=1, device_type="cpu", size=lambda: 2)
    with pytest.raises(ValueError, match="the plan of 'olmo2' cannot be proven: its small copy has no Bilinear"):
        verify(model, mesh, Mock())


@pytest.mark.parametrize("dense", [{"mlp_only_layers": [0, 1, 3]}, {"decoder_sparse_step": 4}], ids=str)
def test_the_small_clone_of_a_mixture_has_experts_more_than_a_token_visits(dense: dict[str, Any]):
    sizes = {"num_hidden_layers": 8, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    config = transformers.Qwen3MoeConfig(**sizes, **dense, pad_token_id=None)
    clone = tiny.build(transformers.Qwen3MoeForCausalLM, tiny.tiny_config(config, 2), "eager")
    experts = clone.model.layers[1].mlp.experts
    assert experts.num_experts == 10  # of each rank more than one
    assert clone.config.num_experts_per_tok == 8
    assert sum(p.numel() for p in clone.parameters()) < 2_000_000


def test_a_clone_is_alike_at_each_call_without_dropout_and_with_biases_that_are_not_zero():
    config = tiny.tiny_config(hf_models.plain(Case("gpt2")).config, 2)
    state = torch.random.get_rng_state()
    one, other = (tiny.build(hf_models.transformers.GPT2LMHeadModel, config, "eager") for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert one.config._attn_implementation == "eager"
    assert one.training
    assert not any(m.training for m in one.modules() if isinstance(m, torch.nn.Dropout))
    for n, p in one.named_parameters():
        assert p.std() > (0.1 if p.ndim < 2 else 0.04), n
    one.transformer.h[0].attn.resid_pdrop = 0.5
    assert tiny.without_dropout(one).transformer.h[0].attn.resid_pdrop == 0.0


def test_the_batch_of_a_proof_hides_an_end_and_a_start_and_some_labels():
    model = tiny.build(hf_models.transformers.GPT2LMHeadModel, hf_models.plain(Case("gpt2")).config, "eager")
    padded = tiny.batch(model, 8, padded=True)
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]
    assert padded["input_ids"].shape == (2, 8)
    assert 3 <= padded["input_ids"].min() < padded["input_ids"].max() < 131
    assert (padded["labels"][:, ::5] == -100).all()
    assert (padded["labels"] >= 0).sum() == 12
    assert "attention_mask" not in tiny.batch(model, 8, padded=False)


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("option", ["sequence_parallel", "loss_parallel", "generic"])
def test_each_option_of_verify_plan_reaches_the_plan(monkeypatch: pytest.MonkeyPatch, option: str):
    parallelize = Mock()
    monkeypatch.setattr(command, "parallelize_hf", parallelize)
    monkeypatch.setattr(command, "verify", lambda model, mesh, cut: cut(model, mesh))
    defaults = {"sequence_parallel": True, "loss_parallel": True, "generic": False}
    parameters = inspect.signature(parallelize_hf).parameters
    assert {name: parameters[name].default for name in defaults} == defaults
    for value in (True, False):
        verify_plan("model", "mesh", **{option: value})  # pyright: ignore[reportArgumentType]
        parallelize.assert_called_with("model", "mesh", verify_native=False, **{**defaults, option: value})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    hf_models.plain(LLAMA).config.save_pretrained(tmp_path)
    plain = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**plain, "architectures": ["LlamaForCausalLM"]}))
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "options", "tp"),
    [
        ([], {"sequence_parallel": True, "generic": False}, 2),
        (["--no-sequence-parallel"], {"sequence_parallel": False, "generic": False}, 2),
        (["--generic", "--tp", "4"], {"sequence_parallel": True, "generic": True}, 4),
    ],
)
def test_the_flags_of_the_command_reach_every_rank_and_the_printed_plan(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags, options, tp
):
    def spawn(fn: Any, args: Any, nprocs: int) -> None:
        assert (args[1:], nprocs) == ((directory, "tp", tp, options), tp)
        torch.save(Verification({("plain", "loss"): 0.0}), Path(args[0], "result"))

    monkeypatch.setattr(command.multiprocessing, "spawn", spawn)
    assert dtmega_main(["verify-plan", str(directory), *flags]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"llama, tp={tp}{', sequence parallel' if options['sequence_parallel'] else ''}\n")
    assert out.endswith("1 of 1 comparisons within 2e-05\n")


def test_a_refusal_of_the_ranks_is_one_message(directory: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def spawn(fn: Any, args: Any, nprocs: int) -> None:
        torch.save(ValueError("the ranks refuse"), Path(args[0], "result"))

    monkeypatch.setattr(command.multiprocessing, "spawn", spawn)
    assert dtmega_main(["verify-plan", str(directory)]) == 2
    assert capsys.readouterr().err.endswith("verify-plan: the ranks refuse\n")


def test_under_torchrun_the_ranks_are_its_own_as_many_as_tp_and_the_first_one_prints(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert dtmega_main(["verify-plan", str(directory), "--tp", "2"]) == 2
    assert "torchrun started 3 processes, expected --tp 2" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    groups = Mock()
    monkeypatch.setattr(command, "dist", groups)
    monkeypatch.setattr(command, "_verification", lambda *_: Verification({("plain", "loss"): 1.0}))
    monkeypatch.setattr(command, "meet", lambda *asked: asked)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert dtmega_main(["verify-plan", str(directory), "--tp", "2"]) == 1
        assert ("WRONG" in capsys.readouterr().out) == (rank == 0)
        store = (rank, 2, command.TIMEOUT)
        groups.init_process_group.assert_called_with(
            "gloo", store=store, rank=rank, world_size=2, timeout=command.TIMEOUT
        )
    assert groups.destroy_process_group.call_count == 2


# -------------------------------------------------------------------------------------------------- what a plan refuses


def planned(name: str, tp: int, **keys: Any) -> Any:
    model_class, config_class, known = (hf_models.MODELS | hf_models.VARIANTS)[name]
    config = getattr(hf_models.transformers, config_class)(**{**known, "vocab_size": 131, **keys})
    with torch.device("meta"):
        return plan_for(getattr(hf_models.transformers, model_class)(config), tp)


HEADS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "opt", "bert"), "num_attention_heads"),
    **{"bloom": "n_head", "gpt2": "n_head", "t5": "num_heads"},
}
SIZES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "bert"), "intermediate_size"),
    **{"gpt2": "n_inner", "opt": "ffn_dim", "t5": "d_ff"},
}


@pytest.mark.parametrize("name", HEADS)
def test_tp_must_divide_the_heads_of_each_family_and_its_feed_forward(name: str):
    with pytest.raises(ValueError, match=rf"tp=3 does not divide {HEADS[name]}=4: 4 % 3 = 1 \(\[mesh\] tp\)"):
        planned(name, 3)
    if name in SIZES:
        with pytest.raises(ValueError, match=rf"tp=2 does not divide {SIZES[name]}=97: 97 % 2 = 1 \(\[mesh\] tp\)"):
            planned(name, 2, **{SIZES[name]: 97})


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_heads_of_keys_are_cut_or_copied_evenly_or_refused(name: str):
    sizes = {"hidden_size": 96, "num_attention_heads": 6}
    with pytest.raises(
        ValueError, match=r"tp=2 and num_key_value_heads=3: neither divides the other, .* \(\[mesh\] tp\)"
    ):
        planned(name, 2, **sizes, num_key_value_heads=3)
    for kv_heads, placement in ((1, Replicate()), (2, Shard(0)), (6, Shard(0))):
        table = planned(name, 2, **sizes, num_key_value_heads=kv_heads).table
        for x in "kv":
            assert table[f"model.layers.*.self_attn.{x}_proj"].placement("weight", 2) == placement
        assert table["model.layers.*.self_attn"].set == {"num_key_value_groups": 3 if kv_heads < 6 else 1}


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("bloom", {"slow_but_exact": True}, "it slices whole weights"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention of this family is not cut"),
        ("bert", {"add_cross_attention": True, "is_decoder": True}, "cross-attention of this family is not cut"),
        ("bert", {"chunk_size_feed_forward": 2}, "its chunks are of the whole sequence"),
        ("opt", {"layerdrop": 0.1}, "ranks would skip different layers"),
        ("xglm", {"layerdrop": 0.1}, "ranks would skip different layers"),
    ],
)
def test_options_of_a_family_that_cannot_be_cut_are_refused_with_the_reason(name: str, keys, reason: str):
    key = next(iter(keys))
    with pytest.raises(ValueError, match=f"{key}={keys[key]} of a {name} config: {reason}"):
        planned(name, 2, **keys)
    planned(name, 2)


def test_heads_that_are_stored_in_blocks_are_shared_block_by_block_or_refused():
    planned("codegen", 2, n_head=8)
    for n_head in (4, 20):  # half a head of each block, and two and a half
        with pytest.raises(
            ValueError, match=rf"n_head={n_head} as 'codegen' stores heads, in 4 blocks of {n_head // 4} "
        ):
            planned("codegen", 2, n_head=n_head, n_embd=160, rotary_dim=4)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("eager", ""),
        ("sdpa", ""),
        ("flash_attention_2", "does not run on a CPU; use 'sdpa' or 'eager'"),
        ("flash_attention_4", "does not run on a CPU"),
        ("flex_attention", "has no backward on a CPU"),
        ("kernels-community/flash", "is not known to work under tp"),
    ],
)
def test_attention_is_one_that_works_on_the_device(attention: str, message: str):
    from dtmega.interop.hf.tp.plan import check

    model = hf_models.plain(LLAMA)
    model.config._attn_implementation = attention
    if message:
        with pytest.raises(ValueError, match=f"attn_implementation='{attention}' {message}"):
            check(model, "cpu")
    else:
        check(model, "cpu")
    if "kernels" not in attention:
        check(model, "cuda")


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_our_plan_of_a_family_cuts_what_transformers_own_plan_cuts(name: str):
    model = hf_models.plain(Case(name))
    table = plan_for(model, 2).table
    dims = {"colwise": 0, "rowwise": 1}
    rows = {f"model.{pattern}": word for pattern, word in model.config.base_model_tp_plan.items() if word in dims}
    assert len(rows) == 7
    for pattern, word in rows.items():
        assert table[pattern].placements["weight"].dim == dims[word], pattern


def test_on_one_rank_nothing_is_proven_and_a_note_tells_of_dropout():
    model = hf_models.plain(Case("gpt2"))
    assert plan_for(model, 2).notes == []
    model.transformer.drop.p = 0.25
    assert plan_for(model, 2).notes == ["dropout (dropout=0.25): its masks are not those of one process"]
    native = hf_models.plain(Case("olmo2"))
    assert [plan_for(native, tp).native for tp in (1, 2)] == [False, True]


# What a plan of transformers' own may say -> the style, the dim of its weight that is cut (None: whole).
STRINGS = {
    "colwise": ("Column", 0),
    "rowwise": ("Row", 1),
    "colwise_gather_output": ("GatheredColumn", 0),
    "colwise_rep": ("GatheredColumn", 0),
    "rowwise_split_input": ("SplitRow", 1),
    "rowwise_rep": ("SplitRow", 1),
    "packed_colwise": ("PackedColumn", 0),
    "replicated_with_grad_allreduce": ("Whole", None),
    "replicate": ("Whole", None),
}


@pytest.mark.parametrize("string", STRINGS)
def test_a_string_of_transformers_own_plan_is_the_style_it_means(string: str):
    model = hf_models.plain(Case("olmo2"))
    model.config.base_model_tp_plan = {"layers.*.mlp.up_proj": string}
    style: Any = plan_for(model, 2).table["model.layers.*.mlp.up_proj"]
    name, dim = STRINGS[string]
    assert type(style).__name__ == name
    placement = getattr(style, "placements", {}).get("weight")
    assert getattr(placement, "dim", None) == dim
    if name == "Whole":
        assert style.of_heads is (string == "replicated_with_grad_allreduce")
    elif dim == 0:
        # Nothing else says where the input enters.
        assert style.enters


def test_a_plan_that_knows_nothing_of_a_parameter_or_of_its_heads_is_refused():
    def planned_with(tp: int = 2, **rows: str) -> str:
        model = hf_models.plain(Case("olmo2"))
        model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, **rows}
        return message(lambda: plan_for(model, tp))

    assert planned_with() == "nothing was raised"
    said = planned_with(**{"layers.*.mlp.up_proj.weight": "colwise"})
    assert "says 'colwise' for model.layers.*.mlp.up_proj.weight, a parameter, and we cut modules only" in said
    assert "tp=3 does not divide num_attention_heads=4: 4 % 3 = 1 ([mesh] tp)" in planned_with(3)
    assert "tp=4 does not divide num_key_value_heads=2, and the plan of transformers" in planned_with(4)


def test_in_a_model_without_a_plan_projections_are_cut_by_their_names():
    config = hf_models.transformers.GPTNeoConfig(
        hidden_size=32, num_layers=1, num_heads=2, attention_types=[[["global"], 1]], vocab_size=131
    )
    for key in ("resid_dropout", "embed_dropout", "attention_dropout"):
        setattr(config, key, 0.0)
    with torch.device("meta"):
        model = hf_models.transformers.GPTNeoForCausalLM._from_config(config, attn_implementation="eager")
    made = plan_for(model, 2, generic=True)
    linears = {name.rpartition(".")[2]: style for name, style in made.table.items() if isinstance(style, GlobalLinear)}
    cut = {name: style.by_output for name, style in linears.items()}
    assert cut == {"q_proj": True, "k_proj": True, "v_proj": True, "out_proj": False, "c_fc": True, "c_proj": False}
    assert made.blocks == ["transformer.h.0"]
    assert "has no adapter and no plan of transformers" in made.notes[0]
    guard = made.table[""]
    guard.check(model, 2)  # pyright: ignore[reportAttributeAccessIssue]
    model.transformer.drop.p = 0.1
    with pytest.raises(ValueError, match=r"cannot drop alike on all ranks: set dropout=0.1 to 0"):
        guard.check(model, 2)  # pyright: ignore[reportAttributeAccessIssue]
    model.transformer.drop.p = 0.0
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"needs attn_implementation='eager' .*, got 'sdpa'"):
        guard.check(model, 2)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_parameter_of_a_module_that_only_moves_the_hidden_state_is_refused():
    config = hf_models.plain(LLAMA).config
    config.num_hidden_layers = 3
    blocks = [f"model.layers.{i}" for i in range(3)]
    for path in (*blocks, "model"):
        with torch.device("meta"):
            model = hf_models.transformers.LlamaForCausalLM(config)
            model.get_submodule(path).register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
        text = f"no style for the parameters of {path}" if path in blocks else "model has parameters of its own"
        with pytest.raises(ValueError, match=text):
            plan_for(model)


def test_a_printed_plan_says_how_parts_are_cut_and_what_each_pass_costs():
    lines = {line.split()[0]: line for line in str(plan_for(hf_models.plain(Case("gpt2")), 2)).splitlines()}
    assert "weight Shard(1) of each of 3 parts, bias Replicate()" in lines["transformer.h.*.attn.c_attn"]
    assert lines["transformer.h.0"].endswith("before it: backward all-gather")
    assert lines["transformer.h.1"].endswith("after it: all-gather")
    plain = str(plan_for(hf_models.plain(Case("gpt2")), 2, sequence_parallel=False, loss_parallel=False)).splitlines()
    assert plain[0] == "gpt2, tp=2"
    (head,) = (line for line in plain if line.startswith("lm_head"))
    assert head.endswith("all-gather of the logits, backward all-reduce")


# ------------------------------------------------------------------------------------------------------ what files hold


def test_position_ids_that_old_versions_stored_are_left_out(tmp_path: Path):
    model = hf_models.build(Case("bert"))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"bert.embeddings.position_ids": torch.arange(512)[None]}
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.device("meta"):
        ours = hf_models.plain(Case("bert"))
    read = load_hf(ours, tmp_path, "cpu")
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), model.parameters(), strict=True))
    assert read == (read.of, sum(p.nbytes for p in model.parameters()))
