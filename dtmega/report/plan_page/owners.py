"""Divide a plan's memory into a dozen classes, and group the pipeline ranks that do the same work.

The planner books each byte under an owner: a text that says what the memory is used for, such as "gradients".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dtmega.pipelining.table import stages_in
from dtmega.planning.counting.recorder import BETWEEN_STAGES, ROOM
from dtmega.planning.counting.role import COPIES, FROZEN, GRADIENTS, MOMENTS, PARAMETERS, WHOLE_GRADIENTS, Role
from dtmega.planning.plan import Plan
from dtmega.report.colours import MEMORY_COLOURS

NAMES = {
    PARAMETERS: "parameters",
    FROZEN: "frozen parameters",
    "parameters and buffers": "parameters",
    MOMENTS: "optimizer's moments",
    GRADIENTS: "gradients",
    WHOLE_GRADIENTS: "gradients before their sum",
    COPIES: "weights for compute",
    BETWEEN_STAGES: "input and tensors between stages",
    "rows of the batch": "input and tensors between stages",
    ROOM: "rooms for messages",
}
BEGINNINGS = {
    "activations of ": "activations of blocks",
    "activations outside of blocks": "activations outside of blocks",
    "backward: ": "temporaries of backward",
}
MAX_PIECES = 3  # maximum number of pieces that `_in_words` lists one by one


def class_of(owner: str) -> str:
    """The class to which an owner's memory belongs. Each class is a key of MEMORY_COLOURS."""
    if owner in NAMES:
        return NAMES[owner]
    for beginning, name in BEGINNINGS.items():
        if owner.startswith(beginning):
            return name
    # The owner of a temporary is named after a phase and a torch operator, for example "optimizer: mul".
    return "temporaries of other phases" if ": " in owner else "other"


def by_class(owners: Mapping[str, int]) -> dict[str, int]:
    """Add up the owners' bytes by class, in the order of MEMORY_COLOURS. Classes without bytes are left out."""
    sums = dict.fromkeys(MEMORY_COLOURS, 0)
    for owner, n_bytes in owners.items():
        sums[class_of(owner)] += n_bytes
    return {name: n_bytes for name, n_bytes in sums.items() if n_bytes}


class Places(NamedTuple):
    """Pipeline ranks that do the same work. The page calls the index of a rank in its pipeline a place.

    Attributes:
        numbers: indices of these ranks in the pipeline, ascending.
        role: plan of the first of these ranks.
        pieces: embedding, layers or head on the first of these ranks, such as "embed, layers.0".
        in_pipeline: whether there is a pipeline; without a pipeline, `numbers` is [0].
    """

    numbers: list[int]
    role: Role
    pieces: str
    in_pipeline: bool

    @property
    def title(self) -> str:
        """A title that contains the place numbers and the planned rank."""
        if not self.in_pipeline:
            return f"rank {self.role.rank}"
        first, last = self.numbers[0], self.numbers[-1]
        if len(self.numbers) == 1:
            places = f"pipeline rank {first}"
        elif self.numbers == [*range(first, last + 1)]:
            places = f"pipeline ranks {first} to {last}"
        else:
            places = f"pipeline ranks {', '.join(map(str, self.numbers))}"
        return f"{places} (rank {self.role.rank})"


def distinct_places(plan: Plan) -> list[Places]:
    """The ranks of the pipeline, grouped by the work that they do."""
    stages_of_places = [[0]] if plan.table is None else stages_in(plan.table)
    groups = []
    for numbers in plan.places_by_role:
        first = numbers[0]
        pieces = "; ".join(_in_words(plan.stages[stage]) for stage in stages_of_places[first])
        groups.append(Places(numbers, plan.roles[first], pieces, plan.table is not None))
    return groups


def _in_words(pieces: list[str]) -> str:
    """The embedding, layers and head of one stage in words: "embed, layers.0" or "embed to layers.9 (11 pieces)"."""
    if len(pieces) <= MAX_PIECES:
        return ", ".join(pieces)
    return f"{pieces[0]} to {pieces[-1]} ({len(pieces)} pieces)"
