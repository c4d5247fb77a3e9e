"""A decoder of `transformers` under the house's contract: `[model] name = "hf"`, `path = DIR`.

The model is transformers' own, unmodified, and so are the names of its parameters. What a pipeline needs to know of a
family (what only its first and its last stage hold) is its `ends` in families.py.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega import config
from dtmega.formats.whole import aliases
from dtmega.hf import families
from dtmega.hf.directory import build, initial_values, read_config
from dtmega.models.model import Model
from dtmega.past import KeyValueCache


class _Zero(nn.Module):
    """A stand-in for learned positions where these were added already."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())  # of no dim, so that it does not decide the dtype of a sum


# Word of families.py -> what it stands for.
STAND_INS: Mapping[str, Callable[[], nn.Module | None]] = {
    families.NOTHING: lambda: None,
    families.PASS_ON: nn.Identity,
    families.ZERO: _Zero,
}


class HF(Model):
    """A decoder of transformers, or the part of it that one pipeline stage holds.

    Attributes:
        hf: the model of transformers; without a head on stages that are not the last.
    """

    def __init__(self, cfg: config.Model) -> None:
        super().__init__()
        self.cfg = cfg
        self.hf: Any = build(read_config(cfg.directory))
        self.is_first = self.is_last = True
        self.longest = longest(self.hf.config)
        known = families.KNOWN.get(self.hf.config.model_type)
        for name in known.as_embedded if known is not None else ():
            self.hf.base_model.get_submodule(name).register_forward_hook(self._as_embedded)
        self.has_cache = known is not None and known.ends is not None  # of others nobody has looked what they keep
        self._takes_positions = "position_ids" in inspect.signature(self.hf.forward).parameters
        self.experts_per_token = getattr(self.hf.config, "num_experts_per_tok", None)
        self.ties = tuple(tuple(names) for _, names in aliases(self) if len(names) > 1)

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
        """Run the model as `Model` says.

        sample_ids are not used, because nothing is dropped; transformers counts places itself. Documents are read only
        with a cache: 0 is the text, anything else is padding on its left.
        """
        if cache is not None and places is not None:
            _, documents = cache.begin_forward(places, document_ids)
            rows = {}
            if documents is not None:
                rows["attention_mask"] = (documents == 0).long()
                if self._takes_positions:  # others count them by the mask
                    rows["position_ids"] = position_ids
            found = self.hf(input_ids=tokens, use_cache=True, past_key_values=cache.inner, **rows)
            cache.inner = found.past_key_values
            return found.logits
        inputs = {"input_ids": tokens} if self.is_first else {"inputs_embeds": hidden}
        if not self.is_last:
            return {"hidden": self.hf.base_model(**inputs, use_cache=False)[0]}
        logits = self.hf(**inputs, use_cache=False).logits
        if labels is None:
            return logits
        smoothing = self.cfg.label_smoothing if self.training else 0.0
        # Where a plan has cut or fused the head, these logits exist only if something other than this asks for them.
        logits = logits.view(-1, logits.shape[-1]).float()
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=smoothing)
        return {"lm": loss}

    def _as_embedded(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out.to(self.hf.get_input_embeddings().weight.dtype)

    def blocks(self) -> list[nn.Module]:
        return list(blocks_of(self.hf).children())

    def parts(self) -> dict[str, list[nn.Module]]:
        found = super().parts()
        known = families.KNOWN.get(self.hf.config.model_type)
        if known is None or known.ends is None:
            return found
        owner = self.hf.base_model.get_submodule(known.owner)
        for name in known.ends.last:
            module = getattr(owner, name, None)
            if module in found["embed"]:  # registered before the blocks, though it comes after them
                found["embed"].remove(module)
                found["head"].append(module)
        return found

    def attention_flops(self, piece: str) -> int:
        theirs = self.hf.config
        heads = getattr(theirs, "num_attention_heads", 0)
        if not heads:  # Mamba's scan is not counted
            return 0
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
        # Latent attention (DeepSeek's) has values of another length than its queries and keys.
        query_dim = getattr(theirs, "qk_head_dim", None) or head_dim
        value_dim = getattr(theirs, "v_head_dim", None) or head_dim
        return 3 * heads * (query_dim + value_dim) if piece.startswith("layers.") else 0

    def keep(self, pieces: Collection[str]) -> None:
        self.is_first = "embed" in pieces
        self.is_last = "head" in pieces
        self.has_cache = False  # transformers counts the tokens before by its first layer
        known = families.KNOWN[self.hf.config.model_type]
        assert known.ends is not None
        base = self.hf.base_model
        owner = base.get_submodule(known.owner)
        held = blocks_of(self.hf)
        for name in [name for name in held._modules if f"layers.{name}" not in pieces]:
            del held._modules[name]  # not `del held[i]`, which gives the others new names
        if kinds := getattr(base.config, "layer_types", None):
            # Some families look up the kind of their i-th layer here: of those they hold.
            base.config = copy.copy(base.config)
            base.config.layer_types = [kinds[int(name)] for name in held._modules]
        elsewhere = {} if self.is_first else dict(known.ends.first)
        elsewhere |= {} if self.is_last else known.ends.last
        for name, word in elsewhere.items():
            setattr(owner, name, STAND_INS[word]())
        if not self.is_first:
            for name, value in known.ends.later.items():
                setattr(owner, name, value)
        if not self.is_last:
            for name, module in list(self.hf.named_children()):
                if module is not base:
                    setattr(self.hf, name, None)

    def init_std(self, name: str) -> float | None:
        return self._drawn[name][1] or None

    def init_constant(self, name: str) -> float:
        return self._drawn[name][0]

    @functools.cached_property
    def _drawn(self) -> dict[str, tuple[float, float]]:
        return initial_values(self.cfg.directory)

    def full_name(self, name: str) -> str:
        return super().full_name(name).removeprefix("hf.")


def longest(theirs: Any) -> int | None:
    """The tokens of a sequence that a configuration allows; None: any number."""
    return next((getattr(theirs, key) for key in families.POSITION_KEYS if getattr(theirs, key, None)), None)


def blocks_of(hf: Any) -> nn.ModuleList:
    """The list of blocks: of a family whose ends are not known, the largest list there is."""
    known = families.KNOWN.get(hf.config.model_type)
    if known is not None and known.ends is not None:
        return hf.base_model.get_submodule(known.owner).get_submodule(known.stacks[known.owner])
    lists = [module for module in hf.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=nn.ModuleList())
