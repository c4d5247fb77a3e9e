"""A decoder of `transformers` under the house's contract: `[model] name = "hf"`, `path = DIR`.

The model is transformers' own, unmodified, and so are the names of its parameters. What a pipeline needs to know of a
family (what only its first and its last stage hold) stands in ENDS; all that tp needs, in families.py.

A line of ENDS is right for a family if its base model's forward does nothing but this: it calls what `first` names on
the tokens, makes masks and rotary tables of the hidden state's length, runs the list of blocks, and calls what `last`
names. Whatever else it does to the hidden state before the blocks is an attribute that `later` switches off.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega import config
from dtmega.formats.whole import aliases
from dtmega.hf.directory import build, initial_values, read_config
from dtmega.models.model import Model


class _Zero(nn.Module):
    """A stand-in for learned positions where these were added already."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())  # of no dim, so that it does not decide the dtype of a sum


@dataclass(frozen=True)
class Ends:
    """The parts of a base model that not every stage has.

    Attributes:
        layers: the list of blocks, a child of `owner`, whose forward runs them.
        first: children of `owner` that only the first stage has -> what stands there on others; None: nobody calls it.
        last: likewise of the last stage.
        later: attributes of `owner` -> their values on every stage but the first, of a forward that works on the hidden
            state before the blocks.
    """

    layers: str
    first: dict[str, type[nn.Module] | None]
    last: dict[str, type[nn.Module] | None]
    owner: str = ""
    later: dict[str, float] = field(default_factory=dict)


_LIKE_LLAMA = Ends("layers", {"embed_tokens": None}, {"norm": nn.Identity})
# The factor of Gemma's embeddings is in embed_tokens; which layers see a window, or have no rotation, in the layers and
# in layer_types, of which a stage keeps its own.
_ALIKE = (
    *("llama", "mistral", "qwen2", "qwen3", "arcee", "ernie4_5", "exaone4", "smollm3", "starcoder2"),
    *("gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3", "phi3", "cohere", "cohere2", "glm", "glm4"),
    *("mixtral", "olmoe", "qwen3_moe"),
)
ENDS = {
    **dict.fromkeys(_ALIKE, _LIKE_LLAMA),
    # Its base model multiplies whatever comes in, embeddings or a hidden state.
    "granite": replace(_LIKE_LLAMA, later={"embedding_multiplier": 1.0}),
    "phi": replace(_LIKE_LLAMA, last={"final_layernorm": nn.Identity}),
    "bloom": Ends("h", {"word_embeddings": None, "word_embeddings_layernorm": nn.Identity}, {"ln_f": nn.Identity}),
    "gpt2": Ends("h", {"wte": None, "wpe": _Zero}, {"ln_f": nn.Identity}),
    "gpt_neox": Ends("layers", {"embed_in": None}, {"final_layer_norm": nn.Identity}),
    "opt": Ends(
        "layers",
        {"embed_tokens": None, "embed_positions": _Zero, "project_in": None},
        {"final_layer_norm": None, "project_out": None},
        owner="decoder",
    ),
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
        self.longest = getattr(self.hf.config, "max_position_embeddings", None)
        self.experts_per_token = getattr(self.hf.config, "num_experts_per_tok", None)
        self.ties = tuple(tuple(names) for _, names in aliases(self) if len(names) > 1)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        sample_ids: Tensor | None = None,
        places: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Run the model as `Model` says.

        sample_ids are not used, because nothing is dropped; transformers counts places itself.
        """
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

    def blocks(self) -> list[nn.Module]:
        return list(blocks_of(self.hf).children())

    def parts(self) -> dict[str, list[nn.Module]]:
        found = super().parts()
        ends = ENDS.get(self.hf.config.model_type)
        owner = self.hf.base_model.get_submodule(ends.owner) if ends else None
        for name in ends.last if ends else ():
            module = getattr(owner, name, None)
            if module in found["embed"]:  # registered before the blocks, though it comes after them
                found["embed"].remove(module)
                found["head"].append(module)
        return found

    def attention_flops(self, piece: str) -> int:
        theirs = self.hf.config
        heads = theirs.num_attention_heads
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
        # Latent attention (DeepSeek's) has values of another length than its queries and keys.
        query_dim = getattr(theirs, "qk_head_dim", None) or head_dim
        value_dim = getattr(theirs, "v_head_dim", None) or head_dim
        return 3 * heads * (query_dim + value_dim) if piece.startswith("layers.") else 0

    def keep(self, pieces: Collection[str]) -> None:
        self.is_first = "embed" in pieces
        self.is_last = "head" in pieces
        base, ends = self.hf.base_model, ENDS[self.hf.config.model_type]
        owner = base.get_submodule(ends.owner)
        held = blocks_of(self.hf)
        for name in [name for name in held._modules if f"layers.{name}" not in pieces]:
            del held._modules[name]  # not `del held[i]`, which gives the others new names
        if kinds := getattr(base.config, "layer_types", None):
            # Some families look up the kind of their i-th layer here: of those they hold.
            base.config = copy.copy(base.config)
            base.config.layer_types = [kinds[int(name)] for name in held._modules]
        for there, replacements in ((self.is_first, ends.first), (self.is_last, ends.last)):
            for name, other in () if there else replacements.items():
                setattr(owner, name, other and other())
        for name, value in () if self.is_first else ends.later.items():
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


def blocks_of(hf: Any) -> nn.ModuleList:
    """The list of blocks: of a family that is not in ENDS, the largest list there is."""
    if ends := ENDS.get(hf.config.model_type):
        return hf.base_model.get_submodule(ends.owner).get_submodule(ends.layers)
    lists = [module for module in hf.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=nn.ModuleList())
