"""Held sequences: any order of hold, fork, append, generate, abort, preempt and free on the slot-echo model.

The state machine keeps a plain list of tokens for each branch; the fuzz's audit looks at every block after each
operation, and at every slot that a step is about to write. Below it, directed tests of what each rule is for, and
faults put into the code on purpose, which the machine must notice.
"""

from types import SimpleNamespace

import pytest
from audit import Audit
from driving import engine, run, snapshot
from driving import request as make
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from test_fuzz import break_it
from test_machines import INDEX, QUICK

from kvlab.config import EngineConfig
from kvlab.contiguous import ContiguousKVCacheManager
from kvlab.engine.core import EngineCore
from kvlab.manager import KVCacheManager
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Policies, Request, RequestStatus, Scheduler
from kvlab.schedule.held import HeldBook
from kvlab.sim import SlotEchoRunner, echo_generate

VOCAB = 5  # so few that different branches often say the same, and find each other's blocks
EOS = (3,)
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7)


class WatchedRunner:
    """Audits each step before it is made, and fails when told to."""

    def __init__(self, machine, inner):
        self.machine, self.inner = machine, inner
        self.fault: str | None = None
        self.failed: list[Request] = []

    def execute(self, output):
        machine = self.machine
        if not output.block_ops_done:
            try:
                machine.audit.before_step(output)
                machine.try_from_within()
            except AssertionError as complaint:  # the engine would take it for a failure of the runner
                machine.complaint = complaint
            if self.fault == "copies":
                raise RuntimeError("before the copies")
            if self.fault == "abort" and output.scheduled:
                machine.abort(output.scheduled[0][0])
            self.inner.execute(SimpleNamespace(block_ops=output.block_ops, scheduled=[], block_tables=[],
                                               block_ops_done=False))  # fmt: skip
            output.block_ops_done = True
            if self.fault in ("forward", "one") and output.scheduled:
                self.failed = [output.scheduled[0][0]] if self.fault == "one" else []
                raise RuntimeError("before the forward")
        if len(output.scheduled) == 1 and output.scheduled[0][0] in self.failed:
            raise RuntimeError("alone")
        return self.inner.execute(output)


class HeldMachine(RuleBasedStateMachine):
    @initialize(size=st.sampled_from([1, 2, 3, 4]), spare=st.integers(0, 6), cpu=st.sampled_from([0, 2, 20]),
                budget=st.sampled_from([2, 5, 64]), seats=st.integers(1, 4), caching=st.booleans(),
                rash=st.booleans(), contiguous=st.sampled_from([False] * 7 + [True]), tokens=TOKENS)  # fmt: skip
    def begin(self, size, spare, cpu, budget, seats, caching, rash, contiguous, tokens):
        usable = -(-16 // size) + spare
        self.config = EngineConfig(
            block_size=size, num_gpu_blocks_override=usable + 1, num_cpu_blocks_override=0 if contiguous else cpu,
            max_num_seqs=seats, max_num_batched_tokens=budget, enable_prefix_caching=caching)  # fmt: skip
        manager = None
        if contiguous:
            manager = ContiguousKVCacheManager(usable + 1, size, lambda request: request.max_num_tokens - 1)
        policies = Policies(may_resume=lambda request, room: True) if rash else None
        self.scheduler = Scheduler(self.config, manager, policies)
        self.manager, self.contiguous = self.scheduler.manager, contiguous
        inner = SlotEchoRunner(usable + 1, size, cpu, VOCAB)
        self.audit, self.runner = Audit(self, inner), WatchedRunner(self, inner)
        self.core = EngineCore(self.scheduler, self.runner)
        self.longest = usable * size + 1
        self.model: dict = {}  # held sequence -> its tokens, while nobody generates for it
        self.jobs: dict = {}  # request -> [its tokens at the end, what it has brought]
        self.number = 0
        self.complaint = None
        self.hold(tokens)

    def name(self, kind: str) -> str:
        self.number += 1
        return f"{kind}{self.number}"

    def pick(self, index, among):
        among = list(among)
        return among[index % len(among)]

    def refused(self, call, *args) -> None:
        before = self.state()
        with pytest.raises(ValueError):
            call(*args)
        assert before == self.state(), "a refusal has changed something"

    def state(self):
        lengths = {held: (held.num_tokens, held.num_computed_tokens) for held in self.scheduler.held.values()}
        return snapshot(self.scheduler), lengths

    def tokens_of(self, held) -> list[int]:
        return self.model[held] if held.request is None else held.request.prompt_token_ids + self.jobs[held.request][1]

    # ---- what users do

    @rule(tokens=TOKENS)
    def hold(self, tokens):
        name = self.name("b")
        self.model[self.scheduler.hold(name, tokens)] = list(tokens)
        self.refused(self.scheduler.hold, name, tokens)

    @precondition(lambda self: self.model)
    @rule(i=INDEX, cut=st.none() | st.integers(0, 20))
    def fork(self, i, cut):
        parent = self.pick(i, self.model)
        tokens = self.tokens_of(parent)
        if cut is not None and not 1 <= cut <= len(tokens):
            return self.refused(self.scheduler.fork, parent, self.name("b"), cut)
        free = self.manager.block_pool.get_num_free_blocks()
        child = self.scheduler.fork(parent, self.name("b"), cut)
        self.model[child] = tokens[:cut]
        assert free == self.manager.block_pool.get_num_free_blocks(), "a fork took a block"
        if self.manager.can_share:
            there = parent.current.request_id in self.manager.req_to_blocks  # not swapped out, nor dropped
            assert child.num_computed_tokens == there * min(parent.current.num_computed_tokens, child.num_tokens)

    @precondition(lambda self: self.model)
    @rule(i=INDEX, tokens=TOKENS)
    def append(self, i, tokens):
        held = self.pick(i, self.model)
        if held.request is not None or held.num_tokens + len(tokens) >= self.longest:
            return self.refused(self.scheduler.append, held, tokens)
        self.scheduler.append(held, tokens)
        self.model[held] += tokens

    @precondition(lambda self: self.model)
    @rule(i=INDEX, max_tokens=st.integers(1, 6), hot=st.booleans(), priority=st.sampled_from([0, 0, 1]))
    def generate(self, i, max_tokens, hot, priority):
        held = self.pick(i, self.model)
        params = SamplingParams(max_tokens=max_tokens, temperature=float(hot), seed=self.number)
        new = Request(self.name("r"), self.tokens_of(held), params, eos_token_ids=EOS, priority=priority)
        new.held = held
        if held.request is not None or new.num_tokens + max_tokens > self.longest:
            return self.refused(self.core.add_request, new)
        self.core.add_request(new)
        self.expect(new)

    @rule(tokens=TOKENS, max_tokens=st.integers(1, 6), priority=st.sampled_from([0, 0, 1]), n=st.integers(1, 2))
    def ordinary(self, tokens, max_tokens, priority, n):
        params = SamplingParams(max_tokens=max_tokens, temperature=0, n=n)
        new = Request(self.name("r"), tokens, params, eos_token_ids=EOS, priority=priority)
        self.core.add_request(new)
        self.expect(new)

    def expect(self, new):
        output = echo_generate(new.all_token_ids, new.sampling_params, new.seed, EOS, VOCAB, new.max_num_tokens)
        self.jobs[new] = [output, []]

    @precondition(lambda self: self.scheduler.requests)
    @rule(i=INDEX)
    def abort_one(self, i):
        self.abort(self.pick(i, self.scheduler.requests.values()))

    def abort(self, victim):
        for output in self.core.abort_request(victim.parent_id):
            self.ended(output.request, "abort")

    @precondition(lambda self: self.model)
    @rule(i=INDEX)
    def free(self, i):
        held = self.pick(i, self.model)
        ended = self.scheduler.let_go(held)
        assert bool(ended) == (held in {r.held for r in self.jobs})
        for each in ended:
            del self.jobs[each]
        del self.model[held]
        assert self.scheduler.let_go(held) == []
        for call in (lambda: self.scheduler.append(held, [1]), lambda: self.scheduler.fork(held, self.name("b"))):
            self.refused(call)

    def try_from_within(self):
        """A step is being made: nothing of this may happen now."""
        for held in list(self.model)[:1]:
            self.refused(self.scheduler.fork, held, self.name("b"))
            self.refused(self.scheduler.append, held, [1])
            self.refused(self.scheduler.let_go, held)
        self.refused(self.scheduler.hold, self.name("b"), [1])

    # ---- steps

    @precondition(lambda self: self.scheduler.requests)
    @rule(fault=st.sampled_from([None] * 12 + ["copies", "forward", "one", "abort"]))
    def step(self, fault):
        self.runner.fault, self.runner.failed = fault, []
        for output in self.core.step():
            if output.request.child_index:
                continue
            self.jobs[output.request][1].extend(output.new_token_ids)
            if output.finish_reason:
                self.ended(output.request, output.finish_reason)
        self.runner.fault = None
        if self.complaint is not None:
            raise self.complaint

    @precondition(lambda self: self.scheduler.requests)
    @rule(most=st.integers(2, 12))
    def steps(self, most):
        while self.scheduler.requests and most:
            self.step(None)
            self.sound()
            most -= 1

    def ended(self, request, reason):
        wanted, got = self.jobs.pop(request, (None, None))
        if wanted is None:
            return  # a sibling
        assert got == (wanted if reason in ("stop", "length") else wanted[: len(got)])
        if request.held is not None:
            self.model[request.held] = request.prompt_token_ids + got

    @invariant()
    def sound(self):
        if not hasattr(self, "audit"):
            return
        self.audit.after_step()
        for request, (wanted, got) in self.jobs.items():
            assert got == wanted[: len(got)], f"{request} brought {got} of {wanted}"
        assert set(self.scheduler.held.values()) == set(self.model)
        for held in self.model:
            assert held.all_token_ids == self.tokens_of(held)

    def teardown(self):
        if not hasattr(self, "audit"):
            return
        most = 600
        while self.scheduler.requests:
            self.step(None)
            self.sound()
            most -= 1
            assert most, "it does not end"
        for held in list(self.model):
            assert self.scheduler.let_go(held) == []
        self.model.clear()
        self.sound()
        assert self.manager.usage == 0 and not self.manager._published
        assert self.manager.reset_prefix_cache()


def test_any_order_of_operations():
    run_machine(HeldMachine, settings=settings(QUICK, max_examples=150, stateful_step_count=50))


@pytest.mark.slow
def test_any_order_of_operations_long():
    run_machine(HeldMachine, settings=settings(QUICK, max_examples=5000, stateful_step_count=60, derandomize=False))


# ---- what each rule is for


def branch_of(core, tokens) -> tuple:
    """A held sequence of 1..tokens, all computed: one more token was generated and forgotten."""
    scheduler = core.scheduler
    held = scheduler.hold("trunk", list(range(1, tokens + 1)))
    generate(core, held, 1)
    scheduler.truncate(held, tokens)
    assert held.num_computed_tokens == tokens
    return scheduler, held


def ask(core, held, max_tokens, name="g", **more) -> Request:
    """A request that goes on with `held`, added."""
    new = make(name, held.all_token_ids, max_tokens, **more)
    new.held = held
    core.add_request(new)
    return new


def generate(core, held, max_tokens) -> list[int]:
    new = ask(core, held, max_tokens)
    return run(core)[new.request_id]


def test_branches_share_all_blocks_and_each_copies_only_what_it_writes():
    core = engine(usable=20, enable_prefix_caching=False)
    scheduler, trunk = branch_of(core, 10)
    before = scheduler.stats.num_scheduled_tokens
    a, b = scheduler.fork(trunk, "a"), scheduler.fork(trunk, "b")
    pool = scheduler.manager.block_pool
    assert pool.get_num_free_blocks() == 17  # 3 blocks, whoever holds them
    scheduler.append(a, [50])
    scheduler.append(b, [60, 61])
    for held, name in ((a, "r1"), (b, "r2")):
        ask(core, held, 2, name)
    got = run(core)
    assert a.all_token_ids == [*range(1, 11), 50, *got["r1"]] and b.all_token_ids == [*range(1, 11), 60, 61, *got["r2"]]
    # Nothing of the trunk was computed again: what was appended, and one token of two outputs each.
    assert scheduler.stats.num_scheduled_tokens - before == 1 + 2 + 2
    assert scheduler.stats.num_copy_on_writes == 2  # the third block, once for each
    assert scheduler.manager.get_block_ids("a")[:2] == scheduler.manager.get_block_ids("trunk")[:2]
    for held in (trunk, a, b):
        scheduler.let_go(held)
    assert pool.get_num_free_blocks() == 20


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("cut", [1, 3, 4, 5, 8, 9])
def test_back_to_any_place_also_amid_a_published_block(cut, caching):
    core = engine(usable=20, enable_prefix_caching=caching)
    scheduler, trunk = branch_of(core, 9)
    child = scheduler.fork(trunk, "child", cut)
    assert child.num_computed_tokens == cut and child.all_token_ids == trunk.all_token_ids[:cut]
    scheduler.append(child, [70] * 5)
    fresh = make("fresh", [*range(1, cut + 1), *[70] * 5], 6)
    assert generate(core, child, 6) == echo_generate(fresh.all_token_ids, fresh.sampling_params)
    assert generate(core, trunk, 6) == echo_generate(list(range(1, 10)), fresh.sampling_params)
    # Its own tokens are published under its own name, not where the trunk left off.
    if caching:
        assert len(scheduler.manager.get_computed_blocks(fresh)[0]) == (cut + 4) // 4


def test_idle_branches_give_way_before_anybody_is_preempted_the_least_recently_used_first():
    core = engine(usable=12, enable_prefix_caching=False)
    scheduler = core.scheduler
    old, new = scheduler.hold("old", [1] * 16), scheduler.hold("new", [2] * 16)
    for held in (new, old):
        generate(core, held, 1)
    generate(core, new, 1)  # used last
    assert scheduler.manager.block_pool.get_num_free_blocks() == 3  # and the request needs five
    core.add_request(make("r", 17, 3))
    run(core)
    assert old.num_computed_tokens == 0 and new.num_computed_tokens > 0
    assert scheduler.stats.num_reclaimed_branches == 1
    assert scheduler.stats.num_preemptions_recompute == 0
    want = echo_generate(old.all_token_ids, make("x", 1, 5).sampling_params)
    assert generate(core, old, 4) == want[:4]  # it works as if nothing had been taken


def test_one_whose_blocks_run_elsewhere_keeps_them():
    """Taking them would free nothing."""
    core = engine(usable=6, enable_prefix_caching=False, policies=Policies(may_resume=lambda *_: True))
    scheduler, trunk = branch_of(core, 8)
    child = scheduler.fork(trunk, "child")
    scheduler.append(child, [9])
    ask(core, child, 4)
    core.add_request(make("r", 12, 4))
    while not scheduler.stats.num_preemptions_recompute:
        core.step()
    assert trunk.num_computed_tokens == 8 and scheduler.stats.num_reclaimed_branches == 0
    run(core)


def test_admission_counts_idle_blocks_as_free_but_not_those_that_are_hits():
    rooms = []
    core = engine(usable=6, policies=Policies(may_resume=lambda request, room: rooms.append(room) or True))
    scheduler, trunk = branch_of(core, 8)
    rooms.clear()
    core.add_request(make("other", [50] * 5, 1))
    run(core)
    core.add_request(make("same", [*range(1, 9), 50], 1))
    run(core)
    other, same = rooms
    assert (other.needed, other.free) == (2, 6)
    assert (same.needed, same.free) == (1, 4)


def test_what_others_have_computed_meanwhile_is_found():
    """The branch holds one block, and the cache knows three: the longer of the two counts."""
    core = engine(usable=20)
    scheduler, trunk = branch_of(core, 5)
    core.add_request(make("other", [*range(1, 6), *[50] * 9], 1))
    run(core)
    scheduler.append(trunk, [50] * 9)
    new = ask(core, trunk, 3)
    assert run(core)["g"] == echo_generate(new.prompt_token_ids, new.sampling_params)
    assert new.num_cached_tokens == 12


def test_a_branch_that_fills_the_pool_finds_room_for_its_copy():
    """Its last block is published, so computing its last token again needs a copy, and no block is left for one."""
    core = engine(usable=4)
    scheduler, trunk = branch_of(core, 16)
    assert scheduler.manager.usage == 1
    params = make("x", 1, 1).sampling_params
    assert generate(core, trunk, 1) == echo_generate(list(range(1, 17)), params)
    scheduler.let_go(trunk)
    assert scheduler.manager.usage == 0


def test_more_branches_than_the_pool_holds_all_end_and_are_right():
    core = engine(usable=9, num_cpu_blocks_override=6, max_num_seqs=4)
    scheduler, trunk = branch_of(core, 13)
    branches = [scheduler.fork(trunk, f"b{i}") for i in range(6)]
    for i, held in enumerate(branches):
        scheduler.append(held, [80 + i] * (i + 1))
        ask(core, held, 7, f"r{i}")
    got = run(core)
    for i in range(6):
        prompt = [*range(1, 14), *[80 + i] * (i + 1)]
        assert got[f"r{i}"] == echo_generate(prompt, make("x", 1, 7).sampling_params)


def test_forked_while_it_is_generating_and_freed_while_it_is_preempted():
    core = engine(usable=20)
    scheduler, trunk = branch_of(core, 6)
    ask(core, trunk, 8)
    core.step()
    core.step()
    child = scheduler.fork(trunk, "child")
    assert child.num_tokens == 8 and child.num_computed_tokens == 7
    for call in (lambda: scheduler.append(trunk, [1]), lambda: ask(core, trunk, 1, "again")):
        with pytest.raises(ValueError, match="branch 'trunk' is generating"):
            call()
    run(core)
    assert generate(core, child, 3) == trunk.all_token_ids[8:11]
    tight = engine(usable=5, enable_prefix_caching=False, policies=Policies(may_resume=lambda *_: True))
    scheduler, trunk = branch_of(tight, 8)
    tight.add_request(make("first", 8, 8))
    ask(tight, trunk, 8)
    while trunk.request.status is not RequestStatus.PREEMPTED:
        tight.step()
    assert [r.request_id for r in scheduler.let_go(trunk)] == ["g"]
    run(tight)
    assert scheduler.manager.usage == 0 and not scheduler.held


@pytest.mark.parametrize("bad, message", [
    (dict(cut=0), "num_tokens is 0: branch 'trunk' has 6; use 1 to 6"),
    (dict(cut=7), "num_tokens is 7: branch 'trunk' has 6; use 1 to 6"),
    (dict(append=[3] * 100), "branch 'trunk': the prompt has 106 tokens|branch 'trunk': 106 prompt tokens"),
    (dict(append=[-1]), "-1 is not a token id"),
    (dict(n=2), "fork it once for each continuation"),
    (dict(name="trunk"), "'trunk': this id is in use by a branch"),
    (dict(max_tokens=500), "lower max_tokens"),
])  # fmt: skip
def test_what_is_refused_changes_nothing(bad, message):
    core = engine(usable=20)
    scheduler, trunk = branch_of(core, 6)
    before = snapshot(scheduler), trunk.num_computed_tokens, list(trunk.all_token_ids), set(scheduler.held)
    with pytest.raises(ValueError, match=message):
        if "cut" in bad:
            scheduler.fork(trunk, "child", bad["cut"])
        elif "append" in bad:
            scheduler.append(trunk, bad["append"])
        else:
            ask(core, trunk, **{"max_tokens": 2, **bad})
    assert before == (snapshot(scheduler), trunk.num_computed_tokens, list(trunk.all_token_ids), set(scheduler.held))
    assert trunk.request is None


def test_a_step_that_fails_leaves_the_branch_its_tokens():
    core = engine(usable=20)
    scheduler, trunk = branch_of(core, 6)
    core.runner.execute = lambda output: 1 / 0
    ask(core, trunk, 3)
    assert [output.finish_reason for output in core.step()] == ["error"]
    del core.runner.execute
    assert trunk.all_token_ids == [1, 2, 3, 4, 5, 6] and trunk.num_computed_tokens == 0
    assert generate(core, trunk, 3) == echo_generate([1, 2, 3, 4, 5, 6], make("x", 1, 3).sampling_params)


# ---- faults, which the machine must notice

FAULTS = {
    "a fork of the first tokens has K/V of all": (
        KVCacheManager, "fork", "computed if num_tokens is None else min(computed, num_tokens)", "computed"),
    "a fork leaves out the block it is cut in": (
        KVCacheManager, "fork", "cdiv(computed, self.block_size)", "computed // self.block_size"),
    "the last token is not computed again": (
        HeldBook, "add_request", "min(held.num_computed_tokens, request.num_tokens - 1)", "held.num_computed_tokens"),
    "what is cut off is lost": (
        KVCacheManager, "hand_over", "self._give_back(reversed(table.cut(cdiv(num_tokens, self.block_size))))",
        "table.cut(cdiv(num_tokens, self.block_size))"),
    "K/V in doubt is kept": (HeldBook, "_finish", "sound = not self.in_step", "pass"),
    "a failed request hands over its K/V": (
        HeldBook, "_finish", "status is not RequestStatus.FINISHED_ERROR", "True"),
    "a branch forgets its output": (
        HeldBook, "_finish", "request.all_token_ids[:]", "request.prompt_token_ids"),
    "blocks are taken and still counted as computed": (
        HeldBook, "_take_blocks", "sequence.num_computed_tokens = 0", "pass"),
    "blocks of running requests are taken": (
        HeldBook, "_reclaimable", "if h.request is None or h.request.status is not running", ""),
    "nobody gives way": (HeldBook, "_reclaim", "if not idle:", "if True:"),
    "free forgets the blocks": (HeldBook, "let_go", "self.manager.free(held)", "pass"),
    "fork from within a step": (HeldBook, "_between_steps", "if self.in_step:", "if False:"),
    "append while it is generating": (HeldBook, "_idle", "if held.request is not None:", "if False:"),
}  # fmt: skip
RARE_FAULTS = {  # the machine seldom comes there; these are the directed tests' own
    "no room for its own copy": (
        test_a_branch_that_fills_the_pool_finds_room_for_its_copy,
        (Scheduler, "_schedule_waiting", "self._take_blocks(request)", "break")),
    "the hits are free a second time": (
        test_admission_counts_idle_blocks_as_free_but_not_those_that_are_hits,
        (HeldBook, "_num_available", "own = set(hits)", "own = set()")),
    "the most recently used gives way": (
        test_idle_branches_give_way_before_anybody_is_preempted_the_least_recently_used_first,
        (HeldBook, "_reclaimable", "h.last_used", "-h.last_used")),
    "hits beside a table of its own": (
        test_what_others_have_computed_meanwhile_is_found,
        (HeldBook, "_own_or_hits", "self.manager.free(request)", "pass")),
    "a fork that is cut keeps the cursor": (
        lambda: test_back_to_any_place_also_amid_a_published_block(5, True),
        (KVCacheManager, "_keep_published", "if published[0] * self.block_size <= num_computed_tokens:", "if True:")),
    "blocks are taken in vain": (
        test_one_whose_blocks_run_elsewhere_keeps_them, (HeldBook, "_reclaim", "block.ref_cnt == count[block]", "1")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_catches_faults(monkeypatch, fault):
    break_it(monkeypatch, *FAULTS[fault])
    monkeypatch.setattr(KVCacheManager, "check", lambda self: None)  # our own audit must do
    quick = settings(QUICK, max_examples=2000, stateful_step_count=50, phases=[Phase.generate])
    with pytest.raises(BaseException):  # noqa: B017  (whatever it is that breaks first)
        run_machine(HeldMachine, settings=quick)


@pytest.mark.parametrize("fault", RARE_FAULTS)
def test_the_directed_tests_catch_faults(monkeypatch, fault):
    test, change = RARE_FAULTS[fault]
    break_it(monkeypatch, *change)
    with pytest.raises((AssertionError, RuntimeError)):
        test()
