"""The slot-echo fuzz: random workloads, hostile policies, a runner that fails; everything checked after every step.

    Fuzz(number).run()      one workload, made from its number alone
        generate            config, pools that barely fit, prompts that share, policies that do their worst
        drive               add, step, abort in any state, reset the cache; the runner raises and aborts midway
        Audit (audit.py)    after each step: who owns what, and what the slots really hold
        judge               tokens equal echo_generate, one finish each, the right reason, nothing leaks

Run one again, with its traceback:  python tests/control/fuzz.py NUMBER       many:  ... fuzz.py FIRST STOP
Nothing here trusts KVCacheManager.check(): the audit counts and hashes by itself.
"""

import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from audit import Audit

from kvlab.config import EngineConfig
from kvlab.contiguous import ContiguousKVCacheManager
from kvlab.engine.core import EngineCore
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import EngineCoreOutput, Policies, Request, Scheduler, SchedulerOutput
from kvlab.schedule import policies as defaults
from kvlab.sim import SlotEchoRunner, echo_generate

EOS = (3, 5)
MAX_STEPS = 5_000


class RunnerFault(RuntimeError):
    """Raised on purpose."""


# ---- generate


class Adversary:
    """Policies that do their worst until their patience ends; then the default ones, so that runs end."""

    def __init__(self, rng: random.Random, patience: int):
        self.rng = rng
        self.patience = patience
        names = ["choose_victim", "swap_or_recompute", "may_resume", "plan_tokens", "admit"]
        chosen = [name for name in names if rng.random() < 0.5]
        self.policies = Policies(**{name: getattr(self, name) for name in chosen})

    def _awake(self) -> bool:
        self.patience -= 1
        return self.patience > 0

    def choose_victim(self, running, needy, gain):
        if self._awake():
            return self.rng.choice([running[0], needy, self.rng.choice(running)])  # also the oldest, also itself
        return defaults.choose_victim(running, needy, gain)

    def swap_or_recompute(self, request, num_blocks, num_free_cpu_blocks):
        return self.rng.choice(["swap", "recompute"])  # swap also where there is no room for it

    def may_resume(self, request, room):
        return True if self._awake() else defaults.may_resume(request, room)

    def admit(self, num_running, max_num_seqs, batch_is_forming):
        if not batch_is_forming and self._awake() and self.rng.random() < 0.5:
            return False
        return num_running < max_num_seqs

    def plan_tokens(self, pending, budget, limit):
        if not self._awake():
            return defaults.plan_tokens(pending, budget, limit)
        plan = [0] * len(pending)
        order = list(range(len(pending)))
        self.rng.shuffle(order)
        for k, i in enumerate(order):
            most = min(pending[i], limit, budget)
            plan[i] = self.rng.randint(min(1, most) if k == 0 else 0, most)
            budget -= plan[i]
        return plan


@dataclass
class Job:
    """One request with what must come out of it, and what did, by index of its continuations."""

    request: Request
    want: list[list[int]]
    got: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)  # may end with "abort"
    broken: set[int] = field(default_factory=set)  # may end with "error"

    @property
    def children(self) -> range:
        """The continuations that exist: all of them as soon as the prompt has been sampled."""
        return range(len(self.want) if self.got.get(0) else 1)

    @property
    def is_done(self) -> bool:
        return all(i in self.reasons for i in self.children)


class HostileRunner:
    """A slot-echo runner that raises before, amid and after the copies, after the forward, or for one request
    always; that aborts requests midway; and that looks whether every slot to be written may be written."""

    def __init__(self, fuzz: "Fuzz", inner: SlotEchoRunner, rate: float):
        self.fuzz, self.inner, self.rate, self.rng = fuzz, inner, rate, fuzz.rng
        self.poisoned: set[Request] = set()

    def execute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        if output.block_ops_done:
            return self._alone(output)
        try:
            self.fuzz.audit.before_step(output)
        except AssertionError as complaint:  # the engine would take it for a failure of the runner
            self.fuzz.complaint = complaint
        self.fuzz.abort_some(0.02, "before the runner")
        rng = self.rng
        rate = min(0.5, self.rate * 5) if output.block_ops else self.rate  # copies are rare and delicate
        if rng.random() < rate:
            made = rng.randint(0, len(output.block_ops))
            self._copy(output.block_ops[:made])
            self.fuzz.count("copies failed")
            for request, _ in output.scheduled:
                self.fuzz.may_break(request)
            raise RunnerFault("amid the copies")
        if rng.random() < rate:
            self._copy(output.block_ops)
            output.block_ops_done = True
            self.fuzz.abort_some(0.1, "after the copies")
            raise RunnerFault("before the forward")
        if self.poisoned.intersection(request for request, _ in output.scheduled):
            self._copy(output.block_ops)
            output.block_ops_done = True
            raise RunnerFault("somebody is poisoned")
        sampled = self.inner.execute(output)
        if rng.random() < rate:
            raise RunnerFault("after the forward")
        self.fuzz.abort_some(0.01, "after the forward")
        return sampled

    def _copy(self, block_ops) -> None:
        self.inner.execute(SchedulerOutput(step=0, block_ops=block_ops))

    def _alone(self, output: SchedulerOutput) -> dict[str, list[int]]:
        [(request, _)] = output.scheduled
        if request in self.poisoned or self.rng.random() < self.rate:
            self.fuzz.may_break(request)
            self.fuzz.count("failed alone")
            raise RunnerFault("alone")
        return self.inner.execute(output)


class Fuzz:
    """One workload, from its number."""

    def __init__(self, number: int):
        self.rng = rng = random.Random(number)
        self.counts: Counter = Counter()
        size = rng.choice([1, 1, 2, 3, 4, 4, 8, 16])
        self.vocab_size = rng.choice([11, 97])
        self.is_tight = rng.random() < 0.4  # many at once, let in without room, in a pool for little more than one
        longest = rng.choice([30, 60] if self.is_tight else [12, 30, 60])
        barely = -(-longest // size)
        usable = max(1, rng.choice([barely, barely, barely + 1, barely + 2, rng.randint(1, barely), 2 * barely, 40]))
        if self.is_tight:
            usable = barely + rng.choice([0, 0, 1, 3])
        num_cpu = rng.choice([0, 0, 1, 3, max(1, usable // 2), 3 * usable, 3 * usable])
        chunked = rng.random() < 0.92
        budget = rng.choice([1, 2, 3, 5, 8, 16, 64, 64]) if chunked else rng.choice([20, 40, 70])
        self.longest = longest
        self.max_model_len = rng.choice([None, None, max(2, longest - 5), 70] if chunked else [None, budget])
        self.config = EngineConfig(
            block_size=size,
            num_gpu_blocks_override=usable + 1,
            num_cpu_blocks_override=num_cpu,
            max_num_seqs=rng.choice([4, 8] if self.is_tight else [1, 2, 3, 4, 5, 6, 7, 8]),
            max_num_batched_tokens=budget,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng.choice([0, 0, 1, 3, 7]),
            enable_prefix_caching=rng.random() < 0.65,
            max_model_len=self.max_model_len,
            batching=rng.choice(["continuous"] * 5 + ["static"]),
            seed=rng.randrange(1000),
        )
        policies = Policies()
        if rng.random() < 0.65:
            policies = Adversary(rng, patience=rng.choice([20, 100, 300])).policies
            if not chunked:  # cutting a prompt would break the promise that it is computed whole
                policies = Policies(choose_victim=policies.choose_victim, swap_or_recompute=policies.swap_or_recompute)
        if self.is_tight:
            policies = replace(policies, may_resume=self._reckless)
        self.recklessness = 300
        self.contiguous = rng.random() < 0.06
        manager = None
        if self.contiguous:
            reserve = lambda request: request.max_num_tokens - 1  # noqa: E731
            manager = ContiguousKVCacheManager(usable + 1, size, reserve)
            num_cpu = 0
        self.scheduler = Scheduler(self.config, manager, policies)
        self.manager = self.scheduler.manager
        inner = SlotEchoRunner(usable + 1, size, num_cpu, self.vocab_size)
        self.audit = Audit(self, inner)
        self.runner = HostileRunner(self, inner, rate=rng.choice([0, 0, 0, 0.02, 0.1]))
        self.core = EngineCore(self.scheduler, self.runner)
        self.tries_steps_again = rng.random() < 0.15  # a driver that schedules a failed step anew
        self.abort_rate = rng.choice([0, 0, 0.02, 0.1])
        self.complaint: AssertionError | None = None
        self.jobs: dict[str, Job] = {}  # the latest by id: ids of finished requests are used again
        self.done: list[Job] = []
        self.num_to_add = rng.choice([6, 10] if self.is_tight else [1, 2, 4, 8, 12])
        self.add_rate = 0.9 if self.is_tight else rng.choice([0.2, 0.5, 0.9])
        shared = [size - 1, size, size + 1, 2 * size, 3 * size, rng.randint(1, 20)]
        self.prefixes = [self._tokens(rng.choice(shared)) for _ in range(3)]
        self.poison_rate = 0.1 if self.runner.rate else 0.0

    def _reckless(self, request, room) -> bool:
        self.recklessness -= 1
        return self.recklessness > 0 or defaults.may_resume(request, room)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] += number

    def _tokens(self, number: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(max(0, number))]

    def _prompt(self) -> list[int]:
        rng, size = self.rng, self.config.block_size
        jobs = [*self.done, *self.jobs.values()]
        kind = rng.random()
        if jobs and kind < 0.2:  # the very same prompt
            prompt = list(rng.choice(jobs).request.prompt_token_ids)
        elif jobs and kind < 0.4:  # the next turn of a conversation
            job = rng.choice(jobs)
            prompt = job.request.prompt_token_ids + rng.choice(job.want) + self._tokens(rng.randint(0, 3))
        else:
            prompt = rng.choice(self.prefixes) + self._tokens(rng.choice([0, 0, 1, size, 2 * size, rng.randint(0, 10)]))
        most = rng.choice([self.longest // 2, self.longest // 2, self.longest + 4])
        return prompt[: self.longest // 3 if self.is_tight else most] or self._tokens(1)

    def _request(self) -> Request:
        rng = self.rng
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3, 4]),
            temperature=rng.choice([0, 1.0]),
            seed=rng.choice([None, rng.randrange(100)]),
            stop_token_ids=rng.sample(range(self.vocab_size), rng.choice([0, 0, 1, 3])),
            max_tokens=None if rng.random() < 0.1 and self.max_model_len else rng.choice([1, 5, 10, 20, 20, 30]),
            ignore_eos=rng.random() < 0.5,
        )
        if rng.random() < 0.3:
            params = SamplingParams(**{**vars(params), "min_tokens": rng.randint(0, params.max_tokens or 10)})
        spare = [name for name, job in self.jobs.items() if job.is_done]
        name = rng.choice(spare) if spare and rng.random() < 0.3 else f"r{len(self.jobs) + len(self.done)}"
        return Request(name, self._prompt(), params, eos_token_ids=EOS, priority=rng.choice([0, 0, 0, 1, 2]),
                       cache_salt=rng.choice([None, None, None, "a", "b"]))  # fmt: skip

    def _limit(self, request: Request) -> int | None:
        """Prompt and outputs at most, or None if it can never fit: counted here independently."""
        usable = (self.config.num_gpu_blocks_override - 1) * self.config.block_size
        prompt, asked = request.num_prompt_tokens, request.sampling_params.max_tokens
        limits = [self.max_model_len] if self.max_model_len else []
        limits += [prompt + asked] if asked else [usable + 1]
        limit = min(limits)
        if not self.config.enable_chunked_prefill:  # after a preemption all of it is computed in one step
            usable = min(usable, self.config.max_num_batched_tokens)
        return limit if prompt < limit and limit - 1 <= usable else None

    # ---- drive

    def add(self) -> None:
        request = self._request()
        limit = self._limit(request)
        before = self._state()
        try:
            self.core.add_request(request)
        except ValueError as error:
            assert limit is None, f"refused, though it fits: {error}"
            assert self._state() == before, "a refusal changed something"
            return self.count("refused")
        assert limit is not None, f"{request} can never fit and was not refused"
        assert request.max_num_tokens == limit
        want = self._want(request, limit)
        if request.request_id in self.jobs:
            self.done.append(self.jobs[request.request_id])
            self.count("id used again")
        self.jobs[request.request_id] = Job(request, want)
        if self.rng.random() < self.poison_rate:
            self.runner.poisoned.add(request)

    def _want(self, request: Request, limit: int) -> list[list[int]]:
        params = request.sampling_params
        return [
            echo_generate(request.prompt_token_ids, params, request.seed + i, EOS, self.vocab_size, limit)
            for i in range(params.n)
        ]

    def _state(self):
        scheduler = self.scheduler
        return list(scheduler.requests), len(scheduler.waiting), len(scheduler.running), self.manager.usage

    def job_of(self, request: Request) -> tuple[Job, int]:
        return self.jobs[request.parent_id], request.child_index

    def may_break(self, request: Request) -> None:
        job, index = self.job_of(request)
        job.broken.add(index)

    def take(self, outputs) -> None:
        """Note what a step or an abort brought."""
        for output in outputs:
            job, index = self.job_of(output.request)
            assert index not in job.reasons, f"{output.request} speaks after its end"
            job.got.setdefault(index, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                job.reasons[index] = output.finish_reason
                self.count("ended: " + output.finish_reason)

    def abort_some(self, rate: float, when: str) -> None:
        if self.rng.random() >= rate * bool(self.abort_rate) or not self.scheduler.requests:
            return
        request_id = self.rng.choice(list(self.scheduler.requests))
        request = self.scheduler.requests[request_id]
        state = request.status.value
        if state == "running":
            state = "decoding" if request.num_output_tokens else "mid-prefill"
        self.count(f"aborted {when}: {state}")
        outputs = self.core.abort_request(request_id)
        for output in outputs:
            job, index = self.job_of(output.request)
            job.aborted.add(index)
        # The id of a parent stands for the family, the id of a child for itself alone.
        assert len(outputs) == 1 or "#" not in request_id
        self.take(outputs)

    def run(self) -> Counter:
        rng = self.rng
        to_add, steps = self.num_to_add, 0
        while to_add or self.core.has_unfinished_requests():
            while to_add and rng.random() < self.add_rate:
                self.add()
                to_add -= 1
            if not self.core.has_unfinished_requests():
                continue
            self.take(self._step_again() if self.tries_steps_again else self.core.step())
            steps += 1
            if self.complaint is not None:
                raise self.complaint
            self.audit.after_step()
            self.abort_some(self.abort_rate, "between steps")
            if rng.random() < 0.02:
                empty = self.manager.usage == 0
                assert self.manager.reset_prefix_cache() == empty
            assert steps < MAX_STEPS, "it does not end"
        self.judge()
        self.count("workloads")
        self.count("steps", steps)
        for name, value in vars(self.scheduler.stats).items():
            if name.startswith("num"):
                self.count(name, value)
        return self.counts

    def _step_again(self):
        """EngineCore.step, but a forward that failed is scheduled anew rather than tried one by one."""
        core, scheduler = self.core, self.scheduler
        while True:
            output = scheduler.schedule()
            assert output.scheduled or output.preempted or not scheduler.requests, "stuck"
            poison = self.runner.poisoned.intersection(request for request, _ in output.scheduled)
            for request in poison:
                self.runner.poisoned.remove(request)  # it would fail for ever
            try:
                sampled = self.runner.execute(output)
            except RunnerFault as error:
                if not output.block_ops_done:
                    return [EngineCoreOutput.ended(r) for r in scheduler.fail_step(output, str(error))]
                self.count("scheduled again")
                continue
            return core.scheduler.update_from_output(output, sampled)

    # ---- judge

    def judge(self) -> None:
        jobs = [*self.done, *self.jobs.values()]
        self.count("requests", len(jobs))
        for job in jobs:
            request = job.request
            assert set(job.reasons) == set(job.children), f"{request}: finished {job.reasons}, exist {job.children}"
            for i, reason in job.reasons.items():
                got, want = job.got[i], job.want[i]
                if reason in ("abort", "error"):
                    assert i in (job.aborted if reason == "abort" else job.broken), f"{request} {i}: {reason}, why?"
                    assert got == want[: len(got)] and len(got) < len(want), f"{request} {i}: {got} is not in {want}"
                    continue
                assert got == want, f"{request} continuation {i}: got {got}, want {want}"
                self._judge_reason(request, i, got, reason)
            self._judge_cached(job, jobs)
        scheduler, manager = self.scheduler, self.manager
        assert not scheduler.requests and not scheduler.running and not len(scheduler.waiting)
        assert not scheduler._families and list(scheduler.waiting) == []
        assert manager.usage == 0 and not manager.req_to_blocks and not manager._published
        assert not manager.swap_space.tables and manager.swap_space.num_free_blocks == manager.swap_space.num_blocks
        assert manager.block_pool.get_num_free_blocks() == manager.block_pool.num_usable_blocks
        assert manager.reset_prefix_cache() and not manager.block_pool.cached_block_hash_to_block
        self.audit.after_step()

    def _judge_reason(self, request: Request, i: int, got: list[int], reason: str) -> None:
        params = request.sampling_params
        enders = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
        stopped = len(got) >= params.min_tokens and got[-1] in enders
        assert reason == ("stop" if stopped else "length"), f"{request} {i} ended with {reason}"

    def _judge_cached(self, job: Job, jobs: list[Job]) -> None:
        """num_cached_tokens: whole blocks, less than the prompt, and somebody else must have computed them."""
        request, cached = job.request, job.request.num_cached_tokens
        if cached is None:
            assert not job.got.get(0), f"{request} brought tokens and was never admitted"
            return
        assert cached % self.config.block_size == 0 and 0 <= cached < request.num_prompt_tokens
        if cached:
            assert self.manager.enable_caching
            head = request.prompt_token_ids[:cached]
            others = [o for o in jobs if o is not job and o.request.cache_salt == request.cache_salt]
            texts = [o.request.prompt_token_ids + want for o in others for want in o.want]
            assert any(text[:cached] == head for text in texts), f"{request}: {cached} cached tokens from nowhere"


def run_range(first: int, stop: int) -> Counter:
    """Run workloads first..stop-1; AssertionError with the number of the first that fails."""
    total: Counter = Counter()
    for number in range(first, stop):
        try:
            total += Fuzz(number).run()
        except Exception as error:
            raise AssertionError(
                f"workload {number} failed ({type(error).__name__}: {error}); "
                f"run it alone: python tests/control/fuzz.py {number}"
            ) from error
    return total


if __name__ == "__main__":
    first = int(sys.argv[1])
    stop = int(sys.argv[2]) if len(sys.argv) > 2 else first + 1
    for what, number in sorted(run_range(first, stop).items()):
        print(f"{number:9,}  {what}")
