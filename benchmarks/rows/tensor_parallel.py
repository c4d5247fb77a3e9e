"""Two ranks of tensor parallelism, beside megatron-core and beside DTensor's loss. CPU time is that of one rank."""

from __future__ import annotations

import contextlib
import functools
import statistics
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.rows import ours
from benchmarks.rows.measure import Row, check_losses, check_tensors, interleaved, top_operators
from dtmega.ops.cross_entropy import linear_cross_entropy
from tests import ranks

TIMEOUT_S = 1800.0
N_TOKENS, HIDDEN, VOCABULARY = 1024, 1024, 62720  # BLOOM's vocabulary / 4
COMPARED = 128  # tokens in fp32
STEP = {
    "model.hidden_size": 512,
    "model.n_layers": 4,
    "model.n_heads": 8,
    "model.vocab_size": 32768,
    "model.max_position_embeddings": 256,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "data.seq_len": 256,
    "batch.micro_batch_size": 4,
    "batch.global_batch_size": 4,
    "mesh.tp": 2,
    "mesh.sequence_parallel": "false",
}


def loss(quick: bool) -> list[Row]:
    """Cross-entropy of a head whose vocabulary is cut over two ranks, with its three products, in bf16."""
    found = ranks.run(2, _loss_on_a_rank, 3 if quick else 7, timeout_s=TIMEOUT_S)
    _, equal, top = found[0]
    ms = {name: statistics.fmean(times[name] for times, *_ in found) for name in found[0][0]}
    name = f"head + loss over tp 2, bf16, V {VOCABULARY:,}"
    return [
        Row(name, "DTensor's loss_parallel", ms["ours"], ms["DTensor"], "CPU ms", 0.45, equal, top),
        Row(name, "megatron-core", ms["ours"], ms["megatron-core"], "CPU ms", 0.70, equal, top),
    ]


def step(quick: bool) -> list[Row]:
    """A GPT over two ranks beside megatron-core's, with its own layers and loss, in fp32."""
    found = ranks.run(2, _step_on_a_rank, 3 if quick else 7, timeout_s=TIMEOUT_S)
    _, equal, top = found[0]
    ms = {name: statistics.fmean(times[name] for times, *_ in found) for name in found[0][0]}
    name = "GPT step over tp 2, fp32, S 256"
    return [
        Row(name, "megatron-core 0.16", ms["eager"], ms["megatron-core"], "CPU ms", 0.80, equal, top),
        Row(f"{name}, compiled", "megatron-core 0.16", ms["compiled"], ms["megatron-core"], "CPU ms", None, equal),
    ]


def _medians(forms: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in interleaved(forms, rounds).items()}


# ---- the loss


def _loss_on_a_rank(rounds: int) -> tuple[dict[str, float], str, list[str]]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    whole = torch.randn(VOCABULARY, HIDDEN) * HIDDEN**-0.5
    shard = whole.chunk(2)[dist.get_rank()].clone()
    h, labels = torch.randn(N_TOKENS, HIDDEN), torch.randint(VOCABULARY, (N_TOKENS,))
    group, mesh = dist.group.WORLD, init_device_mesh("cpu", (2,))
    assert group is not None
    _join_megatron(2)

    def own(h: Tensor, shard: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(_Entered.apply(h), shard, labels, n_valid=VOCABULARY, group=group)

    def megatron(h: Tensor, shard: Tensor, labels: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

        logits = F.linear(copy_to_tensor_model_parallel_region(h), shard)
        return vocab_parallel_cross_entropy(logits[:, None], labels[:, None]).sum()

    def dtensor(h: Tensor, shard: Tensor, labels: Tensor) -> Tensor:
        cut = DTensor.from_local(shard, mesh, [Shard(0)])
        replicated = DTensor.from_local(h, mesh, [Replicate()])
        with loss_parallel():
            logits = F.linear(replicated, cut).float()
            return F.cross_entropy(logits, DTensor.from_local(labels, mesh, [Replicate()]), reduction="sum")

    forms = {"ours": own, "megatron-core": megatron, "DTensor": dtensor}
    gradients: dict[str, list[Tensor]] = {}
    few = h[:COMPARED], shard, labels[:COMPARED]
    truth = F.cross_entropy(F.linear(few[0], whole), few[2], reduction="sum").item()
    for name, form in forms.items():
        found, gradients[name] = _loss_and_gradients(form, *few)
        equal = f"fp32 {check_losses(found, truth)}"
        for mine, first in zip(gradients[name], gradients["ours"], strict=True):
            check_tensors(mine, first, 1e-5)
    del whole, few, gradients
    low = h.bfloat16(), shard.bfloat16(), labels
    calls: dict[str, Callable[[], object]] = {}
    for name, form in forms.items():
        calls[name] = lambda form=form: _loss_and_gradients(form, *low)
    return _medians(calls, rounds), equal, top_operators(calls["ours"])


class _Entered(torch.autograd.Function):
    """The entry of a parallel region: its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        dist.all_reduce(gradient)
        return gradient


def _loss_and_gradients(
    form: Callable[..., Tensor], h: Tensor, shard: Tensor, labels: Tensor
) -> tuple[float, list[Tensor]]:
    h, shard = h.detach().requires_grad_(), shard.detach().requires_grad_()
    found = form(h, shard, labels)
    with loss_parallel():
        found.backward()
    value = found.full_tensor() if isinstance(found, DTensor) else found
    return value.item(), [x.grad for x in (h, shard) if x.grad is not None]


# ---- the step


def _step_on_a_rank(rounds: int) -> tuple[dict[str, float], str, list[str]]:
    warnings.simplefilter("ignore")
    with ExitStack() as closing:
        eager = ours.Stepper(ours.begin("gpt.toml", STEP | {"compile.enable": "false"}, closing))
        compiled = ours.Stepper(ours.begin("gpt.toml", STEP | {"compile.enable": "true"}, closing))
        microbatch = eager.batch.microbatches[0]
        theirs = MegatronStep(dict(eager.run.model.named_parameters()), microbatch["tokens"], microbatch["labels"])
        loss, norm = theirs()
        outcome = eager()
        equal = f"fp32 {check_losses(outcome.loss, loss)}"
        check_losses(outcome.grad_norm, norm, 1e-4)
        check_losses(compiled().loss, loss)
        forms: dict[str, Callable[[], object]] = {"megatron-core": theirs, "eager": eager, "compiled": compiled}
        return _medians(forms, rounds), equal, top_operators(eager)


class MegatronStep:
    """A step of megatron-core's GPT with this rank's part of our weights.

    Its fused kernels need a GPU, so it runs the plain ones; so does AdamW, which is torch's fused one, as ours.
    """

    def __init__(self, weights: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        _join_megatron(2)
        config = TransformerConfig(
            num_layers=STEP["model.n_layers"],
            hidden_size=STEP["model.hidden_size"],
            num_attention_heads=STEP["model.n_heads"],
            activation_func=functools.partial(F.gelu, approximate="tanh"),
            tensor_model_parallel_size=2,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
        )
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=STEP["model.vocab_size"],
            max_sequence_length=STEP["data.seq_len"],
            share_embeddings_and_output_weights=True,
        )
        take(self.model, weights)
        self.tokens, self.labels = tokens, labels
        b, s = tokens.shape
        self.positions = torch.arange(s).expand(b, s)
        self.mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
        self.parameters = [*self.model.parameters()]
        self.cut = [bool(getattr(p, "tensor_model_parallel", False)) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)

    def __call__(self) -> tuple[float, float]:
        """The loss and the norm of the gradient."""
        with _without_cuda():
            losses = self.model(self.tokens, self.positions, self.mask, labels=self.labels)
            loss = losses.mean()
            loss.backward()
        norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm

    def clip(self) -> float:
        """Clip to a norm of 1: what is on both ranks counts once (`optimizer/clip_grads.py`)."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        counted = torch.tensor(self.cut) | (dist.get_rank() == 0)
        total = (norms.square() * counted).sum()
        dist.all_reduce(total)
        norm = float(total.sqrt())
        if norm > 1.0:
            torch._foreach_mul_(gradients, 1.0 / (norm + 1e-6))
        return norm


# A module of megatron-core's layer -> ours.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attention.linear_qkv": "attn.qkv",
    "self_attention.linear_proj": "attn.out",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
}


@torch.no_grad()
def take(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy our weights, of which each rank has the same part."""
    for name, parameter in model.named_parameters():
        weight = weights[_our_name(name)]
        parameter.copy_(weight.to_local() if isinstance(weight, DTensor) else weight)


def _our_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("decoder.layers."):
        _, _, number, inner = module.split(".", 3)
        return f"layers.{number}.{LAYER[inner]}.{kind}"
    ends = {
        "embedding.word_embeddings": "embed",
        "embedding.position_embeddings": "positions",
        "decoder.final_layernorm": "norm",
    }
    return f"{ends[module]}.{kind}"


def _join_megatron(tp: int) -> None:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        with _without_cuda():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)


@contextlib.contextmanager
def _without_cuda():
    """megatron-core forks generators of a GPU around dropout, also where the rate is 0, and asks where buffers go."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    fork = patch.object(CudaRNGStatesTracker, "fork", lambda self, name="": contextlib.nullcontext())
    with fork, patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
        yield


BENCHMARKS = {"loss": loss, "step": step}
