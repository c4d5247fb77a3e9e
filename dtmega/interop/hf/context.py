"""Attention for `transformers` models when each sequence is sharded over the cp ranks ([mesh] cp).

transformers looks up two functions by the name in `config._attn_implementation`. The mask function makes the attention
mask for a forward pass, and the attention function computes attention in each layer. `switch` changes the name, so that
transformers finds the functions of this module:

    _mask         makes the attention rules of the current tokens, once per forward    {window: rule}
    _attention    receives these rules as `attention_mask`, and picks the rule for the layer's window

The rules reach each layer as an argument, so a recomputed layer gets the rules of its own forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from dtmega.ops.attention import attention
from dtmega.ops.attention_rule import AttentionRule, attention_rule

if TYPE_CHECKING:
    from dtmega.ops.context_parallel import ContextParallel

NAME = "dtmega_over_cp"
# Keyword arguments that attention ignores: the rules already hold the tokens' positions, and nothing is cached.
WITHOUT_EFFECT = frozenset({"position_ids", "cache_position", "use_cache", "cu_seq_lens_q", "cu_seq_lens_k"})
Rules: TypeAlias = dict[int, AttentionRule]


class Tokens:
    """The positions and documents of this rank's tokens in the current forward.

    Args:
        places: each token's position in its sequence, [B, S / cp].
        document_ids: document index of each token, [B, S / cp]; None if each sequence is one document.
        context: the cp ranks, over which the sequences are sharded.
        fused: value that `attention_rule` receives as its argument `fused`.
    """

    def __init__(self, places: Tensor, document_ids: Tensor | None, context: ContextParallel, fused: bool) -> None:
        self._places, self._document_ids, self._context, self._fused = places, document_ids, context, fused
        self._rules: Rules = {}

    def rules(self, windows: set[int]) -> Rules:
        """The tokens' attention rules, keyed by window; 0 means no window."""
        for window in sorted(windows - self._rules.keys()):
            self._rules[window] = attention_rule(
                self._places,
                causal=True,
                window=window,
                document_ids=self._document_ids,
                fused=self._fused,
                context=self._context,
            )
        return {window: self._rules[window] for window in windows}


_AT_HAND: ContextVar[Tokens | None] = ContextVar("tokens at hand", default=None)


@contextlib.contextmanager
def at_hand(
    places: Tensor | None, document_ids: Tensor | None, context: ContextParallel, fused: bool
) -> Iterator[None]:
    """Give models called in the `with` block the tokens' positions and documents."""
    assert places is not None
    token = _AT_HAND.set(Tokens(places, document_ids, context, fused))
    try:
        yield
    finally:
        _AT_HAND.reset(token)


def switch(model: nn.Module, own: Mapping[int, str] | None = None) -> dict[int, str]:
    """Switch a transformers model to the attention functions of this module, or back to the model's own.

    Args:
        model: the model, whole or one pipeline stage.
        own: result of the earlier call that this call undoes; None if the model switches to this module's functions.

    Returns:
        The previous attention implementation of each config in the model, keyed by the config's `id`.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    before: dict[int, str] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and id(config) not in before:
            before[id(config)] = config._attn_implementation
            config._attn_implementation = NAME if own is None else own[id(config)]
    return before


def windows_of(config: Any) -> set[int]:
    """The attention windows of a model's layers; 0 means no window."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    return {window if kind == "sliding_attention" else 0 for kind in kinds} if kinds else {window}


def _mask(config: Any, use_vmap: bool = False, **_: Any) -> Rules:
    """Return the attention rules of the tokens set by `at_hand`. transformers calls this function to make a mask."""
    tokens = _AT_HAND.get()
    assert tokens is not None, "called outside of `at_hand`"
    # transformers sets `use_vmap` if the model combines the causal mask with a mask of its own.
    if use_vmap:
        raise ValueError(f"'{config.model_type}' has a mask of its own, which ranks that share sequences do not know")
    return tokens.rules(windows_of(config))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Rules,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention for this rank's tokens. transformers calls this function in each layer.

    Raises:
        ValueError: an argument would change the results in a way that the attention rules do not express.
    """
    name = type(module).__name__
    _check(module, name, query, value, dropout, others)
    rule = attention_mask.get(sliding_window or 0)
    if rule is None:
        raise ValueError(
            f"{name} has sliding_window={sliding_window}, but the windows in its config are {sorted(attention_mask)}, "
            f"where 0 means none"
        )
    out = attention(query, key, value, rule, scale=scaling, softcap=softcap)
    return out.transpose(1, 2).contiguous(), None


def _check(
    module: nn.Module, name: str, query: Tensor, value: Tensor, dropout: float, others: Mapping[str, Any]
) -> None:
    """Raise an error if an argument asks for attention that the attention rules cannot express.

    Raises:
        ValueError: an argument asks for such attention; the message names the argument.
    """
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"{name} attends both ways: expected is_causal=True, got False")
    if dropout:
        raise ValueError(f"{name} drops attention probabilities: expected dropout=0, got {dropout}")
    if query.shape[-1] != value.shape[-1]:
        raise ValueError(
            f"{name} has heads of another size for values: expected {query.shape[-1]} as for queries, got "
            f"{value.shape[-1]}"
        )
    for keyword, given in others.items():
        # False only switches off a feature, such as `output_attentions`.
        if keyword != "is_causal" and keyword not in WITHOUT_EFFECT and given is not None and given is not False:
            raise ValueError(
                f"{name} passes '{keyword}' to its attention, which is unknown where ranks share sequences: expected "
                f"None, got {type(given).__name__}"
            )
