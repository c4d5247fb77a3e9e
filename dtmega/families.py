"""The families that can be trained, one record each: the only file that joins a model with its plan and its files.

Everybody else asks `of(cfg.model)` and knows no family's name. A new model of the house is a file in `models/`, a table
in `plans/`, and a line in FAMILIES.
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
from dtmega.cost import Piece
from dtmega.data import exported
from dtmega.data.exported import ExportedTokenizer
from dtmega.data.objectives import MASKED, NEXT_TOKEN, PREFIX, SEPARATE_SPANS, SPANS, Objective
from dtmega.data.tokenizer import Tokenizer
from dtmega.family import Family, check_units, hidden_state, lengths_of
from dtmega.formats.format import Format
from dtmega.formats.sources import Source
from dtmega.formats.whole import as_ours, as_theirs, closest
from dtmega.hf.files import config_json, ours
from dtmega.hf.files import export as hf_export
from dtmega.hf.files.tensors import TensorFiles
from dtmega.hf.record import Transformers
from dtmega.megatron import forms as megatron
from dtmega.mesh import World
from dtmega.models import bert, bloom, count, gpt, llama, t5
from dtmega.models.model import Model
from dtmega.models.show import ANSWERS, CONTINUATION, FILLS, Show
from dtmega.pipelining.schedule import splits_backward
from dtmega.plans import apply_plan, check_plan, shard_buffers
from dtmega.plans.bert import plan as bert_plan
from dtmega.plans.bloom import plan as bloom_plan
from dtmega.plans.gpt import plan as gpt_plan
from dtmega.plans.llama import plan as llama_plan
from dtmega.plans.styles import Plan
from dtmega.plans.t5 import plan as t5_plan

DECODER: Mapping[str, Objective] = MappingProxyType({"auto": NEXT_TOKEN, "prefix-lm": PREFIX})


@dataclass(frozen=True)
class Own:
    """A family whose model and plan are written here.

    Attributes:
        model: its class.
        plan: its table, of the [model] section with sequence parallelism or without.
        vocabulary_of: what answers `vocabulary`.
    """

    model: Callable[[Any], Model]
    plan: Callable[[Any, bool], Plan]
    formats: Mapping[str, Sequence[Format]]
    libraries: tuple[str, ...] = ()
    directory: bool = False
    objectives: Mapping[str, Objective] = field(default_factory=lambda: DECODER)
    show: Show = CONTINUATION
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    vocabulary_of: Callable[[Tokenizer, config.Data], ExportedTokenizer] = exported.of_documents

    def resolve(self, cfg: config.Config) -> config.Config:
        return cfg

    def digest(self, model: config.Model) -> str:
        return ""

    def reread_directory(self, model: config.Model, trained: str) -> config.Model:
        return model

    def notes(self, model: config.Model) -> list[str]:
        return []

    def build(self, model: config.Model) -> Model:
        return self.model(model)

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
            check_plan(whole, self._table(cfg), tp)
        if whole.one_backward and splits_backward(cfg, sizes["pp"]):
            raise ValueError(
                f"backward cannot run in two parts, as {whole.one_backward}: torch would give wrong gradients "
                f"([pipeline] schedule, [model] name)"
            )
        for key, length in lengths.items():
            if cfg.mesh.sequence_parallel and length % tp:
                raise ValueError(f"tp={tp} does not divide {key}={length} ([mesh] tp, [data] {key})")

    def cut(self, cfg: config.Config, stage: Model, world: World) -> list[str]:
        return apply_plan(stage, world.tp, self._table(cfg)) if world.tp.size() > 1 else []

    def allocate(self, cfg: config.Config, stage: Model, world: World, device: torch.device) -> None:
        # `to_empty` gives each owner of a tied parameter memory of its own.
        stage.to_empty(device=device)
        stage.tie()
        stage.init_buffers(cfg.run.seed)
        if world.tp.size() > 1:
            shard_buffers(stage, world.tp, self._table(cfg))

    def boundary(self, cfg: config.Config, sizes: Mapping[str, int], whole: Model, after: str) -> dict[str, Tensor]:
        parts = sizes["tp"] if cfg.mesh.sequence_parallel else 1
        return {name: hidden_state(cfg, parts, key) for name, key in whole.handed_on(after).items()}

    def weights(self, model: config.Model) -> Source | None:
        if not model.init_from:
            return None
        if is_hf_folder(model.init_from):
            return self.folder(Path(model.init_from), model)
        return open_checkpoint_weights(model)

    def folder(self, path: Path, model: config.Model) -> Source:
        return ours.open_weights(path, self.form(model, "hf"), model, self.model)

    def vocabulary(self, tokenizer: Tokenizer, data: config.Data) -> ExportedTokenizer:
        return self.vocabulary_of(tokenizer, data)

    def export(self, source: Source, folder: Path, model: config.Model, tokenizer: str | None, **options: Any) -> None:
        form = self.form(model, "hf")
        described = form.to_config(model)
        theirs = as_theirs(source, form, model, self.model)
        hf_export.export(theirs, folder, described, None, tokenizer, **options)

    def read(self, program: str, source: Source, model: config.Model, where: str) -> Source:
        return as_ours(source, self.form(model, program), model, self.model, where)

    def as_stored(self, program: str, source: Source, model: config.Model) -> tuple[dict[str, Any], Source]:
        form = self.form(model, program)
        return form.to_config(model), as_theirs(source, form, model, self.model)

    def form(self, model: config.Model, program: str) -> Format:
        """The form in which another program stores a model.

        Raises:
            ValueError: it has none for this one.
        """
        forms = self.formats.get(program, ())
        found = next((form for form in forms if form.fits(model)), None)
        if found is None:
            wrong = forms[0].mismatches(model) if forms else {}
            expected = ", ".join(f"{key}={value!r}" for key, value in wrong.items()) or "another model"
            keys = ", ".join(f"[model] {key}" for key in ("name", *wrong))
            raise ValueError(
                f"{program} has no model like this one of name = '{model.name}': expected {expected} ({keys})"
            )
        return found

    def _table(self, cfg: config.Config) -> Plan:
        return self.plan(cfg.model, cfg.mesh.sequence_parallel)


FAMILIES: dict[str, Family] = {
    "bloom": Own(bloom.Bloom, bloom_plan, {"hf": [bloom.HF], "megatron": [megatron.BLOOM_FORM]}),
    "gpt": Own(gpt.GPT, gpt_plan, {"hf": [gpt.HF], "megatron": [megatron.GPT_FORM]}),
    "llama": Own(llama.Llama, llama_plan, {"hf": [llama.HF]}),
    "bert": Own(
        *(bert.Bert, bert_plan, {"hf": bert.HF, "megatron": [megatron.BERT_FORM]}),
        objectives={"auto": MASKED},
        show=FILLS,
    ),
    "t5": Own(
        *(t5.T5, t5_plan, {"hf": [t5.HF], "megatron": [megatron.T5_FORM]}),
        objectives={"auto": SPANS, "separate-spans": SEPARATE_SPANS},
        show=ANSWERS,
        vocabulary_of=exported.of_spans,
    ),
    "hf": Transformers(),
}


def of(model: config.Model) -> Family:
    return FAMILIES[model.name]


def resolve(cfg: config.Config) -> config.Config:
    """The configuration with what its family knows of it.

    Raises:
        ValueError: as `Family.resolve`.
    """
    return of(cfg.model).resolve(cfg)


def objective(cfg: config.Config) -> Objective:
    """The objective that a run is trained for.

    Raises:
        ValueError: its family is not.
    """
    known = of(cfg.model).objectives
    if cfg.data.objective not in known:
        raise ValueError(
            f"a model of name = '{cfg.model.name}' is not trained with objective = '{cfg.data.objective}': expected "
            f"{' or '.join(known)} ([data] objective, [model] name)"
        )
    return known[cfg.data.objective]


def sample_options(cfg: config.Config) -> dict[str, Any]:
    """The options of `Show.text` that follow from how a run was trained, by name.

    Raises:
        ValueError: as `objective`.
    """
    options = {key: getattr(cfg.data, key) for key in of(cfg.model).show.reads}
    if objective(cfg).prompt_is_prefix:
        options["prompt_is_prefix"] = True
    return options


def build(cfg: config.Config) -> Model:
    """The whole model on the default device, meta included, with values not yet initialised."""
    return of(cfg.model).build(cfg.model)


def pieces(model: config.Model) -> list[Piece]:
    """The units of a pipeline in order, and what each costs; together the whole model."""
    family = of(model)
    with torch.device("meta"):
        whole = family.build(model)
    return family.pieces(whole)


def shapes(model: config.Model) -> dict[str, tuple[int, ...]]:
    """The whole model's tensors, tied ones once, by their names in checkpoints and in order."""
    with torch.device("meta"):
        built = of(model).build(model)
    return {built.full_name(name): tuple(tensor.shape) for name, tensor in built.stored_tensors()}


def stored_buffers(model: config.Model) -> frozenset[str]:
    """Names of the whole model's tensors that no training changes, and whose dtype no conversion changes."""
    with torch.device("meta"):
        built = of(model).build(model)
    return frozenset(built.full_name(name) for name, _ in built.stored_buffers())


def open_folder(path: Path, model: config.Model | None) -> tuple[Source, config.Model]:
    """A directory of transformers, read as the family of the house that it is of.

    Args:
        model: the [model] section that it must agree with; None: the one that its config.json describes.

    Raises:
        ValueError: it is of no such family, or does not agree.
    """
    if model is None:
        file = f"{path}/{config_json.NAME}"
        theirs = config_json.read_plain(path)
        known = {form.kind: (name, form) for name, family in FAMILIES.items() for form in family.formats.get("hf", ())}
        kind = theirs["model_type"]
        if kind not in known:
            raise ValueError(
                f"{file} has model_type={kind!r:.80}, expected one of {', '.join(sorted(known))} ([model] name); a "
                f"model of transformers needs no conversion: name = 'hf' with path = '{path}' trains it as it is"
            )
        name, form = known[kind]
        model = config.model_section({"name": name, **form.section(theirs, file, TensorFiles(path))}, str(path))
    return of(model).folder(path, model), model


def described(
    program: str,
    names: Collection[str],
    theirs: Mapping[str, Any],
    where: str,
    asked: config.Model | None = None,
) -> config.Model:
    """The [model] section of a model that another program has stored.

    Args:
        program: a key of `formats`.
        names: of its tensors there, of which the family is told.
        theirs: the configuration beside them.
        where: they are; for messages.
        asked: the section that it has to agree with.

    Raises:
        ValueError: no model here is like that, or it does not agree.
    """
    if asked is not None:
        family = of(asked)
        if not isinstance(family, Own):
            raise ValueError(f"{where}: {program} has no model of name = '{asked.name}' (--config)")
        family.form(asked, program).check(theirs, where, asked)
        return asked
    forms = {name: forms[0] for name, family in FAMILIES.items() if (forms := family.formats.get(program))}
    name = closest(names, forms)
    return config.model_section({"name": name, **forms[name].section(theirs, where)}, where)
