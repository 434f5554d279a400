"""When a step fails (pitfalls 5, 8): who ends with an error, who goes on, and with the right tokens."""

import pytest
from driving import engine, request, run, want

from kvlab.schedule import Policies, SchedulerOutput
from kvlab.sim import SlotEchoRunner


class Failing(SlotEchoRunner):
    """Raises in the batches of chosen steps: before, "amid" or "after" the copies, or after the forward."""

    def __init__(self, *args, when="after", steps=(), poisoned=()):
        super().__init__(*args)
        self.when, self.steps, self.poisoned = when, steps, poisoned
        self.alone = []

    def execute(self, output):
        names = [req.request_id for req, _ in output.scheduled]
        if output.block_ops_done:
            self.alone += names
            if set(names) & set(self.poisoned):
                raise RuntimeError(f"{names[0]} is poison")
            return super().execute(output)
        made = {"before": 0, "amid": len(output.block_ops) // 2}.get(self.when, len(output.block_ops))
        if output.step in self.steps or set(names) & set(self.poisoned):
            super().execute(SchedulerOutput(output.step, block_ops=output.block_ops[:made]))
            output.block_ops_done = self.when in ("after", "forward")
            if self.when == "forward":
                super().execute(output)
            raise RuntimeError("out of luck")
        return super().execute(output)


@pytest.mark.parametrize("when", ["after", "forward"])
def test_a_forward_that_fails_once_costs_nobody_anything(when):
    """Also with copies in that step: made once, not again."""
    core = engine(runner=(runner := Failing(21, 4, when=when, steps=range(1, 12))))
    core.add_request(a := request("a", 6, n=3, max_tokens=6))
    core.add_request(b := request("b", [9] * 7, max_tokens=6))
    got = run(core)
    assert got["a"] == want(a) and got["a#2"] == want(a, 2) and got["b"] == want(b)
    assert core.scheduler.stats.num_copy_on_writes == 2 and runner.alone


def test_who_spoils_the_batch_ends_with_an_error_and_the_others_go_on():
    core = engine(runner=Failing(21, 4, poisoned=["bad"]))
    core.add_request(good := request("good", 6, max_tokens=5))
    core.add_request(bad := request("bad", [9] * 6, max_tokens=5))
    got = run(core)
    assert got["good"] == want(good) and good.finish_reason == "length"
    assert got["bad"] == [] and bad.finish_reason == "error" and bad.error == "RuntimeError: bad is poison"
    assert core.scheduler.manager.usage == 0


def test_the_first_child_that_fails_does_not_take_its_siblings_with_it():
    """Child 0 bears the id of the whole request."""
    core = engine(runner=(runner := Failing(21, 4)))
    core.add_request(a := request("a", 6, n=3, max_tokens=6))
    core.step()
    runner.poisoned = ["a"]
    got = run(core)
    assert a.finish_reason == "error"
    assert got["a#1"] == want(a, 1)[1:] and got["a#2"] == want(a, 2)[1:]


@pytest.mark.parametrize("when", ["before", "amid"])
def test_copies_that_fail_end_those_whose_kv_is_in_doubt_and_nobody_else(when):
    """Step 2 copies for two of three siblings; the fourth waits for a seat and is computed anew."""
    core = engine(runner=Failing(21, 4, when=when, steps=[2]), max_num_seqs=3)
    core.add_request(a := request("a", 6, n=4, max_tokens=6))
    core.add_request(b := request("b", [9] * 6, max_tokens=6))
    outputs = core.step()
    assert [o.request.request_id for o in outputs] == ["a", "a#1", "a#2", "a#3"]
    outputs = core.step()
    assert [(o.request.request_id, o.finish_reason) for o in outputs] == [
        ("a", "error"), ("a#1", "error"), ("a#2", "error")]  # fmt: skip
    got = run(core)
    assert got == {"a#3": want(a, 3)[1:], "b": want(b)}
    assert core.scheduler.manager.usage == 0


def test_a_victim_whose_way_to_swap_space_failed_is_computed_again():
    core = engine(usable=4, enable_prefix_caching=False, num_cpu_blocks_override=8,
                  runner=(runner := Failing(5, 4, 8, when="before")), policies=Policies(may_resume=lambda *args: True))
    for name in "ab":
        core.add_request(request(name, [ord(name)] * 4, max_tokens=6))
    a, b = core.scheduler.requests.values()
    while a.num_computed_tokens < 8:
        core.step()
    runner.steps = [core.scheduler.stats.num_steps + 1]
    [output] = core.step()
    assert output.request is a and a.finish_reason == "error"
    assert b.status.value == "preempted" and b.num_computed_tokens == 0 and not core.scheduler.manager.swap_space.tables
    run(core)
    assert b.output_token_ids == want(b)


def test_nothing_is_published_by_a_step_that_failed():
    core = engine(runner=Failing(21, 4, when="before", steps=[1], poisoned=["a"]))
    core.add_request(request("a", 9))
    core.step()
    assert not core.scheduler.manager.block_pool.cached_block_hash_to_block
    assert not core.has_unfinished_requests() and core.scheduler.manager.reset_prefix_cache()


@pytest.mark.parametrize("end", ["fails", "is aborted before the forward", "is aborted after it"])
def test_nothing_is_published_of_a_chunk_whose_step_came_to_nothing(end):
    """Its first chunk of 4 is findable; the second was given its block and perhaps written, but never taken in."""
    core = engine(max_num_batched_tokens=4)
    core.add_request(request("a", 13))
    core.step()
    output = core.scheduler.schedule()
    if end == "fails":
        core.scheduler.fail_requests([output.scheduled[0][0]], "on purpose")
    elif end == "is aborted before the forward":
        core.abort_request("a")
    else:
        sampled = core.runner.execute(output)
        core.abort_request("a")
        core.scheduler.update_from_output(output, sampled)
    assert len(core.scheduler.manager.block_pool.cached_block_hash_to_block) == 1
    core.add_request(again := request("b", 13))
    assert run(core)["b"] == want(again) and again.num_cached_tokens == 4


def test_a_failed_forward_may_be_scheduled_again():
    """The scheduler's promise: until update_from_output nothing is advanced, so the same step comes out again."""
    core = engine()
    core.add_request(req := request("a", 6, n=2, max_tokens=6))
    core.step()
    first = core.scheduler.schedule()
    core.runner.execute(first)  # and its tokens are lost
    second = core.scheduler.schedule()
    assert second.scheduled == first.scheduled and second.block_ops == [] != first.block_ops
    core.scheduler.update_from_output(second, core.runner.execute(second))
    got = run(core)
    assert got["a"] == want(req)[2:] and got["a#1"] == want(req, 1)[2:]


def test_an_engine_that_cannot_move_says_so_and_can_be_emptied():
    core = engine(policies=Policies(admit=lambda *args: False))
    core.add_request(request("a", 3))
    with pytest.raises(RuntimeError, match="stuck: 1 requests wait, 0 run"):
        core.step()
    core.abort_request("a")
    assert core.step() == [] and not core.has_unfinished_requests()


def test_aborting_what_is_not_there_is_ignored():
    core = engine()
    assert core.abort_request("nobody") == []
