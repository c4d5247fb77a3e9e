"""The class of the keys of [model] for each family, opened when its name is asked for.

    KEYS["llama"]  # LlamaKeys; loads `llama.py`

BUILT_IN has the names of dtmega's own families, one file each. `dtmega.families.register` adds a family from elsewhere
through `register_family`. An installed package may have an entry point of the group `dtmega.families`: its name is the
family's, its value a module. The module is imported when a configuration names the family, and registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points

from dtmega import rooms
from dtmega.config.model_keys import Model

GROUP = "dtmega.families"  # of entry points
DEFAULT = "bloom"
BUILT_IN: Mapping[str, Callable[[], type[Model]]] = {
    "bloom": lambda: rooms.bloom_keys().BloomKeys,
    "gpt": lambda: rooms.gpt_keys().GPTKeys,
    "bert": lambda: rooms.bert_keys().BertKeys,
    "llama": lambda: rooms.llama_keys().LlamaKeys,
    "moe": lambda: rooms.moe_keys().MoEKeys,
    "t5": lambda: rooms.t5_keys().T5Keys,
    "hf": lambda: rooms.hf_keys().TransformersKeys,
}


class KeysByName(Mapping[str, type[Model]]):
    """The class of keys for each value of [model] name. The families of packages are known by name only, not listed."""

    def __init__(self) -> None:
        self._registered: dict[str, type[Model]] = {}

    def __getitem__(self, name: str) -> type[Model]:
        if name in BUILT_IN:
            return BUILT_IN[name]()
        if name not in self._registered:
            _import_installed(name)
        return self._registered[name]

    def __iter__(self) -> Iterator[str]:
        yield from (*BUILT_IN, *self._registered)

    def __len__(self) -> int:
        return len(BUILT_IN) + len(self._registered)

    def add(self, name: str, keys: type[Model]) -> None:
        self._registered[name] = keys


KEYS = KeysByName()


def register_family(keys: type[Model]) -> None:
    """Add the keys of a family from outside of dtmega. The default of its key `name` is the value of [model] name.

    Raises:
        ValueError: the class has no name, or its name is another family's.
    """
    field = keys.model_fields["name"]
    name = field.default
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{keys.__name__} has no name: expected a line such as name: Literal['neox'] = key('neox', ...)"
        )
    if name in list(KEYS):
        raise ValueError(
            f"{keys.__name__} has the name of another family: expected none of {', '.join(KEYS)}, got {name}"
        )
    KEYS.add(name, keys)


def _import_installed(name: str) -> None:
    """Import the module that an installed package names for this family, if there is one.

    Raises:
        ValueError: the module cannot be imported, or registers no family of this name.
    """
    for found in entry_points(group=GROUP, name=name):
        module = f"'{name}' is registered by the module {found.value} (entry point of {GROUP})"
        try:
            found.load()
        except ImportError as error:
            raise ValueError(f"{module}, which cannot be imported: {error}") from None
        if name not in list(KEYS):
            raise ValueError(f"{module}, which did not: expected families.register(record) of name = '{name}' there")
