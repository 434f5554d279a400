"""Beam groups on the slot-echo model: what they find, that they move as a whole, and what is refused.

The oracle searches the whole vocabulary without blocks, batches or a scheduler. (That its rules are those of
`transformers` is for tests/engine/test_beam_search.py.)
"""


import fuzz
import pytest
from driving import engine, run, snapshot, want
from driving import request as plain_request
from test_fuzz import break_it

from kvlab.manager import KVCacheManager
from kvlab.sampling_params import BeamSearchParams
from kvlab.schedule import BeamGroup, Policies, Request, RequestStatus, Scheduler, beam_request
from kvlab.schedule import group as whole
from kvlab.schedule import policies as defaults
from kvlab.sim import SlotEchoRunner, echo_logprobs

EOS = fuzz.EOS


def search(prompt, params: BeamSearchParams, eos=EOS, vocab_size=97, limit=None) -> list[tuple]:
    """(tokens, summed log-probability, score) of the best hypotheses: all continuations, ranked each step."""
    limit = limit or len(prompt) + params.max_tokens
    eos = () if params.ignore_eos else eos
    living, finished, length = [(0.0, [])], [], 0
    while True:
        length += 1
        every = [
            (total + logprob, [*tokens, token])
            for total, tokens in living
            for token, logprob in enumerate(echo_logprobs([*prompt, *tokens], vocab_size))
        ]
        every.sort(key=lambda c: -c[0])
        ends = [len(prompt) + length >= limit or tokens[-1] in eos for _, tokens in every]
        finished += [
            (tokens, total, total / length**params.length_penalty)
            for (total, tokens), end in zip(every[: params.beam_width], ends, strict=False)
            if end
        ]
        finished = sorted(finished, key=lambda f: -f[2])[: params.beam_width]
        living = [c for c, end in zip(every, ends, strict=True) if not end][: params.beam_width]
        full = len(finished) == params.beam_width
        if not living or full and (
            params.early_stopping or living[0][0] / length**params.length_penalty <= finished[-1][2]
        ):
            return finished


def found(req: Request) -> list[tuple]:
    return [(h.token_ids, h.cumulative_logprob, h.score) for h in req.group.finished]


def beams(name="b", prompt=6, width=3, max_tokens=8, **more) -> Request:
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    options = {k: more.pop(k) for k in ("length_penalty", "early_stopping", "ignore_eos") if k in more}
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **options)
    return beam_request(name, tokens, params, eos_token_ids=EOS, **more)


def oracle(req: Request, **more) -> list[tuple]:
    return search(req.prompt_token_ids, req.group.params, **more)


# ---- random workloads


class BeamFuzz(fuzz.Fuzz):
    """The big fuzz, with a beam group in place of about every second request."""

    def __init__(self, number: int):
        super().__init__(number)
        self.found: dict[Request, list[tuple]] = {}  # what each search must find

    def _request(self) -> Request:
        plain, rng = super()._request(), self.rng
        if rng.random() < 0.5:
            return plain
        params = BeamSearchParams(
            beam_width=rng.choice([1, 2, 2, 3, 4, 6]),
            max_tokens=rng.choice([1, 5, 10, 20]),
            length_penalty=rng.choice([0.0, 1.0, 2.0, -1.0]),
            early_stopping=rng.random() < 0.5,
            ignore_eos=rng.random() < 0.5,
        )
        prompt = plain.prompt_token_ids[: rng.choice([3, 8, 60])]
        return beam_request(plain.request_id, prompt, params, eos_token_ids=EOS, priority=plain.priority,
                            cache_salt=plain.cache_salt)  # fmt: skip

    def _limit(self, request: Request) -> int | None:
        limit = super()._limit(request)
        if request.group is None or limit is None:
            return limit
        width, config = request.group.width, self.config
        blocks = width * -(-(limit - 1) // config.block_size)
        fits = blocks < config.num_gpu_blocks_override and width <= config.max_num_seqs
        fits = fits and width <= config.max_num_batched_tokens and config.enable_chunked_prefill
        return limit if fits and not self.contiguous else None

    def _want(self, request: Request, limit: int) -> list[list[int]]:
        if request.group is None:
            return super()._want(request, limit)
        self.found[request] = search(request.prompt_token_ids, request.group.params, EOS, self.vocab_size, limit)
        return [[]]  # a search says nothing before its end

    def job_of(self, request: Request):
        job, index = super().job_of(request)
        return job, index if request.group is None else 0

    def take(self, outputs) -> None:
        for output in outputs:
            group = output.request.group
            assert group is None or (output.request is group.leader and output.finish_reason)
        super().take(outputs)

    def abort_some(self, rate: float, when: str) -> None:
        super().abort_some(rate, when)
        for group in self.scheduler.groups.values():
            assert all(member.request_id in self.scheduler.requests for member in group.members), "a part of it ended"

    def _judge_reason(self, request: Request, i: int, got: list[int], reason: str) -> None:
        if request.group is None:
            return super()._judge_reason(request, i, got, reason)
        assert found(request) == self.found[request], f"{request} did not find what there is"
        first, params = request.group.finished[0], request.group.params
        stopped = not params.ignore_eos and first.token_ids[-1] in EOS
        assert reason == first.finish_reason == ("stop" if stopped else "length")
        self.count("searches of width 1" if params.beam_width == 1 else "searches")
        return self.count("searches after a preemption", request.num_preemptions > 0 and params.beam_width > 1)

    def _judge_cached(self, job, jobs) -> None:
        """Who else computed it cannot be told: a search publishes also what lives on in nobody."""
        assert (job.request.num_cached_tokens or 0) % self.config.block_size == 0

    def judge(self) -> None:
        for job in [*self.done, *self.jobs.values()]:
            if job.request.group is not None and job.reasons.get(0) in ("abort", "error"):
                job.want = [[0]]  # what came, nothing, is less than what was wanted
        super().judge()
        assert not self.scheduler.groups


CHUNK = 200
MUST_HAPPEN = [
    "refused", "searches", "searches of width 1", "searches after a preemption", "ended: stop", "ended: length",
    "ended: abort", "ended: error", "copies failed", "failed alone", "scheduled again", "num_copy_on_writes",
    "num_preemptions_recompute", "num_preemptions_swap", "num_swapped_in_blocks", "num_prefix_hit_tokens",
]  # fmt: skip


@pytest.fixture
def beams_for_fuzz(monkeypatch):
    monkeypatch.setattr(fuzz, "Fuzz", BeamFuzz)


@pytest.mark.parametrize("chunk", range(4))
def test_fuzz(beams_for_fuzz, chunk):
    seen = fuzz.run_range(chunk * CHUNK, (chunk + 1) * CHUNK)
    assert seen["workloads"] == CHUNK
    assert [kind for kind in MUST_HAPPEN if not seen[kind]] == []


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_fuzz_long(beams_for_fuzz, chunk):
    fuzz.run_range(10_000 + chunk * 1_000, 10_000 + (chunk + 1) * 1_000)


FAULTS = {
    "a part of a group goes on": (whole, "keep_whole", "scheduled.pop(member.request_id, None)", "pass"),
    "a plan for a part of a group": (whole, "keep_whole", "plan[i] = 0", "pass"),
    "an empty step": (whole, "keep_whole", "plan[i] = 1", "pass"),
    "nobody waits for the others": (whole, "pending_tokens", "- (r.group in held_back)", ""),
    "only one member gives way": (whole, "companions", "request.group.members", "[request]"),
    "members are let in without room for all": (Scheduler, "_has_room", "if needed > num_free:", "if False:"),
    "a seat for one": (Request, "num_seats", "self.group.width", "1"),
    "a fork after the token": (
        whole, "branch", "for parent, child in group.place(living):",
        "order = list(group.members)\n"
        "    for parent, token in living[:1]:\n        order[parent].all_token_ids.append(token)\n"
        "    for parent, child in group.place(living):"),
    "who does not live on keeps its blocks": (whole, "branch", "manager.free(child)", "pass"),
    "two share one list of tokens": (whole, "branch", "list(parent.all_token_ids)", "parent.all_token_ids"),
    "copies of members left out are forgiven": (
        Scheduler, "fail_step", "+ held_back", ""),
    "who has ended lives on": (BeamGroup, "advance", "if is_last or token in self.enders:", "if is_last:"),
    "what ends beyond the width is kept": (BeamGroup, "advance", "if rank < self.width:", "if True:"),
    "the search ends too early": (BeamGroup, "advance", "self.params.early_stopping or", "True or"),
    "the search ends too late": (BeamGroup, "advance", "<= self.finished[-1].score", "<= -1e9"),
    "no norm": (BeamGroup, "advance", "length**self.params.length_penalty", "1.0"),
    "scores start anew": (BeamGroup, "advance", "self.scores = [total for", "self.scores = [0.0 * total for"),
    "a name outlives the fork": (KVCacheManager, "free", "self._published.pop(request.request_id, None)", "pass"),
    "a stale row of scores": (BeamGroup, "place", "self.members = members", "pass"),
}  # fmt: skip


def workloads_until_caught(most: int = 600) -> int:
    for number in range(most):
        try:
            BeamFuzz(number).run()
        except Exception:
            return number + 1
    return 0


@pytest.mark.parametrize("fault", FAULTS)
def test_fuzz_catches_faults(monkeypatch, fault):
    break_it(monkeypatch, *FAULTS[fault])
    monkeypatch.setattr(fuzz, "MAX_STEPS", 1_000)
    assert workloads_until_caught(), f"nobody noticed: {fault}"


# ---- the search


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_it_finds_what_an_unpaged_search_finds(width, length_penalty, early_stopping):
    reasons = set()
    for start in range(10):
        req = beams(prompt=[start, 7, 8, 9, 1], width=width, max_tokens=12, length_penalty=length_penalty,
                    early_stopping=early_stopping)  # fmt: skip
        core = engine(usable=30, runner=SlotEchoRunner(31, 4, vocab_size=11))
        core.add_request(req)
        assert run(core) == {"b": []}
        assert found(req) == oracle(req, vocab_size=11)
        assert len(req.group.finished) == width
        scores = [h.score for h in req.group.finished]
        assert scores == sorted(scores, reverse=True)
        reasons |= {h.finish_reason for h in req.group.finished}
    assert "stop" in reasons


def test_width_one_is_greedy():
    req = beams(width=1, max_tokens=9, ignore_eos=True)
    core = engine()
    core.add_request(req)
    run(core)
    tokens = req.prompt_token_ids
    for _ in range(9):
        logprobs = echo_logprobs(tokens)
        tokens = [*tokens, logprobs.index(max(logprobs))]
    assert [h.token_ids for h in req.group.finished] == [tokens[6:]]


def test_the_memory_report_counted_by_hand():
    """Blocks of 4, a prompt of 8, two beams, two outputs."""
    req = beams(prompt=8, width=2, max_tokens=2, ignore_eos=True)
    core = engine(enable_prefix_caching=False)
    core.add_request(req)
    run(core)
    memory = req.group.memory
    # Step 1: the prompt, 2 blocks for all. Step 2: one block more for each; copying would hold 3 each.
    assert (memory.peak_blocks, memory.peak_blocks_copying) == (4, 6)
    assert (memory.sum_blocks, memory.sum_blocks_copying) == (2 + 4, 2 + 6)
    assert memory.saved_at_peak == pytest.approx(1 / 3) and memory.saved_on_average == pytest.approx(1 / 4)
    assert memory.num_copies == core.scheduler.stats.num_copy_on_writes == 0  # they part where a block begins


def test_beams_copy_only_the_block_that_two_write_into():
    req = beams(prompt=6, width=2, max_tokens=2, ignore_eos=True)  # the second block is half full at the fork
    core = engine(enable_prefix_caching=False)
    core.add_request(req)
    run(core)
    assert req.group.memory.num_copies == core.scheduler.stats.num_copy_on_writes == 1


# ---- as a whole


def drive(core, check=lambda output: None) -> dict[str, str]:
    """Run to the end, looking at every step; the finish reasons."""
    reasons = {}
    execute = core.runner.execute
    core.runner.execute = lambda output: (check(output), execute(output))[1]
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finish_reason:
                assert output.request.request_id not in reasons
                reasons[output.request.request_id] = output.finish_reason
        core.scheduler.manager.check()
    return reasons


@pytest.mark.parametrize("num_cpu", [0, 40])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [4, 5, 7, 64])
def test_with_no_free_block_the_younger_group_leaves_and_comes_back_whole(budget, caching, num_cpu):
    free = []

    def choose_victim(running, needy, gain):
        free.append(core.scheduler.manager.block_pool.get_num_free_blocks())
        return defaults.choose_victim(running, needy, gain)

    rash = Policies(may_resume=lambda request, room: True, choose_victim=choose_victim)
    core = engine(usable=18, policies=rash, max_num_batched_tokens=budget, enable_prefix_caching=caching,
                  num_cpu_blocks_override=num_cpu)  # fmt: skip
    old = plain_request("old", 36, max_tokens=36)  # grows to all 18 blocks
    req = beams(prompt=9, width=3, max_tokens=16, ignore_eos=True)  # 3 x 6 blocks at worst
    core.add_request(old)
    core.add_request(req)
    left = []

    def check(output):
        left.extend(output.preempted)
        sampled = [r for r, n in output.scheduled if r.num_computed_tokens + n == r.num_tokens]
        if req.group.is_branched:
            assert len([r for r in sampled if r.group]) in (0, 3)
            assert len({r.status is RequestStatus.RUNNING for r in req.group.members}) == 1

    assert drive(core, check) == {"old": "length", "b": "length"}
    assert 0 in free and {"b", "b#1", "b#2"} <= set(left) and "old" not in left
    assert found(req) == oracle(req)
    assert old.output_token_ids == want(old)


def test_a_group_alone_never_lacks_a_block():
    """What is refused is exact: with one block less it would not have been let in, with these it is never preempted."""
    req = beams(prompt=9, width=3, max_tokens=12, ignore_eos=True)
    core = engine(usable=15)
    core.add_request(req)
    drive(core)
    assert found(req) == oracle(req)
    assert core.scheduler.stats.num_preemptions_recompute == core.scheduler.stats.num_preemptions_swap == 0


def test_a_budget_as_wide_as_the_group_is_enough_in_company():
    core = engine(usable=60, max_num_batched_tokens=3)
    one, two = beams("one", prompt=5, width=3), beams("two", prompt=6, width=3)
    other = plain_request("plain", 7, max_tokens=20)
    for req in (one, other, two):
        core.add_request(req)
    drive(core)
    assert found(one) == oracle(one) and found(two) == oracle(two) and other.output_token_ids == want(other)


def test_a_plan_that_never_thinks_of_the_whole_cannot_stop_a_group():
    stingy = Policies(plan_tokens=lambda pending, budget, limit: [1] + [0] * (len(pending) - 1))
    core = engine(policies=stingy)
    req = beams(width=3)
    core.add_request(req)
    drive(core)
    assert found(req) == oracle(req)


def test_higher_priority_moves_a_whole_group_out_and_a_group_moves_others_out():
    core = engine(usable=16)
    low = plain_request("low", 44, max_tokens=20, priority=2)
    core.add_request(low)
    core.step()
    req = beams(prompt=9, width=3, max_tokens=12, ignore_eos=True, priority=1)
    core.add_request(req)
    while low.status is RequestStatus.RUNNING:
        core.step()
    assert req.group.is_branched and low.status is RequestStatus.PREEMPTED and len(core.scheduler.running) == 3
    high = plain_request("high", 44, max_tokens=10, priority=0)
    core.add_request(high)
    core.step()
    assert {member.status for member in req.group.members} == {RequestStatus.PREEMPTED}
    assert set(drive(core)) == {"low", "b", "high"}
    assert found(req) == oracle(req)
    assert low.output_token_ids == want(low) and high.output_token_ids == want(high)


@pytest.mark.parametrize("name", ["b", "b#1"])
def test_an_abort_ends_all_of_a_group_once(name):
    core = engine()
    req = beams()
    core.add_request(req)
    core.step()
    core.step()
    [output] = core.abort_request(name)
    assert output.request is req and output.finish_reason == "abort"
    assert not core.has_unfinished_requests() and core.scheduler.manager.usage == 0
    assert not core.scheduler.groups and core.abort_request("b") == []


def test_the_failure_of_one_member_ends_the_group_once():
    class Spoilt(SlotEchoRunner):
        def execute(self, output):
            sampled = super().execute(output)
            if any(request.request_id == "b#2" for request, _ in output.scheduled):
                raise RuntimeError("b#2 is spoilt")
            return sampled

    core = engine(runner=Spoilt(21, 4))
    req, other = beams(), plain_request("plain", 5, max_tokens=6)
    core.add_request(req)
    core.add_request(other)
    assert drive(core) == {"b": "error", "plain": "length"}
    assert req.error == "RuntimeError: b#2 is spoilt" and other.output_token_ids == want(other)
    assert core.scheduler.manager.usage == 0


# ---- refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_num_seqs=3), "beam_width is 4 and there are 3 seats, .* lower beam_width or raise max_num_seqs"),
        (dict(max_num_batched_tokens=3), "beam_width is 4 and a step computes 3 tokens, .* or raise max_num_bat"),
        (dict(usable=15), "4 beams of 4 blocks, .* more than the 15 KV blocks .* lower beam_width or max_tokens"),
        (dict(enable_chunked_prefill=False), "beams compute their tokens again in parts; enable chunked prefill"),
        (dict(reservation="contiguous", max_model_len=40), "contiguous reservation cannot; use 'paged'"),
    ],
)
def test_what_could_not_go_on_whole_is_refused(settings, message):
    core = engine(**settings)
    before = snapshot(core.scheduler)
    with pytest.raises(ValueError, match=message):
        core.add_request(beams(prompt=6, width=4, max_tokens=8))
    assert snapshot(core.scheduler) == before and not core.scheduler.groups


def test_what_just_fits_is_served():
    core = engine(max_num_seqs=4, max_num_batched_tokens=4, usable=16)
    req = beams(prompt=6, width=4, max_tokens=8)
    core.add_request(req)
    drive(core)
    assert found(req) == oracle(req)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(beam_width=0), "beam_width is 0: use a whole number >= 1"),
        (dict(max_tokens=None), "max_tokens is None: use a whole number >= 1"),
        (dict(length_penalty=float("nan")), "length_penalty is nan: use a number"),
        (dict(early_stopping="never"), "early_stopping is 'never': use True or False"),
    ],
)
def test_bad_parameters_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong})


def test_a_runner_that_reports_too_little_is_told_so():
    class Few(SlotEchoRunner):
        def execute(self, output):
            sampled = super().execute(output)
            for entries in sampled.logprobs.values():
                entries[0] = dict(list(entries[0].items())[:1])
            return sampled

    core = engine(runner=Few(21, 4))
    core.add_request(beams())
    with pytest.raises(ValueError, match="1 tokens can follow, too few for 3 beams"):
        core.step()
