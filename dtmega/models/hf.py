"""A decoder of `transformers` under the house's contract: `[model] name = "hf"`, `path = DIR`.

The model is transformers' own, unmodified, and so are the names of its parameters. What a pipeline needs to know of a
family (what only its first and its last stage hold) stands in ENDS; all that tp needs, in `plans/hf`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega import config
from dtmega.models.hf_draws import draws_of
from dtmega.models.stage import Stage

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
# [model] keys that config.json decides, and those that a model of transformers does not have.
SIZES = ("vocab_size", "hidden_size", "n_layers", "n_heads", "ffn_hidden_size", "elements", "digest")
FOREIGN = ("pad_vocab_to_multiple", "hidden_dropout", "attention_dropout", "layer_norm_eps", "init_std", "z_loss")
FOREIGN += ("apply_residual_connection_post_layernorm",)
FEED_FORWARD = ("intermediate_size", "ffn_dim", "n_inner")
IDLE = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "_name_or_path")


class _Zero(nn.Module):
    """In place of learned positions where these were added already."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())  # of no dim, so that it does not decide the dtype of a sum


@dataclass(frozen=True)
class Ends:
    """What of a base model is not of every stage.

    Attributes:
        layers: the list of blocks, a child of `owner`, whose forward runs them.
        first: children of `owner` that only the first stage has -> what stands there on others; None: nobody calls it.
        last: likewise of the last stage.
    """

    layers: str
    first: dict[str, type[nn.Module] | None]
    last: dict[str, type[nn.Module] | None]
    owner: str = ""


ENDS = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3"), Ends("layers", {"embed_tokens": None}, {"norm": nn.Identity})
    ),
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


class HF(Stage):
    """Attributes:
    hf: the model of transformers; without a head on stages that are not the last.
    """

    def __init__(self, cfg: config.Model) -> None:
        super().__init__()
        self.cfg = cfg
        self.hf: Any = _build(_config(cfg.path))
        self.is_first = self.is_last = True
        self.longest = getattr(self.hf.config, "max_position_embeddings", None)
        embedding, head = self.hf.get_input_embeddings(), self.hf.get_output_embeddings()
        names = {id(module): name for name, module in self.named_modules()}
        if head is not None and embedding.weight is head.weight:
            self.tied = f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight"

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        sample_ids: Tensor | None = None,
    ) -> Tensor:
        """See `Stage`; sample_ids are not used, because nothing is dropped."""
        inputs = {"input_ids" if self.is_first else "inputs_embeds": tokens, "use_cache": False}
        if not self.is_last:
            return self.hf.base_model(**inputs)[0]
        logits = self.hf(**inputs).logits
        if labels is None:
            return logits
        smoothing = self.cfg.label_smoothing if self.training else 0.0
        # Where a plan has cut or fused the head, these logits exist only if something other than this asks for them.
        logits = logits.view(-1, logits.shape[-1]).float()
        return F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=smoothing)

    def blocks(self) -> list[nn.Module]:
        return list(_blocks(self.hf).children())

    def keep(self, layers: Sequence[int], is_first: bool, is_last: bool) -> None:
        self.is_first, self.is_last = is_first, is_last
        base, ends = self.hf.base_model, ENDS[self.hf.config.model_type]
        owner = base.get_submodule(ends.owner)
        held = _blocks(self.hf)
        for name in [name for name in held._modules if int(name) not in layers]:
            del held._modules[name]  # not `del held[i]`, which gives the others new names
        if kinds := getattr(base.config, "layer_types", None):
            # Some families look up the kind of their i-th layer here: of those they hold.
            base.config = copy.copy(base.config)
            base.config.layer_types = [kinds[i] for i in sorted(layers)]
        for there, replacements in ((is_first, ends.first), (is_last, ends.last)):
            for name, other in () if there else replacements.items():
                setattr(owner, name, other and other())
        if not is_last:
            for name, module in list(self.hf.named_children()):
                if module is not base:
                    setattr(self.hf, name, None)

    def init_std(self, name: str) -> float | None:
        return self._drawn[name][1] or None

    def init_constant(self, name: str) -> float:
        return self._drawn[name][0]

    @functools.cached_property
    def _drawn(self) -> dict[str, tuple[float, float]]:
        return initial_values(self.cfg.path)

    def full_name(self, name: str) -> str:
        return super().full_name(name).removeprefix("hf.")


def _blocks(hf: Any) -> nn.ModuleList:
    """The list of blocks: of a family that is not in ENDS, the largest list there is."""
    if ends := ENDS.get(hf.config.model_type):
        return hf.base_model.get_submodule(ends.owner).get_submodule(ends.layers)
    lists = [module for module in hf.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=nn.ModuleList())


def initial_values(path: str) -> dict[str, tuple[float, float]]:
    """(mean, std) of each parameter's normal distribution, as the family draws it.

    Raises:
        ValueError: it draws one in another way.
    """
    with torch.device("meta"):
        found = draws_of(_build(_config(path)))
    for name, drawn in found.items():
        if drawn is None:
            raise ValueError(
                f"'{name}' of {path} has initial values that the trainer does not know how to draw: start with weights "
                f"([model] path, [model] init_from)"
            )
    return {name: drawn for name, drawn in found.items() if drawn is not None}


def resolve(cfg: config.Config) -> config.Config:
    """The configuration with sizes and tokenizer that the directory of [model] path has.

    Raises:
        ValueError: no such directory, not a causal language model, code of its own, a size that config.json
            contradicts, what a model of transformers does not have or the trainer cannot give it.
    """
    theirs = _config(cfg.model.path)
    try:
        values = sizes(cfg.model)
    except ValueError:
        raise
    except Exception as error:  # of a family's own code, or what is no plain decoder has not
        raise ValueError(
            f"{cfg.model.path}/config.json makes no decoder of '{theirs.model_type}' that the trainer can train: "
            f"{type(error).__name__}: {error} ([model] path)"
        ) from None
    defaults = config.Model()
    for key in FOREIGN:
        if getattr(cfg.model, key) != getattr(defaults, key):
            raise ValueError(
                f"[model] {key}={getattr(cfg.model, key)} is not for name = 'hf': config.json of {cfg.model.path} "
                f"decides, and dropout is off; expected {getattr(defaults, key)}"
            )
    for key in SIZES:
        if key in cfg.model.model_fields_set and getattr(cfg.model, key) != values[key]:
            raise ValueError(
                f"[model] {key}={getattr(cfg.model, key)}, but by {cfg.model.path}/config.json it is {values[key]}; "
                f"leave it out ([model] {key})"
            )
    longest = getattr(theirs, "max_position_embeddings", None)
    if longest and cfg.data.seq_len > longest:
        raise ValueError(
            f"seq_len={cfg.data.seq_len} is more than the max_position_embeddings={longest} of {cfg.model.path} "
            f"([data] seq_len)"
        )
    for key in ("reset_position_ids", "reset_attention_mask"):
        if getattr(cfg.data, key):
            raise ValueError(f"[data] {key} is not for name = 'hf': the model computes positions and masks itself")
    changed: dict[str, config.Section] = {"model": cfg.model.model_copy(update=values)}
    if "tokenizer" not in cfg.data.model_fields_set:
        tokenizer = Path(cfg.model.path, "tokenizer.json")
        if not tokenizer.is_file():
            raise ValueError(
                f"{cfg.model.path} has no tokenizer.json: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) may "
                f"make one, [data] tokenizer names another"
            )
        changed["data"] = cfg.data.model_copy(update={"tokenizer": str(tokenizer)})
    return cfg.model_copy(update=changed)


def has_weights(path: str) -> bool:
    """Without them a run starts with random values. Pickles count: they must not be taken for nothing."""
    return any(True for pattern in WEIGHTS for _ in Path(path).glob(pattern))


def notes(model: config.Model) -> list[str]:
    """What the trainer does otherwise than config.json says, or the user might not know."""
    drops = [f"{key}={p}" for key, p in _drops(_config(model.path)).items() if p > 0]
    found = [f"{model.path}: without its dropout ({', '.join(drops)})"] if drops else []
    if not model.init_from and not has_weights(model.path):
        found.append(f"{model.path} has no weights: initial values are drawn from [run] seed")
    return found


def _config(path: str) -> Any:
    """Raises:
    ValueError: transformers is missing, no directory with config.json, or not of a causal language model of its own.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("name = 'hf' needs transformers: pip install dtmega[hf] ([model] name)") from None
    if not path:
        raise ValueError("name = 'hf' needs a directory with config.json ([model] path)")
    file = Path(path, "config.json")
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {file}: {error} ([model] path)") from None
    plain = plain if isinstance(plain, dict) else {}
    kind = plain.get("model_type")
    if kind not in transformers.CONFIG_MAPPING or "auto_map" in plain:
        why = "auto_map: code of its own, which is not run" if "auto_map" in plain else f"model_type={kind!r}"
        raise ValueError(
            f"{file} has {why}; expected a model of transformers {transformers.__version__} ([model] path)"
        )
    if "quantization_config" in plain:
        # Its tensors are not what their names say: an fp8 weight is to be multiplied by another tensor.
        raise ValueError(f"{file} is of quantised weights (quantization_config), which are not trained ([model] path)")
    try:
        theirs = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:  # each family checks its keys in its own way
        raise ValueError(f"{file}: {error} ([model] path)") from None
    # BERT and its like have causal heads too, where config.json says so; GPT-NeoX has the key, and is always causal.
    decoder = getattr(theirs, "is_decoder", True) or theirs.model_type.startswith("gpt_neox")
    if not decoder or theirs.is_encoder_decoder or type(theirs) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model_type '{kind}' of {file} is not a causal language model, which is what the trainer trains; "
            f"dtmega.plans.parallelize_hf cuts it for a loop of your own ([model] path)"
        )
    return theirs


def _build(theirs: Any) -> Any:
    """The model, with values not yet initialised, in fp32, without dropout."""
    from transformers import AutoModelForCausalLM

    theirs = copy.deepcopy(theirs)
    for key in _drops(theirs):
        setattr(theirs, key, 0.0)
    return AutoModelForCausalLM.from_config(theirs, dtype=torch.float32)


def _drops(theirs: Any) -> dict[str, float]:
    """Keys that say how much is dropped."""
    return {key: p for key, p in theirs.to_dict().items() if "drop" in key and isinstance(p, float)}


def sizes(model: config.Model) -> dict[str, Any]:
    """What the directory decides of the [model] section.

    Raises:
        ValueError: as `_config`, or the model has stored what is no parameter.
    """
    theirs = _config(model.path)
    with torch.device("meta"):
        hf = _build(theirs)
    if stored := sorted(hf.state_dict().keys() - dict(hf.named_parameters(remove_duplicate=False)).keys()):
        raise ValueError(f"{model.path}: '{stored[0]}' is a stored buffer, and none is kept here ([model] path)")
    blocks = list(_blocks(hf).children())
    layer = sum(p.numel() for p in blocks[0].parameters()) if blocks else 0
    feed_forward = next((getattr(theirs, k) for k in FEED_FORWARD if hasattr(theirs, k)), 0)
    plain = json.loads(Path(model.path, "config.json").read_text(encoding="utf-8"))
    said = {k: v for k, v in plain.items() if k not in IDLE}
    return {
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "n_layers": len(blocks),
        "n_heads": theirs.num_attention_heads,
        "ffn_hidden_size": feed_forward or 0,
        "elements": [layer, sum(p.numel() for p in hf.parameters())],
        "digest": hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12],
    }
