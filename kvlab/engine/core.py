"""The step loop: the whole engine in three lines, and what happens when a step fails (lab 13).

    step(scheduler, runner):  schedule()  ->  execute()  ->  update_from_output()
                                                  | raises
                                                  v
                              one request at a time: those who fail alone end with an error, the others go on

A step function may be replaced; who fails is found below it, so it never hears of that. A forward only writes slots
that its own requests will write again, so trying it again is harmless. The copies before it are not, so they are made
once (`block_ops_done`); if they fail, the step is given up.
"""

from collections.abc import Callable
from typing import Protocol

from kvlab.schedule import EngineCoreOutput, Request, SampledTokens, Scheduler, SchedulerOutput


class DeviceLost(RuntimeError):
    """The GPU does nothing more for this process. No request is to blame, and none can be served: the engine ends."""


class Runner(Protocol):
    """Computes what the scheduler decided: kvlab.engine.ModelRunner, or a stand-in without a model."""

    def execute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Make output.block_ops once, run one forward, return the sampled token ids by request id.

        DeviceLost ends the engine, any other exception the requests that bring it.
        """


def step(scheduler: Scheduler, runner: Runner) -> list[EngineCoreOutput]:
    """One step: decide, compute, take in what was computed; what it brought (L33 4.3)."""
    output = scheduler.schedule()
    sampled = runner.execute(output)
    return scheduler.update_from_output(output, sampled)


class EngineCore:
    """Scheduler and runner, stepped together by `one_step`. One thread owns it."""

    def __init__(self, scheduler: Scheduler, runner: Runner, one_step: Callable = step):
        self.scheduler = scheduler
        self.runner = runner
        self.one_step = one_step

    def add_request(self, request: Request) -> None:
        """Queue `request`. ValueError, and nothing changed, if it can never be served."""
        self.scheduler.add_request(request)

    def abort_request(self, request_id: str) -> list[EngineCoreOutput]:
        """End a request with all its children; unknown ids are ignored."""
        return [EngineCoreOutput.ended(request) for request in self.scheduler.finish_requests(request_id)]

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineCoreOutput]:
        """One step; what it brought. RuntimeError if requests wait and yet nothing could be done."""
        self.scheduler.in_step = True  # whoever is called from its midst may not fork or free a branch
        try:
            return self._step()
        finally:
            self.scheduler.in_step = False

    def _step(self) -> list[EngineCoreOutput]:
        forward = _Forward(self)
        try:
            results = self.one_step(self.scheduler, forward)
        except _GivenUp as error:
            return [EngineCoreOutput.ended(request) for request in self.scheduler.fail_step(error.output, str(error))]
        if logprobs := getattr(forward.sampled, "logprobs", None):
            for result in results:
                request = result.request
                if not result.new_token_ids:
                    continue
                if own := logprobs.get(request.request_id):
                    result.logprobs = [own[0]]
                elif born := logprobs.get(request.parent_id):  # a child of this step: its token came with the parent's
                    result.logprobs = [born[request.child_index]]
        return forward.failed + results

    def _execute_one_by_one(self, output: SchedulerOutput) -> tuple[SampledTokens, list[EngineCoreOutput]]:
        """Find out who spoils the batch. Whoever fails alone ends with an error."""
        sampled, failed = SampledTokens(), []
        for entry, table in zip(output.scheduled, output.block_tables, strict=True):
            if entry[0].is_finished():
                continue  # with its beam group, which somebody before it has spoilt
            alone = SchedulerOutput(output.step, [entry], [table], block_ops_done=True)
            try:
                tokens = self.runner.execute(alone)
                sampled.update(tokens)
                sampled.logprobs |= getattr(tokens, "logprobs", {})
            except DeviceLost:
                raise
            except Exception as error:
                ended = self.scheduler.fail_requests([entry[0]], describe(error))
                failed += [EngineCoreOutput.ended(request) for request in ended]
        return sampled, failed


class _Forward:
    """The runner that a step function is given: a request that fails is ended here, and the rest is computed."""

    def __init__(self, core: EngineCore):
        self.core = core
        self.sampled: dict[str, list[int]] = {}
        self.failed: list[EngineCoreOutput] = []

    def execute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        core = self.core
        if not output.scheduled and not output.preempted and core.has_unfinished_requests():
            raise RuntimeError(
                f"stuck: {len(core.scheduler.waiting)} requests wait, {len(core.scheduler.running)} run, and the "
                f"step is empty; a replaced policy or block layer may never say yes"
            )
        try:
            self.sampled = core.runner.execute(output)
        except DeviceLost:
            raise
        except Exception as error:
            if output.block_ops and not output.block_ops_done:
                raise _GivenUp(output, describe(error)) from error
            self.sampled, self.failed = core._execute_one_by_one(output)
        return self.sampled


class _GivenUp(Exception):
    """The copies of a step failed, and with them the step."""

    def __init__(self, output: SchedulerOutput, message: str):
        super().__init__(message)
        self.output = output


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
