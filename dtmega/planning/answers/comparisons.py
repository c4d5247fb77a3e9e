"""Compare counts with formulas from the literature (`prices/formulas.py`) wherever a formula applies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dtmega.config import Config, DropoutModel
from dtmega.files import console
from dtmega.models.trainable import Elements
from dtmega.ops.cost import Piece
from dtmega.pipelining.table import simulate, stages_per_rank
from dtmega.planning.answers.job import Job
from dtmega.planning.counting.ledger import Span
from dtmega.planning.counting.role import GRADIENTS, MOMENTS, PARAMETERS
from dtmega.planning.extrapolation import in_flight
from dtmega.planning.plan import Plan
from dtmega.planning.prices import formulas

BLOCKS = "activations of "  # prefix under which the ledger lists each block's activations
WITH_BUBBLE = ("GPipe", "1F1B", "Interleaved1F1B")  # schedules for which Narayanan et al. give a formula
HALF = ("bfloat16", "float16")


class Comparison(NamedTuple):
    """A number from the plan (bytes, or the bubble's share), and the value that a formula gives for it.

    Attributes:
        what: description of the number, such as "activations of layers".
        unit: "bytes", or "share" for a fraction of the step.
        counted: value in the plan.
        formula: value of the formula.
        source: paper that states the formula, and the parts that the formula leaves out.
    """

    what: str
    unit: str
    counted: float
    formula: float
    source: str

    @property
    def difference(self) -> float:
        """The formula's error, relative to the count; 0 if the count is 0."""
        if self.counted == 0:
            return 0.0
        return self.formula / self.counted - 1


def compare_role(job: Job, plan: Plan, place: int, pieces: Sequence[Piece], elements: Elements) -> list[Comparison]:
    """Compare the memory of a pp rank with formulas.

    Args:
        job: configuration, layout and hardware.
        plan: plan of the job.
        place: coordinate of the rank on the pp axis.
        pieces: pieces of the whole model.
        elements: numbers of trained and of frozen weights in the model.
    """
    mine = _pieces_of(plan, place, pieces)
    cfg = job.cfg
    # The formula assumes that every parameter has a gradient and moments, so it does not cover frozen parameters.
    found = [] if elements.frozen else [_states(job, plan, place, mine)]
    one_by_one = cfg.recompute.method == "uniform" and cfg.recompute.layers == 1
    if cfg.precision.params in HALF and one_by_one and _has_layers_of_megatron(cfg, mine):
        found.append(_activations(job, plan, place, mine))
    return found


def _has_layers_of_megatron(cfg: Config, pieces: Sequence[Piece]) -> bool:
    """True if the model has dropout and if each of its layers has as many weights as a layer in Korthikanti et al.

    A layer in the paper has two norms with biases, four products with biases, and 4 h channels in the feed-forward
    network. The result is False if `pieces` contains no layers.
    """
    h = cfg.model.hidden_size
    weights = 4 * h + (3 * h * h + 3 * h) + (h * h + h) + (8 * h * h + 5 * h)
    layers = [piece for piece in pieces if piece.is_layer]
    return isinstance(cfg.model, DropoutModel) and bool(layers) and all(one.elements == weights for one in layers)


def _pieces_of(plan: Plan, place: int, pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of the model (embedding, layers, head) that the pp rank `place` holds."""
    if plan.table is None:
        return list(pieces)
    numbers = {action.stage for action in plan.table[place]}
    names = {name for number in numbers for name in plan.stages[number]}
    return [piece for piece in pieces if piece.name in names]


def _states(job: Job, plan: Plan, place: int, mine: Sequence[Piece]) -> Comparison:
    """Compare the largest total size of weights, gradients and moments with a formula."""
    elements = sum(piece.elements for piece in mine)
    if plan.table is not None:
        elements += _copies(plan, place, mine)
    n = job.sizes["dp_shard"] * job.sizes["cp"]
    stage = 3 if n > 1 else 0
    formula = formulas.zero_bytes(elements / job.sizes["tp"], n, stage)
    counted = max(map(_bytes_of_states, plan.roles[place].spans))
    source = (
        f"ZeRO stage {stage}, 16 bytes a parameter over {console.counted(n, 'rank')} (arXiv:1910.02054); it divides "
        f"evenly, and leaves out norms and biases that every tp rank holds"
    )
    return Comparison("weights, gradients and moments", "bytes", counted, formula, source)


def _copies(plan: Plan, place: int, mine: Sequence[Piece]) -> int:
    """The number of elements in a pp rank's copies of weights that stages share.

    A stage without the model's first piece holds a copy of each weight that its pieces share with the first piece.
    """
    assert plan.table is not None
    first = plan.stages[0][0]
    elements = 0
    for number in {action.stage for action in plan.table[place]}:
        if first not in plan.stages[number]:
            elements += sum(piece.shared for piece in mine if piece.name in plan.stages[number])
    return elements


def _bytes_of_states(span: Span) -> int:
    return sum(span.at_peak.get(owner, 0) for owner in (PARAMETERS, GRADIENTS, MOMENTS))


def activation_bytes(at_peak: dict[str, int]) -> int:
    """The bytes of the activations that blocks keep for backward."""
    return sum(n_bytes for owner, n_bytes in at_peak.items() if owner.startswith(BLOCKS))


def _activations(job: Job, plan: Plan, place: int, mine: Sequence[Piece]) -> Comparison:
    """Compare the largest total size of all layers' activations with a formula."""
    cfg, sizes = job.cfg, job.sizes
    layers = sum(piece.is_layer for piece in mine)
    flight = 1.0
    if plan.table is not None:
        n_stages = len({action.stage for action in plan.table[place]})
        flight = in_flight(plan.table)[place] / n_stages
    assert isinstance(cfg.model, DropoutModel)
    # Without attention dropout, attention is fused and keeps no scores, like Megatron's "selective" recomputation.
    recompute = "selective"
    each = "34 s b h, without scores,"
    if cfg.recompute.mode == "full":
        recompute, each = "full", "2 s b h"
    elif cfg.recompute.mode == "none" and cfg.model.attention_dropout:
        recompute, each = "none", "34 s b h + 5 a s^2 b"
    per_layer = formulas.activation_bytes_per_layer(
        cfg.data.seq_len // sizes["cp"],
        cfg.batch.micro_batch_size,
        cfg.model.hidden_size,
        cfg.model.n_heads,
        sizes["tp"],
        sizes["tp"] > 1 and cfg.mesh.sequence_parallel,
        recompute,
    )
    counted = max(activation_bytes(span.at_peak) for span in plan.roles[place].spans)
    source = f"Megatron's {each} for {layers * flight:g} layers in flight (arXiv:2205.05198, table 2)"
    return Comparison("activations of layers", "bytes", counted, per_layer * layers * flight, source)


def compare_bubble(job: Job, plan: Plan) -> Comparison | None:
    """Compare the bubble formula with a simulation of equal stages; return None if the schedule has no formula."""
    pipeline = job.cfg.pipeline
    if plan.table is None or pipeline.csv or pipeline.schedule not in WITH_BUBBLE:
        return None
    over_ideal = formulas.bubble_over_ideal(job.sizes["pp"], plan.n_microbatches, stages_per_rank(pipeline))
    source = "(p - 1) / (m v) of the ideal time (arXiv:2104.04473, section 2.2), for stages that take equally long"
    share = over_ideal / (1 + over_ideal)
    return Comparison("bubble with equal stages", "share", simulate(plan.table).bubble, share, source)
