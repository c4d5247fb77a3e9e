"""Claims about families from outside of dtmega: how their keys are known, read, kept and refused."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from pathlib import Path
from typing import Literal

import pytest
import tomli

from dtmega import config
from dtmega.config import families, help
from dtmega.config.families.hf import TransformersKeys
from dtmega.config.model_keys import Model, NativeModel
from dtmega.config.schema import key


class NeoXKeys(NativeModel):
    """A family of someone's own."""

    name: Literal["neox"] = key("neox", "the family of models")
    rotary_share: float = key(0.25, "share of a head's channels that are rotated", gt=0, le=1)


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(families.KEYS, "_registered", {})


@pytest.fixture
def registered() -> None:
    config.register_family(NeoXKeys)


def load(tmp_path: Path, toml: str, *overrides: str) -> config.Config:
    path = tmp_path / "test.toml"
    path.write_text(toml)
    return config.load(["--config", str(path), "--train.steps", "1", *overrides])


@pytest.mark.usefixtures("registered")
def test_a_registered_family_is_read_like_one_of_the_house(tmp_path: Path):
    cfg = load(tmp_path, "[model]\nname = 'neox'\nrotary_share = 0.5", "--model.n_heads", "4")
    assert cfg.model == NeoXKeys(rotary_share=0.5, n_heads=4)
    assert load(tmp_path, "", "--model.name", "neox").model == NeoXKeys()


@pytest.mark.usefixtures("registered")
def test_its_configuration_is_kept_whole_in_toml_in_copies_and_between_processes(tmp_path: Path):
    cfg = load(tmp_path, "[model]\nname = 'neox'\nrotary_share = 0.5")
    assert tomli.loads(cfg.to_toml())["model"] == cfg.model.model_dump()
    assert cfg.model_dump()["model"]["rotary_share"] == 0.5
    assert load(tmp_path, cfg.to_toml()) == cfg
    assert pickle.loads(pickle.dumps(cfg)) == copy.deepcopy(cfg) == cfg
    assert config.model_section(cfg.model_dump()["model"], "a checkpoint") == cfg.model


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[model]\nrotary_share = 0.5", "key 'rotary_share' in [model] is for name = 'neox', not for 'bloom'"),
        ("[model]\nname = 'neox'\nrotary_share = 2.0", "test.toml: [model] rotary_share: Input should be less than or"),
        ("[model]\nname = 'neox'\nrotary_shar = 1.0", "did you mean [model] rotary_share?"),
        ("[model]\nname = 'neox'\nn_heads = 7", "n_heads=7 does not divide hidden_size=256"),
        (
            "[model]\nname = 'neo'",
            "test.toml: [model] name: expected bloom or gpt or bert or llama or moe or t5 or hf or neox",
        ),
    ],
)
def test_its_keys_are_refused_with_the_same_words(tmp_path: Path, toml: str, words: str):
    with pytest.raises(config.ConfigError, match=re.escape(words)):
        load(tmp_path, toml)


@pytest.mark.usefixtures("registered")
def test_help_lists_its_keys():
    assert "[model], name = 'neox'\n  --model.rotary_share 0.25\n" in help.text(config.Config, "model")


def test_a_name_that_nobody_registered_is_refused_with_how_it_is_registered():
    with pytest.raises(config.ConfigError) as refused:
        config.model_section({"name": "neox"}, "runs/neox/checkpoints/step-00000100")
    assert str(refused.value) == (
        "runs/neox/checkpoints/step-00000100: [model] name: expected bloom or gpt or bert or llama or moe or t5 or hf, "
        "got 'neox'; a family from elsewhere is known once families.register has its record (docs/adding-a-model.md)"
    )


def test_a_section_of_another_family_is_an_object_of_that_family():
    values = {"model": {"name": "hf", "path": "x"}, "train": {"steps": 1}}
    assert config.Config.model_validate(values).model == TransformersKeys(path="x")
    with pytest.raises(ValueError, match=r"expected bloom or .* got 'neox'"):
        config.Config.model_validate({"model": {"name": "neox"}, "train": {"steps": 1}})


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            NeoXKeys,
            "NeoXKeys has the name of another family: expected none of bloom, gpt, bert, llama, moe, t5, hf, neox,",
        ),
        (TransformersKeys, "TransformersKeys has the name of another family"),
        (Model, "Model has no name"),
    ],
)
def test_a_class_without_a_name_of_its_own_is_refused(keys: type[Model], words: str):
    with pytest.raises(ValueError, match=words):
        config.register_family(keys)


def install(folder: Path, module: str, source: str) -> None:
    """Install a package whose entry point says that its module registers the family 'gptx'."""
    metadata = folder / f"{module}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[dtmega.families]\ngptx = {module}\n")
    (folder / f"{module}.py").write_text(source)


REGISTERING = """
from dtmega import config

class Keys(config.NativeModel):
    name: str = "gptx"

config.register_family(Keys)
"""


def test_a_family_of_an_installed_package_is_imported_when_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "registering_gptx", REGISTERING)
    monkeypatch.syspath_prepend(tmp_path)
    load(tmp_path, "")
    assert "registering_gptx" not in sys.modules
    assert load(tmp_path, "[model]\nname = 'gptx'").model.name == "gptx"


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("needy_gptx", "import no_such_module", "which cannot be imported: No module named 'no_such_module'"),
        ("silent_gptx", "", "which did not: expected families.register(record) of name = 'gptx' there"),
    ],
)
def test_a_package_that_does_not_register_its_family_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, words: str
):
    install(tmp_path, module, source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(config.ConfigError) as refused:
        load(tmp_path, "", "--model.name", "gptx")
    assert str(refused.value) == (
        f"--model.name: 'gptx' is registered by the module {module} (entry point of dtmega.families), {words}"
    )
