"""A call: what one HTTP request asks of the engine, and the pigeonhole where its handler finds the answers.

The engine thread reads `name` and `jobs`, which never change. All else belongs to the event loop.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from kvlab.sampling_params import SamplingParams


@dataclass(frozen=True)
class Job:
    """One prompt of a call. prompt: token ids. text: what the client wrote, where it wrote text."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    text: str | None = None


@dataclass
class JobTimes:
    """When things happened to one prompt, time.monotonic() seconds. last: by continuation, of which some have ended."""

    scheduled: float | None = None
    first_token: float | None = None
    last: dict[int, float] = field(default_factory=dict)
    num_ended: int = 0


class Call:
    """The prompts of one HTTP request. They start together or not at all.

    name: the id that the client sees; the engine's ids begin with it. stream: wants every delta, not only the whole.
    arrival: when the HTTP request came.
    """

    def __init__(self, name: str, jobs: list[Job], stream: bool = False, arrival: float | None = None):
        self.name = name
        self.jobs = jobs
        self.stream = stream
        self.arrival = time.monotonic() if arrival is None else arrival
        self.queued = self.arrival  # when the engine took it
        self.times = [JobTimes() for _ in jobs]
        self.num_left = len(jobs)  # prompts that have not ended
        self._events: list[Any] = []
        self._has_events = asyncio.Event()

    def put(self, event: Any) -> None:
        """Leave something for the handler. (Event loop only.)"""
        self._events.append(event)
        self._has_events.set()

    async def take(self) -> list[Any]:
        """All that has been left since the last time; waits until there is something."""
        await self._has_events.wait()
        self._has_events.clear()
        events, self._events = self._events, []
        return events
