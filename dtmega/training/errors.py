"""Record the errors that end a run. Some errors are explained in one line; all other errors need a traceback."""

from __future__ import annotations

from dtmega.data.lost import DataLost
from dtmega.distributed import exit_codes
from dtmega.files import console
from dtmega.training import out_of_memory
from dtmega.training.step import Run


def exit_code(run: Run, error: Exception) -> int | None:
    """Record the error that ends this rank.

    Returns:
        The exit code if a printed line explains the error; None if the user needs the traceback.
    """
    exhausted = out_of_memory.find(error)
    if exhausted is not None:
        return _end_without_memory(run, exhausted)
    if isinstance(error, DataLost):
        return _end_without_data(run, error)
    # A RuntimeError may come from a collective after other ranks have exited. If a signal came first, the other ranks
    # exited at the end of their grace time, and the watchdog would soon end this rank too.
    of_collective = isinstance(error, RuntimeError)
    if of_collective and run.watch.signals:
        return run.watch.report_stuck(f"before this: {error}")
    is_first = run.watch.record_exit(exit_codes.FAILED, exit_codes.error_summary(error))
    if of_collective and not is_first:
        return run.watch.report_first_exit(error)
    return None


def _end_without_memory(run: Run, error: BaseException) -> int:
    """Print and record that this rank has run out of memory.

    Args:
        run: objects of the run.
        error: error that the allocator raised.

    Returns:
        The exit code.
    """
    where = f"in step {run.exit_status.step + 1}, in {run.phases.name}"
    reason = out_of_memory.explain(error, run.cfg, where, run.metrics.peak_memory)
    profiler = run.phases.profiler
    if profiler is not None and (snapshot := profiler.dump_memory_history()):
        reason += f"; all allocations: {snapshot} (https://pytorch.org/memory_viz)"
    console.say(f"rank {run.world.rank}: {reason} (exit code {exit_codes.FAILED})")
    run.watch.record_exit(exit_codes.FAILED, reason)
    return exit_codes.FAILED


def _end_without_data(run: Run, error: DataLost) -> int:
    """Record that this rank cannot read its data. If several ranks fail, only the first of them prints the error.

    Returns:
        The exit code: STUCK if the run can continue once the object store responds; otherwise FAILED.
    """
    code = exit_codes.STUCK if error.is_temporary else exit_codes.FAILED
    if run.watch.record_exit(code, str(error)):
        console.say(f"rank {run.world.rank}: {error} (exit code {code})")
    return code
