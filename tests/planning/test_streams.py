"""planning/prices/streams.py: overlap and exposure against closed forms, and random lists against a plain recursion."""

from __future__ import annotations

import functools
import random

import pytest

from dtmega.planning.prices import streams
from dtmega.planning.work import COMPUTE, Message, Work

GATHER = Message("all-gather", "fsdp", 8, 1)
REDUCE = Message("all-reduce", "tp", 8, 1)


def kernel(action: str = "0F0", waits: tuple[int, ...] = (), stream: str = COMPUTE) -> Work:
    return Work(action, stream, "aten.mm", waits=waits)


def message(what: Message, waits: tuple[int, ...] = (), stream: str = "nccl", action: str = "0F0") -> Work:
    return Work(action, stream, "c10d", message=what, waits=waits)


def prefetched(layers: int) -> list[Work]:
    """Layers whose weights are gathered one after another on a stream of their own; a layer waits for its weights."""
    works = []
    for layer in range(layers):
        works += [message(GATHER), kernel(waits=(2 * layer,))]
    return works


@pytest.mark.parametrize(("gather_s", "layer_s"), [(2.0, 5.0), (5.0, 2.0), (3.0, 3.0)])
def test_prefetched_weights_expose_the_first_gather_or_the_slower_stream(gather_s: float, layer_s: float):
    times = streams.run(prefetched(4), [gather_s, layer_s] * 4)
    exposed_s = gather_s + 3 * max(0.0, gather_s - layer_s)
    assert times.compute_s == 4 * layer_s
    assert times.communication_s == 4 * gather_s
    assert times.exposed == {("0F0", "fsdp"): pytest.approx(exposed_s)}
    assert times.seconds == times.compute_s + times.exposed_s
    covered = [each.exposed_s == 0 for each in times.messages]
    assert covered == [False, *[gather_s <= layer_s] * 3]


def test_a_collective_that_the_next_kernel_needs_is_exposed_whole():
    works = [kernel(), message(REDUCE, waits=(0,)), kernel(waits=(1,))]
    times = streams.run(works, [1.0, 4.0, 2.0])
    assert times.spans == [(0, 1), (1, 5), (5, 7)]
    assert times.exposed == {("0F0", "tp"): 4.0}


def test_a_reduction_at_the_end_is_exposed_beyond_the_last_kernel_under_the_action_that_launched_it():
    works = [kernel("0B0"), message(REDUCE, waits=(0,), action="0B0"), kernel("0B1")]
    times = streams.run(works, [1.0, 5.0, 2.0])
    assert times.seconds == 6.0
    assert times.exposed == {("0B0", "tp"): 3.0}


def test_a_wait_is_divided_among_the_messages_that_ran_in_it():
    works = [kernel(), message(GATHER), message(REDUCE), kernel(waits=(2,))]
    times = streams.run(works, [1.0, 3.0, 4.0, 1.0])
    assert times.exposed == {("0F0", "fsdp"): 2.0, ("0F0", "tp"): 4.0}


def test_a_message_on_the_compute_stream_is_exposed():
    times = streams.run([kernel(), message(REDUCE, stream=COMPUTE), kernel()], [1.0, 4.0, 1.0])
    assert (times.compute_s, times.exposed_s, times.seconds) == (2.0, 4.0, 6.0)


def test_a_wait_for_a_kernel_on_another_stream_is_no_communication():
    times = streams.run([kernel(stream="copy"), kernel(waits=(0,))], [2.0, 1.0])
    assert times.exposed == {("0F0", streams.OTHER): 2.0}


def test_an_empty_list_takes_no_time():
    assert streams.run([], []).seconds == 0


def test_a_work_that_waits_for_a_later_one_is_refused():
    with pytest.raises(ValueError, match=r"work 1 \(aten\.mm\) waits for \[2\], expected earlier works"):
        streams.run([kernel(), kernel(waits=(2,)), kernel()], [1.0] * 3)


def test_starts_of_random_lists_are_the_longest_paths_and_busy_plus_waiting_is_the_whole_time():
    draw = random.Random(0)
    for _ in range(50):
        works: list[Work] = []
        for number in range(30):
            waits = tuple(draw.sample(range(number), min(number, draw.randint(0, 2))))
            stream = draw.choice([COMPUTE, "nccl", "copy"])
            works.append(message(REDUCE, waits, stream) if stream == "nccl" else kernel("0F0", waits, stream))
        durations = [float(draw.randint(0, 5)) for _ in works]

        @functools.cache
        def end(number: int, works=tuple(works), durations=tuple(durations)) -> float:
            before = [i for i in range(number) if works[i].stream == works[number].stream][-1:]
            return durations[number] + max((end(i) for i in (*before, *works[number].waits)), default=0.0)

        times = streams.run(works, durations)
        assert [span.end_s for span in times.spans] == [end(number) for number in range(30)]
        assert times.compute_s + times.exposed_s == pytest.approx(times.seconds)
