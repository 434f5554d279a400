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
            assert child.num_computed_tokens == min(parent.current.num_computed_tokens, child.num_tokens)

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
    run_machine(HeldMachine, settings=settings(QUICK, max_examples=150, stateful_step_count=50, phases=[Phase.generate]))


@pytest.mark.slow
def test_any_order_of_operations_long():
    run_machine(HeldMachine, settings=settings(QUICK, max_examples=5000, stateful_step_count=60, derandomize=False))
