"""The replay of preemption: its figures are the scheduler's own, its reasons are true, and six seats gain nothing."""

from pathlib import Path

import pytest

from kvlab.config import EngineConfig
from kvlab.costs.preemption_steps import wasted_tokens
from kvlab.events import Recorder
from kvlab.parts import Parts
from kvlab.sampling_params import SamplingParams
from kvlab.schedule.request import Request
from kvlab.watch import probe, views
from kvlab.watch.lanes import COLUMNS, after, shown
from kvlab.watch.preemption import FULL
from kvlab.watch.view import states_of

SCENARIOS = ("six", "victim", "four", "watermark", "mixed")


def events_of(scenario, seed=0, parts=None):
    return list(views.preemption().view.scenarios[scenario].play(seed, parts or Parts()))


@pytest.mark.parametrize(
    ("scenario", "right", "figures"),
    [  # steps, tokens for the first time, again, preemptions; of the other run: steps, tokens, again, preemptions
        ("six", "no fewer", (53, 280, 80, 5, 51, 280, 0, 0)),
        ("four", "nobody", (51, 280, 0, 0, 97, 280, 0, 0)),
        ("watermark", "one or two", (53, 280, 45, 2, 53, 360, 80, 5)),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_surprise(scenario, right, figures, seed):
    player = views.preemption(scenario, seed=seed)
    end = player.states[-1]
    assert (end.num_steps, end.useful, end.again, end.num_preemptions, *end.reference[1:]) == figures
    assert player.ask()[1][player.answer()[0]] == right
    assert max(end.held) == (35 if scenario == "four" else 36) and end.num_blocks == 36
    assert player.frames[-1].say.startswith(f"All are done after {figures[0]} steps: {end.tokens} tokens computed")


@pytest.mark.parametrize("seed", range(6))
def test_with_mixed_lengths_six_seats_are_quicker_and_still_compute_more(seed):
    player = views.preemption("mixed", seed=seed)
    end = player.states[-1]
    assert 0.7 < end.num_steps / end.reference[1] < 0.97 and end.again > end.reference[3]
    assert player.ask()[1][player.answer()[0]] == "somewhat fewer"
    assert player.states[player.question.step].num_preemptions == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_youngest_gives_way_and_the_sentence_says_why(seed):
    player = views.preemption("victim", seed=seed)
    [victim], before = player.states[FULL + 1].victims, player.states[FULL]
    assert before.held[-1] == before.num_blocks and before.num_preemptions == 0
    running = [name for name in before.order if before.status[name] == "running"]
    assert victim.name == running[-1] and victim.lost == 20 == min(before.computed[name] for name in running)
    assert f"{victim.name}, the youngest" in player.ask()[1][player.answer()[0]]
    assert f"{victim.name} gives way, the youngest who runs, with the least to lose" in player.frames[FULL + 1].say


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_is_counted_twice_is_what_the_log_of_the_scheduler_says(scenario):
    events = events_of(scenario, seed=2)
    end = states_of(views.preemption().view, events)[-1]
    rows = [event.values for event in events if event.kind == "compute"]
    log = [row[i : i + 3] for row in rows for i in range(0, len(row), 3)]
    assert end.again == sum(wasted_tokens(log).values()) and end.tokens == sum(number for _, _, number in log)
    assert end.num_preemptions == sum(event.kind == "preempt" for event in events)
    assert all(len(lane) <= end.num_steps for lane in end.lanes.values())
    assert sum(lane.count("!") for lane in end.lanes.values()) == end.num_preemptions


def test_never_more_than_the_pool_and_full_just_before_somebody_gives_way():
    player = views.preemption("six")
    for before, now in zip(player.states, player.states[1:], strict=False):
        assert now.held[-1] <= now.num_blocks
        if now.victims:
            assert before.num_blocks - before.held[-1] < before.count("running")


def test_pure_and_the_same_from_a_saved_trace(tmp_path):
    recorder = Recorder()
    for event in events_of("watermark", seed=1):
        recorder.step = event.step
        recorder.emit(*event[1:])
    recorder.save(tmp_path / "run.jsonl")
    player = views.preemption(trace=tmp_path / "run.jsonl")
    assert player.frames == views.preemption("watermark", seed=1).frames
    last = [event for event in recorder.events() if event.step == FULL + 1]
    state = player.states[FULL]
    assert after(state, last) == after(state, last) == player.states[FULL + 1] and state == player.states[FULL]


# ---- a student's parts


def the_oldest(running, needy, gain):
    return running[0] if running[0] is not needy else running[-1]


def test_another_choice_of_victims_is_seen_and_not_praised():
    player = views.preemption("victim", parts=Parts(choose_victim=the_oldest))
    [victim] = player.states[FULL + 1].victims
    assert victim.reason == "" and "whom the policy chose" in player.frames[FULL + 1].say
    assert "the oldest" in player.ask()[1][player.answer()[0]]
    assert player.states[-1].again > views.preemption("victim").states[-1].again


def test_a_part_that_fails_or_never_ends_has_a_last_frame():
    broken = views.preemption("six", parts=Parts(choose_victim=lambda *args: 1 / 0))
    assert "choose_victim" in broken.frames[-1].say and len(broken.frames) == FULL + 2
    stuck = views.preemption("six", parts=Parts(may_resume=lambda request, room: request.arrival < 2))
    assert "The run ends here" in stuck.frames[-1].say and set("wxs") & set(stuck.states[-1].lanes["G"])


# ---- engines


def test_a_live_engine_that_swaps():
    recorder = Recorder()
    config = EngineConfig(num_gpu_blocks_override=9, num_cpu_blocks_override=8, block_size=4,
                          enable_prefix_caching=False)  # fmt: skip
    engine = Parts(may_resume=lambda *args: True).make_engine(config, recorder=recorder)
    for name in ("user-1", "user-2"):
        engine.add_request(Request(name, [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=20, ignore_eos=True)))
    while engine.has_unfinished_requests():
        engine.step()
        probe(engine.scheduler.manager, recorder)
    player = views.preemption(trace=recorder)
    assert any("its K and V wait on the CPU" in frame.say for frame in player.frames)
    assert any("Back: user-2, with 0 tokens to compute again" in frame.say for frame in player.frames)
    assert player.states[-1].again == 0 and "s" in player.states[-1].lanes["user-2"]
    assert set(player.states[-1].status.values()) == {"finished"}


def test_a_higher_priority_is_the_reason_where_it_is():
    recorder = Recorder()
    config = EngineConfig(num_gpu_blocks_override=9, block_size=4, max_num_seqs=1)
    engine = Parts().make_engine(config, recorder=recorder)
    for name, priority in (("A", 1), ("B", 0)):
        engine.add_request(Request(name, [1, 2, 3, 4, ord(name)], SamplingParams(max_tokens=4), priority=priority))
        engine.step()
        probe(engine.scheduler.manager, recorder)
    [victim] = views.preemption(trace=recorder).states[-1].victims
    assert (victim.name, victim.needy, victim.reason) == ("A", "B", "priority")


def test_a_long_run_of_many_requests_slides_and_shows_eight_of_them():
    recorder = Recorder()
    engine = Parts().make_engine(EngineConfig(num_gpu_blocks_override=30, block_size=4), recorder=recorder)
    for number in range(12):
        engine.add_request(Request(f"r{number}", [number] * 5, SamplingParams(max_tokens=40, n=1 + number % 2)))
    while engine.has_unfinished_requests():
        engine.step()
        probe(engine.scheduler.manager, recorder)
    player = views.preemption(trace=recorder)
    end = player.states[-1]
    assert end.num_steps > 2 * COLUMNS and len(end.order) == 18 and set(end.status.values()) == {"finished"}
    assert len(shown(end)) == 8 and ">18 requests, 8 drawn<" in player.svg(end.num_steps)
    assert f">{end.num_steps // 10 * 10}<" in player.svg(end.num_steps)
    assert all(set(shown(state)) <= {name for name in state.order} for state in player.states)


def test_a_model_is_watched_and_a_trace_without_probes_is_told_what_is_missing():
    pytest.importorskip("torch")
    from kvlab import LLM

    recorder = Recorder()
    llm = LLM("tiny", num_gpu_blocks_override=10, block_size=4, max_model_len=36, enable_prefix_caching=False,
              recorder=recorder)  # fmt: skip
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    for i in range(3):
        llm.add_request([1, 2, 3, 4, 5, 6, 7, 8 + i], params)
    llm.step()
    with pytest.raises(ValueError, match="refs.*probe"):
        views.preemption(trace=recorder)
    while llm.has_unfinished_requests():
        llm.step()
        probe(llm.engine.scheduler.manager, recorder)
    player = views.preemption(trace=recorder)
    end = player.states[-1]
    assert end.num_preemptions > 0 and end.again > 0 and end.num_blocks == 9 and max(end.held) == 9
    assert any("gives way" in frame.say for frame in player.frames) and not end.reference


def test_the_figures_of_the_page_on_demonstrations_are_those_of_the_views():
    page = " ".join((Path(__file__).parents[2] / "docs" / "demos.md").read_text(encoding="utf-8").split())
    six, mark, mixed = (views.preemption(name).states[-1] for name in ("six", "watermark", "mixed"))
    victim = views.preemption("victim").states[FULL + 1].victims[0]
    for said in (
        f"take {six.reference[1]} steps for all",
        f"**The answer.** {six.num_steps}. ",
        f"{six.num_preemptions} times somebody gives way, and {six.again} tokens are computed again: {six.tokens} for",
        f"{victim.lost} tokens to compute again, where",
        f"{mark.num_preemptions} give way, not {mark.reference[4]}; {mark.again} tokens again, not {mark.reference[3]}",
        f"{mixed.num_steps} steps for {mixed.reference[1]}",
        f"{mixed.again} tokens are computed again. More",
    ):
        assert said in page
