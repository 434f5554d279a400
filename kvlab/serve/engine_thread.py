"""The one thread that owns the engine. Nothing else touches the scheduler while it lives.

    event loop:   add(call), abort(call), ask(f)  --inbox-->   drained between two steps
    this thread:  add, abort, llm.step()            --Report-->  one call of `post` a step

With nothing to do it sleeps on its inbox. If it dies, its last report carries the error, and it stays dead: after an
exception out of a step the books of the scheduler are in doubt.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from kvlab.engine.outputs import RequestOutput, StreamDelta
from kvlab.events import Event, Recorder
from kvlab.serve.call import Call

logger = logging.getLogger("kvlab.serve")


@dataclass
class Report:
    """What has happened since the last report. (call, i) is prompt i of a call; times are time.monotonic() seconds.

    started, refused: calls that the engine has taken, or why not. scheduled: prompts that got into a batch for the
    first time, and when. deltas: what the step added; outputs: all of a prompt, with its last delta. aborted: prompts
    that were ended. num_drained: prompts taken out of the inbox. stats: LLMEngine.stats() after the step. time: now.
    """

    started: list[tuple[Call, float]] = field(default_factory=list)
    refused: list[tuple[Call, str]] = field(default_factory=list)
    scheduled: list[tuple[Call, int, float]] = field(default_factory=list)
    deltas: list[tuple[Call, int, StreamDelta]] = field(default_factory=list)
    outputs: list[tuple[Call, int, RequestOutput]] = field(default_factory=list)
    aborted: list[tuple[Call, int]] = field(default_factory=list)
    num_drained: int = 0
    stats: dict[str, float] = field(default_factory=dict)
    time: float = 0.0
    error: BaseException | None = None


class EngineThread:
    """Steps `llm` while there is work.

    llm: an LLMEngine, from now on this thread's alone. post: called on this thread with each Report; it must hand it
    over and return at once. recorder: that of the llm, which tells when a prompt is first scheduled.
    """

    def __init__(self, llm: Any, post: Callable[[Report], None], recorder: Recorder | None = None):
        self._thread = threading.Thread(target=self._run, name="kvlab-engine", daemon=True)
        self._llm, self._post = llm, post
        self._inbox: SimpleQueue[tuple[Callable, Any]] = SimpleQueue()
        self._owners: dict[str, tuple[Call, int]] = {}  # request id -> whose it is
        self._ids: dict[Call, list[str]] = {}
        self._never_scheduled: set[str] = set()
        self._report = Report()
        self._is_stopping = False
        self._is_over = False
        self.error: BaseException | None = None
        if recorder is not None:
            recorder.listen(self._note_schedule)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    # ---- for other threads: each only puts something into the inbox

    def add(self, call: Call) -> None:
        """Add all prompts of `call`, or none: a report says which."""
        self._inbox.put((self._add, call))

    def abort(self, call: Call) -> None:
        """End what is left of `call` before the next step. One that has just ended is left alone."""
        self._inbox.put((self._abort, call))

    def ask(self, function: Callable[[], Any]) -> Future:
        """Run `function` between two steps, where it may look at the engine. It runs after this thread's death, too."""
        future: Future = Future()
        self._inbox.put((self._answer, (function, future)))
        if self._is_over:
            self._answer_the_rest()
        return future

    def stop(self) -> None:
        """End what is unfinished, and the thread with it."""
        self._inbox.put((self._stop, None))

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._drain()
                if not self._is_stopping and self._llm.has_unfinished_requests():
                    self._sort(self._llm.step())
                self._hand_over()
        except BaseException as error:
            logger.critical("the engine thread has died; every request ends with an error", exc_info=error)
            self.error = self._report.error = error
            self._hand_over()
        finally:
            self._is_over = True
            self._answer_the_rest()

    def _drain(self) -> None:
        """Do all that is in the inbox; with nothing to compute, wait for something to be."""
        if not self._llm.has_unfinished_requests():
            do, argument = self._inbox.get()
            do(argument)
        while not self._inbox.empty():
            do, argument = self._inbox.get()
            do(argument)

    def _hand_over(self) -> None:
        report, self._report = self._report, Report()
        if report.error is None:
            report.stats = self._llm.stats()
        report.time = time.monotonic()
        self._post(report)

    def _add(self, call: Call) -> None:
        self._report.num_drained += len(call.jobs)
        ids: list[str] = []
        try:
            for i, job in enumerate(call.jobs):
                where = f"prompt {i}: " if len(call.jobs) > 1 else ""
                request = self._llm.add_request(job.prompt, job.params, priority=job.priority,
                                                cache_salt=job.cache_salt, name=call.name, where=where)  # fmt: skip
                ids.append(request.request_id)
        except ValueError as error:
            for request_id in ids:
                self._llm.abort_request(request_id)
            self._report.refused.append((call, str(error)))
            return
        self._ids[call] = ids
        self._owners.update((request_id, (call, i)) for i, request_id in enumerate(ids))
        self._never_scheduled.update(ids)
        self._report.started.append((call, time.monotonic()))

    def _abort(self, call: Call) -> None:
        for request_id in self._ids.pop(call, ()):
            if (owner := self._owners.get(request_id)) is not None:
                self._forget(request_id)
                self._report.aborted.append(owner)

    def _forget(self, request_id: str) -> None:
        del self._owners[request_id]
        self._never_scheduled.discard(request_id)
        self._llm.abort_request(request_id)

    def _sort(self, deltas: list[StreamDelta]) -> None:
        """Give each delta to its call; with a request's last one goes all of it."""
        for delta in deltas:
            if (owner := self._owners.get(delta.request_id)) is None:
                continue
            call, i = owner
            self._report.deltas.append((call, i, delta))
            if delta.usage is not None:
                self._report.outputs.append((call, i, self._llm.processor.output(delta.request_id)))
                self._forget(delta.request_id)
                self._ids[call].remove(delta.request_id)
                if not self._ids[call]:
                    del self._ids[call]

    def _note_schedule(self, event: Event) -> None:
        if event.kind == "schedule" and event.request_id in self._never_scheduled:
            self._never_scheduled.discard(event.request_id)
            self._report.scheduled.append((*self._owners[event.request_id], time.monotonic()))

    def _stop(self, _: None) -> None:
        for call in list(self._ids):
            self._abort(call)
        self._is_stopping = True

    def _answer(self, question: tuple[Callable[[], Any], Future]) -> None:
        function, future = question
        if not future.set_running_or_notify_cancel():  # who asked has gone
            return
        try:
            future.set_result(function())
        except Exception as error:  # the asker's, not the engine's
            future.set_exception(error)

    def _answer_the_rest(self) -> None:
        while True:
            try:
                do, argument = self._inbox.get_nowait()
            except Empty:
                return
            if do == self._answer:
                do(argument)
