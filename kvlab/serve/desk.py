"""The desk: on the event loop, between the handlers and the engine thread. It knows every call in flight.

    handler -- submit(call) --> [429? 503?] --> EngineThread.add
    handler <-- call.take() <-- _take(report) <-- one call_soon_threadsafe a step
    handler -- release(call) --> EngineThread.abort, unless it has ended

What is put into a call: STARTED, then (i, StreamDelta) if it streams, (i, RequestOutput) when prompt i has ended, and
an APIError if it can go no further.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kvlab.events import Recorder
from kvlab.serve.call import Call
from kvlab.serve.engine_thread import EngineThread, Report
from kvlab.serve.errors import APIError, bad_request, draining, engine_dead
from kvlab.serve.metrics import Metrics

logger = logging.getLogger("kvlab.serve")
STARTED = "started"


class Desk:
    """One engine's calls.

    llm: the engine, which belongs to the thread from `open` on. max_waiting: prompts that may wait for a place; None
    is no limit. metrics: is told of every report.
    """

    def __init__(self, llm: Any, recorder: Recorder | None, metrics: Metrics, max_waiting: int | None = None):
        self._llm, self._recorder, self._metrics = llm, recorder, metrics
        self._max_waiting = max_waiting
        self._max_num_seqs = llm.config.max_num_seqs
        self._calls: set[Call] = set()
        self._num_in_inbox = 0  # prompts that were handed in since the last report
        self._thread: EngineThread | None = None
        self._all_gone: asyncio.Event | None = None
        self.is_draining = False
        self.is_dead = False
        self.stats = llm.stats()  # of the last report

    def open(self) -> None:
        """Start the engine thread; reports come back to the loop that runs now."""
        loop = asyncio.get_running_loop()
        self._all_gone = asyncio.Event()
        self._thread = EngineThread(self._llm, lambda r: loop.call_soon_threadsafe(self._take, r), self._recorder)
        self._thread.start()

    async def close(self) -> None:
        """End what is unfinished, and the thread."""
        self.is_draining = True
        self._thread.stop()
        while self._thread.is_alive():  # not by a helper thread: a process that is ending starts none
            await asyncio.sleep(0.005)

    # ---- for handlers

    def check_open(self) -> None:
        """APIError 503 if no request can be taken."""
        if self.is_dead:
            raise engine_dead()
        if self.is_draining:
            raise draining()

    def submit(self, call: Call) -> None:
        """Hand a call in. APIError 503 or 429, and nothing changed, if it cannot be taken now."""
        self.check_open()
        self._check_queue(len(call.jobs))
        self._calls.add(call)
        self._num_in_inbox += len(call.jobs)
        self._thread.add(call)

    def _check_queue(self, num_new: int) -> None:
        """Those who wait, as the last step left them, and those who came since are to be at most max_waiting.

        While nobody waits, the next step gives free seats to who came since; those do not count as waiting.
        """
        if self._max_waiting is None:
            return
        num_waiting, seats = self.stats["num_waiting"], 0
        if not num_waiting:
            seats = max(0, self._max_num_seqs - self.stats["num_running"])
        if num_waiting + self._num_in_inbox + num_new > self._max_waiting + seats:
            self._metrics.reject("max_waiting")
            raise APIError(429, f"{int(num_waiting)} requests are waiting and the queue takes {self._max_waiting}; try "
                           f"again later", code="rate_limit_exceeded", retry_after=1)  # fmt: skip

    def release(self, call: Call) -> None:
        """The handler is done with a call; what is left of it ends within a step."""
        self._calls.discard(call)
        if call.num_left and not self.is_dead:
            self._thread.abort(call)
        if not self._calls:
            self._all_gone.set()

    async def ask(self, function: Callable[[], Any]) -> Any:
        """Run `function` between two steps of the engine."""
        return await asyncio.wrap_future(self._thread.ask(function))

    @property
    def is_healthy(self) -> bool:
        return not self.is_dead and self._thread is not None and self._thread.is_alive()

    # ---- shutting down

    async def drain(self, timeout: float) -> bool:
        """Take no new calls and wait for those in flight, `timeout` seconds at most; True if all have ended."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout):
                while self._calls:
                    self._all_gone.clear()
                    await self._all_gone.wait()
        except TimeoutError:
            return False
        return True

    def fail_all(self, error: APIError) -> None:
        """Every call in flight ends with `error`."""
        for call in list(self._calls):
            call.put(error)

    # ---- from the engine thread

    def _take(self, report: Report) -> None:
        """Each part of a report to its call."""
        if report.stats:
            self.stats = report.stats
        self._num_in_inbox -= report.num_drained
        self._metrics.observe(report)
        for call, message in report.refused:
            call.num_left = 0
            call.put(bad_request(message))
        for call, _ in report.started:
            call.put(STARTED)
        for call, i, delta in report.deltas:
            if delta.error is not None:
                logger.error("request %s failed: %s", delta.request_id, delta.error)
            if call.stream:
                call.put((i, delta))
        for call, i, output in report.outputs:
            call.num_left -= 1
            call.put((i, output))
        if report.error is not None:
            self.is_dead = True
            self.fail_all(engine_dead())
