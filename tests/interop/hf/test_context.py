"""Files context.py and context_proof.py: ranks that share a sequence compute what transformers does on one process.

Loss, gradients and steps of whole families are in test_training.py, on the layouts with cp.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor

from dtmega import config, families
from dtmega.config.families.hf import TransformersKeys
from dtmega.interop.hf import context, context_proof
from dtmega.interop.hf.families import OVER_CP, WHOLE_SEQUENCES
from dtmega.interop.hf.model import HF
from dtmega.ops.attention_rule import attention_rule
from dtmega.ops.context_parallel import ContextParallel
from dtmega.training.checks import check
from tests import hf_models, ranks
from tests.hf_models import Case

CPU = torch.device("cpu")
# In each row two documents end at another place; the window of 6 is shorter than each of them.
LENGTH, ENDS = 24, (9, 14)
PACKING = ("llama", "mistral", "gpt2")
ALONE = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}


def directory(name: str, folder: Path, **keys: Any) -> str:
    """A directory with the config.json of a family, and no more."""
    hf_models.plain(Case(name, tied=False)).config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return str(folder)


def packed() -> dict[str, Tensor]:
    """Rows of two documents, whose positions start again."""
    tokens, labels = torch.randint(3, 131, (2, 2, LENGTH), generator=torch.Generator().manual_seed(4))
    places = torch.arange(LENGTH).expand(2, -1)
    ends = torch.tensor(ENDS)[:, None]
    document_ids = (places >= ends).long()
    return {
        "tokens": tokens,
        "labels": labels,
        "document_ids": document_ids,
        "position_ids": places - ends * document_ids,
    }


def numbers_of_packed(paths: dict[str, str]) -> dict[str, Any]:
    """Loss and gradients of rows of documents over all ranks, in each form, and the attention before and after."""
    found: dict[str, Any] = {}
    for name, path in paths.items():
        for by_heads in (False, True):
            model = HF(TransformersKeys(name="hf", path=path, vocab_size=131))
            model.hf.load_state_dict(hf_models.build(Case(name, tied=False)).state_dict())
            names = [model.hf.config._attn_implementation]
            shared = ContextParallel(dist.group.WORLD, by_heads)  # pyright: ignore[reportArgumentType]
            part = model.part_of(packed(), shared)
            model.context = shared
            names.append(model.hf.config._attn_implementation)
            with patch.object(context, "attention_rule", wraps=attention_rule) as made:
                loss = model(**part)["lm"]
            loss.backward()
            model.context = None
            names.append(model.hf.config._attn_implementation)
            gradients = {n: p.grad for n, p in model.hf.named_parameters()}
            for tensor in (loss := loss.detach(), *gradients.values()):
                dist.all_reduce(tensor)
            alone = model(packed()["tokens"])
            found[f"{name} {by_heads}"] = (loss.item(), gradients, names, made.call_count, alone.detach())
    return found


@functools.cache
def computed(folder: str) -> dict[str, Any]:
    first, second = ranks.run(2, numbers_of_packed, {name: directory(name, Path(folder, name)) for name in PACKING})
    assert {name: found[0] for name, found in first.items()} == {name: found[0] for name, found in second.items()}
    return first


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize("name", PACKING)
def test_documents_and_windows_are_those_of_each_document_by_itself(name: str, by_heads: bool, folder: str):
    loss, gradients, _, _, _ = computed(folder)[f"{name} {by_heads}"]
    truth, rows, expected = hf_models.build(Case(name, tied=False)), packed(), torch.zeros(())
    for row, end in enumerate(ENDS):
        for document in (slice(0, end), slice(end, LENGTH)):
            logits = truth(rows["tokens"][row : row + 1, document]).logits
            expected = expected + F.cross_entropy(logits[0], rows["labels"][row, document], reduction="sum")
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for parameter, p in truth.named_parameters():
        torch.testing.assert_close(gradients[parameter], p.grad, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", PACKING)
def test_rules_are_made_once_and_later_the_model_has_its_own_attention(name: str, folder: str):
    _, _, names, made, alone = computed(folder)[f"{name} False"]
    assert names == ["sdpa", context.NAME, "sdpa"]
    assert made == 1
    expected = hf_models.build(Case(name, tied=False))(packed()["tokens"]).logits
    torch.testing.assert_close(alone, expected.detach(), rtol=1e-5, atol=1e-5)


def configured(path: str, layout: dict[str, Any], seq_len: int = 16) -> config.Config:
    sections = {"model": {"name": "hf", "path": path}, "data": {"seq_len": seq_len, "tokenizer": "bytes"}}
    sections |= {"train": {"steps": 1}, "run": {"device": "cpu"}, "mesh": layout}
    return families.resolve(config.validate(sections, "test"))


def checked(path: str, seq_len: int = 16, **sizes: int) -> None:
    check(configured(path, {"cp": 2}, seq_len), {**ALONE, "cp": 2, **sizes}, CPU)


@pytest.mark.parametrize("name", ["bloom", "deepseek_v3", "gpt_neo"])
def test_a_family_that_is_not_listed_is_refused_with_the_list_and_the_reason(name: str, tmp_path: Path):
    path = directory(name, tmp_path)
    hf_models.build(Case(name, tied=False)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"sequences of '{name}'.*one of llama, .*\(\[mesh\] cp\)") as refused:
        checked(path)
    assert WHOLE_SEQUENCES.get(name, "") in str(refused.value)
    assert not WHOLE_SEQUENCES.keys() & {*OVER_CP}


def test_gpt_oss_is_refused_because_of_its_sinks(tmp_path: Path):
    keys = {"num_hidden_layers": 2, "num_local_experts": 4, "hidden_size": 64, "num_attention_heads": 4}
    keys |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32, "vocab_size": 131}
    transformers.GptOssConfig(**keys).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'gpt_oss': its attention has sinks, which it passes as 's_aux'"):
        checked(str(tmp_path))


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "partial_rotary_factor": 1.0}


@pytest.mark.parametrize(
    ("name", "keys", "seq_len", "message"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, 16, "'gemma3_text' attends both ways"),
        ("llama", {}, 18, "2 x cp = 4 does not divide seq_len=18"),
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 16}, 32, "up to .*=16"),
    ],
)
def test_what_attention_over_cp_does_not_know_is_refused(
    name: str, keys: dict[str, Any], seq_len: int, message: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=message):
        checked(directory(name, tmp_path, **keys), seq_len)


def test_a_length_that_tp_does_not_divide_is_no_obstacle(tmp_path: Path):
    checked(directory("llama", tmp_path), seq_len=20, tp=4)


def test_heads_that_cp_does_not_divide_are_gathered_or_refused(tmp_path: Path):
    cfg = configured(directory("llama", tmp_path), {"cp_form": "heads"})
    family = families.of(cfg.model)
    assert family.attends_by_heads(cfg, {**ALONE, "cp": 2})
    with pytest.raises(ValueError, match="the 2 heads of keys and values"):
        family.attends_by_heads(cfg, {**ALONE, "cp": 4})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"s_aux": torch.ones(2)}, "passes 's_aux' to its attention.*expected None, got Tensor"),
        ({"output_attentions": True}, "passes 'output_attentions'"),
        ({"dropout": 0.1}, "expected dropout=0, got 0.1"),
        ({"is_causal": False}, "expected is_causal=True"),
        ({"sliding_window": 5}, r"sliding_window=5, but the windows in its config are \[0\]"),
    ],
)
def test_a_keyword_that_would_change_attention_is_refused_by_name(keywords: dict[str, Any], message: str):
    module: Any = SimpleNamespace(is_causal=True)
    q = torch.randn(1, 2, 4, 8)
    rules = {0: attention_rule(torch.arange(4)[None], causal=True)}
    harmless = {"position_ids": torch.arange(4)[None], "use_cache": False, "position_bias": None}
    out, _ = context._attention(module, q, q, q, rules, scaling=1.0, **harmless)
    assert out.shape == (1, 4, 2, 8)
    with pytest.raises(ValueError, match=message):
        context._attention(module, q, q, q, rules, **keywords)
    with pytest.raises(ValueError, match="expected 8 as for queries, got 4"):
        context._attention(module, q, q, q[..., :4], rules)


def proofs() -> list[str]:
    """What the proof says of right attention, and of attention that ignores its scale, its window, or its soft cap."""
    shared = ContextParallel(dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    with torch.device("meta"):
        model = hf_models.plain(Case("mistral"))
    said = [ranks.message(context_proof.prove, model, shared, CPU)]
    attention, rules = context.attention, context.Tokens.rules
    with patch.object(context, "attention", lambda q, k, v, rule, scale, softcap: attention(q, k, v, rule)):
        said.append(ranks.message(context_proof.prove, hf_models.plain(Case("granite")), shared, CPU))
    with patch.object(context.Tokens, "rules", lambda self, windows: dict.fromkeys(windows, rules(self, {0})[0])):
        said.append(ranks.message(context_proof.prove, model, shared, CPU))
    with torch.device("meta"):
        capped = hf_models.plain(Case("gemma2"))
    capped.config.attn_logit_softcapping = 0.05  # of scores of a clone with small weights
    said.append(ranks.message(context_proof.prove, capped, shared, CPU))
    with patch.object(
        context, "attention", lambda q, k, v, rule, scale, softcap: attention(q, k, v, rule, None, scale)
    ):
        said.append(ranks.message(context_proof.prove, capped, shared, CPU))
    return said


def test_attention_that_is_wrong_is_refused_at_start():
    right, unscaled, unlimited, capped, uncapped = ranks.run(2, proofs)[0]
    assert right == capped == "nothing was raised"
    assert "'granite' over cp=2 is not what one process computes ([mesh] cp)" in unscaled
    assert "'mistral' over cp=2 is not what one process computes ([mesh] cp)" in unlimited
    assert "WRONG" in unlimited
    assert "'gemma2' over cp=2 is not what one process computes ([mesh] cp)" in uncapped
