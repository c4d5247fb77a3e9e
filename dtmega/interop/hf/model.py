"""Wraps a `transformers` decoder as a `Model` for the trainer: `[model] name = "hf"`, `path = DIR`.

The transformers model and its parameter names stay unmodified. For pipelines, `ends` in families.py lists the modules
that only the first or only the last stage holds.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega import config, rooms
from dtmega.interop.hf import families
from dtmega.interop.hf.directory import build, experts_of, initial_values, original_length, read_config
from dtmega.models.model import Fused, Model
from dtmega.models.ties import aliases
from dtmega.ops.key_value_cache import KeyValueCache

if TYPE_CHECKING:
    from dtmega.ops.context_parallel import ContextParallel


def fused_cut(kind: str, module: Any, facts: families.FamilyFacts, hf_config: Any) -> Fused:
    """Return the matrices in a linear layer's fused weight.

    Args:
        kind: order of the matrices: `families.BY_HEAD`, `families.Q_K_V` or `families.GATE_UP`.
        module: linear layer, an nn.Linear or a Conv1D (which stores its weight as [in, out]).
        facts: facts about the family.
        hf_config: config of the model.
    """
    dim = int(type(module).__name__ == "Conv1D")
    length = module.weight.shape[dim]
    if kind == families.GATE_UP:
        return dim, (length // 2,) * 2
    heads = getattr(hf_config, facts.heads)
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    n_repeats = facts.head_blocks if kind == families.Q_K_V else heads
    if kv_heads == heads:
        return dim, (length // (3 * n_repeats),) * 3
    # If query heads share key heads, BY_HEAD and Q_K_V weights both store all queries, then all keys, then all values.
    head_dim = length // (heads + 2 * kv_heads)
    return dim, (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)


class _Zero(nn.Module):
    """Stand-in for the position embedding on later stages; the first stage has already added the positions."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # A 0-dim tensor does not take part in type promotion, so adding this zero keeps the other summand's dtype.
        return torch.zeros(())


# Name of a stand-in in families.py -> function that creates the stand-in.
STAND_INS: Mapping[str, Callable[[], nn.Module | None]] = {
    families.NOTHING: lambda: None,
    families.PASS_ON: nn.Identity,
    families.ZERO: _Zero,
}


class HF(Model):
    """A transformers decoder, whole or one pipeline stage.

    Attributes:
        hf: the transformers model; only the last stage keeps the head.
        takes_positions: whether `hf.forward` has an argument `position_ids`.
        is_clone: whether the model is a scaled-down copy, built from `small_config`.
    """

    def __init__(self, cfg: config.Model, small_config: Any = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.is_clone = small_config is not None
        self.hf: Any = build(small_config or read_config(cfg.directory))
        if any(hasattr(part, "rope_type") and original_length(part.config) is not None for part in self.hf.modules()):
            rooms.longrope().choose_by_conversation(self.hf)
        self.is_first = self.is_last = True
        self.longest = longest(self.hf.config)
        facts = families.KNOWN.get(self.hf.config.model_type)
        if facts is not None:
            for name in facts.in_embedding_dtype:
                self.hf.base_model.get_submodule(name).register_forward_hook(self._cast_to_embedding_dtype)
        # For families without `ends`, generation with a cache has not been checked.
        self.has_cache = facts is not None and facts.ends is not None
        head = self.hf.get_output_embeddings()
        self.outputs = [name for name, p in self.named_parameters() if head is not None and p is head.weight]
        self.takes_positions = "position_ids" in inspect.signature(self.hf.forward).parameters
        self.experts_per_token = getattr(self.hf.config, "num_experts_per_tok", None)
        self.ties = tuple(tuple(names) for _, names in aliases(self) if len(names) > 1)
        self._context: ContextParallel | None = None
        self._over_cp: Any = None  # the module `context.py`, from when there are cp ranks
        self._own_attention: Mapping[int, str] = {}

    @property
    def context(self) -> ContextParallel | None:
        """The cp ranks, over which the current batch's sequences are sharded; None if each rank has whole sequences.

        With cp ranks, the functions in `context.py` compute attention.
        """
        return self._context

    @context.setter
    def context(self, context: ContextParallel | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._context is None and context is not None:
            self._over_cp = rooms.transformers_over_cp()
            self._own_attention = self._over_cp.switch(self.hf)
        elif self._context is not None and context is None:
            self._over_cp.switch(self.hf, self._own_attention)
        self._context = context

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        sample_ids: Tensor | None = None,
        places: Tensor | None = None,
        hidden: Tensor | None = None,
        cache: KeyValueCache | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Run the model, as described in `Model`.

        `sample_ids` are ignored, because there is no dropout. `places` (token positions) are used only with a cache or
        over cp ranks; otherwise transformers counts positions itself.

        Args:
            tokens: token ids, [B, S]; ignored by stages other than the first.
            labels: ids of the tokens to predict, [B, S]. If None, the last stage returns logits.
            hidden: hidden state from the previous stage, [B, S, D].
            cache: keys and values of the earlier tokens, for generation.
            document_ids: document index of each token, [B, S]. Used only with a cache or over cp ranks.
                With a cache, 0 marks the text, and any other number marks padding to the left of the text.
            position_ids: position of each token, [B, S]. Without a cache, transformers restarts attention at
                every position 0, so tokens after a restart do not attend to tokens before the restart.

        Returns:
            The hidden state for the next stage, logits [B, S, V], or the loss summed over the microbatch.
        """
        if cache is not None and places is not None:
            _, documents = cache.begin_forward(places, document_ids)
            rows = {}
            if documents is not None:
                rows["attention_mask"] = (documents == 0).long()
                # Families without a `position_ids` argument derive positions from the mask.
                if self.takes_positions:
                    rows["position_ids"] = position_ids
            out = self.hf(input_ids=tokens, use_cache=True, past_key_values=cache.inner, **rows)
            cache.inner = out.past_key_values
            return out.logits
        inputs: dict[str, Tensor | None] = {"input_ids": tokens} if self.is_first else {"inputs_embeds": hidden}
        if self.context is not None and position_ids is None:
            position_ids = places
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        at_hand = contextlib.nullcontext()
        if self.context is not None:
            at_hand = self._over_cp.at_hand(places, document_ids, self.context, fused=labels is not None)
        with at_hand:
            if not self.is_last:
                return {"hidden": self.hf.base_model(**inputs, use_cache=False)[0]}
            logits = self.hf(**inputs, use_cache=False).logits
        if labels is None:
            return logits
        smoothing = self.cfg.label_smoothing if self.training else 0.0
        # If a plan has sharded or fused the head, the logits are `VocabLogits`. The lines below then compute the loss
        # without computing the full logits.
        logits = logits.view(-1, logits.shape[-1]).float()
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=smoothing)
        return {"lm": loss}

    def _cast_to_embedding_dtype(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out.to(self.hf.get_input_embeddings().weight.dtype)

    def blocks(self) -> list[nn.Module]:
        return list(blocks_of(self.hf).children())

    def experts(self) -> list[nn.Module]:
        return experts_of(self.hf)

    def parts(self) -> dict[str, list[nn.Module]]:
        modules_of = super().parts()
        facts = families.KNOWN.get(self.hf.config.model_type)
        if facts is None or facts.ends is None:
            return modules_of
        owner = self.hf.base_model.get_submodule(facts.owner)
        for name in facts.ends.last:
            module = getattr(owner, name, None)
            # `Model` counts all modules registered before the blocks as part of the embedding, even the head's modules.
            if module in modules_of["embed"]:
                modules_of["embed"].remove(module)
                modules_of["head"].append(module)
        return modules_of

    def matrices(self) -> dict[str, Fused]:
        matrices = super().matrices()
        facts = families.KNOWN.get(self.hf.config.model_type)
        for name, module in self.named_modules():
            weight = self.full_name(f"{name}.weight")
            if facts is not None and weight in matrices:
                kind = facts.fused.get(name.rpartition(".")[2])
                if kind is not None:
                    matrices[weight] = fused_cut(kind, module, facts, self.hf.config)
        return matrices

    def attention_flops(self, piece: str) -> int:
        hf_config = self.hf.config
        heads = getattr(hf_config, "num_attention_heads", 0)
        # A model without heads has no attention; Mamba's scan is not counted.
        if not heads:
            return 0
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
        # In latent attention (DeepSeek), the head size of values differs from the head size of queries and keys.
        query_dim = getattr(hf_config, "qk_head_dim", None) or head_dim
        value_dim = getattr(hf_config, "v_head_dim", None) or head_dim
        return 3 * heads * (query_dim + value_dim) if piece.startswith("layers.") else 0

    def keep(self, pieces: Collection[str]) -> None:
        self.is_first = "embed" in pieces
        self.is_last = "head" in pieces
        # transformers reads the number of cached tokens from layer 0 of the cache, and not every stage has a layer 0.
        self.has_cache = False
        facts = families.KNOWN[self.hf.config.model_type]
        assert facts.ends is not None
        base = self.hf.base_model
        owner = base.get_submodule(facts.owner)
        blocks = blocks_of(self.hf)
        for name in [name for name in blocks._modules if f"layers.{name}" not in pieces]:
            # `del blocks[i]` would renumber the other blocks.
            del blocks._modules[name]
        if kinds := getattr(base.config, "layer_types", None):
            # Some families look up a block's kind in `layer_types`, by the block's index in the stage. So keep only the
            # entries for this stage.
            base.config = copy.copy(base.config)
            base.config.layer_types = [kinds[int(name)] for name in blocks._modules]
        stand_ins = {} if self.is_first else dict(facts.ends.first)
        stand_ins |= {} if self.is_last else facts.ends.last
        for name, stand_in in stand_ins.items():
            setattr(owner, name, STAND_INS[stand_in]())
        if not self.is_first:
            for name, value in facts.ends.later.items():
                setattr(owner, name, value)
        # Everything outside the base model belongs to the head.
        if not self.is_last:
            for name, module in list(self.hf.named_children()):
                if module is not base:
                    setattr(self.hf, name, None)

    def init_std(self, name: str) -> float | None:
        _, std = self._initial_values[name]
        return std or None

    def init_constant(self, name: str) -> float:
        mean, _ = self._initial_values[name]
        return mean

    @functools.cached_property
    def _initial_values(self) -> dict[str, tuple[float, float]]:
        return initial_values(self.cfg.directory)

    def full_name(self, name: str) -> str:
        return super().full_name(name).removeprefix("hf.")


def longest(hf_config: Any) -> int | None:
    """The maximum sequence length that a transformers config allows, in tokens; None if the config sets no limit."""
    return next((getattr(hf_config, key) for key in families.POSITION_KEYS if getattr(hf_config, key, None)), None)


def blocks_of(hf: Any) -> nn.ModuleList:
    """A model's list of blocks; for a family without `ends`, the module list with the most parameters."""
    facts = families.KNOWN.get(hf.config.model_type)
    if facts is not None and facts.ends is not None:
        return hf.base_model.get_submodule(facts.owner).get_submodule(facts.stacks[facts.owner])
    lists = [module for module in hf.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=nn.ModuleList())
