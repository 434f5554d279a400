"""The one stream of events that every view, trace and comparison reads.

    layer --emit(kind, request_id, values)--> Recorder (bounded ring) --> events(), save(), listeners

A layer holds `recorder: Recorder | None` and emits only when there is one, so an engine that nobody
watches pays one `is not None` test a call. One event carries a whole batch of block ids, never one each.

kinds: block layer    alloc, free, touch, copy, publish, evict, swap_out, swap_in   (values: block ids)
       request layer  add, schedule, victim, preempt, finish, fork                  (values: see emitters)
       step layer     step_begin, compute, step_end     (compute: request id, first position, number of tokens, of each;
                      step_begin: the token budget and the seats)
"""

import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple


class Event(NamedTuple):
    """One thing that happened: in which engine step, what, to whom, with which block ids or numbers."""

    step: int
    kind: str
    request_id: str | None
    values: tuple


def to_json_lines(events: Iterable[Event]) -> str:
    """What Recorder.load reads: a line [step, kind, request_id, values] for each event."""
    return "".join(json.dumps(event) + "\n" for event in events)


class Recorder:
    """Keep the last `capacity` events; tell listeners of each as it happens."""

    def __init__(self, capacity: int = 65_536):
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a recorder keeps at least 1 event")
        self.step = 0
        self.num_dropped = 0
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._listeners: list[Callable[[Event], None]] = []

    def emit(self, kind: str, request_id: str | None = None, values: Iterable = ()) -> None:
        event = Event(self.step, kind, request_id, tuple(values))
        self.num_dropped += len(self._ring) == self._ring.maxlen
        self._ring.append(event)
        for listener in self._listeners:
            listener(event)

    def listen(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def events(self, *kinds: str) -> list[Event]:
        """What is in the ring, oldest first; only `kinds` if any are named."""
        return [e for e in self._ring if not kinds or e.kind in kinds]

    def save(self, path: str | Path) -> None:
        """Write the ring as JSON lines: [step, kind, request_id, values]."""
        Path(path).write_text(to_json_lines(self._ring), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Recorder":
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        recorder = cls(capacity=max(1, len(lines)))
        for line in lines:
            step, kind, request_id, values = json.loads(line)
            recorder._ring.append(Event(step, kind, request_id, tuple(values)))
            recorder.step = step
        return recorder
