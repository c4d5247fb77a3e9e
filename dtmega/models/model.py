"""The base class of all models: the interface that the trainer, the plans and the pipeline use."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dtmega import rooms

if TYPE_CHECKING:
    from dtmega.ops.context_parallel import ContextParallel

CONTAINERS = nn.ModuleDict, nn.ModuleList
Per = Literal["token", "label", "decoder", "sequence"]
Fused = tuple[int, tuple[int, ...]]  # matrices that lie side by side in a weight: the dim, and sizes (`muon.Cut`)


class Model(nn.Module):
    """A whole model, or one pipeline stage of a model. Every model that dtmega trains is a subclass.

    A model is called as `model(**tensors of a microbatch, **tensors from the previous stage)` and returns tensors keyed
    by name: tensors for the next stage (listed by the family's `boundary`), and sums over the microbatch as fp32
    scalars (listed by the family's objective). Without labels the last stage returns predictions instead of a loss; a
    language model's predictions are the logits [B, S, V].

    A stage runs the modules that it holds, so a stack may begin on any stage, and any stage may return a sum. If the
    boundary lists a tensor that a stage receives but does not return, the tensor is passed to the next stage unchanged.

    `places` are the tokens' positions in their whole samples. The batch contains the positions, because a cp rank may
    hold any part of a sequence, and a model cannot compute the positions itself. If the caller passes no `places` (for
    example, in a notebook), the tokens are treated as a whole sequence that starts at position 0.

    Attributes:
        cfg: [model] section of the configuration.
        layers: index of a block -> block, for a model with a single stack.
        ties: groups of parameter names in the whole model. All names in a group share one parameter, and checkpoints
            use the first name.
        longest: length of the longest sequence that the model supports; None for no limit.
        runs_layers: whether the model calls `run_layers` for all layers of a stack. Recomputing several layers as
            a unit needs `run_layers`.
        has_cache: whether forward takes a `cache`, so that generation computes each token once.
        experts_per_token: number of experts that each token uses, for models that stack the experts' weights as
            [experts, rows, columns]; None for all other models.
        works_per: name of a module that does not run on every token -> unit of the module's work. Such a module runs
            once per labelled token, per decoder token, or per sequence. An entry also applies to all nested modules,
            and later entries override earlier entries.
        lengths: keys of [data] that hold the lengths of the model's sequences.
        both_ways: keys of [data] that hold the lengths of sequences with attention in both directions.
        decoder_rows: names of the batch's tensors that have the length of the decoder's sequence.
        context: cp ranks over which the current batch's sequences are split; None if this rank has whole sequences.
        decoder_begins: name of the decoder's first pipeline piece; '' for models without an encoder and a decoder.
        outputs: names of the weights that compute predictions from the last hidden state.
        one_backward: reason why a pipeline cannot run backward for inputs and for weights separately; '' if it can.
        read_by_layers: names of the parameters that all layers of a stack read, although no layer contains them.
        layers_apart: whether each layer reads the parameters of `read_by_layers` in a separate call, so that the
            gradients of these parameters can be taken layer by layer ([run] exact).
    """

    cfg: Any
    layers: nn.ModuleDict
    ties: tuple[tuple[str, ...], ...] = ()
    longest: int | None = None
    runs_layers: bool = False
    has_cache: bool = False
    experts_per_token: int | None = None
    works_per: Mapping[str, Per] = MappingProxyType({})
    lengths: tuple[str, ...] = ("seq_len",)
    both_ways: frozenset[str] = frozenset()
    decoder_rows: frozenset[str] = frozenset()
    context: ContextParallel | None = None
    decoder_begins: str = ""
    outputs: Collection[str] = ("head.weight",)
    one_backward: str = ""
    read_by_layers: tuple[str, ...] = ()
    layers_apart: bool = False

    def __call__(self, tokens: Tensor, *args: Any, places: Tensor | None = None, **kwargs: Any) -> Any:
        if places is None:
            places = consecutive(tokens)
        return super().__call__(tokens, *args, places=places, **kwargs)

    def part_of(self, rows: Mapping[str, Tensor], context: ContextParallel) -> dict[str, Tensor]:
        """This cp rank's part of each sequence in a batch, including the tokens' positions (`places`)."""
        whole = {"places": consecutive(rows["tokens"]), **rows}
        if "decoder_tokens" in rows:
            whole.setdefault("decoder_places", consecutive(rows["decoder_tokens"]))
        parts: dict[str, Tensor] = {}
        for name, row in whole.items():
            length = "decoder_seq_len" if name in self.decoder_rows else "seq_len"
            # A tensor [B] has one number per sample, and every rank needs all of these numbers.
            parts[name] = row if row.ndim < 2 else context.slice(row, balanced=length not in self.both_ways)
        return parts

    def stored_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that checkpoints store, with their names. Training does not change these buffers."""
        for prefix, module in self.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    yield name, buffer

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that checkpoints store, with their names: the parameters, then the stored buffers."""
        yield from self.named_parameters()
        yield from self.stored_buffers()

    def blocks(self) -> list[nn.Module]:
        """This stage's layers, in order. Each layer is recomputed, compiled and wrapped by FSDP separately."""
        return list(self.layers.values())

    def experts(self) -> list[nn.Module]:
        """The modules whose parameters, [experts, ...], can be divided over ep."""
        return []

    def may_fuse(self, labels: Tensor | None, attention_dropout: float = 0.0) -> bool:
        """Return True if attention may use a fused kernel in this forward pass.

        A fused kernel is compiled again for each length and does not support keyed dropout masks. Forward passes
        without labels mostly generate text, where each new token changes the length. A fused kernel is therefore used
        only in passes with labels and without attention dropout.
        """
        drops = self.training and attention_dropout > 0
        return labels is not None and not drops

    def run_layers(self, layers: Sequence[nn.Module], hidden: Tensor, *shared: Any) -> Tensor:
        """Apply the layers to `hidden`, one after the other. Every layer also gets the `shared` arguments.

        A model calls this method once for all layers of a stack, so that `recompute.py` can recompute several layers as
        a unit.
        """
        for layer in layers:
            hidden = layer(hidden, *shared)
        return hidden

    def parts(self) -> dict[str, list[nn.Module]]:
        """Map each pipeline piece's name to the piece's modules, including nested ones, in the pipeline's order.

        By default, modules registered before the blocks belong to the embedding, and modules registered after the
        blocks belong to the head.
        """
        blocks = self.blocks()
        layer_of: dict[nn.Module, str] = {}
        for i, block in enumerate(blocks):
            layer_of |= dict.fromkeys(block.modules(), f"layers.{i}")
        names = ["embed", *(f"layers.{i}" for i in range(len(blocks))), "head"]
        modules_of: dict[str, list[nn.Module]] = {name: [] for name in names}
        end = "embed"
        for module in self.modules():
            if module in layer_of:
                end = "head"
                modules_of[layer_of[module]].append(module)
            else:
                modules_of[end].append(module)
        return modules_of

    def attention_flops(self, piece: str) -> int:
        """The attention FLOPs of a causal decoder's named pipeline piece, counted as in `Piece.attention_flops`."""
        return 6 * self.cfg.n_heads * self.cfg.head_dim if piece.startswith("layers.") else 0

    def attention_window(self, piece: str) -> int:
        """The attention window of the named pipeline piece (`Piece.window`); 0, the default, for no window."""
        return 0

    def decoder_attention_flops(self, piece: str) -> tuple[int, int]:
        """FLOPs of the decoder's self- and cross-attention in the named pipeline piece (see `Piece`); by default 0."""
        return 0, 0

    def handed_on(self, after: str) -> Mapping[str, str]:
        """Map each tensor [B, length, D] that a stage sends to the next stage to the [data] key of the tensor's length.

        Args:
            after: name of the stage's last pipeline piece.
        """
        return {"hidden": "seq_len"}

    def keep(self, pieces: Collection[str]) -> None:
        """Delete all modules that do not belong to the given pipeline pieces. Call this on a meta copy of the model.

        A deleted layer disappears from its ModuleDict, and any other deleted module becomes None. The remaining modules
        keep their names.
        """
        parts = self.parts()
        needed = set[nn.Module]()
        for piece in pieces:
            needed.update(parts[piece])
        _keep(self, needed)

    def expect(self, factors: Mapping[str, float]) -> None:
        """Tell each head the gradient that backward will pass to the head's summed loss.

        Call this method before each forward pass in training. A head computes its gradient during the forward pass. In
        float16, the head must multiply the gradient by the sum's factor before rounding; otherwise, small gradients
        would become 0.

        Args:
            factors: name of each loss -> gradient of its sum (loss scale x weight / count).
        """
        for module in self.modules():
            if hasattr(module, "expected"):
                module.expected = factors[module.loss_name]  # pyright: ignore[reportArgumentType,reportIndexIssue]

    def compile_losses(self) -> None:
        """Make all heads that compute token losses use compiled kernels. Call this method if blocks are compiled."""
        for module in self.modules():
            if hasattr(module, "passes"):
                module.passes = rooms.compiled_softmax().CompiledPasses  # pyright: ignore[reportArgumentType]

    def move_buffers(self, device: torch.device) -> None:
        """Move the buffers to the compute device, to which FSDP with CPU offload moves only parameters."""
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    def tie(self) -> None:
        """Make tied names share one parameter. Call this method again after parameters are replaced (`to_empty`).

        On a pipeline stage, only the tied names that the stage holds share one parameter; `pipelining/tied.py` ties the
        parameters of different stages.
        """
        here = dict(self.named_parameters(remove_duplicate=False))
        for names in self.ties:
            names_here = [name for name in names if name in here]
            for name in names_here[1:]:
                owner, _, attribute = name.rpartition(".")
                self.get_submodule(owner).register_parameter(attribute, self.get_parameter(names_here[0]))

    def init_std(self, name: str) -> float | None:
        """The standard deviation for the parameter with this full name; None if `init_constant` fills the parameter."""
        if name.endswith("bias") or "norm" in name:
            return None
        # The 2 L weights with these names write to the residual stream. Dividing the weights' std by sqrt(2 L) makes
        # the variance of the sum independent of the depth (GPT-2; Megatron's `scaled_init_method_normal`).
        if name.endswith(("attn.out.weight", "mlp.down.weight")):
            return self.cfg.init_std / math.sqrt(2 * self.cfg.n_layers)
        return self.cfg.init_std

    def init_constant(self, name: str) -> float:
        """The initial value of a parameter without an `init_std`: 0 for biases, 1 for norm weights."""
        return 1.0 if name.endswith("weight") else 0.0

    def unseen(self) -> dict[str, Tensor]:
        """Masks of elements that affect no output: parameter name -> mask, bool in the whole parameter's shape.

        The bias of unrotated keys adds the same number to all scores of a query, and softmax cancels this number. The
        gradient of the bias is therefore 0, but computing the gradient leaves rounding noise, which Adam would turn
        into full steps. Training therefore sets the gradient to 0, and the bias keeps its initial value. The models
        have this bias only because other programs' checkpoints contain the bias.

        A module with unseen elements has a method `unseen` that returns the masks under the module's parameter names.
        """
        masks = {}
        for prefix, module in self.named_modules():
            if module is not self and hasattr(module, "unseen"):
                masks |= {f"{prefix}.{name}": mask for name, mask in module.unseen().items()}  # pyright: ignore
        return masks

    def matrices(self) -> dict[str, Fused]:
        """The weights that Muon trains in a whole model: all trained matrices except embeddings and `outputs`.

        A module whose weight consists of several matrices has a method `fused` that describes them.

        Raises:
            ValueError: a trained weight has more than two dims.
        """
        fused: dict[str, Fused] = {}
        left_out = set[int]()
        for prefix, module in self.named_modules():
            if module is not self and hasattr(module, "fused"):
                fused |= {f"{prefix}.{name}": cut for name, cut in module.fused().items()}  # pyright: ignore
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if isinstance(module, nn.Embedding) or name in self.outputs:
                    left_out.add(id(parameter))
        matrices: dict[str, Fused] = {}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and parameter.ndim > 2:
                raise ValueError(
                    f"name='muon' trains matrices, but '{name}' is {list(parameter.shape)}: expected 2 dims, or "
                    f"another optimizer ([optim] name)"
                )
            if parameter.requires_grad and parameter.ndim == 2 and id(parameter) not in left_out:
                matrices[self.full_name(name)] = fused.get(name, (0, ()))
        return matrices

    def counts_of_step(self) -> Tensor | None:
        """Return what the model has counted since the last `after_step` (such as experts' loads); None for no counts.

        The tensor has the shape of the whole model's counts, but covers only this rank's tokens. The sum over all ranks
        and stages covers the global batch.
        """
        return None

    def after_step(self, counts: Tensor, skipped: bool) -> None:
        """Update the model's state from a step's counts over the global batch, and reset the counts of this rank.

        Args:
            counts: sum of all ranks' `counts_of_step`.
            skipped: whether the step was skipped, so that no weight has changed.
        """

    def init_buffers(self, seed: int) -> None:
        """Set the values of all buffers; needed after `to_empty`, which leaves buffers undefined."""

    def full_name(self, name: str) -> str:
        """A parameter's name in checkpoints: its name in the whole model, or the first name of its tied group."""
        return next((names[0] for names in self.ties if name in names), name)


def consecutive(tokens: Tensor) -> Tensor:
    """The positions [B, S] of tokens [B, S] if each row is a whole sequence: 0, 1, ..., S - 1."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])


def _keep(owner: nn.Module, needed: Collection[nn.Module]) -> None:
    """Delete all modules inside `owner` that hold no needed module. Keep containers, even if they are empty."""
    for name, module in list(owner.named_children()):
        if isinstance(module, CONTAINERS) or any(inside in needed for inside in module.modules()):
            _keep(module, needed)
        elif isinstance(owner, CONTAINERS):
            # `del owner[i]` would renumber the other items of a ModuleList and thus change their parameters' names.
            del owner._modules[name]
        else:
            setattr(owner, name, None)
