"""The scheduler: who runs, who gives way, and when (pitfalls 2, 5-9), each with the right value."""

import random

import pytest
from driving import engine, request, run, want

from kvlab.contiguous import ContiguousKVCacheManager
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Policies, Request, RequestQueue, RequestStatus
from kvlab.schedule.policies import Room, may_resume
from kvlab.sim import SlotEchoRunner


def scheduled(output):
    return {request.request_id: num_tokens for request, num_tokens in output.scheduled}


def step(core):
    """One step by hand: (output, results)."""
    output = core.scheduler.schedule()
    results = core.scheduler.update_from_output(output, core.runner.execute(output))
    core.scheduler.manager.check()
    return output, results


class Counting(SlotEchoRunner):
    """Notes every (token, position) that is computed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.computed = []

    def execute(self, output):
        for req, num_tokens in output.scheduled:
            self.computed += range(req.num_computed_tokens, req.num_computed_tokens + num_tokens)
        return super().execute(output)


# ---- budget and chunks


def test_decodes_come_first_and_a_long_prompt_gets_the_rest_in_chunks():
    core = engine(max_num_batched_tokens=8)
    core.add_request(request("a", 4, max_tokens=10))
    step(core)
    core.add_request(request("b", [50] * 17))
    plans = [scheduled(step(core)[0]) for _ in range(3)]
    assert plans == [{"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 3}]


def test_a_chunk_that_is_not_the_last_samples_nothing():
    core = engine(max_num_batched_tokens=3)
    core.add_request(request("a", 7, max_tokens=2))
    assert [len(step(core)[1]) for _ in range(4)] == [0, 0, 1, 1]


def test_one_prompt_never_gets_more_than_the_threshold():
    core = engine(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    core.add_request(request("a", 7))
    core.add_request(request("b", [9] * 7))
    assert [scheduled(step(core)[0]) for _ in range(3)] == [{"a": 3, "b": 3}, {"a": 3, "b": 3}, {"a": 1, "b": 1}]


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_takes_it_whole():
    core = engine(max_num_batched_tokens=8, enable_chunked_prefill=False, long_prefill_token_threshold=2)
    core.add_request(request("a", 6, max_tokens=3))
    core.add_request(request("b", [9] * 6, max_tokens=3))
    assert [scheduled(step(core)[0]) for _ in range(4)] == [{"a": 6}, {"a": 1, "b": 6}, {"a": 1, "b": 1}, {"b": 1}]


# ---- sharing over time


def test_two_equal_prompts_in_one_step_compute_the_shared_blocks_once():
    core = engine(runner=(runner := Counting(21, 4)))
    for name in "ab":
        core.add_request(request(name, 11, max_tokens=1))
    run(core)
    assert sorted(runner.computed) == sorted([*range(11), 8, 9, 10])  # the second computes its half block only


def test_the_second_of_two_equal_prompts_follows_chunk_by_chunk():
    core = engine(runner=(runner := Counting(21, 4)), max_num_batched_tokens=4)
    for name in "ab":
        core.add_request(request(name, 11, max_tokens=1))
    run(core)
    assert len(runner.computed) == 14


def test_equal_prompts_with_different_salts_share_nothing():
    core = engine(runner=(runner := Counting(21, 4)))
    core.add_request(request("a", 9, max_tokens=1, cache_salt="x"))
    core.add_request(request("b", 9, max_tokens=1, cache_salt="y"))
    run(core)
    assert len(runner.computed) == 18
    assert core.scheduler.stats.num_steps == 1, "one waited for a block that it may not share"


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_a_prompt_seen_before_is_hit_in_whole_blocks_but_never_to_its_last_token(length):
    core = engine()
    core.add_request(request("a", length, max_tokens=1))
    run(core)
    core.add_request(again := request("b", length, max_tokens=3))
    assert run(core)["b"] == want(again)
    assert again.num_cached_tokens == (length - 1) // 4 * 4


def test_a_resumed_request_hits_its_own_blocks_outputs_included_and_at_an_exact_multiple():
    core = engine()
    core.add_request(req := request("a", 5, max_tokens=8))
    while req.num_tokens < 9:
        step(core)
    assert req.num_computed_tokens == 8  # two full blocks, published
    core.scheduler._preempt(req, {}, core.scheduler.schedule())
    core.scheduler.policies = Policies(swap_or_recompute=lambda *args: "recompute")
    assert req.status is RequestStatus.PREEMPTED and req.num_computed_tokens == 0
    output, _ = step(core)
    assert scheduled(output) == {"a": 1}  # 8 hits of 9 tokens
    run(core)
    assert req.output_token_ids == want(req) and req.num_cached_tokens == 0


def test_statistics_count_a_request_once_however_often_it_is_tried_or_preempted():
    core = engine(usable=6, policies=Policies(may_resume=lambda *args: True))
    for i in range(5):
        core.add_request(request(str(i), [1, 2, 3, 4, 5, 6 + i], max_tokens=14))
    run(core)
    stats = core.scheduler.stats
    assert stats.num_preemptions_recompute > 0
    assert stats.num_prefix_queried_tokens == 5 * 6
    assert stats.num_prefix_hit_tokens <= 4 * 4


def test_n_children_appear_with_the_prompts_first_sample():
    core = engine()
    core.add_request(req := request("a", 6, n=3))
    _, results = step(core)
    assert [(r.request.request_id, r.request.child_index) for r in results] == [("a", 0), ("a#1", 1), ("a#2", 2)]
    assert req.num_to_fork == 0


def test_n_4_with_three_seats():
    core = engine(max_num_seqs=3)
    core.add_request(req := request("a", 6, n=4, max_tokens=5))
    step(core)
    assert [r.request_id for r in core.scheduler.running] == ["a", "a#1", "a#2"]
    assert [r.request_id for r in core.scheduler.waiting] == ["a#3"]
    got = run(core)
    assert {name: len(tokens) for name, tokens in got.items()} == {"a": 4, "a#1": 4, "a#2": 4, "a#3": 4}
    assert got["a#3"] == want(req, 3)[1:]


# ---- size


def test_a_request_that_fills_the_pool_runs_and_one_token_more_is_refused():
    core = engine(usable=3)
    fits = request("a", 8, max_tokens=5)  # 12 slots: the last output needs none
    core.add_request(fits)
    assert run(core)["a"] == want(fits)
    with pytest.raises(ValueError, match="8 prompt tokens and 6 outputs .* than the 3 KV blocks .*max_tokens to 5"):
        core.add_request(request("b", 8, max_tokens=6))
    with pytest.raises(ValueError, match="shorten the prompt"):
        core.add_request(request("c", 13, max_tokens=1))
    core.add_request(request("d", 12, max_tokens=1))
    assert len(run(core)["d"]) == 1


def test_without_max_tokens_it_grows_to_the_end_of_the_pool_or_of_the_model():
    core = engine(usable=3)
    core.add_request(Request("a", [1, 2], SamplingParams(max_tokens=None, temperature=0)))
    assert len(run(core)["a"]) == 13 - 2
    core = engine(usable=30, max_model_len=20)
    core.add_request(Request("a", [1, 2], SamplingParams(max_tokens=None, temperature=0)))
    assert len(run(core)["a"]) == 18


# ---- preemption


def two_in_a_tight_pool(**policies):
    """Two requests that fit together only at first; the step in which the blocks run out is the next."""
    core = engine(usable=4, enable_prefix_caching=False, max_num_batched_tokens=8,
                  policies=Policies(may_resume=lambda *args: True, **policies))  # fmt: skip
    core.add_request(request("a", [1] * 4, max_tokens=6))
    core.add_request(request("b", [2] * 4, max_tokens=6))
    step(core)
    while core.scheduler.running[0].num_computed_tokens < 8:
        step(core)
    assert core.scheduler.manager.block_pool.get_num_free_blocks() == 0
    return core


def test_the_younger_gives_way_and_nobody_comes_in_in_that_step():
    core = two_in_a_tight_pool()
    core.add_request(request("c", [3]))
    output, _ = step(core)
    assert (scheduled(output), output.preempted) == ({"a": 1}, ["b"])
    assert [r.request_id for r in core.scheduler.waiting] == ["b", "c"]  # at its own place, before who came later


def test_a_victim_that_was_scheduled_gives_its_tokens_back():
    core = two_in_a_tight_pool(choose_victim=lambda running, needy, gain: running[0])
    a, b = core.scheduler.running
    core.scheduler.running = [b, a]  # b first: it takes from ... itself first, then a is next
    output, _ = step(core)
    assert output.preempted == ["b"] and scheduled(output) == {"a": 1}


def test_the_budget_of_a_victim_goes_to_those_who_come_after():
    """Budget 2, three decodes: a and b are planned, b needs a block and a is thrown out, so c gets its token."""
    core = engine(usable=5, enable_prefix_caching=False, max_num_batched_tokens=12, policies=Policies(
        may_resume=lambda *args: True, choose_victim=lambda running, needy, gain: running[0]))  # fmt: skip
    core.add_request(request("a", [1] * 5, max_tokens=9))
    core.add_request(request("b", [2] * 4, max_tokens=9))
    core.add_request(request("c", [3] * 3, max_tokens=9))
    step(core)
    a, b, c = core.scheduler.running
    # b's next token needs a block; 2 + 1 + 1 of 5 are taken, so take the last one away.
    core.scheduler.manager.block_pool.get_new_blocks(1)
    core.scheduler.config.max_num_batched_tokens = 2
    output = core.scheduler.schedule()
    assert output.preempted == ["a"] and scheduled(output) == {"b": 1, "c": 1}


def test_after_a_preemption_the_rest_is_planned_with_what_is_left():
    """a has its chunk when b takes c's block: a is not planned again, and b and d share the 3 tokens that are left."""
    victims = lambda running, needy, gain: next((r for r in running if r.request_id == "c"), needy)  # noqa: E731
    core = engine(block_size=2, usable=9, enable_prefix_caching=False, max_num_batched_tokens=6,
                  long_prefill_token_threshold=3,
                  policies=Policies(may_resume=lambda *args: True, choose_victim=victims))  # fmt: skip
    for name, prompt in (("a", 12), ("b", 1), ("c", 2), ("d", 8)):
        core.add_request(request(name, prompt, max_tokens=6))
    outputs = [step(core)[0] for _ in range(3)]
    assert [output.preempted for output in outputs] == [[], [], ["c"]]
    assert scheduled(outputs[2]) == {"a": 3, "b": 1, "d": 2}


def test_nobody_enters_in_a_step_with_a_preemption_not_even_at_the_head_of_the_queue():
    core = two_in_a_tight_pool()
    core.add_request(request("c", [3], priority=-1))
    output, _ = step(core)
    assert (scheduled(output), output.preempted) == ({"a": 1}, ["b"])
    assert [r.request_id for r in core.scheduler.waiting] == ["c", "b"]


def test_a_request_may_have_to_preempt_itself():
    core = two_in_a_tight_pool(choose_victim=lambda running, needy, gain: needy)
    a, b = core.scheduler.running
    output, _ = step(core)
    assert output.preempted == ["a"] and scheduled(output) == {"b": 1}  # a steps back, and b finds its block
    run(core)
    assert (a.output_token_ids, b.output_token_ids) == (want(a), want(b))


def test_a_copy_of_a_victim_is_made_before_its_blocks_are_used_again():
    """A child copies, is thrown out in the same step, and its block goes to somebody else: all outputs are right."""
    for seed in range(30):
        rng = random.Random(seed)
        policies = Policies(may_resume=lambda *args: True, choose_victim=lambda running, *_, r=rng: r.choice(running))
        core = engine(usable=7, block_size=2, policies=policies, num_cpu_blocks_override=rng.choice([0, 9]))
        requests = [request(str(i), [i] * 3, max_tokens=8, n=2) for i in range(3)]
        for req in requests:
            core.add_request(req)
        got = run(core)
        assert core.scheduler.stats.num_copy_on_writes > 0
        for req in requests:
            assert got[req.request_id] == want(req) and got[req.request_id + "#1"] == want(req, 1)


def test_swapped_out_requests_come_back_before_new_ones_are_admitted():
    core = engine(usable=4, enable_prefix_caching=False, num_cpu_blocks_override=8,
                  policies=Policies(may_resume=lambda *args: True))  # fmt: skip
    for name in "ab":
        core.add_request(request(name, [ord(name)] * 4, max_tokens=6))
    while core.scheduler.stats.num_preemptions_swap == 0:
        step(core)
    core.add_request(request("new", [7], max_tokens=1))
    assert core.scheduler.waiting.peek().status is RequestStatus.SWAPPED
    entered = []
    while core.scheduler.waiting:
        output, _ = step(core)
        entered += [name for name in scheduled(output) if name != "a" and name not in entered]
    assert entered == ["b", "new"]


def test_a_resumed_request_draws_the_numbers_that_it_would_have_drawn():
    for cpu, caching in [(0, False), (0, True), (12, False), (12, True)]:
        core = engine(usable=6, num_cpu_blocks_override=cpu, enable_prefix_caching=caching,
                      policies=Policies(may_resume=lambda *args: True))  # fmt: skip
        requests = [Request(str(i), [i] * 4, SamplingParams(max_tokens=16, seed=i), eos_token_ids=()) for i in range(4)]
        for req in requests:
            core.add_request(req)
        got = run(core)
        stats = core.scheduler.stats
        assert stats.num_preemptions_swap if cpu else stats.num_preemptions_recompute
        assert got == {req.request_id: want(req) for req in requests}


def thrash(policies):
    core = engine(block_size=4, usable=24, max_num_batched_tokens=16, max_num_seqs=12, policies=policies,
                  enable_prefix_caching=False)  # fmt: skip
    requests = [request(str(i), [i] * 20, max_tokens=20) for i in range(12)]
    for req in requests:
        core.add_request(req)
    run(core)
    return core.scheduler.stats, max(req.num_preemptions for req in requests)


def test_admission_does_not_thrash():
    """12 requests of 20 + 20 tokens in 24 blocks, which hold two and a half of them at full length (L33 9.3-1)."""
    stats, most = thrash(None)
    reckless, most_reckless = thrash(Policies(may_resume=lambda *args: True))
    assert most <= 2 and stats.num_preemptions_recompute <= 6
    assert most_reckless >= 3 * max(1, most)
    assert reckless.num_recomputed_tokens > 2 * stats.num_recomputed_tokens


@pytest.mark.parametrize("usable, running", [(8, ["a"]), (9, ["a", "b"])])
def test_room_is_what_is_free_less_what_others_were_promised(usable, running):
    """a has 1 of its 5 blocks. b needs 3, and 1 is spare for a's growth: with the 4 promised to a that makes 8."""
    core = engine(usable=usable, enable_prefix_caching=False, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    core.add_request(request("a", [1] * 20))
    core.add_request(request("b", [2] * 12))
    step(core)
    assert [r.request_id for r in core.scheduler.running] == running


def test_each_preemption_asks_for_more_room_to_come_back():
    req = request("a", 4)
    for req.num_preemptions in range(4):
        needed = 3 + 2 * (1 + req.num_preemptions)  # and one block for each of two that grow, as often as thrown out
        assert may_resume(req, Room(3, needed, 0, 2)) and not may_resume(req, Room(3, needed - 1, 0, 2))


def test_stop_conditions_hold_after_a_preemption():
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=6, stop_token_ids=range(0, 97, 4))
    core = engine(usable=5, policies=Policies(may_resume=lambda *args: True))
    requests = [Request(str(i), [i] * 4, params) for i in range(6)]
    for req in requests:
        core.add_request(req)
    got = run(core)
    assert got == {req.request_id: want(req) for req in requests}
    ended = [req.finish_reason for req in requests if req.num_preemptions]
    assert "stop" in ended and all(6 <= len(tokens) for tokens in got.values())


# ---- the ends


@pytest.mark.parametrize("state", ["waiting", "mid-prefill", "decoding", "preempted", "swapped"])
def test_abort_in_every_state_leaves_nothing(state):
    core = engine(usable=6, max_num_batched_tokens=4, enable_prefix_caching=False,
                  num_cpu_blocks_override=9 if state == "swapped" else 0)  # fmt: skip
    core.add_request(other := request("other", [9] * 4, max_tokens=6))
    core.add_request(req := request("a", 9, max_tokens=6))
    if state != "waiting":
        while req.num_computed_tokens < (6 if state == "mid-prefill" else 10):
            core.step()
    if state in ("preempted", "swapped"):
        core.scheduler._preempt(req, {}, core.scheduler.schedule())
    assert req.status.value == {"mid-prefill": "running", "decoding": "running"}.get(state, state)
    core.runner.execute(core.scheduler.schedule()) if state == "swapped" else None  # its copies are under way
    [output] = core.abort_request("a")
    assert output.finish_reason == "abort" and output.new_token_ids == []
    assert core.abort_request("a") == []
    core.scheduler.manager.check()
    run(core)
    assert other.finish_reason is not None or state == "swapped"
    assert core.scheduler.manager.usage == 0 and core.scheduler.manager.swap_space.num_free_blocks == (
        9 if state == "swapped" else 0)  # fmt: skip


def test_a_sibling_aborted_while_its_copy_is_pending():
    core = engine()
    core.add_request(req := request("a", 6, n=3, max_tokens=6))
    core.step()
    output = core.scheduler.schedule()
    assert sum(kind == "copy" for kind, _, _ in output.block_ops) == 2
    core.abort_request("a#1")
    results = core.scheduler.update_from_output(output, core.runner.execute(output))
    assert [r.request.request_id for r in results] == ["a", "a#2"]
    got = run(core)
    assert got["a"] == want(req)[2:] and got["a#2"] == want(req, 2)[2:] and "a#1" not in got


def test_the_id_of_a_parent_ends_the_family_and_the_id_of_a_child_itself():
    core = engine()
    core.add_request(request("a", 6, n=3))
    core.step()
    assert [o.request.request_id for o in core.abort_request("a#2")] == ["a#2"]
    assert [o.request.request_id for o in core.abort_request("a")] == ["a", "a#1"]
    assert not core.has_unfinished_requests()


def test_stop_ids_end_of_sequence_and_min_tokens():
    plain = want(request("x", 5, max_tokens=12))
    stop = plain[3]

    def ended(eos=(), **params):
        req = Request("a", list(range(1, 6)), SamplingParams(temperature=0, seed=0, max_tokens=12, **params),
                      eos_token_ids=eos)  # fmt: skip
        core = engine()
        core.add_request(req)
        return len(run(core)["a"]), req.finish_reason, req.stop_reason

    first = plain.index(stop) + 1
    assert ended(stop_token_ids=(stop,)) == (first, "stop", stop)
    assert ended(eos=(stop,)) == (first, "stop", None)
    assert ended(eos=(stop,), ignore_eos=True) == (12, "length", None)
    assert ended(eos=(stop,), min_tokens=12)[0] == 12


def test_a_stop_token_before_min_tokens_does_not_end_a_request():
    """A runner should not draw one; should it, the scheduler goes on."""
    core = engine()
    req = Request("a", [1, 2, 3], SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=(7,)))
    core.add_request(req)
    for expected in (None, "stop"):
        core.scheduler.update_from_output(core.scheduler.schedule(), {"a": [7]})
        assert req.finish_reason == expected


# ---- queue, priorities, static batching, contiguous reservation


def test_the_queue_is_ordered_by_priority_then_arrival():
    queue = RequestQueue()
    for arrival, (name, priority) in enumerate([("a", 1), ("b", 0), ("c", 0), ("d", -1)]):
        req = request(name, 1, priority=priority)
        req.arrival = arrival
        queue.add(req)
        if name == "c":
            dropped = req
    queue.remove(dropped)
    assert [r.request_id for r in queue] == ["d", "b", "a"] and dropped not in queue
    assert [queue.pop().request_id for _ in range(3)] == ["d", "b", "a"]
    for call in (queue.pop, queue.peek):
        with pytest.raises(IndexError):
            call()


def test_a_removed_request_may_come_back_to_the_queue_once():
    queue = RequestQueue()
    req = request("a", 1)
    queue.add(req)
    queue.remove(req)
    queue.add(req)
    with pytest.raises(ValueError, match="'a' is waiting already"):
        queue.add(req)
    assert queue.pop() is req and len(queue) == 0 and list(queue) == []


def text_experiment_2(batching):
    """L33 7.2: seed 42, 16 requests of 10 to 120 tokens, 4 seats; one-token prompts: each step brings an output."""
    rng = random.Random(42)
    lengths = [rng.randint(10, 120) for _ in range(16)]
    core = engine(block_size=16, usable=200, max_num_seqs=4, batching=batching)
    for i, length in enumerate(lengths):
        core.add_request(request(str(i), [i], max_tokens=length))
    got = run(core)
    assert [len(got[str(i)]) for i in range(16)] == lengths
    return core.scheduler.stats, sum(lengths)


def test_static_batching_takes_338_steps_and_continuous_279():
    """C26: 393 idle seat-steps, 70.93% of the seats used; 59 steps saved, 1.21 times; the bound is ceil(sum / 4)."""
    static, total = text_experiment_2("static")
    continuous, _ = text_experiment_2("continuous")
    assert (static.num_steps, static.num_idle_seats, total) == (338, 393, 959)
    assert round(100 * total / (4 * static.num_steps), 2) == 70.93
    assert continuous.num_steps == 279 and round(338 / 279, 2) == 1.21
    assert -(-total // 4) <= continuous.num_steps


def test_static_batching_lets_nobody_in_until_all_have_finished():
    core = engine(batching="static", max_num_seqs=2)
    for name, length in (("a", 1), ("b", 3), ("c", 2)):
        core.add_request(request(name, [1], max_tokens=length))
    outputs = [scheduled(step(core)[0]) for _ in range(5)]
    assert outputs == [{"a": 1, "b": 1}, {"b": 1}, {"b": 1}, {"c": 1}, {"c": 1}]
    assert core.scheduler.stats.num_idle_seats == 2


def contiguous(usable, reserve, **settings):
    manager = ContiguousKVCacheManager(usable + 1, 4, reserve)
    return engine(usable=usable, manager=manager, policies=Policies(may_resume=lambda *args: True), **settings)


def test_a_contiguous_reservation_starves_admission_with_most_slots_empty():
    """L33 1.1: 5 blocks each are kept for 20 tokens, of which 3 are used; paging runs all six at once."""
    reserved, paged = contiguous(12, 20), engine(usable=12)
    for core in (reserved, paged):
        for i in range(6):
            core.add_request(request(str(i), [i + 1] * 2, max_tokens=2))
    reserved.step(), paged.step()
    assert len(reserved.scheduler.running) == 2 and len(paged.scheduler.running) == 6
    for core in (reserved, paged):
        run(core)
        assert core.scheduler.manager.usage == 0


def test_contiguous_tables_are_consecutive_and_a_hole_too_short_is_of_no_use():
    core = contiguous(9, lambda req: req.max_num_tokens - 1)
    for name, prompt in (("a", 8), ("b", 8), ("c", 16)):
        core.add_request(request(name, [1] * prompt, max_tokens=5))
    core.step()
    tables = core.scheduler.manager.req_to_blocks
    assert [tables[name].block_ids for name in "ab"] == [[1, 2, 3], [4, 5, 6]] and "c" not in tables
    core.abort_request("a")  # 3 + 3 are free, in two holes; c needs 5
    core.step()
    assert core.scheduler.manager.block_pool.get_num_free_blocks() == 6 and "c" not in tables
    got = run(core)
    assert len(got["c"]) == 5


def test_n_samples_of_a_contiguous_prompt_are_computed_anew_and_right():
    core = contiguous(20, lambda req: req.max_num_tokens - 1)
    core.add_request(req := request("a", 6, n=3, max_tokens=5))
    got = run(core)
    assert [got[name] for name in ("a", "a#1", "a#2")] == [want(req, i) for i in range(3)]


# ---- wrong policies are named


def test_a_victim_that_does_not_run_is_an_error():
    core = two_in_a_tight_pool(choose_victim=lambda running, needy, gain: request("stranger", 3))
    with pytest.raises(ValueError, match="choose_victim returned .*stranger.* which is not running"):
        core.step()


@pytest.mark.parametrize("plan", [[99], [-1], [1, 1]])
def test_a_plan_that_is_not_one_is_an_error(plan):
    core = engine(policies=Policies(plan_tokens=lambda pending, budget, limit: plan))
    core.add_request(request("a", 3))
    core.step()
    with pytest.raises(ValueError, match="plan_tokens|argument"):
        core.step()
