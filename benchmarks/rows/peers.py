"""Models of transformers, trained as most users do: autocast, fused AdamW, clipped gradients, torch.compile or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor


class HfStep:
    """A step of a model of transformers on one batch.

    Args:
        model: with fp32 weights.
        inputs: what it is called with; its output has `loss`.
        autocast: compute in bf16.
        compiled: by torch.compile, as a whole.
    """

    def __init__(self, model: Any, inputs: dict[str, Tensor], *, autocast: bool, compiled: bool) -> None:
        self.parameters = [*model.parameters()]
        self.forward: Callable[..., Any] = torch.compile(model) if compiled else model
        self.inputs, self.autocast = inputs, autocast
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def __call__(self) -> tuple[float, float]:
        """The loss and the norm of the gradient."""
        device_type = self.parameters[0].device.type
        with torch.autocast(device_type, torch.bfloat16) if self.autocast else contextlib.nullcontext():
            loss = self.forward(**self.inputs).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()


def bloom(folder: Path, *, hidden_size: int, n_layers: int, n_heads: int, vocab_size: int) -> None:
    """Write a new BLOOM with dropout 0 to the folder."""
    config = transformers.BloomConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        n_layer=n_layers,
        n_head=n_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    torch.manual_seed(0)
    transformers.BloomForCausalLM(config).save_pretrained(folder)


def llama(folder: Path, *, hidden_size: int, n_layers: int, n_heads: int, vocab_size: int) -> None:
    """Write a new Llama with a quarter of the heads for keys."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_heads // 4,
        intermediate_size=1408,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        use_cache=False,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def bert(folder: Path, *, hidden_size: int, n_layers: int, n_heads: int, vocab_size: int) -> None:
    """Write a new BERT with both heads and dropout 0."""
    config = transformers.BertConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        intermediate_size=4 * hidden_size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    transformers.BertForPreTraining(config).save_pretrained(folder)


def loaded(folder: Path) -> Any:
    """The model in the folder, of its own class, in training mode."""
    config = transformers.AutoConfig.from_pretrained(folder)
    (name,) = config.architectures
    return getattr(transformers, name).from_pretrained(folder).train()


def causal_inputs(microbatch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arguments of a causal model; our labels are shifted already, and theirs would be shifted once more."""
    return {
        "input_ids": microbatch["tokens"],
        "labels": microbatch["labels"],
        "shift_labels": microbatch["labels"],
    }
