"""The decisions of the scheduler, one small function each. Labs 07-09 replace them one by one.

    admit               may one more request enter the running batch?         (L33 3.2; lab 07)
    plan_tokens         who gets how much of the step's token budget?         (L33 4.4; lab 08)
    choose_victim       who gives way when blocks run out?                    (L33 5.1, A.2; lab 09)
    swap_or_recompute   does a victim's K/V wait on the CPU or is it dropped? (L33 5.4; lab 09)
    may_resume          is there room enough to let a request in again?       (L33 9.3-1; lab 09)

A policy changes when things happen, never what a request generates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvlab.schedule.request import Request


def admit(num_running: int, max_num_seqs: int, batch_is_forming: bool) -> bool:
    """Continuous batching: whenever a seat is free. (Children to come of running requests count as running.)"""
    return num_running < max_num_seqs


def admit_static(num_running: int, max_num_seqs: int, batch_is_forming: bool) -> bool:
    """Static batching: only into a batch that is being formed; it closes when seats, room or requests run out."""
    return batch_is_forming and num_running < max_num_seqs


def plan_tokens(pending: Sequence[int], budget: int, limit: int) -> list[int]:
    """Divide `budget` tokens among running requests that have `pending[i]` tokens without K/V.

    Decodes (one token pending) come first, so that a long prompt never makes those who are already reading
    wait; what is left is filled with chunks of at most `limit` tokens, in order. Returns tokens per request.
    """
    decodes = pending.count(1)
    if decodes == len(pending) <= budget:
        return [1] * decodes
    plan = [0] * len(pending)
    for decode in (True, False):
        for i, tokens in enumerate(pending):
            if (tokens == 1) == decode:
                plan[i] = min(tokens, limit, budget)
                budget -= plan[i]
    return plan


def choose_victim(running: Sequence[Request], needy: Request, gain: Callable[[Request], int]) -> Request:
    """The youngest of lowest priority whose blocks help; `needy` itself if everybody else was there before it.

    gain(request) is how many blocks come free with it: shared blocks do not. Never somebody older than
    `needy`: two requests could otherwise take turns in throwing each other out for ever.
    """
    younger = [request for request in running if request.sort_key > needy.sort_key]
    useful = [request for request in younger if gain(request) > 0]
    return max(useful or younger or [needy], key=lambda request: request.sort_key)


def swap_or_recompute(request: Request, num_blocks: int, num_free_cpu_blocks: int) -> str:
    """"swap" when swap space has room for the victim's `num_blocks` blocks, else "recompute"."""
    return "swap" if num_blocks <= num_free_cpu_blocks else "recompute"


class Room(NamedTuple):
    """What an admission needs and finds, in blocks."""

    needed: int  # to hold all known tokens of the request; blocks that others hold for it are not counted
    free: int  # not owned by anybody, or only by held branches that do not run
    promised: int  # that running requests still need for tokens they were admitted with
    num_growing: int  # running requests that may need another block soon


def may_resume(request: Request, room: Room) -> bool:
    """Enter only with room for the whole prompt, for what others were promised, and for the next growth.

    Counting the whole prompt and not its first chunk is what keeps chunked prefill from admitting more than
    fits. The spare blocks, one for each request that grows, are hysteresis; every preemption of a request asks
    one more of each, so a request that was thrown out comes back later each time and thrashing ends.
    """
    spare = room.num_growing * (1 + request.num_preemptions)
    return room.num_growing == 0 or room.needed + room.promised + spare <= room.free


@dataclass(frozen=True)
class Policies:
    """The scheduler's decisions; replace any by a function of the same arguments."""

    admit: Callable[[int, int, bool], bool] = admit
    plan_tokens: Callable[[Sequence[int], int, int], list[int]] = plan_tokens
    choose_victim: Callable[[Sequence[Request], Request, Callable[[Request], int]], Request] = choose_victim
    swap_or_recompute: Callable[[Request, int, int], str] = swap_or_recompute
    may_resume: Callable[[Request, Room], bool] = may_resume
