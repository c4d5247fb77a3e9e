"""Claims about what is known of a family's files: found by its name, and only if a record is there."""

from __future__ import annotations

from typing import Literal

import pytest

from dtmega.config.families.bloom import BloomKeys
from dtmega.config.model_keys import NativeModel
from dtmega.config.schema import key
from dtmega.interop import stored
from dtmega.interop.formats.own import OwnFormats


class OwnKeys(NativeModel):
    """A family of someone's own."""

    name: Literal["own"] = key("own", "the family of models")


def test_files_of_a_family_from_elsewhere_are_known_by_a_record_that_is_registered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stored, "_registered", {})
    with pytest.raises(
        ValueError, match=r"name = 'own' is not known here: expected one of bloom, .*\[model\] init_from"
    ):
        stored.of(OwnKeys())
    record = OwnFormats({})
    stored.register("own", record)
    assert stored.of(OwnKeys()) is record
    assert stored.all_families()["own"] is record


def test_a_model_whose_values_come_from_the_seed_has_no_weights_to_start_from():
    assert stored.weights(BloomKeys()) is None
