"""All layouts for a given number of ranks, and training's reasons for refusing some of them.

    fallen = Fallen()
    for layout in Layouts(cfg, {"mesh.tp"}, 384, device).legal(fallen):
        with_layout(cfg, layout)        # a configuration that `checks.check` and the loader accept

Training's own checks decide which layouts are legal. Each check runs once per combination of the keys that it reads.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dtmega import config, families, mesh
from dtmega.data import loader
from dtmega.pipelining.table import SCHEDULES
from dtmega.planning.search.layout import KEYS, SECTIONS, Layout, with_layout
from dtmega.training import checks, exact


class Reason(NamedTuple):
    """A reason why layouts were rejected.

    Attributes:
        message: message for the first layout that was rejected for this reason.
        n: number of layouts that were rejected for this reason.
    """

    message: str
    n: int


class Fallen:
    """Counts of the rejected layouts, by reason. Messages that differ only in numbers count as one reason."""

    def __init__(self) -> None:
        self._reasons: dict[str, Reason] = {}

    def add(self, message: str, n: int = 1) -> None:
        """Record that n more layouts were rejected with this message."""
        kind = re.sub(r"\d+", "0", message)
        first = self._reasons.get(kind, Reason(message, 0))
        self._reasons[kind] = Reason(first.message, first.n + n)

    @property
    def n(self) -> int:
        """The number of layouts that were rejected."""
        return sum(reason.n for reason in self._reasons.values())

    @property
    def reasons(self) -> list[Reason]:
        """The reasons, with the most frequent reason first."""
        return sorted(self._reasons.values(), key=lambda reason: -reason.n)


class Layouts:
    """The layouts of a configuration on a given number of ranks.

    Keys that have no effect are not varied: sequence_parallel without tp, cp_form without cp, the schedule without a
    pipeline, and reshard_after_forward and accumulate if nothing is sharded. reshard_after_forward = true is not tried,
    because "auto" already frees gathered weights wherever possible. The sizes tried for ep divide both dp_shard x cp
    and the number of experts.

    Args:
        cfg: configuration, completed by `families.resolve`.
        fixed: keys such as "mesh.tp" whose values must not be varied. A mesh size of -1 (the rest) and a
            microbatch size of 0 fix nothing.
        world: number of ranks.
        device: device on which each rank computes.

    Raises:
        ValueError: a fixed key is not among the varied keys, the fixed sizes of the mesh do not divide the number of
            ranks, or a fixed ep does not divide dp_shard x cp in any layout.
    """

    def __init__(self, cfg: config.Config, fixed: Collection[str], world: int, device: torch.device) -> None:
        self.cfg, self.world, self.device = cfg, world, device
        self.fixed: dict[str, Any] = {}
        for name in fixed:
            section, _, key = name.partition(".")
            if SECTIONS.get(key) != section:
                raise ValueError(f"{name} is not varied: expected some of {', '.join(KEYS)}")
            self.fixed[key] = getattr(getattr(cfg, section), key)
        for key in (*mesh.AXES, "micro_batch_size"):
            if self.fixed.get(key) in (-1, 0):
                del self.fixed[key]
        free = {axis: -1 for axis in mesh.AXES if axis not in self.fixed}
        # One free axis takes the remaining ranks, so that `resolve` reports any error in the fixed sizes.
        ones = dict.fromkeys(free, 1) | dict(list(free.items())[:1])
        mesh.resolve(cfg.mesh.model_copy(update=ones | {"ep": 1}), world)
        with torch.device("meta"):
            stacks = [next(module.parameters()).shape[0] for module in families.build(cfg).experts()]
        self.n_experts = math.gcd(*stacks)  # 0 if the model has no experts
        if next(self._meshes(), None) is None:
            raise ValueError(f"ep={self.fixed['ep']} divides dp_shard x cp in no layout of {world} ranks ([mesh] ep)")
        self.pieces = families.pieces(cfg.model)
        self._family = families.of(cfg.model)
        self._n_layers = sum(piece.is_layer for piece in self.pieces)
        self._refusals: dict[tuple[Any, ...], str] = {}

    def legal(self, fallen: Fallen) -> Iterator[Layout]:
        """Yield each layout that training accepts. Count the refused layouts in `fallen`, by training's messages."""
        for sizes in self._meshes():
            shapes, pipelines = self._shapes(sizes), self._pipelines(sizes)
            for micro_batch_size in self._micro_batch_sizes():
                any_layout = self._layout(sizes, micro_batch_size, shapes[0], "whole", pipelines[0])
                if refusal := self._refused_batch(any_layout):
                    fallen.add(refusal, len(shapes) * len(pipelines))
                    continue
                sums = self._sums(any_layout)
                for shape in shapes:
                    example = self._layout(sizes, micro_batch_size, shape, sums[0], ("1F1B", 0, "none", "auto"))
                    if refusal := self._refused_model(example):
                        fallen.add(refusal, len(sums) * len(pipelines))
                        continue
                    for pipeline in pipelines:
                        example = self._layout(sizes, micro_batch_size, shape, sums[0], pipeline)
                        refusal = self._refused_pipeline(example) or self._refused_exact(example)
                        if refusal := refusal or self._refused_model(example):
                            fallen.add(refusal, len(sums))
                            continue
                        for accumulate in sums:
                            yield example._replace(accumulate=accumulate)

    def _layout(
        self,
        sizes: Mapping[str, int],
        micro_batch_size: int,
        shape: tuple[bool, str],
        accumulate: str,
        pipeline: tuple[str, int, str, str | bool],
    ) -> Layout:
        cut, cp_form = shape
        schedule, virtual, mode, reshard = pipeline
        return Layout(
            **sizes,
            micro_batch_size=micro_batch_size,
            sequence_parallel=cut,
            cp_form=cp_form,
            accumulate=accumulate,
            schedule=schedule,
            virtual_stages=virtual,
            mode=mode,
            reshard_after_forward=reshard,
        )

    def _meshes(self) -> Iterator[dict[str, int]]:
        """Yield all combinations of axis sizes whose product is the number of ranks, each with every possible ep."""
        divisors = [n for n in range(1, self.world + 1) if self.world % n == 0]
        choices = [self._choose(axis, divisors) for axis in mesh.AXES]

        def cut(rest: int, axes: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
            if not axes:
                if rest == 1:
                    yield ()
                return
            for size in axes[0]:
                if rest % size == 0:
                    for others in cut(rest // size, axes[1:]):
                        yield size, *others

        for found in cut(self.world, choices):
            sizes = dict(zip(mesh.AXES, found, strict=True))
            n_sharded = sizes["dp_shard"] * sizes["cp"]
            common = math.gcd(n_sharded, self.n_experts) if self.n_experts else 1
            for ep in self._choose("ep", [n for n in divisors if common % n == 0]):
                if n_sharded % ep == 0:
                    yield {**sizes, "ep": ep}

    def _micro_batch_sizes(self) -> list[int]:
        """The microbatch sizes that divide every global batch of the run."""
        common = math.gcd(*self.cfg.batch.sizes)
        return self._choose("micro_batch_size", [n for n in range(1, common + 1) if common % n == 0])

    def _shapes(self, sizes: Mapping[str, int]) -> list[tuple[bool, str]]:
        """The pairs (sequence_parallel, cp_form) to try."""
        now = self.cfg.mesh
        cuts = [True, False] if sizes["tp"] > 1 else [now.sequence_parallel]
        forms = ["gather", "heads"] if sizes["cp"] > 1 else [now.cp_form]
        return list(itertools.product(self._choose("sequence_parallel", cuts), self._choose("cp_form", forms)))

    def _sums(self, layout: Layout) -> list[str]:
        """The values of `accumulate` to try."""
        n_microbatches = self.cfg.batch.global_batch_size // (layout.data_size * layout.micro_batch_size)
        differs = layout.n_shards > 1 and n_microbatches > 1
        return self._choose("accumulate", ["whole", "sharded"] if differs else ["whole"])

    def _pipelines(self, sizes: Mapping[str, int]) -> list[tuple[str, int, str, str | bool]]:
        """The tuples (schedule, virtual_stages, [recompute] mode, reshard_after_forward) to try."""
        pp = sizes["pp"]
        reshards: list[str | bool] = ["auto"]
        if pp == 1 and sizes["dp_shard"] * sizes["cp"] > 1:
            reshards.append(False)
        reshards = self._choose("reshard_after_forward", reshards)
        modes = self._choose("mode", ["none", "selective", "full"])
        found = []
        for schedule in self._choose("schedule", self._schedules(pp)):
            n_stages = [0]
            if pp > 1 and not self.cfg.pipeline.csv and SCHEDULES[schedule].per_rank == "2+":
                n_stages = list(range(2, max(2, self._n_layers // pp) + 1))
            for virtual in self._choose("virtual_stages", n_stages):
                found += [(schedule, virtual, mode, reshard) for mode in modes for reshard in reshards]
        return found

    def _schedules(self, pp: int) -> list[str]:
        """The schedules to try; only the default if there is no pipeline or a CSV file defines the schedule."""
        if pp == 1 or self.cfg.pipeline.csv:
            return [config.Pipeline().schedule]
        return list(SCHEDULES)

    def _choose(self, key: str, choices: list[Any]) -> list[Any]:
        return [self.fixed[key]] if key in self.fixed else choices

    def _refused_batch(self, layout: Layout) -> str:
        """The loader's reason for refusing the batch; '' if the loader accepts it."""
        key = "batch", layout.data_size, layout.micro_batch_size

        def check() -> None:
            loader.check_sizes(with_layout(self.cfg, layout).batch, layout.data_size)

        return self._refused(key, check)

    def _refused_model(self, layout: Layout) -> str:
        """The reason for which the model's checks refuse the layout; '' if they accept it.

        tp and cp are first checked alone, because a size that is refused alone is refused in every combination.
        """
        splits = layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward
        units = layout.mode != "none" and self.cfg.recompute.layers > 1
        pp = layout.pp if self.cfg.pipeline.csv else min(2, layout.pp)
        if not (splits or self._family.directory or self.cfg.pipeline.csv):
            pp = 1  # a built-in model's check only asks whether the schedule splits backward, so it needs no pipeline
        if layout.ep > 1:
            key = "experts", layout.ep, layout.mode
            if refusal := self._refused(key, lambda: checks.check_experts(with_layout(self.cfg, layout))):
                return refusal
        ep = layout.ep if self._family.directory else 1  # only the check of transformers models depends on ep
        for tp, cp in ((layout.tp, 1), (1, layout.cp), (layout.tp, layout.cp)):
            part = layout._replace(tp=tp, cp=cp, pp=pp, cp_form="gather", ep=ep)
            key = "model", tp, cp, pp, ep, layout.sequence_parallel, splits, units
            refusal = self._refused(key, lambda part=part: self._check_model(part))
            if refusal:
                return refusal
        key = "form", layout.tp, layout.cp, layout.cp_form
        return self._refused(key, lambda: self._check_form(layout))

    def _check_form(self, layout: Layout) -> None:
        self._family.attends_by_heads(with_layout(self.cfg, layout), layout.sizes)

    def _check_model(self, layout: Layout) -> None:
        checks.check_model(with_layout(self.cfg, layout), layout.sizes)

    def _refused_pipeline(self, layout: Layout) -> str:
        """The reason for which the pipeline's checks refuse the layout; '' if they accept it."""
        of_step = layout.data_size * layout.micro_batch_size
        key = "pipeline", layout.pp, of_step, layout.schedule, layout.virtual_stages, layout.mode
        key = *key, layout.reshard_after_forward

        def check() -> None:
            cfg = with_layout(self.cfg, layout)
            checks.check_pipeline(cfg, layout.sizes, self.device, self.pieces)

        return self._refused(key, check)

    def _refused_exact(self, layout: Layout) -> str:
        """The reason for which [run] exact refuses the layout; '' if the layout is accepted."""
        if not self.cfg.run.exact:
            return ""
        key = "exact", layout.tp, layout.pp, layout.ep
        return self._refused(key, lambda: exact.check(with_layout(self.cfg, layout), layout.sizes, self.device))

    def _refused(self, key: tuple[Any, ...], check: Callable[[], None]) -> str:
        if key not in self._refusals:
            try:
                check()
                self._refusals[key] = ""
            except ValueError as error:
                self._refusals[key] = str(error)
        return self._refusals[key]
