"""What can happen to a request, as a table: (status, event) -> status (L33 3.2; lab 07).

    waiting --schedule--> running --stop, length--> finished         abort, error: from any of the four, at any time
                          |     ^
          recompute, swap v     | schedule
                  preempted, swapped --lose--> preempted

The scheduler does not ask this table: it sets `Request.status` where things happen. tests/control/test_lifecycle.py
watches every change of status in hundreds of random runs, and finds no other move than these.

One kind of request is born in the middle of the table: a sibling (n > 1) comes into being with its first token, in the
step that its parent ran. It counts as running there, also if it finds no seat afterwards and waits.
"""

from functools import cache

from kvlab.schedule.request import RequestStatus

WAITING, RUNNING = RequestStatus.WAITING, RequestStatus.RUNNING
PREEMPTED, SWAPPED = RequestStatus.PREEMPTED, RequestStatus.SWAPPED
LIVE = (WAITING, RUNNING, PREEMPTED, SWAPPED)

EVENTS = {
    "schedule": "it takes a seat, and this step computes some of its tokens",
    "recompute": "it must make way, and its K/V is dropped",
    "swap": "it must make way, and its K/V is copied to the CPU's memory",
    "lose": "while it waits there, its K/V in the CPU's memory turns out to be of no use",
    "stop": "the token that it has just got is one that ends it",
    "length": "the token that it has just got is the last one that it may have",
    "abort": "its user has gone",
    "error": "something went wrong that concerns this request alone",
}


@cache
def transitions() -> dict[tuple[RequestStatus, str], RequestStatus]:
    """All that can happen: (status, event) -> the next status. 16 entries; nothing happens to who is finished."""
    return {
        (WAITING, "schedule"): RUNNING,
        (PREEMPTED, "schedule"): RUNNING,
        (SWAPPED, "schedule"): RUNNING,
        (RUNNING, "recompute"): PREEMPTED,
        (RUNNING, "swap"): SWAPPED,
        (SWAPPED, "lose"): PREEMPTED,
        (RUNNING, "stop"): RequestStatus.FINISHED_STOPPED,
        (RUNNING, "length"): RequestStatus.FINISHED_LENGTH_CAPPED,
        **{(status, "abort"): RequestStatus.FINISHED_ABORTED for status in LIVE},
        **{(status, "error"): RequestStatus.FINISHED_ERROR for status in LIVE},
    }


def next_status(status: str, event: str) -> str:
    """The status after `event`, both as RequestStatus's values. ValueError, naming both, if it cannot happen then."""
    for (before, what), after in transitions().items():
        if before.value == status and what == event:
            return after.value
    raise ValueError(f"{event!r} cannot happen to a request that is {status!r}")
