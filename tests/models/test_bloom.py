"""models/bloom.py against transformers' BloomForCausalLM, and its published sizes."""

import re

import pytest
import torch
import torch.nn.functional as F
from transformers import BloomConfig, BloomForCausalLM

from dtmega import families
from dtmega.config.families.bloom import BloomKeys
from dtmega.interop.formats.bloom import HF
from dtmega.models.bloom import Bloom
from dtmega.models.generate import Sampling, generate
from dtmega.models.initial import init_weights
from dtmega.ops.attention_rule import attention_rule

V, S = 131, 77


def hf_name(name: str) -> str:
    for rule in HF.rules:
        assert isinstance(rule.ours, str)
        assert isinstance(rule.theirs, str)
        if match := re.match("^" + re.escape(rule.ours).replace(r"\{\}", r"(\d+)"), name):
            return rule.theirs.format(*match.groups()) + name[match.end() :]
    raise AssertionError(f"{name} is in no rule")


def small(n_heads: int, **keys) -> Bloom:
    cfg = BloomKeys(vocab_size=V, hidden_size=8 * n_heads, n_layers=2, n_heads=n_heads, **keys)
    model = families.of(cfg).build(cfg)
    init_weights(model, seed=1)
    model.init_buffers(1)
    return model


def pair(n_heads: int, post_layernorm: bool = False) -> tuple[Bloom, BloomForCausalLM]:
    """The same weights in both, with biases and norms perturbed so that a missing or doubled term shows."""
    ours = small(n_heads, apply_residual_connection_post_layernorm=post_layernorm)
    theirs = BloomForCausalLM(
        BloomConfig(
            vocab_size=V,
            hidden_size=8 * n_heads,
            n_layer=2,
            n_head=n_heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            apply_residual_connection_post_layernorm=post_layernorm,
        )
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
            theirs.get_parameter(hf_name(name)).copy_(p)
    return ours, theirs


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(V, (2, S), generator=generator)
    return tokens, tokens.roll(-1, dims=1)


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return ((ours - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("post_layernorm", [False, True])
@pytest.mark.parametrize("n_heads", [6, 8, 12])
def test_logits_equal_hugging_face(n_heads, post_layernorm):
    ours, theirs = pair(n_heads, post_layernorm)
    tokens, _ = batch()
    assert error(ours(tokens), theirs(tokens).logits) < 1e-5


@pytest.mark.parametrize("post_layernorm", [False, True])
@pytest.mark.parametrize("n_heads", [6, 8, 12])
def test_loss_and_every_gradient_equal_hugging_face(n_heads, post_layernorm):
    ours, theirs = pair(n_heads, post_layernorm)
    tokens, labels = batch()
    loss = ours(tokens, labels)["lm"]
    truth = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
    loss.backward()
    truth.backward()
    wrong = {}
    for name, p in ours.named_parameters():
        expected = theirs.get_parameter(hf_name(name)).grad
        assert p.grad is not None
        assert expected is not None
        if error(p.grad, expected) > 1e-5:
            wrong[name] = error(p.grad, expected)
    assert wrong == {}


def test_every_parameter_of_hugging_face_has_a_name_here():
    ours, theirs = pair(6)
    assert {hf_name(name) for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "count"),
    [
        (24, 1024, 16, 559_214_592),
        (24, 1536, 16, 1_065_314_304),
        (24, 2048, 16, 1_722_408_960),
        (30, 2560, 32, 3_002_557_440),
        (30, 4096, 32, 7_069_016_064),
        (70, 14336, 112, 176_247_271_424),
    ],
)
def test_published_sizes_have_the_published_parameter_counts(layers, hidden, heads, count):
    with torch.device("meta"):
        cfg = BloomKeys(vocab_size=250_880, hidden_size=hidden, n_layers=layers, n_heads=heads)
        model = families.of(cfg).build(cfg)
    assert sum(p.numel() for p in model.parameters()) == count


def test_changing_a_token_leaves_earlier_outputs_bit_equal_and_changes_the_later_ones():
    model = small(8).eval()
    tokens, _ = batch()
    before = model(tokens)
    i = S // 2
    tokens[:, i] = (tokens[:, i] + 1) % V
    after = model(tokens)
    assert torch.equal(after[:, :i], before[:, :i])
    assert (after[:, i:] != before[:, i:]).any(-1).all()


def test_a_document_in_a_packed_row_gives_the_logits_it_gives_alone():
    model = small(6).eval()
    tokens, _ = batch()
    documents = torch.zeros_like(tokens)
    documents[:, 30:] = 1
    packed = model(tokens, document_ids=documents)
    torch.testing.assert_close(packed[:, 30:], model(tokens[:, 30:]), atol=1e-5, rtol=1e-5)


def test_positions_that_restart_change_nothing_as_alibi_is_of_distance_in_the_sequence():
    model = small(6).eval()
    tokens, _ = batch()
    restarted = torch.arange(tokens.shape[1]).expand_as(tokens) % 10
    documents = (torch.arange(tokens.shape[1]).expand_as(tokens) // 10).contiguous()
    assert torch.equal(model(tokens, position_ids=restarted), model(tokens))
    packed = model(tokens, document_ids=documents)
    assert torch.equal(model(tokens, position_ids=restarted, document_ids=documents), packed)


@pytest.mark.parametrize("site", ["hidden_dropout", "attention_dropout"])
def test_dropout_in_training_without_sample_ids_is_refused(site):
    model = small(6, **{site: 0.1})
    with pytest.raises(ValueError, match="sample_ids"):
        model(*batch())
    model.eval()(*batch())


@pytest.mark.parametrize(
    ("labels", "training", "attention_dropout", "fused"),
    [(True, True, 0.0, True), (True, True, 0.1, False), (True, False, 0.1, True), (False, False, 0.0, False)],
)
def test_a_kernel_is_asked_for_where_there_is_a_loss_and_no_probability_is_dropped(
    monkeypatch, labels, training, attention_dropout, fused
):
    asked = []

    def noting(places, **keywords):
        asked.append(keywords["fused"])
        return attention_rule(places, **keywords)

    monkeypatch.setattr("dtmega.models.bloom.attention_rule", noting)
    tokens, targets = batch()
    model = small(6, attention_dropout=attention_dropout).train(training)
    model(tokens, targets if labels else None, torch.arange(len(tokens)))
    assert asked == [fused]


def test_block_compiled_gives_the_same_loss_and_gradients():
    tokens, labels = batch()
    results = []
    for compiled in (False, True):
        model = small(6, hidden_dropout=0.1)
        if compiled:
            # Inductor's numbers are those of the run that compiles in test_parity.py, with `-m full`.
            model.layers["1"].compile(fullgraph=True, backend="aot_eager")
        loss = model(tokens, labels, torch.tensor([1, 2]))["lm"]
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-5)


def test_a_sample_is_cut_into_equal_parts_and_padding_changes_no_token(monkeypatch):
    model, lengths = small(6), list[int]()
    forward = Bloom.forward

    def noting(self, tokens, *args, **keywords):
        lengths.append(tokens.shape[1])
        return forward(self, tokens, *args, **keywords)

    monkeypatch.setattr(Bloom, "forward", noting)
    samplings = [Sampling(V, frozenset([V - 1]), seed=5, multiple=parts) for parts in (1, 2, 3, 6, 7)]
    samples = [generate(model, [1, 2, 3], 70, sampling) for sampling in samplings]
    assert samples == 5 * samples[:1]
    assert len(samples[0]) == 70
    assert set(lengths) == {3, 1, 64, 128, 192, 7 * 64}  # undivided, a token is computed once


def test_a_sample_takes_the_tokens_that_are_settled_and_ends_where_they_say():
    seen: list[int] = []

    def settle(token: torch.Tensor) -> bool:
        seen.append(int(token))
        token.fill_(7)
        return len(seen) < 4

    new = generate(small(6), [1, 2, 3], 10, Sampling(V, frozenset([V - 1]), seed=5, settle=settle))
    assert new == [7, 7, 7]
