"""The one thread that owns the engine, driven with an engine that does as it is told."""

import threading
from types import SimpleNamespace

import pytest

from kvlab.engine.outputs import StreamDelta, Usage
from kvlab.sampling_params import SamplingParams
from kvlab.serve.call import Call, Job
from kvlab.serve.engine_thread import EngineThread, Report


class FakeEngine:
    """Each step waits for `go`, and gives every request one token; the third is the last."""

    def __init__(self):
        self.go, self.begun, self.num_begun = threading.Semaphore(0), threading.Semaphore(0), 0
        self.requests: dict[str, int] = {}
        self.log: list[str] = []
        self.threads: set[str] = set()
        self.fail: BaseException | None = None
        self.processor = SimpleNamespace(output=lambda request_id: f"all of {request_id}")

    def add_request(self, prompt, params, *, priority, cache_salt, name, where):
        self.threads.add(threading.current_thread().name)
        if prompt == [666]:
            raise ValueError(f"{where}the prompt is bad")
        request_id = f"{name}-{len(self.log)}"
        self.requests[request_id] = 0
        self.log.append(f"add {request_id}")
        return SimpleNamespace(request_id=request_id)

    def abort_request(self, request_id):
        self.threads.add(threading.current_thread().name)
        self.log.append(f"abort {request_id}" if request_id in self.requests else f"forget {request_id}")
        self.requests.pop(request_id, None)

    def has_unfinished_requests(self):
        return bool(self.requests)

    def stats(self):
        return {"num_running": len(self.requests), "num_waiting": 0}

    def wait_for_step(self, number: int) -> None:
        """Until step `number` has begun."""
        while self.num_begun < number:
            assert self.begun.acquire(timeout=20)
            self.num_begun += 1

    def step(self):
        self.begun.release()
        assert self.go.acquire(timeout=20)
        self.threads.add(threading.current_thread().name)
        self.log.append("step")
        if self.fail:
            raise self.fail
        deltas = []
        for request_id in list(self.requests):
            self.requests[request_id] += 1
            is_last = self.requests[request_id] == 3
            usage = Usage(1, 3) if is_last else None
            deltas.append(StreamDelta(request_id, 0, "x", [1], "length" if is_last else None, usage=usage))
            if is_last:
                del self.requests[request_id]
        return deltas


class Watched:
    """A thread whose reports are kept."""

    def __init__(self):
        self.engine = FakeEngine()
        self.reports: list[Report] = []
        self._came = threading.Semaphore(0)
        self.thread = EngineThread(self.engine, self._keep)
        self.thread.start()

    def _keep(self, report: Report) -> None:
        self.reports.append(report)
        self._came.release()

    def next(self) -> Report:
        assert self._came.acquire(timeout=20), "no report"
        return self.reports[-1]

    def step(self) -> Report:
        self.engine.go.release()
        return self.next()


@pytest.fixture
def watched():
    made = Watched()
    yield made
    made.thread.stop()
    made.engine.go.release(100)
    made.thread.join(20)
    assert not made.thread.is_alive()


def call(name: str, *prompts: list[int]) -> Call:
    return Call(name, [Job(prompt, SamplingParams()) for prompt in prompts or ([1],)])


def test_a_request_goes_through_in_one_report_a_step(watched):
    asked = call("a")
    watched.thread.add(asked)
    first = watched.step()
    assert [started[0] for started in first.started] == [asked] and first.num_drained == 1
    assert [(c, i, d.text) for c, i, d in first.deltas] == [(asked, 0, "x")] and not first.outputs
    watched.step()
    last = watched.step()
    assert last.outputs == [(asked, 0, "all of a-0")]
    assert len(watched.reports) == 3 and last.stats["num_running"] == 0
    assert watched.engine.threads == {"kvlab-engine"}


def test_it_sleeps_when_there_is_nothing_to_do(watched):
    watched.engine.go.release(5)
    answer = watched.thread.ask(lambda: 42)
    assert answer.result(20) == 42
    assert "step" not in watched.engine.log


def test_what_comes_during_a_step_is_taken_up_before_the_next(watched):
    one, two = call("a"), call("b")
    watched.thread.add(one)
    watched.step()
    watched.engine.wait_for_step(2)
    watched.thread.add(two)
    watched.thread.abort(one)
    report = watched.step()  # it was under way already
    assert report.aborted == [] and {c for c, _, _ in report.deltas} == {one}
    report = watched.step()
    assert report.aborted == [(one, 0)] and {c for c, _, _ in report.deltas} == {two}
    assert watched.engine.log == ["add a-0", "step", "step", "add b-3", "abort a-0", "step"]


def test_the_prompts_of_a_call_start_together_or_not_at_all(watched):
    asked = call("a", [1], [2], [666])
    watched.thread.add(asked)
    report = watched.next()
    assert report.refused == [(asked, "prompt 2: the prompt is bad")] and not report.started
    assert watched.engine.requests == {} and report.num_drained == 3
    assert [entry for entry in watched.engine.log if entry.startswith("abort")] == ["abort a-0", "abort a-1"]


def test_aborting_one_that_has_just_ended_or_never_was_is_harmless(watched):
    asked = call("a")
    watched.thread.add(asked)
    for _ in range(3):
        watched.step()
    watched.thread.abort(asked)
    watched.thread.abort(asked)
    watched.thread.abort(call("stranger"))
    assert watched.thread.ask(lambda: "fine").result(20) == "fine"
    assert not any(report.aborted for report in watched.reports)
    assert not any(entry.startswith("abort") for entry in watched.engine.log)


def test_two_calls_of_one_name_are_two_calls(watched):
    one, two = call("same"), call("same")
    watched.thread.add(one)
    watched.thread.add(two)
    seen = set()
    for _ in range(4):
        watched.engine.go.release()
    while len(seen) < 2:
        seen |= {c for c, _, _ in watched.next().outputs}
    assert seen == {one, two}


def test_its_death_is_told_in_its_last_report(watched, caplog):
    asked = call("a")
    watched.thread.add(asked)
    watched.step()
    watched.engine.fail = RuntimeError("the books are in doubt")
    report = watched.step()
    assert report.error is watched.engine.fail and watched.thread.error is watched.engine.fail
    watched.thread.join(20)
    assert not watched.thread.is_alive()
    assert "the engine thread has died" in caplog.text
    watched.thread.add(call("late"))  # into an inbox that nobody reads
    assert watched.thread.ask(lambda: "still answers").result(20) == "still answers"


def test_an_error_of_who_asks_is_his_own(watched):
    with pytest.raises(ZeroDivisionError):
        watched.thread.ask(lambda: 1 / 0).result(20)
    gone = watched.thread.ask(lambda: None)
    gone.cancel()
    assert watched.thread.ask(lambda: "alive").result(20) == "alive"


def test_stop_ends_what_is_unfinished(watched):
    asked = call("a")
    watched.thread.add(asked)
    watched.step()
    watched.thread.stop()
    watched.engine.go.release()
    watched.thread.join(20)
    assert watched.engine.requests == {} and any(report.aborted == [(asked, 0)] for report in watched.reports)
