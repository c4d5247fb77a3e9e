"""The rooms that only a key of the configuration opens, one function each: the statement that imports the room stands here.

    rooms.compiled_proof().prove(...)

A function returns the module that is the room's door. A run loads a room when it calls the room's function, and so loads
nothing that its configuration does not ask for (`tests/test_closure.py`). All other imports stand at the top of a file.
Type checkers, linters and `lint-imports` read the statements like any import; tests/test_house.py counts a call as an
import by the caller. Call these functions when something is set up, never in code that `torch.compile` traces.
"""

from __future__ import annotations

# Families: a record for each value of [model] name.


# Data: objectives, orders, preparing, object stores.


# Training: what a step may do beside training, and what a run may report.


def dry_run():
    """The check whether a run would start, without starting it: `--dry-run`."""
    from dtmega.planning.answers import dry_run

    return dry_run


def exact():
    """Sums with the same bits on every layout: [run] exact."""
    from dtmega.training import exact

    return exact


def compiled_proof():
    """The proof that compiled blocks compute what eager blocks do: [compile] enable."""
    from dtmega.training import compiled_proof

    return compiled_proof


def exact_machine():
    """What decides the bits of products on this machine: [run] exact."""
    from dtmega.training.exact import machine

    return machine


def exact_record():
    """The digests of each step, for `dtmega replay`: [run] exact."""
    from dtmega.training.exact import record

    return record


def loss_scale():
    """A factor on the loss: [precision] params = "float16"."""
    from dtmega.training import loss_scale

    return loss_scale


def spikes():
    """Steps with a conspicuous loss or gradient, which are skipped: [train] skip_spikes."""
    from dtmega.ops.optim import spikes

    return spikes


def profile():
    """Traces of chosen steps: [profile], or a file `profile-now` in the run directory."""
    from dtmega.training import profile

    return profile


def trackers():
    """wandb, mlflow and trackio: [log] trackers."""
    from dtmega.training.records import trackers

    return trackers


def rank_log():
    """A log of each rank: [log] ranks = "all"."""
    from dtmega.training.records import rank_log

    return rank_log


def expert_loads():
    """The record of the experts' loads: models with experts."""
    from dtmega.training.records import loads

    return loads


# Layouts: axes of the mesh, adapters, experts, optimizers.


# Checkpoints and files: object stores, starting weights, files of other programs.
