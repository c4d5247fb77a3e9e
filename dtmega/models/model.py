"""The contract between a model and the rest of the house: whole, or the part of it that one pipeline stage holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

CONTAINERS = nn.ModuleDict, nn.ModuleList
Per = Literal["token", "label", "decoder", "sequence"]


class Model(nn.Module):
    """A model that can be cut into stages; a new model of the house is one of these.

    It is called as model(**rows of a microbatch, **what the stage before hands on) and returns tensors by name: what it
    hands on to the next stage (the family's `boundary`) and its sums over the microbatch (those of the family's
    objective), fp32 scalars, as far as this stage has any. Without labels the last stage returns what there is instead
    of a loss, of a language model the logits [B, S, V]. A stage does what the modules that it holds are for: a stack
    may begin on any stage, and a sum may be on any. What a stage is given and does not return is handed on as it came,
    if the boundary has it.

    Places are the global index of each token in its sample. They come with the batch, and no model counts for itself:
    its tokens may be any part of a sequence. Without them, as in a notebook, the tokens are a whole sequence, from 0.

    Attributes:
        cfg: its [model] section, of its family.
        layers: its blocks by number, of a model with one stack.
        ties: all names of each parameter that has several in the whole model; the first is its name in checkpoints.
        longest: sequence it has positions for; None: any.
        runs_layers: it runs its layers by `run_layers`, those of each stack together.
        has_past: its forward takes a `past`, so that a token is computed once where one after the other is made.
        experts_per_token: of those that a weight [experts, rows, columns] stacks; None: no weight is one.
        works_per: names of modules that do not work on every token, and with all inside of them once for each token
            that has a label, for each of a decoder's, or once for a sequence; of several names the last one counts.
        lengths: keys of [data] with the lengths of its sequences.
        decoder_begins: the piece with which a decoder behind an encoder begins; '' where there is none.
        one_backward: why its backward cannot run in two parts; '' where it can.
    """

    cfg: Any
    layers: nn.ModuleDict
    ties: tuple[tuple[str, ...], ...] = ()
    longest: int | None = None
    runs_layers: bool = False
    has_past: bool = False
    experts_per_token: int | None = None
    works_per: Mapping[str, Per] = MappingProxyType({})
    lengths: tuple[str, ...] = ("seq_len",)
    decoder_begins: str = ""
    one_backward: str = ""

    def __call__(self, tokens: Tensor, *args: Any, places: Tensor | None = None, **kwargs: Any) -> Any:
        if places is None:
            places = consecutive(tokens)
        return super().__call__(tokens, *args, places=places, **kwargs)

    def stored_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that a checkpoint has, by name: numbers that are given, and that training does not change."""
        for prefix, module in self.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    yield name, buffer

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a checkpoint has, by name: parameters, and then stored buffers."""
        yield from self.named_parameters()
        yield from self.stored_buffers()

    def blocks(self) -> list[nn.Module]:
        """The layers held here, in order: what is recomputed, compiled and wrapped by FSDP one by one."""
        return list(self.layers.values())

    def run_layers(self, layers: Sequence[nn.Module], hidden: Tensor, *shared: Any) -> Tensor:
        """Run hidden through these layers, one after the other; all are given the same beside it.

        A model calls it for all layers of a stack, so that several of them can be recomputed as a unit.
        """
        for layer in layers:
            hidden = layer(hidden, *shared)
        return hidden

    def parts(self) -> dict[str, list[nn.Module]]:
        """The pieces of a whole model, in the pipeline's order -> all modules in each, single ones and nested.

        By default what is registered before the blocks is the embedding, and what comes after them the head.
        """
        blocks = self.blocks()
        number = {module: i for i, block in enumerate(blocks) for module in block.modules()}
        found: dict[str, list[nn.Module]] = {"embed": [], **{f"layers.{i}": [] for i in range(len(blocks))}, "head": []}
        end = "embed"
        for module in self.modules():
            if module in number:
                end = "head"
                found[f"layers.{number[module]}"].append(module)
            else:
                found[end].append(module)
        return found

    def attention_flops(self, piece: str) -> int:
        """`Piece.attention_flops` of the piece of that name: of a causal decoder, whose heads make up D."""
        return 6 * self.cfg.hidden_size if piece.startswith("layers.") else 0

    def decoder_attention_flops(self, piece: str) -> tuple[int, int]:
        """`Piece.decoder_attention_flops` and `cross_attention_flops` of the piece of that name: of no decoder."""
        return 0, 0

    def handed_on(self, after: str) -> Mapping[str, str]:
        """The tensors [B, length, D] that a stage whose last piece is `after` hands on: name -> key of their length."""
        return {"hidden": "seq_len"}

    def keep(self, pieces: Collection[str]) -> None:
        """Delete from a (copied, meta) whole model what none of these pieces needs. The names of what stays stay.

        A layer is gone from its ModuleDict, any other module is None.
        """
        parts = self.parts()
        _keep(self, {module for piece in pieces for module in parts[piece]})

    def expect(self, factors: Mapping[str, float]) -> None:
        """Tell the heads, before a forward in training, with which factor backward will begin at each sum, by name.

        A head that computes its gradient in forward has the factor in it before it rounds: float16 needs that.
        """
        for module in self.modules():
            if hasattr(module, "expected"):
                module.expected = factors[module.loss_name]  # pyright: ignore[reportArgumentType,reportIndexIssue]

    def compile_losses(self) -> None:
        """Let the heads that compute a loss by tokens do it in compiled kernels, as the blocks are compiled."""
        for module in self.modules():
            if isinstance(getattr(module, "compiled", None), bool):
                module.compiled = True  # pyright: ignore[reportArgumentType]

    def tie(self) -> None:
        """Give the names of a tie that are here one parameter; again after anything that replaces parameters."""
        here = dict(self.named_parameters(remove_duplicate=False))
        for names in self.ties:
            found = [name for name in names if name in here]
            for name in found[1:]:
                owner, _, attribute = name.rpartition(".")
                self.get_submodule(owner).register_parameter(attribute, self.get_parameter(found[0]))

    def init_std(self, name: str) -> float | None:
        """std of N(0, std) for the parameter of that full name; None for those that start with `init_constant`.

        By default what writes to the residual is scaled down by sqrt(2 L) (GPT-2; Megatron's
        `scaled_init_method_normal`).
        """
        if name.endswith("bias") or "norm" in name:
            return None
        if name.endswith(("attn.out.weight", "mlp.down.weight")):
            return self.cfg.init_std / math.sqrt(2 * self.cfg.n_layers)
        return self.cfg.init_std

    def init_constant(self, name: str) -> float:
        """The initial value of a parameter without an `init_std`: 0 for biases, 1 for weights of norms."""
        return 1.0 if name.endswith("weight") else 0.0

    def unseen(self) -> dict[str, Tensor]:
        """Mark what no output depends on, by name here: a bool tensor in the shape of each whole parameter.

        A bias of keys that are not rotated adds one number to all scores of a query, which its softmax does not see.
        Its gradient is 0, but comes out as rounding, of which Adam would make full steps: training counts it as 0. Such
        a bias is there because other programs have it, and keeps the value that it begins with.

        A module that has such parameters says so by a method of this name.
        """
        found = {}
        for prefix, module in self.named_modules():
            if module is not self and hasattr(module, "unseen"):
                found |= {f"{prefix}.{name}": marked for name, marked in module.unseen().items()}  # pyright: ignore
        return found

    def init_buffers(self, seed: int) -> None:
        """Set the values of everything that is not a parameter; needed after `to_empty`."""

    def full_name(self, name: str) -> str:
        """The name in checkpoints, that of the whole model, of a parameter here; tied ones have one name."""
        return next((names[0] for names in self.ties if name in names), name)


def consecutive(tokens: Tensor) -> Tensor:
    """The places [B, S] of tokens [B, S] that are all of a sequence."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])


def _keep(owner: nn.Module, needed: Collection[nn.Module]) -> None:
    for name, module in list(owner.named_children()):
        if isinstance(module, CONTAINERS) or any(inside in needed for inside in module.modules()):
            _keep(module, needed)
        elif isinstance(owner, CONTAINERS):
            del owner._modules[name]  # not `del owner[i]`, which gives the others of a list new names
        else:
            setattr(owner, name, None)
