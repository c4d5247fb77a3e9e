"""The model families that can be trained. Only this file defines which plan and which formats belong to a model.

Each family is one object in FAMILIES. All other code calls `of(cfg.model)` and never names a family. To add a model,
write a file in `models/` and a table in `plans/`, and add a line to FAMILIES (docs/adding-a-model.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dtmega import config
from dtmega.checkpoint.weights import is_hf_folder, open_checkpoint_weights
from dtmega.data.objectives import known
from dtmega.data.objectives.objective import Objective
from dtmega.data.objectives.routed import with_router_losses
from dtmega.data.tokenizers import exported
from dtmega.data.tokenizers.exported import ExportedTokenizer
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.formats.format import Format
from dtmega.formats.sources import Source
from dtmega.formats.whole import as_ours, as_theirs
from dtmega.interop.hf.files import config_json, ours
from dtmega.interop.hf.files import export as hf_export
from dtmega.interop.hf.files.peft import TheirModel, their_model
from dtmega.interop.hf.names import bert as bert_names
from dtmega.interop.hf.names import bloom as bloom_names
from dtmega.interop.hf.names import gpt as gpt_names
from dtmega.interop.hf.names import llama as llama_names
from dtmega.interop.hf.names import moe as moe_names
from dtmega.interop.hf.names import t5 as t5_names
from dtmega.interop.hf.record import Transformers
from dtmega.interop.megatron import core_forms as core
from dtmega.interop.megatron import forms as megatron
from dtmega.mesh import World
from dtmega.models import bert, bloom, count, gpt, llama, lora, moe, t5, trainable
from dtmega.models.family import Family, check_units, hidden_state
from dtmega.models.lengths import attends_by_heads, check_lengths, lengths_of
from dtmega.models.lora import proof as lora_proof
from dtmega.models.model import Model
from dtmega.models.show import ANSWERS, CONTINUATION, FILLS, Show
from dtmega.ops.cost import Piece
from dtmega.pipelining.schedule import splits_backward
from dtmega.plans import apply_plan, check_plan, shard_buffers
from dtmega.plans.bert import plan as bert_plan
from dtmega.plans.bloom import plan as bloom_plan
from dtmega.plans.gpt import plan as gpt_plan
from dtmega.plans.llama import plan as llama_plan
from dtmega.plans.moe import plan as moe_plan
from dtmega.plans.styles import Plan
from dtmega.plans.t5 import plan as t5_plan

DECODER: Mapping[str, Objective] = MappingProxyType(
    {
        "auto": known.objective("next-token"),
        "prefix-lm": known.objective("prefix-lm"),
        "conversations": known.objective("conversations"),
    }
)


@dataclass(frozen=True)
class BuiltInFamily:
    """A family whose model and plan are part of dtmega. `Family` documents all methods and the remaining attributes.

    Attributes:
        model: class of the model, called with the [model] section.
        plan: function that makes the plan, called with the [model] section and [mesh] sequence_parallel.
        vocabulary_of: function that implements the method `vocabulary`.
        completed: function that implements the method `complete`.
    """

    model: Callable[[Any], Model]
    plan: Callable[[Any, bool], Plan]
    formats: Mapping[str, Sequence[Format]]
    libraries: tuple[str, ...] = ()
    directory: bool = False
    objectives: Mapping[str, Objective] = field(default_factory=lambda: DECODER)
    show: Show = CONTINUATION
    exact: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    vocabulary_of: Callable[[Tokenizer, config.Data], ExportedTokenizer] = exported.of_documents
    completed: Callable[[Any, Objective], Objective] = lambda model, objective: objective

    def resolve(self, cfg: config.Config) -> config.Config:
        return cfg

    def digest(self, model: config.Model) -> str:
        return ""

    def reread_directory(self, model: config.Model, trained: str) -> config.Model:
        return model

    def notes(self, model: config.Model) -> list[str]:
        is_theirs = bool(model.init_from) and Path(model.init_from, config_json.NAME).exists()
        code = config_json.own_code(model.init_from) if is_theirs else ""
        return [code] if code else []

    def build(self, model: config.Model) -> Model:
        return self.model(model)

    def clone(self, cfg: config.Config, tp: int) -> tuple[config.Config, Model]:
        model = lora_proof.small_section(cfg.model, tp)  # pyright: ignore[reportArgumentType]
        return cfg.model_copy(update={"model": model}), self.build(model)

    def complete(self, model: config.Model, objective: Objective) -> Objective:
        return self.completed(model, objective)

    def pieces(self, whole: Model) -> list[Piece]:
        return count.pieces(whole)

    def check(self, cfg: config.Config, sizes: Mapping[str, int]) -> None:
        with torch.device("meta"):
            whole = self.build(cfg.model)
        lengths = lengths_of(cfg, whole)
        check_units(cfg, whole)
        for key, length in lengths.items():
            if whole.longest is not None and length > whole.longest:
                raise ValueError(
                    f"{key}={length} is more than the {whole.longest} positions of the model "
                    f"([data] {key}, [model] max_position_embeddings)"
                )
        tp = sizes["tp"]
        if tp > 1:
            check_plan(whole, self._plan(cfg), tp)
        if whole.one_backward and splits_backward(cfg, sizes["pp"]):
            raise ValueError(
                f"backward cannot run in two parts, as {whole.one_backward}: torch would give wrong gradients "
                f"([pipeline] schedule, [model] name)"
            )
        check_lengths(cfg, whole, lengths, sizes)
        self.attends_by_heads(cfg, sizes)

    def attends_by_heads(self, cfg: config.Config, sizes: Mapping[str, int]) -> bool:
        n_heads = cfg.model.n_heads
        return attends_by_heads(cfg, n_heads, getattr(cfg.model, "kv_heads", n_heads), sizes)

    def cut(self, cfg: config.Config, stage: Model, world: World) -> list[str]:
        return apply_plan(stage, world.tp, self._plan(cfg)) if world.tp.size() > 1 else []

    def allocate(self, cfg: config.Config, stage: Model, world: World, device: torch.device) -> None:
        stage.to_empty(device=device)
        # `to_empty` has given separate memory to each module that shares a tied parameter.
        stage.tie()
        # Fill the buffers before sharding, because slopes and ids depend on global head and channel numbers.
        stage.init_buffers(cfg.run.seed)
        if world.tp.size() > 1:
            shard_buffers(stage, world.tp, self._plan(cfg))

    def boundary(self, cfg: config.Config, sizes: Mapping[str, int], whole: Model, after: str) -> dict[str, Tensor]:
        # A rank passes on only its slice of the sequence, which is sharded over cp and, with sequence parallelism, tp.
        parts = sizes["cp"] * (sizes["tp"] if cfg.mesh.sequence_parallel else 1)
        return {name: hidden_state(cfg, parts, key) for name, key in whole.handed_on(after).items()}

    def weights(self, model: config.Model) -> Source | None:
        if not model.init_from:
            return None
        if is_hf_folder(model.init_from):
            return self.folder(Path(model.init_from), model)
        return open_checkpoint_weights(model, self.weights)

    def folder(self, path: Path, model: config.Model) -> Source:
        kind = config_json.read_plain(path)["model_type"]
        return ours.open_weights(path, self.form(model, "hf", kind), model, self.model)

    def vocabulary(self, tokenizer: Tokenizer, data: config.Data) -> ExportedTokenizer:
        return self.vocabulary_of(tokenizer, data)

    def export(self, source: Source, folder: Path, model: config.Model, tokenizer: str | None, **options: Any) -> None:
        plain_config, theirs = self.as_stored("hf", source, model)
        hf_export.export(theirs, folder, plain_config, None, tokenizer, **options)

    def their_model(self, model: config.Model, layers: Collection[str]) -> TheirModel:
        return their_model(self.form(model, "hf"), model, self.model, layers)

    def read(self, program: str, source: Source, model: config.Model, where: str) -> Source:
        return as_ours(source, self.form(model, program), model, self.model, where)

    def as_stored(self, program: str, source: Source, model: config.Model) -> tuple[dict[str, Any], Source]:
        form = self.form(model, program)
        return form.to_config(model), as_theirs(source, form, model, self.model)

    def form(self, model: config.Model, program: str, kind: str = "") -> Format:
        """The format in which another program stores a model with this [model] section.

        Args:
            model: the [model] section.
            program: a key of `formats`.
            kind: name that the program's stored configuration gives to the family. If several formats fit the section,
                the method returns the format of this kind, or the first of these formats if this kind does not fit.

        Raises:
            ValueError: the program has no model with the values in this section.
        """
        forms = self.formats.get(program, ())
        fitting = [form for form in forms if form.fits(model)]
        if not fitting:
            wrong = forms[0].mismatches(model) if forms else {}
            expected = ", ".join(f"{key}={value!r}" for key, value in wrong.items()) or "another model"
            keys = ", ".join(f"[model] {key}" for key in ("name", *wrong))
            raise ValueError(
                f"{program} has no model like this one of name = '{model.name}': expected {expected} ({keys})"
            )
        return next((form for form in fitting if kind and form.kind == kind), fitting[0])

    def _plan(self, cfg: config.Config) -> Plan:
        return self.plan(cfg.model, cfg.mesh.sequence_parallel)


FAMILIES: dict[str, Family] = {
    "bloom": BuiltInFamily(
        *(bloom.Bloom, bloom_plan, {"hf": [bloom_names.HF], "megatron": [megatron.BLOOM_FORM]}),
        exact=("eager", "compiled", "tp with pp"),
    ),
    "gpt": BuiltInFamily(
        *(gpt.GPT, gpt_plan, {"hf": [gpt_names.HF], **core.GPT_FORMS}),
        exact=("eager", "tp with pp"),
    ),
    "llama": BuiltInFamily(
        *(llama.Llama, llama_plan, {"hf": llama_names.HF, **core.LLAMA_FORMS}),
        exact=("eager", "compiled", "tp with pp"),
    ),
    "moe": BuiltInFamily(
        *(moe.MoE, moe_plan, {"hf": moe_names.HF}),
        completed=with_router_losses,
        exact=("eager", "tp with pp"),
    ),
    "bert": BuiltInFamily(
        *(bert.Bert, bert_plan, {"hf": bert_names.HF, "megatron": [megatron.BERT_FORM]}),
        objectives={"auto": known.objective("masked")},
        show=FILLS,
        exact=("eager", "tp with pp"),
    ),
    "t5": BuiltInFamily(
        *(t5.T5, t5_plan, {"hf": [t5_names.HF], "megatron": [megatron.T5_FORM]}),
        objectives={"auto": known.objective("spans"), "separate-spans": known.objective("separate-spans")},
        show=ANSWERS,
        vocabulary_of=exported.of_spans,
        exact=("eager",),
    ),
    "hf": Transformers(),
}


def of(model: config.Model) -> Family:
    """The family that a [model] section belongs to."""
    return FAMILIES[model.name]


def resolve(cfg: config.Config) -> config.Config:
    """Complete the configuration with values that the model's family provides, such as the sizes of an `hf` model.

    Raises:
        ValueError: the configuration has keys that the family ignores or cannot honour.
    """
    return of(cfg.model).resolve(cfg)


def objective(cfg: config.Config) -> Objective:
    """The training objective of a run.

    Raises:
        ValueError: the family does not have the objective that [data] objective names.
    """
    objectives = of(cfg.model).objectives
    if cfg.data.objective not in objectives:
        raise ValueError(
            f"a model of name = '{cfg.model.name}' is not trained with objective = '{cfg.data.objective}': expected "
            f"{' or '.join(objectives)} ([data] objective, [model] name)"
        )
    return of(cfg.model).complete(cfg.model, objectives[cfg.data.objective])


def sample_options(cfg: config.Config) -> dict[str, Any]:
    """The options of `Show.text` that depend on how the run was trained, keyed by option name.

    Raises:
        ValueError: the family does not have the run's objective.
    """
    options = {key: getattr(cfg.data, key) for key in of(cfg.model).show.reads}
    if objective(cfg).prompt_is_prefix:
        options["prompt_is_prefix"] = True
    return options


def build(cfg: config.Config) -> Model:
    """Build the whole model on the default device, which may be meta. Parameter values are not initialised yet.

    Raises:
        ValueError: [train] freeze or [lora] targets does not fit the model.
    """
    whole = of(cfg.model).build(cfg.model)
    if cfg.train.freeze:
        trainable.freeze(whole, cfg.train.freeze)
    if cfg.lora.rank:
        lora.attach(whole, cfg.lora)
    return whole


def elements(cfg: config.Config) -> trainable.Elements:
    """Count the trained elements and the frozen elements in the whole model's parameters."""
    with torch.device("meta"):
        return trainable.elements(build(cfg).parameters())


def pieces(model: config.Model) -> list[Piece]:
    """The whole model's pieces (embedding, layers, head), in pipeline order, each with its costs."""
    family = of(model)
    with torch.device("meta"):
        whole = family.build(model)
    return family.pieces(whole)


def pieces_of_run(cfg: config.Config) -> list[Piece]:
    """The pieces of a run's model, like `pieces`, but with the costs of adapters and of frozen weights."""
    with torch.device("meta"):
        whole = build(cfg)
    return of(cfg.model).pieces(whole)


def shapes(model: config.Model) -> dict[str, tuple[int, ...]]:
    """The shapes of the whole model's tensors, keyed by checkpoint name. A tied tensor is listed only once."""
    with torch.device("meta"):
        built = of(model).build(model)
    return {built.full_name(name): tuple(tensor.shape) for name, tensor in built.stored_tensors()}


def stored_buffers(model: config.Model) -> frozenset[str]:
    """The names of the whole model's stored buffers.

    Training does not change the values of these buffers, and conversion does not change their dtype.
    """
    with torch.device("meta"):
        built = of(model).build(model)
    return frozenset(built.full_name(name) for name, _ in built.stored_buffers())
