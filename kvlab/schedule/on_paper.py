"""Batching on paper: requests of known length, seats, and a clock that counts steps (L33 3.1, 3.2, 7.2; lab 07).

    lengths --static_schedule, continuous_schedule--> (seat, start, end) of each request
    (arrival, length) --serve(admit)-->               (start, end): the loop of an engine, whoever decides

A request of length n needs n steps, one token each; the prompt costs nothing. Steps count from 0; one that runs in
steps 3, 4 and 5 has start 3 and end 6. A seat-step is one seat in one step: busy, or idle.
"""

import heapq
from collections.abc import Callable, Sequence

from kvlab.primer import GPU, step_flops, step_seconds
from kvlab.sizing import ModelShape

Turn = tuple[int, int, int]  # seat, start, end
Admit = Callable[[int, int, bool], bool]  # as kvlab.schedule.policies.admit


class Stuck(Exception):
    """Requests wait, nobody runs, and nobody is let in: nothing would ever change."""


def ghost_idle(lengths: Sequence[int]) -> tuple[int, int, float]:
    """(steps, idle seat-steps, idle share from 0 to 1) of one static batch, a seat for each request (L33 3.1)."""
    steps = max(lengths)
    idle = steps * len(lengths) - sum(lengths)
    return steps, idle, idle / (steps * len(lengths))


def static_schedule(lengths: Sequence[int], num_seats: int) -> list[Turn]:
    """`num_seats` requests at a time, in order; the next ones begin when the longest of them has ended (L33 3.1)."""
    turns: list[Turn] = []
    start = 0
    for first in range(0, len(lengths), num_seats):
        batch = lengths[first : first + num_seats]
        turns += [(seat, start, start + length) for seat, length in enumerate(batch)]
        start += max(batch)
    return turns


def continuous_schedule(lengths: Sequence[int], num_seats: int) -> list[Turn]:
    """In order; a seat that one request has left is the next one's in the following step (L33 3.2)."""
    free = [(0, seat) for seat in range(num_seats)]  # (from which step on, seat): a heap
    turns = []
    for length in lengths:
        start, seat = heapq.heappop(free)
        turns.append((seat, start, start + length))
        heapq.heappush(free, (start + length, seat))
    return turns


def num_steps(turns: Sequence[Turn]) -> int:
    """Steps until the last request has ended."""
    return max((end for *_, end in turns), default=0)


def num_idle(turns: Sequence[Turn], num_seats: int) -> int:
    """Seat-steps without a token: those after an early end, and those of seats for which nobody was left."""
    return num_seats * num_steps(turns) - sum(end - start for *_, start, end in turns)


def step_bounds(lengths: Sequence[int], num_seats: int) -> tuple[int, int]:
    """(fewest steps that any schedule can take, most that continuous batching takes, in whatever order).

    Least: the seats cannot do more than num_seats tokens a step, and the longest request has no shortcut. Most: whoever
    ends last was let in at the latest when the others had kept every seat busy (Graham 1966).
    """
    total, longest = sum(lengths), max(lengths)
    return max(-(-total // num_seats), longest), (total - longest) // num_seats + longest


def serve(requests: Sequence[tuple[int, int]], num_seats: int, admit: Admit) -> list[tuple[int, int]]:
    """The loop: who has all tokens leaves, who may enter enters, who sits gets a token. (start, end) of each.

    requests: (arrival, length) by arrival, the first step in which it may run. admit(num_running, num_seats,
    batch_is_forming) is asked for the first who waits, until it says no; the batch is forming in a step that begins
    with all seats empty. Raises Stuck.
    """
    starts: list[int] = []
    running: dict[int, int] = {}  # number of the request -> tokens to go
    step = 0
    while running or len(starts) < len(requests):
        running = {number: left for number, left in running.items() if left}
        forming = not running
        while len(starts) < len(requests) and requests[len(starts)][0] <= step:
            if not admit(len(running), num_seats, forming):
                break
            running[len(starts)] = requests[len(starts)][1]
            starts.append(step)
        if not running and len(starts) < len(requests) and requests[len(starts)][0] <= step:
            raise Stuck(f"step {step}: nobody runs, and request {len(starts)} is not let in")
        running = {number: left - 1 for number, left in running.items()}
        step += 1
    return [(start, start + length) for start, (_, length) in zip(starts, requests, strict=True)]


def full_memory(gpu: GPU, shape: ModelShape, kv_bytes: int, context: int, reserve: int) -> tuple[int, float, float]:
    """Decode with as many requests as fit: (how many, seconds of a step, share of the arithmetic used), at best.

    kv_bytes: for K and V, besides the weights. context: tokens before, of each. reserve: slots that each holds,
    at least context + 1. (0, 0.0, 0.0) if none fits. L33 3.3, 3.4.
    """
    batch = kv_bytes // (reserve * shape.kv_bytes_per_token())
    if batch == 0:
        return 0, 0.0, 0.0
    step = [(1, context)] * batch
    seconds = step_seconds(gpu, shape, step)
    return batch, seconds, step_flops(shape, step) / (seconds * gpu.peak_flops)
