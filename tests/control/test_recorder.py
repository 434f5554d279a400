"""The event stream of a small run, and the recorder itself."""

import json

import pytest
from driving import engine, request, run

from kvlab.events import Event, Recorder
from kvlab.schedule import Policies


def test_the_events_of_a_small_run():
    core = engine(recorder=(recorder := Recorder()))
    core.add_request(request("a", 5, max_tokens=2))
    run(core)
    told = [(e.step, e.kind, e.request_id, e.values) for e in recorder.events()]
    limits = (core.scheduler.config.max_num_batched_tokens, core.scheduler.config.max_num_seqs)
    assert told == [
        (0, "add", "a", (5,)),
        (1, "step_begin", None, limits),
        (1, "alloc", None, (1, 2)),
        (1, "schedule", "a", (0,)),
        (1, "compute", None, ("a", 0, 5)),
        (1, "publish", "a", (1,)),
        (1, "step_end", None, (5,)),
        (2, "step_begin", None, limits),
        (2, "compute", None, ("a", 5, 1)),
        (2, "free", None, (2, 1)),
        (2, "finish", "a", ("length", 2)),
        (2, "step_end", None, (1,)),
    ]


def test_a_hit_an_eviction_a_fork_and_a_copy_are_told():
    core = engine(usable=6, recorder=(recorder := Recorder()))
    core.add_request(request("a", 5, max_tokens=1))
    run(core)
    core.add_request(request("b", 6, max_tokens=3, n=2))
    run(core)
    assert [e.values for e in recorder.events("touch")][0] == (1,)
    assert [e.request_id for e in recorder.events("fork")] == ["b#1"]
    [copy] = recorder.events("copy")
    assert len(copy.values) == 2 and copy.values[0] != copy.values[1]
    core.add_request(request("c", [77] * 21, max_tokens=1))
    run(core)
    assert (1,) in [e.values for e in recorder.events("evict")]


def test_preemption_by_swap_is_told_with_its_blocks():
    core = engine(usable=4, enable_prefix_caching=False, num_cpu_blocks_override=8, recorder=(recorder := Recorder()),
                  policies=Policies(may_resume=lambda *args: True))  # fmt: skip
    for name in "ab":
        core.add_request(request(name, [ord(name)] * 4, max_tokens=6))
    run(core)
    assert [(e.request_id, e.values) for e in recorder.events("preempt")] == [("b", ("swapped",))]
    assert [(e.request_id, e.values) for e in recorder.events("victim")] == [("b", ("a",))]
    [out], [back] = recorder.events("swap_out"), recorder.events("swap_in")
    assert out.request_id == back.request_id == "b" and len(out.values) == len(back.values) == 2


def test_blocks_owned_follow_from_the_events_alone():
    """What a view does: replay alloc, touch and free; at every step the owners are those of the pool."""
    core = engine(usable=7, block_size=2, recorder=(recorder := Recorder()), num_cpu_blocks_override=4,
                  policies=Policies(may_resume=lambda *args: True))  # fmt: skip
    owned: set[int] = set()

    def replay(event):
        if event.kind in ("alloc", "touch"):
            owned.update(event.values)
        elif event.kind == "free":
            owned.difference_update(event.values)

    recorder.listen(replay)
    for i in range(4):
        core.add_request(request(str(i), [1, 2, 3], max_tokens=9, n=2))
    while core.has_unfinished_requests():
        core.step()
        assert owned == {b.block_id for b in core.scheduler.manager.block_pool.blocks if b.ref_cnt}
    assert not owned


def test_nothing_is_told_without_a_recorder(monkeypatch):
    monkeypatch.setattr(Recorder, "emit", lambda *args: pytest.fail("an event without a listener"))
    core = engine(num_cpu_blocks_override=4)
    core.add_request(request("a", 5, n=2))
    run(core)


def test_a_run_is_the_same_with_and_without_a_recorder():
    outputs = []
    for recorder in (None, Recorder(4)):
        core = engine(usable=6, recorder=recorder, policies=Policies(may_resume=lambda *args: True))
        for i in range(3):
            core.add_request(request(str(i), 5, max_tokens=9))
        outputs.append((run(core), core.scheduler.stats))
    assert outputs[0] == outputs[1]


def test_the_ring_is_bounded_and_says_what_it_dropped():
    recorder = Recorder(capacity=3)
    heard = []
    recorder.listen(heard.append)
    for i in range(5):
        recorder.step = i
        recorder.emit("alloc", None, [i])
    assert [e.values for e in recorder.events()] == [(2,), (3,), (4,)]
    assert recorder.num_dropped == 2 and len(heard) == 5
    assert recorder.events("alloc") == recorder.events() and recorder.events("free") == []


def test_a_saved_stream_comes_back_the_same(tmp_path):
    core = engine(recorder=(recorder := Recorder()))
    core.add_request(request("ä", 9, n=2))
    run(core)
    recorder.save(tmp_path / "events.jsonl")
    again = Recorder.load(tmp_path / "events.jsonl")
    assert again.events() == recorder.events() and again.step == recorder.step
    assert all(isinstance(e, Event) and isinstance(e.values, tuple) for e in again.events())
    first = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert json.loads(first) == [0, "add", "ä", [9]]
    Recorder().save(tmp_path / "empty.jsonl")
    assert Recorder.load(tmp_path / "empty.jsonl").events() == []
