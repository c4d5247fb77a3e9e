"""Stop a run whose losses are too high: `[train] stop_loss_above` and `stop_validation_rises`.

Each checkpoint stores the counts of high losses, so a resumed run continues to count, and a stopped run stays stopped.
"""

from __future__ import annotations

import math

from dtmega.checkpoint.state import HealthState
from dtmega.config import keys


class Health:
    """Counters of high losses. Each rank has its own counters, which agree because all ranks see equal losses.

    Args:
        cfg: section [train] of the run's configuration.
        state: counts in the checkpoint from which the run resumes.

    Attributes:
        state: counts after the last step and the last validation.
    """

    def __init__(self, cfg: keys.Train, state: HealthState) -> None:
        self._cfg = cfg
        # With [train] past_stop, a stopped run continues: the counts restart at zero, but the best loss stays.
        self.state = state._replace(losses_above=0, rises=0, stopped="") if cfg.past_stop else state

    def after_step(self, step: int, loss: float) -> None:
        """Record the loss of a step. NaN exceeds every limit."""
        if not self._cfg.stop_loss_above:
            return
        limit, n_steps = self._cfg.stop_loss_above
        losses_above = 0 if loss <= limit else self.state.losses_above + 1
        self.state = self.state._replace(losses_above=losses_above)
        if losses_above >= n_steps:
            self._stop(f"[train] stop_loss_above: the loss was above {limit:g} for {losses_above} steps, up to {step}")

    def after_validation(self, step: int, loss: float) -> bool:
        """Record the validation loss after a step. Returns True if this loss is the best so far."""
        n_rises = self._cfg.stop_validation_rises
        if not n_rises:
            return False
        best_loss, best_step = self.state.best_loss, self.state.best_step
        if math.isfinite(loss) and (best_loss is None or loss < best_loss):
            self.state = self.state._replace(rises=0, best_loss=loss, best_step=step)
            return True
        self.state = self.state._replace(rises=self.state.rises + 1)
        if self.state.rises >= n_rises:
            best = "no loss was finite" if best_loss is None else f"the best one is {best_loss:.4f} at step {best_step}"
            self._stop(
                f"[train] stop_validation_rises: {self.state.rises} validations in a row, up to step {step}, were not "
                f"below the best one before them; {best}"
            )
        return False

    def _stop(self, reason: str) -> None:
        # If both keys stop the run at the same step, the first reason is kept.
        self.state = self.state._replace(stopped=self.state.stopped or reason)
