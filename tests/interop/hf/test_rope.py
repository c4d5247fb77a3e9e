"""Claims about longrope: each conversation has the frequencies for its own length, whatever stands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dtmega import config, families
from dtmega.config.families.hf import TransformersKeys
from dtmega.interop.hf.model import HF
from dtmega.training.checks import check
from tests.hf_models import transformers

ORIGINAL, ROW = 12, 28
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 64, "pad_token_id": 0}
# Tokens of each conversation of a row; the longest are above the original length, and one is exactly as long.
ROWS = ((5, 20, 3), (7, 12, 9), (13, 15), (4, 5, 6, 7, 6))


def longrope(kind: str = "Phi3", **keys: Any) -> Any:
    """A small model on meta whose factors for long conversations differ from those for short ones."""
    factors = {"short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL, **factors}
    # dtmega sets the jitter to 0, which PhiMoE's choice of experts reads without training, too.
    sizes = SIZES | ({"router_jitter_noise": 0.0} if kind == "Phimoe" else {})
    made = getattr(transformers, f"{kind}Config")(**sizes, rope_parameters=rope | keys)
    made.original_max_position_embeddings = ORIGINAL
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")(made)


def saved(folder: Path, kind: str = "Phi3", **keys: Any) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        type(model := longrope(kind, **keys))(model.config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "keys"), [("Phi3", {}), ("Llama", {}), ("Phimoe", {"short_mscale": 1.1, "long_mscale": 1.3})]
)
def test_packed_rows_have_the_loss_of_each_conversation_alone_in_any_microbatch(
    kind: str, keys: dict[str, float], tmp_path: Path
):
    path = saved(tmp_path, kind, **keys)
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    truth = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    ours = HF(TransformersKeys(name="hf", path=path, vocab_size=131)).eval()
    ours.hf.load_state_dict(truth.state_dict())
    tokens, labels = torch.randint(3, 131, (2, len(ROWS), ROW), generator=torch.Generator().manual_seed(4))
    expected = 0.0
    with torch.no_grad():
        for row, lengths in enumerate(ROWS):
            for ids, targets in zip(tokens[row].split(lengths), labels[row].split(lengths), strict=True):
                expected += F.cross_entropy(truth(ids[None]).logits[0], targets, reduction="sum").item()
        positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS])
        for microbatches in ([[0, 1, 2, 3]], [[3, 1], [0, 2]], [[0], [1], [2], [3]]):
            totals = [ours(tokens[rows], labels[rows], position_ids=positions[rows])["lm"] for rows in microbatches]
            assert sum(total.item() for total in totals) == pytest.approx(expected, rel=1e-6), microbatches
        # Without restarts, a row is as long as it is.
        for n_tokens in (ORIGINAL, ROW):
            ids = tokens[:, :n_tokens]
            torch.testing.assert_close(ours(ids), truth(ids).logits)


@pytest.mark.parametrize(
    ("data", "mesh", "cure"),
    [
        ({"objective": "conversations", "pack": False}, {}, r"or pack=true \(\[data\] pack\)"),
        ({}, {"cp": 2}, r"or cp=1 \(\[mesh\] cp\)"),
        ({"objective": "conversations"}, {}, ""),
        ({}, {}, ""),
        ({"objective": "conversations", "pack": False, "seq_len": ORIGINAL}, {}, ""),
        ({"seq_len": ORIGINAL}, {"cp": 2}, ""),
    ],
)
def test_rows_above_the_original_length_are_refused_where_a_rank_does_not_know_a_conversations_length(
    data: dict[str, Any], mesh: dict[str, int], cure: str, tmp_path: Path
):
    sections = {"model": {"name": "hf", "path": saved(tmp_path)}, "data": {"seq_len": ROW, "tokenizer": "bytes"} | data}
    sections |= {"train": {"steps": 1}, "run": {"device": "cpu"}, "mesh": mesh}
    cfg = families.resolve(config.validate(sections, "test"))
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1} | mesh
    if not cure:
        check(cfg, sizes, torch.device("cpu"))
        return
    with pytest.raises(ValueError, match=f"rope_type='longrope'.*seq_len up to .*={ORIGINAL}, got.*{cure}"):
        check(cfg, sizes, torch.device("cpu"))


def test_dynamic_frequencies_change_above_the_models_longest_sequence_only_which_is_refused(tmp_path: Path):
    made = transformers.LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    made.save_pretrained(tmp_path)
    sections = {"model": {"name": "hf", "path": str(tmp_path)}, "data": {"tokenizer": "bytes"}, "train": {"steps": 1}}
    with pytest.raises(ValueError, match=r"seq_len=65 is more than the max_position_embeddings=64"):
        families.resolve(config.validate(sections | {"data": {"tokenizer": "bytes", "seq_len": 65}}, "test"))
    model = HF(TransformersKeys(name="hf", path=str(tmp_path), vocab_size=131))
    rotary = model.hf.model.rotary_emb
    before = rotary.inv_freq.clone()
    model(torch.zeros(1, 64, dtype=torch.int64))
    assert torch.equal(rotary.inv_freq, before)
    model(torch.zeros(1, 65, dtype=torch.int64))
    assert not torch.equal(rotary.inv_freq, before)
