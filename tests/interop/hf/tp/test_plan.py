"""Claims about hf/tp: a model of transformers, cut, computes what it computes in one process, or is refused."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import math
import os
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtmega.__main__ import main as dtmega_main
from dtmega.data.tokenizers.tokenizer_json import to_json
from dtmega.interop.hf.directory import materialize
from dtmega.interop.hf.logits import VocabLogits
from dtmega.interop.hf.tp import command, parallel
from dtmega.interop.hf.tp.packed import ConvColumn
from dtmega.interop.hf.tp.regions import EnterHeads
from dtmega.interop.hf.tp.styles import Stack
from dtmega.interop.hf.tp.verify import Verification, verify
from dtmega.ops import cross_entropy as loss_room
from dtmega.ops.shards import full_tensor
from dtmega.plans import load_hf, parallelize_hf, plan_for, verify_plan
from dtmega.plans.styles import Enter, Whole
from tests import hf_models, ranks
from tests.distributed.test_process import free_port
from tests.hf_models import MODELS, VARIANTS, Case
from tests.ranks import message

# Where one process and two sum in another order; rounding alone is below 1e-6 of the largest.
LOSS, GRADIENT, AFTER_STEPS = 1e-6, 1e-5, 1e-4
TIMEOUT_S = 600.0  # half a minute of work, on a machine that may be busy
# `tests/hf_sweep.py` has every combination of these, on five layouts: here of what the families share one each.
CASES = [
    *(Case(name, vocab=131, tied=True, length=12, padded=True) for name in MODELS),
    *(Case(name, vocab=129, tied=False, length=13, padded=False) for name in ("gpt2", "t5")),
    Case("bloom", vocab=128, tied=False, length=12, padded=False),
    *(Case(name, padded="base" not in name) for name in VARIANTS),
    Case("gemma2", kv_heads=1),  # with a plan of transformers, as Gemma 3 1B
]
# Without sequence parallelism; the others' projections are cut as these are.
PLAIN_TOO = ("bloom", "gpt2", "t5")
TP4 = [Case("qwen2", kv_heads=2, length=13), Case("qwen3", kv_heads=2)]
# One for each way to cut a projection; those that are left out have LLaMA's or BLOOM's.
DP2_TP2 = [Case(name, tied=name not in ("opt", "llama")) for name in ("bloom", "gpt2", "llama", "opt", "t5")]
HSDP = [Case("gpt2")]
# The axes of the meshes of four ranks.
TP, FSDP_TP, HSDP_TP = ("tp",), ("dp_shard", "tp"), ("dp_replicate", "dp_shard", "tp")
# What three steps of AdamW make of the DTensors: torch takes seconds to find out how those of a mesh are cut. Of GPT-2,
# and of four ranks, interop/hf/test_training.py says it.
STEPPED = [Case("bloom")]
# What only `pytest -m full` measures: one family of each other kind on each mesh.
# T5's ReLU of 12 tokens has a unit so near its kink that rounding decides on which side it is after a step.
REPEATING = [*(Case(name) for name in ("qwen3", "opt", "gemma2")), Case("t5", length=10), Case("cohere", kv_heads=1)]
REPEATING_ON_FOUR: dict[tuple[str, ...], list[Case]] = {("tp",): TP4[1:], ("dp_replicate", "dp_shard", "tp"): HSDP}
# A projection in parts; a tensor that transformers saves under another name; two tied pairs.
FILES = [Case("gpt2"), Case("gpt_neox", tied=False), Case("bert"), Case("qwen3", vocab=129)]
FILES_ON_FOUR = FILES[::3]
# The caches of the others are as LLaMA's.
GENERATING = ("bloom", "llama", "mistral", "opt", "t5")
GENERATING_LIKE_THEM = ("gpt2", "qwen2", "qwen3", "gpt_neox")


def error(ours: Tensor, truth: Tensor, of_all: float = 0.0) -> float:
    """Relative to truth, or to all gradients if it is 0 but for rounding: softmax does not see a bias of the keys."""
    found = full_tensor(ours)
    size = truth.norm().item()
    return (found - truth).norm().item() / (of_all if size < 1e-5 * of_all else max(size, 1e-30))


def rows_of(mesh: DeviceMesh) -> slice:
    """The rows of this data rank: all, or one of two."""
    if mesh.ndim == 1:
        return slice(0, 2)
    row = mesh.get_rank() // mesh["tp"].size()
    return slice(row, row + 1)


def deviations(
    case: Case, mesh: DeviceMesh, sequence_parallel: bool, truth: dict[str, Any], stepping: bool
) -> dict[str, float]:
    """Relative errors of loss, logits, every gradient, and if `stepping` every parameter after three steps."""
    rows = rows_of(mesh)
    inputs = {k: v[rows] for k, v in hf_models.batch(case).items()}
    at = rows.start if mesh.ndim > 1 else 0
    model = parallelize_hf(hf_models.build(case), mesh, sequence_parallel, verify_native=False)
    loss, logits = hf_models.forward(model, inputs)
    found = {"loss": error(loss.detach(), truth["losses"][at]), "logits": error(logits, truth["logits"][at])}
    loss.backward()
    total = torch.stack([g.norm() for g in truth["gradients"].values() if g is not None]).norm().item()
    for name, p in model.named_parameters(remove_duplicate=False):
        expected = truth["gradients"][name]
        assert (p.grad is None) == (expected is None), name
        if p.grad is not None and expected is not None:
            found[f"gradient of {name}"] = error(p.grad, expected, total)
    if stepping:
        hf_models.steps(model, inputs)
        for name, p in model.named_parameters(remove_duplicate=False):
            found[f"stepped {name}"] = error(p.detach(), truth["stepped"][name])
    return found


def parity(
    mesh: DeviceMesh, cases: list[Case], path: str, both: bool, stepped: list[Case]
) -> dict[Case, dict[str, float]]:
    truths, found = torch.load(path, weights_only=False), {}
    for case in cases:
        found[case] = deviations(case, mesh, True, truths[case], stepping=case in stepped)
        # An odd sequence is not cut in either case.
        if both and case.name in PLAIN_TOO and case.length % mesh.size() == 0:
            plain = deviations(case, mesh, False, truths[case], stepping=False)
            found[case] |= {f"{name}, no sequence parallel": e for name, e in plain.items()}
    return found


class Collectives(TorchDispatchMode):
    """Names of the collectives called inside, and the most numbers that one of them moved."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def structure(mesh: DeviceMesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in MODELS:
        case = Case(name)
        whole, model = hf_models.build(case), parallelize_hf(hf_models.build(case), mesh)
        hf_models.forward(model, hf_models.batch(case))[0].backward()
        embedding = model.get_input_embeddings().weight
        found[name] = {
            "same names": [n for n, _ in model.named_parameters()] == [n for n, _ in whole.named_parameters()],
            "plain functions": all(
                inspect.isfunction(m.forward.__func__) for m in model.modules() if "forward" in vars(m)
            ),
            "same keys": sorted(model.state_dict()) == sorted(whole.state_dict()),
            "all DTensors": all(isinstance(p, DTensor) and p.device_mesh == mesh for p in model.parameters()),
            "head is the embedding": model.get_output_embeddings().weight is embedding,
            "its gradient is cut": embedding.grad.placements == (Shard(0),),
            "matrices not cut in blocks": [
                n
                for n, p in model.named_parameters()
                if p.ndim > 1 and p.placements == (Replicate(),) and any(c.isdigit() for c in n)
            ],
        }
    return found


def collectives(mesh: DeviceMesh) -> dict[str, Any]:
    found = {}
    for sequence_parallel in (True, False):
        model = parallelize_hf(hf_models.build(Case("llama")), mesh, sequence_parallel)
        with Collectives() as forward:
            loss = model(**hf_models.batch(Case("llama"))).loss
        with Collectives() as backward:
            loss.backward()
        found[f"sequence parallel {sequence_parallel}"] = (forward.counts, backward.counts)
    return found


def logits(mesh: DeviceMesh) -> dict[str, Any]:
    """What else is done to logits that nobody computed yet."""
    case = Case("llama")
    inputs = hf_models.batch(case)
    truth, ours = hf_models.build(case), parallelize_hf(hf_models.build(case), mesh)
    out, expected = ours(**inputs), truth(**inputs).logits
    found: dict[str, Any] = {"lazy": isinstance(out.logits, VocabLogits), "repr": repr(out.logits)}
    found["shape"] = tuple(out.logits.shape)
    found["sum"] = error((out.logits * 2).sum(), (expected * 2).sum())
    found["item"] = error(out.logits[0, 3, -7:], expected[0, 3, -7:])
    labels, flat = inputs["labels"], (-1, case.vocab)
    for options in ({"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 5}):
        args = (labels.clamp(min=0) if "ignore_index" in options else labels).flatten()
        ours_loss = torch.nn.functional.cross_entropy(out.logits.float().view(flat), args, **options)
        found[str(options)] = error(ours_loss, torch.nn.functional.cross_entropy(expected.view(flat), args, **options))
    grads = []
    for model in (truth, ours):
        model.zero_grad()
        scored = model(**inputs).logits
        (scored[..., 3::7] ** 2).sum().backward()
        grads.append(model.get_output_embeddings().weight.grad)
    found["gradient through them"] = error(grads[1], grads[0])
    with torch.no_grad():
        ours.lm_head.weight.mul_(2)
    found["stale"] = message(lambda: out.logits + 1, error=RuntimeError)
    return found


class Shapes(TorchDispatchMode):
    """Shapes of everything that is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor)}
        return out


def scaled_logits(mesh: DeviceMesh) -> dict[str, Any]:
    """Of models that scale or cap logits before their loss: is [B S, V], or this rank's part of it, ever computed?"""
    found: dict[str, Any] = {}
    for name in ("gemma2", "granite", "cohere"):
        case = Case(name)
        inputs, tokens = hf_models.batch(case), 2 * case.length
        for fused in (True, False):
            model = parallelize_hf(hf_models.build(case), mesh, loss_parallel=fused, verify_native=False)
            few = {"CHUNK_TOKENS": {"cpu": 5}, "CHUNK_LOGITS": 0}
            with patch.multiple(loss_room, **few), Shapes() as shapes:
                model(**inputs).loss.backward()
            columns = [shape for shape in shapes.found if shape and shape[-1] in (65, 66, 131)]
            rows = [math.prod(shape[:-1]) for shape in columns if shape != (shape[-1],)]
            found[f"{name}, fused {fused}"] = (tokens in rows, 5 in rows)
    return found


def changed_logits(mesh: DeviceMesh) -> dict[str, float]:
    """Deviations where logits of a forward with labels are changed in place, and of what is done to them then."""
    case = Case("llama")
    inputs = hf_models.batch(case)
    truth, ours = hf_models.build(case), parallelize_hf(hf_models.build(case), mesh)
    found: dict[str, float] = {}

    def loss(logits: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.view(-1, case.vocab).float(), inputs["labels"].flatten())

    def masked(logits: Any) -> Tensor:
        logits[:, :, 70:90] = -5.0
        return loss(logits)

    def multiplied(logits: Any) -> Tensor:
        logits.mul_(2)
        return loss(logits)

    def divided(logits: Any) -> Tensor:
        logits /= 3
        return loss(logits)

    def capped_twice(logits: Any) -> Tensor:
        return loss(torch.tanh(torch.tanh(logits / 2) * 3) * 4)

    def negative(logits: Any) -> Tensor:
        return loss(-2 * torch.tanh(logits * -0.5))

    for change in (masked, multiplied, divided, capped_twice, negative):
        results = []
        for model in (truth, ours):
            model.zero_grad()
            value = change(model(**inputs).logits)
            value.backward()
            results.append((value.detach(), model.get_output_embeddings().weight.grad))
        found[change.__name__] = max(error(a, b) for a, b in zip(results[1], results[0], strict=True))
    return found


def other_forwards(mesh: DeviceMesh) -> dict[str, Any]:
    """Options of a forward that a cut model must not answer wrongly."""
    found: dict[str, Any] = {}
    for name in ("llama", "bert", "t5", "gpt2"):
        inputs = hf_models.batch(Case(name))
        truth, ours = hf_models.build(Case(name)), parallelize_hf(hf_models.build(Case(name)), mesh)
        key = "encoder_hidden_states" if name == "t5" else "hidden_states"
        states = [model(**inputs, output_hidden_states=True)[key] for model in (ours, truth)]
        found[f"{name} hidden states"] = max(error(a, b) for a, b in zip(*states, strict=True))
        found[f"{name} attentions"] = message(functools.partial(ours, **inputs, output_attentions=True))
    inputs, truth = hf_models.batch(Case("llama")), hf_models.build(Case("llama"))
    ours = parallelize_hf(hf_models.build(Case("llama")), mesh, loss_parallel=False)
    out = ours(**inputs)
    found["loss_parallel=False"] = (type(out.logits) is Tensor, error(out.loss, truth(**inputs).loss))
    ours = parallelize_hf(hf_models.build(Case("llama")), mesh)
    getattr(ours, "activation_checkpointing_enable", ours.gradient_checkpointing_enable)()  # renamed in 5.x
    for model in (ours, truth):
        hf_models.forward(model, inputs)[0].backward()
    named = dict(ours.named_parameters())
    found["recompute"] = max(error(named[n].grad, p.grad) for n, p in truth.named_parameters())
    return found


def dropout(mesh: DeviceMesh) -> dict[str, Any]:
    """Drops half of what comes out of each block's residual branches; where a rank has tokens of its own, its own."""
    found: dict[str, Any] = {}
    for sequence_parallel in (True, False):
        model = hf_models.build(Case("gpt2"))
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
        model = parallelize_hf(model, mesh, sequence_parallel)
        torch.manual_seed(4)
        losses = [model(**hf_models.batch(Case("gpt2"))).loss for _ in range(2)]
        losses[0].backward()
        grads = [p.grad for p in model.parameters() if p.grad.placements == (Replicate(),)]
        found[f"sequence parallel {sequence_parallel}"] = (
            [loss.item() for loss in losses],
            torch.stack([g.to_local().norm() for g in grads]).tolist(),
            torch.rand(()).item(),
        )
        torch.manual_seed(dist.get_rank())
        found[f"seeds, sequence parallel {sequence_parallel}"] = message(
            functools.partial(model, **hf_models.batch(Case("gpt2")))
        )
    return found


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    def of(name: str, **keys: Any) -> Callable[[], Any]:
        model_class, config_class, known = MODELS[name]
        config = getattr(transformers, config_class)(**{**known, "vocab_size": 131, **keys})
        with torch.device("meta"):
            model = getattr(transformers, model_class)(config)
        return lambda: parallelize_hf(model, mesh)

    def attribute(name: str, value: Any) -> Callable[[], Any]:
        model = hf_models.build(Case("llama"))
        setattr(model.config, name, value)
        return lambda: parallelize_hf(model, mesh)

    class Mine(transformers.LlamaForCausalLM):
        pass

    ours = Mine(hf_models.build(Case("llama")).config)
    with torch.device("meta"):
        mamba = transformers.MambaForCausalLM(transformers.MambaConfig(num_hidden_layers=1, hidden_size=8))
    different = hf_models.build(Case("llama"))
    with torch.no_grad():
        different.lm_head.weight[3, 3] += dist.get_rank()
    planted = hf_models.build(Case("olmo2"))
    planted.config.base_model_tp_plan = {**planted.config.base_model_tp_plan, "layers.*.mlp.up_proj": "diagonal"}
    layer = hf_models.build(Case("llama"))
    layer.model.layers[0].extra = torch.nn.Linear(4, 4)
    return {
        "heads": message(of("llama", hidden_size=96, num_attention_heads=3, num_key_value_heads=3)),
        "kv heads": message(of("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)),
        "feed-forward": message(of("opt", ffn_dim=97)),
        "vocabulary": message(of("gpt2", vocab_size=1)),
        "layerdrop": message(of("opt", layerdrop=0.1)),
        "cross-attention": message(of("gpt2", add_cross_attention=True)),
        "code": message(lambda: parallelize_hf(ours, mesh)),
        "attention": message(attribute("_attn_implementation", "paged|sdpa")),
        "flash on CPU": message(attribute("_attn_implementation", "flash_attention_2")),
        "family": message(lambda: plan_for(transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=1)))),
        "gathered keys": message(lambda: plan_for(hf_models.plain(Case("olmo2", kv_heads=1)))),
        "no heads": message(lambda: verify_plan(mamba, mesh, generic=True)),
        "string": message(lambda: parallelize_hf(planted, mesh)),
        "module": message(lambda: parallelize_hf(layer, mesh)),
        "ranks differ": message(lambda: parallelize_hf(different, mesh)),
        "uncut after a refusal": str(
            any(isinstance(p, DTensor) for m in (different, layer, ours) for p in m.parameters())
        ),
    }


def planted(mesh: DeviceMesh) -> dict[str, dict[str, float]]:
    """Plans that are wrong without an error, as worst deviations of what `verify` finds wrong."""
    found: dict[str, dict[str, float]] = {}

    def verified(what: str, name: str, change: Callable[[Any, Any], None]) -> None:
        def wrongly(model: Any, mesh: DeviceMesh) -> Any:
            made = plan_for(model, mesh.size(), sequence_parallel=False)
            change(made.table, model)
            model = parallel.cut(model, mesh, made)
            if what == "cut ties":
                model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
            return model

        verification = verify(hf_models.build(Case(name)), mesh, wrongly)
        assert what == "nothing" or not verification.ok
        found[what] = {key: e for (case, key), e in verification.wrong.items() if case == "plain"}

    def norms_of_heads(table: Any, model: Any) -> None:
        for norm in ("q_norm", "k_norm"):
            table[f"model.layers.*.self_attn.{norm}"] = Whole(Stack())

    def heads_not_counted(table: Any, model: Any) -> None:
        table["model.decoder.layers.*.self_attn"] = Enter(Stack())

    def slopes_of_fewer_heads(table: Any, model: Any) -> None:
        table["transformer.h.*.self_attention"] = EnterHeads(Stack(), divide=("num_heads",))
        model.transformer.num_heads //= mesh.size()

    def contiguous_qkv(table: Any, model: Any) -> None:
        table["transformer.h.*.attn.c_attn"] = ConvColumn(Stack())

    verified("nothing", "bloom", lambda table, model: None)
    verified("gradients of norms of heads", "qwen3", norms_of_heads)
    verified("heads not counted", "opt", heads_not_counted)
    verified("slopes of fewer heads", "bloom", slopes_of_fewer_heads)
    verified("contiguous q, k, v", "gpt2", contiguous_qkv)
    verified("cut ties", "bloom", lambda table, model: None)
    return found


class Forgetful(torch.nn.Module):
    """A dropout whose rate is in no key of a config, nor in its attributes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=self.training)


class OwnDropout(Forgetful):
    pass


def own_dropout(mesh: DeviceMesh) -> dict[str, bool]:
    """Is a right cut of a class with such a module found right, and one that the wrapper cannot know of wrong?"""
    from transformers.models.llama import modeling_llama

    honest, found = modeling_llama.LlamaMLP.__init__, {}
    for kind in (OwnDropout, Forgetful):

        def init(self: Any, config: Any, kind: type[torch.nn.Module] = kind) -> None:
            honest(self, config)
            self.act_fn = torch.nn.Sequential(self.act_fn, kind())

        with patch.object(modeling_llama.LlamaMLP, "__init__", init):
            found[kind.__name__] = verify_plan(hf_models.plain(Case("llama")), mesh).ok
    return found


def generation(mesh: DeviceMesh, names: Sequence[str] = GENERATING) -> dict[str, bool]:
    return {
        name: torch.equal(
            hf_models.generated(parallelize_hf(hf_models.build(Case(name)), mesh), Case(name)),
            hf_models.generated(hf_models.build(Case(name)), Case(name)),
        )
        for name in names
    }


def without_a_plan(mesh: DeviceMesh) -> dict[str, Any]:
    """GPT-Neo, which has neither an adapter nor a plan of transformers."""
    import transformers

    config = transformers.GPTNeoConfig(hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global"], 2]])
    for key in ("resid_dropout", "embed_dropout", "attention_dropout"):
        setattr(config, key, 0.0)
    model = transformers.GPTNeoForCausalLM._from_config(config, attn_implementation="eager")
    found = {"refused": message(lambda: plan_for(model))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["wrong"] = verify_plan(model, mesh, generic=True).wrong
    found["warned"] = str(caught[0].message)
    return found


def loaded(mesh: DeviceMesh, directories: dict[Case, str]) -> dict[Case, dict[str, Any]]:
    """Models on meta, cut, that read their parts from files."""
    found = {}
    for case, directory in directories.items():
        with torch.device("meta"):
            model = hf_models.plain(case)
        parallelize_hf(model.train(), mesh)
        read, truth = load_hf(model, directory, "cpu"), hf_models.build(case)
        held = sum(p.to_local().nbytes for p in model.parameters())
        loss, expected = (hf_models.forward(m, hf_models.batch(case))[0].item() for m in (model, truth))
        pairs = zip(model.parameters(), truth.parameters(), strict=True)
        found[case] = {
            "equal": all(torch.equal(full_tensor(p), q) for p, q in pairs),
            "loss": abs(loss / expected - 1),
            "share": read.bytes / read.of,
            "held": held == read.bytes,
            "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        }
    return found


def on_meta(mesh: DeviceMesh) -> dict[str, Any]:
    found = {}
    for name in MODELS:
        with torch.device("meta"):
            model = hf_models.plain(Case(name))
        model = parallelize_hf(model, mesh)
        found[name] = model.get_output_embeddings().weight is model.get_input_embeddings().weight and all(
            p.is_meta and isinstance(p, DTensor) for p in model.parameters()
        )
    return found


def everything_on_two(path: str, directories: dict[Case, str]) -> dict[str, Any]:
    """All that is measured on tp 2, so that its processes start once."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {"parity": parity(mesh, CASES, path, both=True, stepped=STEPPED)}
    for fn in (
        structure,
        collectives,
        logits,
        other_forwards,
        dropout,
        refusals,
        planted,
        generation,
        own_dropout,
        without_a_plan,
        scaled_logits,
        changed_logits,
    ):
        found[fn.__name__] = fn(mesh)
    return found | {"on_meta": on_meta(mesh), "loaded": loaded(mesh, directories)}


def everything_on_four(tp4: str, together: str, apart: str, directories: dict[Case, str]) -> dict[Any, Any]:
    # FSDP2 says that OPT's and T5's blocks return views; their models change none of them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    found: dict[Any, Any] = {}
    for shape, names, cases, path in (
        ((4,), TP, TP4, tp4),
        ((2, 2), FSDP_TP, DP2_TP2, apart),
        ((2, 1, 2), HSDP_TP, HSDP, together),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        found[names] = parity(mesh, cases, path, both=False, stepped=[])
        if shape == (2, 2):
            found["loaded"] = loaded(mesh, {case: directories[case] for case in FILES_ON_FOUR})
    return found


@functools.cache
def on_two() -> list[dict[str, Any]]:
    truths, directories = hf_models.truths(CASES, rows_apart=False, stepped=STEPPED), hf_models.saved(FILES)
    return ranks.run(2, everything_on_two, truths, directories, timeout_s=TIMEOUT_S)


@functools.cache
def on_four() -> list[dict[str, Any]]:
    apart, hsdp = (hf_models.truths(cases, rows_apart=True, stepped=[]) for cases in (DP2_TP2, HSDP))
    tp4, directories = hf_models.truths(TP4, rows_apart=False, stepped=[]), hf_models.saved(FILES)
    return ranks.run(4, everything_on_four, tp4, hsdp, apart, directories, timeout_s=TIMEOUT_S)


def repeated_on(shape: tuple[int, ...], names: tuple[str, ...], cases: list[Case], path: str) -> Any:
    return parity(init_device_mesh("cpu", shape, mesh_dim_names=names), cases, path, both=True, stepped=cases)


@functools.cache
def repeated() -> list[dict[Case, dict[str, float]]]:
    """What each rank of each mesh found."""
    truths = hf_models.truths(REPEATING, rows_apart=False)
    found = ranks.run(2, repeated_on, (2,), TP, REPEATING, truths, timeout_s=TIMEOUT_S)
    for names, shape in ((TP, (4,)), (HSDP_TP, (2, 1, 2))):
        cases = REPEATING_ON_FOUR[names]
        truths = hf_models.truths(cases, rows_apart=names != TP)
        found += ranks.run(4, repeated_on, shape, names, cases, truths, timeout_s=TIMEOUT_S)
    return found


def too_far(errors: dict[str, float]) -> dict[str, float]:
    def bound(name: str) -> float:
        return AFTER_STEPS if name.startswith("stepped") else LOSS if name.startswith("loss") else GRADIENT

    return {name: e for name, e in errors.items() if not e <= bound(name)}


def titled(case: Case) -> str:
    return f"{case.name}-V{case.vocab}-S{case.length}{'-tied' if case.tied else ''}{'-padded' if case.padded else ''}"


@pytest.mark.parametrize("case", CASES, ids=titled)
def test_loss_logits_every_gradient_and_three_steps_of_tp_2_equal_one_process(case: Case):
    for found in on_two():
        assert len(found["parity"][case]) > 10
        assert any(name.startswith("stepped") for name in found["parity"][case]) is (case in STEPPED)
        assert too_far(found["parity"][case]) == {}


@pytest.mark.full
@pytest.mark.parametrize("case", [*REPEATING, *TP4[1:], *HSDP], ids=titled)
def test_the_same_of_more_families_and_on_four_processes(case: Case):
    of_case = [found[case] for found in repeated() if case in found]
    assert of_case
    for found in of_case:
        assert any(name.startswith("stepped") for name in found)
        assert too_far(found) == {}


@pytest.mark.parametrize("case", TP4, ids=titled)
def test_two_heads_of_keys_are_copied_to_four_ranks_and_nothing_changes(case: Case):
    for found in on_four():
        assert too_far(found[TP][case]) == {}


@pytest.mark.parametrize(
    ("axes", "case"), [*((FSDP_TP, case) for case in DP2_TP2), *((HSDP_TP, case) for case in HSDP)]
)
def test_under_fsdp2_and_hsdp_gradients_are_those_of_the_mean_of_the_ranks_losses(axes: tuple[str, ...], case: Case):
    for found in on_four():
        assert too_far(found[axes][case]) == {}


@pytest.mark.parametrize("name", GENERATING)
def test_generate_with_its_cache_gives_the_tokens_of_one_process(name: str):
    assert [found["generation"][name] for found in on_two()] == [True, True]


def generation_of_the_rest() -> dict[str, bool]:
    return generation(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), GENERATING_LIKE_THEM)


@pytest.mark.full
def test_generate_with_its_cache_gives_the_tokens_of_one_process_for_more_families():
    assert ranks.run(2, generation_of_the_rest) == [dict.fromkeys(GENERATING_LIKE_THEM, True)] * 2


@pytest.mark.parametrize("name", MODELS)
def test_names_stay_ties_stay_and_every_parameter_is_a_dtensor(name: str):
    for found in on_two():
        structure = dict(found["structure"][name])
        assert structure.pop("matrices not cut in blocks") == []
        assert [what for what, holds in structure.items() if not holds] == []
        assert found["on_meta"][name]


@pytest.mark.parametrize("case", FILES, ids=titled)
def test_a_model_on_meta_reads_its_part_of_the_files_and_nothing_else(case: Case):
    groups = {1 / 2: on_two()} | ({1 / 4: on_four()} if case in FILES_ON_FOUR else {})
    for share, results in groups.items():
        for found in (result["loaded"][case] for result in results):
            assert found["equal"]
            assert found["held"]
            assert found["tied"] is case.tied
            assert found["loss"] < LOSS
            # What is whole on every rank: norms, biases, positions (of BERT 512 of them).
            assert share <= found["share"] + 0.01 < share * (1.4 if case.name == "bert" else 1.06) + 0.01


def test_collectives_are_those_that_the_plan_prints():
    n_layers, n_norms = 2, 2 * 2
    for found in on_two():
        forward, backward = found["collectives"]["sequence parallel True"]
        # Embedding; enter attention and feed-forward, and after the last block; leave them; the loss.
        assert forward == {
            "allreduce_": 1,
            "_allgather_base_": 2 * n_layers + 1,
            "_reduce_scatter_base_": 2 * n_layers,
            "allgather_": 1,
        }
        # Norms and head; leave attention and feed-forward, gather again what enters them, and before the first block.
        assert backward == {
            "allreduce_": n_norms + 1,
            "_allgather_base_": 2 * n_layers + 2 * n_layers + 1,
            "_reduce_scatter_base_": 2 * n_layers,
        }
        forward, backward = found["collectives"]["sequence parallel False"]
        assert forward == {"allreduce_": 2 * n_layers + 1, "allgather_": 1}
        assert backward == {"allreduce_": 2 * n_layers + 1}


def test_logits_of_a_forward_with_labels_are_computed_by_what_is_done_to_them():
    for found in on_two():
        found = dict(found["logits"])
        assert (found.pop("lazy"), found.pop("shape")) == (True, (2, 12, 131))
        assert found.pop("repr") == "VocabLogits([2, 12, 131], torch.float32, not computed)"
        assert "use them before the optimizer's step" in found.pop("stale")
        assert {what: e for what, e in found.items() if not e < 1e-5} == {}


def test_scaled_and_capped_logits_go_to_the_loss_some_tokens_at_a_time():
    for found in on_two():
        for name in ("gemma2", "granite", "cohere"):
            whole, few = found["scaled_logits"][f"{name}, fused True"]
            assert (whole, few) == (False, True)
            whole, _ = found["scaled_logits"][f"{name}, fused False"]
            assert whole


def test_logits_changed_in_place_or_in_a_way_that_nothing_carries_are_still_right():
    for found in on_two():
        assert len(found["changed_logits"]) == 5
        assert {what: e for what, e in found["changed_logits"].items() if not e < 1e-5} == {}


def test_hidden_states_are_whole_attentions_are_refused_and_recompute_changes_nothing():
    for found in on_two():
        found = dict(found["other_forwards"])
        for name in ("llama", "bert", "t5", "gpt2"):
            assert found[f"{name} hidden states"] < 1e-6
            assert "probabilities of its own heads only" in found[f"{name} attentions"]
        assert found["recompute"] < 1e-5
        plain, deviation = found["loss_parallel=False"]
        assert plain
        assert deviation < 1e-6


def test_dropout_keeps_the_ranks_together_and_ranks_with_other_seeds_are_refused():
    first, second = (found["dropout"] for found in on_two())
    for sequence_parallel in (True, False):
        losses, grads, number = first[f"sequence parallel {sequence_parallel}"]
        assert second[f"sequence parallel {sequence_parallel}"] == (losses, grads, number)
        assert losses[0] != losses[1]
        assert "same random state" in first[f"seeds, sequence parallel {sequence_parallel}"]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("heads", "tp=2 does not divide num_attention_heads=3: 3 % 2 = 1"),
        ("kv heads", "tp=2 and num_key_value_heads=3: neither divides the other"),
        ("feed-forward", "tp=2 does not divide ffn_dim=97"),
        ("vocabulary", "leave a rank without any of 1"),
        ("layerdrop", "layerdrop=0.1 of a opt config: ranks would skip different layers"),
        ("cross-attention", "add_cross_attention=True"),
        ("code", "expected a model class of transformers, got tests.interop.hf.tp.test_plan.Mine"),
        ("attention", "attn_implementation='paged|sdpa' is not known to work"),
        ("flash on CPU", "attn_implementation='flash_attention_2' does not run on a CPU"),
        ("family", "no plan for model_type 'vit'"),
        ("gathered keys", "tp=2 does not divide num_key_value_heads=1, and the plan of transformers for 'olmo2'"),
        ("no heads", "a config of 'mamba' has no number of heads"),
        ("string", "says 'diagonal' for model.layers.*.mlp.up_proj, which we have no style for"),
        ("module", "has no style for the parameters of model.layers.0.extra (Linear)"),
        ("ranks differ", "first 'model.embed_tokens.weight' (which of them is right cannot be told)"),
        ("uncut after a refusal", "False"),
    ],
)
def test_a_model_that_would_be_wrong_is_refused_before_anything_is_done(what: str, text: str):
    for found in on_two():
        assert text in found["refusals"][what]


@pytest.mark.parametrize(
    ("what", "least"),
    [
        ("gradients of norms of heads", 1e-2),
        ("heads not counted", 1e-2),
        ("slopes of fewer heads", 1e-3),
        ("contiguous q, k, v", 1e-2),
        ("cut ties", 1e-2),
    ],
)
def test_verify_plan_finds_each_plan_that_is_wrong_without_an_error(what: str, least: float):
    for found in on_two():
        assert max(found["planted"][what].values()) > least
        assert found["planted"]["nothing"] == {}
        logits_wrong = "logits" in found["planted"][what]
        assert logits_wrong is (what not in ("gradients of norms of heads", "cut ties"))


def test_dropout_of_modules_that_no_key_of_the_config_rules_does_not_make_a_right_plan_wrong():
    for found in on_two():
        assert found["own_dropout"] == {"OwnDropout": True, "Forgetful": False}  # the second shows that masks count


def as_spawned(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    """What torch.multiprocessing.spawn calls."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    fn(rank, *args)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's ranks are forked; where they are spawned, each imports torch and transformers."""

    def spawn(fn: Any, args: Any, nprocs: int) -> None:
        ranks.run(nprocs, as_spawned, fn, args)

    monkeypatch.setattr(command.multiprocessing, "spawn", spawn)


@pytest.mark.usefixtures("forked")
def test_a_model_without_a_plan_or_heads_is_one_line_and_exit_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    config = hf_models.transformers.MambaConfig(num_hidden_layers=1, hidden_size=8, architectures=["MambaForCausalLM"])
    config.save_pretrained(tmp_path)
    assert dtmega_main(["verify-plan", str(tmp_path), "--tp", "1", "--generic"]) == 2
    err = capfd.readouterr().err
    assert "a config of 'mamba' has no number of heads" in err
    assert "Traceback" not in err


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="DTensor of torch 2.11 refuses the views of GPT-Neo's heads")
def test_a_model_without_any_plan_computes_on_dtensors_if_told_to_and_says_what_that_costs():
    for found in on_two():
        found = found["without_a_plan"]
        assert "generic=True" in found["refused"]
        assert found["wrong"] == {}
        assert "exact but slow" in found["warned"]


def test_the_printed_plan_says_where_each_parameter_is_and_what_a_module_costs():
    text = str(plan_for(hf_models.build(Case("qwen3")), tp=4))
    assert text.splitlines()[0] == "qwen3, tp=4, sequence parallel"
    lines = {line.split("  ")[0]: " ".join(line.split("  ")[1:]) for line in text.splitlines()}
    assert "weight Shard(1)" in lines["model.layers.*.self_attn.o_proj"]
    assert "reduce-scatter, backward all-gather" in lines["model.layers.*.self_attn.o_proj"]
    assert "Replicate()" in lines["model.layers.*.self_attn.k_proj"]  # 2 heads of keys on 4 ranks
    assert "backward all-reduce of the weight" in lines["model.layers.*.self_attn.q_norm"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    hf_models.build(Case("qwen3")).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    return tmp_path


@pytest.mark.full
def test_the_command_starts_its_ranks_and_ends_with_their_refusal(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    test_a_model_without_a_plan_or_heads_is_one_line_and_exit_code_2(tmp_path, capfd)


@pytest.mark.usefixtures("forked")
def test_the_command_prints_plan_and_deviations_and_exits_0(directory: Path, capfd: pytest.CaptureFixture[str]):
    assert dtmega_main(["verify-plan", str(directory), "--tp", "2"]) == 0
    out = capfd.readouterr().out
    assert "model.layers.*.self_attn.q_norm" in out
    assert "WRONG" not in out
    assert re.search(r"(\d+) of \1 comparisons within", out)


def test_the_command_exits_1_where_something_differs_and_2_without_a_model(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def spawn(fn: Any, args: Any, nprocs: int) -> None:
        torch.save(Verification({("padded", "loss"): 0.0, ("padded", "lm_head.weight"): 1e-3}), Path(args[0], "result"))

    monkeypatch.setattr(command.multiprocessing, "spawn", spawn)
    assert dtmega_main(["verify-plan", str(directory)]) == 1
    assert re.search(r"lm_head.weight\s+1.0e-03\s+WRONG", capsys.readouterr().out)
    assert dtmega_main(["verify-plan", str(directory / "nowhere")]) == 2
    (directory / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoModel": "m.M"}}))
    assert dtmega_main(["verify-plan", str(directory)]) == 2
    assert "custom (remote) code is not run" in capsys.readouterr().err


def test_a_model_filled_from_files_has_its_buffers_beside_parameters_too(tmp_path: Path):
    keys = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 131}
    cfg = hf_models.transformers.Gemma3TextConfig(**keys, num_attention_heads=4, num_key_value_heads=2)
    truth = hf_models.transformers.Gemma3ForCausalLM(cfg)
    truth.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = hf_models.transformers.Gemma3ForCausalLM(cfg)
    load_hf(model, tmp_path, "cpu")
    ours, theirs = dict(model.named_buffers()), dict(truth.named_buffers())
    assert "model.embed_tokens.embed_scale" in ours
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_model_within_a_model_fills_its_own_buffers():
    cfg = hf_models.transformers.Gemma3Config(**hf_models.NESTED)
    truth = dict(hf_models.transformers.Gemma3ForConditionalGeneration(cfg).named_buffers())
    with torch.device("meta"):
        model = hf_models.transformers.Gemma3ForConditionalGeneration(cfg)
    materialize(model, "cpu")
    ours = dict(model.named_buffers())
    assert "model.vision_tower.embeddings.position_ids" in ours
    assert [name for name, buffer in truth.items() if not torch.equal(ours[name], buffer)] == []


def example(script: str, argv: list[str], port: int) -> str:
    """Run an example as torchrun does, on this rank; what it printed."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= place | {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    dist.destroy_process_group()
    warnings.simplefilter("default")
    sys.argv = [script, *argv]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def run_example(n: int, name: str, source: Path, target: Path, *more: str) -> str:
    """An example on n ranks, which are started by hand; what the first of them printed."""
    script = Path(__file__).resolve().parents[4] / "examples" / name
    return ranks.run(n, example, str(script), [str(source), str(target), *more], free_port())[0]


def test_the_example_trains_saves_and_what_it_saves_is_what_one_process_gets(tmp_path: Path):
    model = hf_models.build(Case("gpt2"))
    model.save_pretrained(tmp_path / "in")
    printed = run_example(2, "hf_tp.py", tmp_path / "in", tmp_path / "out")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0)
    tokens = torch.randint(131, (4, 64))
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.4f}")
    assert re.findall(r"loss ([\d.]+)", printed) == losses
    ours = hf_models.transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").state_dict()
    assert max(error(ours[name], p) for name, p in model.state_dict().items()) < AFTER_STEPS


def test_the_one_gpu_example_ends_with_a_directory_that_holds_what_it_trained(tmp_path: Path):
    model = hf_models.build(Case("llama", vocab=8200))
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text(to_json("stdlib-8k"))
    printed = run_example(1, "one_gpu.py", tmp_path / "in", tmp_path / "out", "3")
    assert re.findall(r"step (\d): loss [\d.]+", printed) == ["1", "2", "3"]
    assert "\ndef " in printed
    ours = hf_models.transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    # Adam moves a weight by no more than the rate a step, and the masters, unlike bf16, by nearly that.
    moved = {name: (ours[name] - p).abs().max().item() for name, p in model.state_dict().items()}
    assert all(1e-3 < most <= 3.1e-3 for most in moved.values()), moved


def with_sinks() -> Any:
    cfg = transformers.GptOssConfig(vocab_size=131, hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    with torch.device("meta"):
        return transformers.GptOssForCausalLM(cfg)


def with_a_delta_rule() -> str:
    """The message that refuses the model."""
    sizes: dict[str, Any] = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    cfg = transformers.Qwen3NextConfig(layer_types=["linear_attention", "full_attention"], **sizes)
    with torch.device("meta"):
        model = transformers.Qwen3NextForCausalLM(cfg)
    tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return message(parallelize_hf, model, tp)


def test_models_that_nobody_knows_how_to_cut_are_refused_over_tp():
    with pytest.raises(ValueError, match="no plan for model_type 'gpt_oss'"):
        plan_for(with_sinks())
    for refusal in ranks.run(2, with_a_delta_rule):
        assert refusal.startswith("the plan that transformers brings for 'qwen3_next' is wrong:")
