"""The token budget: gaps and first tokens are those of the simulator, and what a smaller budget gains and costs."""

from pathlib import Path

import pytest

from kvlab.config import EngineConfig
from kvlab.costs.budget import knee
from kvlab.events import Recorder
from kvlab.parts import Parts
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import timetable
from kvlab.schedule.request import Request
from kvlab.watch import views
from kvlab.watch.budget import BEFORE, LONG, _enough, simulate
from kvlab.watch.budget_picture import WINDOW, shown
from kvlab.watch.pace import COST, after

SCENARIOS = {"whole": 8192, "chunks": 512, "half": 64, "starved": 3}


def events_of(scenario, seed=0, parts=None):
    return list(views.budget().view.scenarios[scenario].play(seed, parts or Parts()))


def chosen(player):
    return player.ask()[1][player.answer()[0]]


def figures(player):
    """(longest gap, time to first token of D), in ms."""
    end = player.states[-1]
    return round(end.gap.ms, 1), round(end.ttft)


@pytest.mark.parametrize(
    ("scenario", "said", "right"),
    [
        ("whole", (321.6, 322), "in over 200 ms"),
        ("chunks", (43.6, 328), "gap half or less, first token about as before"),
        ("half", (10.0, 637), "gap hardly shorter, first token far later"),
        ("starved", (9.3, 175), "when one of them ends"),
    ],
)
def test_the_surprise(scenario, said, right):
    player = views.budget(scenario)
    assert figures(player) == said
    for seed in range(3):
        assert chosen(views.budget(scenario, seed=seed)) == right


def test_the_run_to_compare_with_is_the_one_that_it_names():
    assert views.budget("chunks").states[-1].reference == ("8,192", *map(str, figures(views.budget("whole"))))
    name, gap, ttft = views.budget("half").states[-1].reference
    assert (name, gap, ttft) == ("128", "11.7", "352")


@pytest.mark.parametrize("scenario", ["whole", "chunks", "half"])
@pytest.mark.parametrize("seed", [0, 2])
def test_every_figure_is_the_simulators_own(scenario, seed):
    budget, long = SCENARIOS[scenario], LONG[seed]
    result = simulate(budget, long, _enough(budget, long))
    end = views.budget(scenario, seed=seed).states[-1]
    near = pytest.approx
    assert len(end.steps) == result.stats.num_steps and end.budget == budget
    assert end.gap.ms == near(max(one.longest_gap for one in result.records) / 1e6, abs=1e-3)
    for one in result.records:
        assert end.first[one.request_id] - end.arrived[one.request_id] == near(one.ttft_ns / 1e6, abs=1e-3)
        assert end.last[one.request_id] == near(one.last_token_at / 1e6, abs=1e-3)
    assert sum(step.num_tokens for step in end.steps) == result.stats.num_scheduled_tokens
    assert all(step.num_tokens <= budget for step in end.steps)


@pytest.mark.parametrize(("scenario", "num_chunks"), [("whole", 1), ("chunks", 8), ("half", 66)])
def test_the_chunks_are_those_on_paper(scenario, num_chunks):
    steps = views.budget(scenario).states[-1].steps
    sizes = [number for step in steps for name, number in step.chunks if name == "D"]
    assert sizes == timetable.chunks(LONG[0], SCENARIOS[scenario], 3) and len(sizes) == num_chunks
    assert all(set("ABC") <= set(step.decodes) for step in steps if step.chunks and step.start > 0)


def test_a_starved_prompt_begins_when_a_decode_ends():
    player = views.budget("starved")
    begins = next(i for i, state in enumerate(player.states) if state.ready.get("D"))
    assert begins == 13 and player.states[12].done == {"A"} and player.states[BEFORE + 1].left_out == ["D"]
    assert "nothing is left for D" in player.frames[12].say and "In step 13, after A has ended" in player.answer()[1]


def test_below_the_knee_a_step_reads_weights_and_above_it_computes():
    flops, read = COST.linears
    from_here = knee(COST.flops_rate, COST.memory_rate, flops / 2, 2)
    assert 64 < from_here < 128 and from_here == 115 and read == flops
    assert {step.bound for step in views.budget("half").states[-1].steps} == {"memory"}
    assert {step.bound for step in views.budget("chunks").states[-1].steps if step.num_tokens > 128} == {"compute"}


def test_pure_and_the_same_from_a_saved_trace(tmp_path):
    recorder = Recorder()
    for event in events_of("chunks", seed=1):
        recorder.step = event.step
        recorder.emit(*event[1:])
    recorder.save(tmp_path / "run.jsonl")
    player = views.budget(trace=tmp_path / "run.jsonl")
    assert player.frames == views.budget("chunks", seed=1).frames
    before, events = player.states[8], [event for event in recorder.events() if event.step == 9]
    assert after(before, events) == after(before, events) == player.states[9] and len(before.steps) == 8


def test_a_column_is_as_wide_as_its_step_is_long_and_all_fit():
    for scenario in SCENARIOS:
        end = views.budget(scenario).states[-1]
        assert end.now < WINDOW
        for step, following in zip(end.steps, end.steps[1:], strict=False):
            assert step.end == following.start
    player = views.budget("whole")
    wide, drawn = max(step.ms for step in player.states[-1].steps), player.svg(BEFORE + 1)
    assert f'width="{wide:.1f}"' in drawn and ">D 4,000<" in drawn and ">3 decodes + chunk 4,000<" in drawn


# ---- a student's parts


def chunks_first(pending, budget, limit):
    """The plan that lab 08 warns of: prompts before those who read."""
    plan = [0] * len(pending)
    for i in sorted(range(len(pending)), key=lambda i: -pending[i]):
        plan[i] = min(pending[i], limit, budget)
        budget -= plan[i]
    return plan


def test_a_plan_that_serves_chunks_first_stops_those_who_read():
    player = views.budget("chunks", parts=Parts(plan_tokens=chunks_first))
    end = player.states[-1]
    assert end.gap.ms > 250 and end.ttft < 335 and "parts=parts" in player.line
    assert chosen(player) == "both hardly change"
    starving = player.states[BEFORE + 3]
    assert starving.left_out == ["A", "B", "C"] and starving.steps[-1].decodes == ()


def test_a_part_that_fails_has_a_last_frame_and_no_answer_is_invented():
    player = views.budget("chunks", parts=Parts(plan_tokens=lambda *args: 1 / 0))
    assert "plan_tokens" in player.frames[-1].say
    with pytest.raises(ValueError, match="asks nothing"):
        player.ask()


# ---- engines


def test_a_live_engine_with_chunks_and_more_requests_than_lanes():
    recorder = Recorder()
    config = EngineConfig(num_gpu_blocks_override=200, block_size=4, max_num_batched_tokens=16, max_num_seqs=6)
    engine = Parts().make_engine(config, recorder=recorder)
    for number in range(9):
        params = SamplingParams(max_tokens=40, n=1 + number % 2)
        engine.add_request(Request(f"r{number}", [number] * (30 + number), params))
    while engine.has_unfinished_requests():
        engine.step()
    player = views.budget(trace=recorder)
    end = player.states[-1]
    assert end.budget == 16 and len(end.steps) == engine.scheduler.stats.num_steps and end.now > WINDOW
    assert max(step.num_tokens for step in end.steps) == 16 and not end.reference
    assert all(len(shown(state)) <= 4 for state in player.states)
    assert set(end.order) == end.done and len(end.order) == 13
    rows = [event.values for event in recorder.events("compute")]
    assert sum(step.num_tokens for step in end.steps) == sum(sum(row[2::3]) for row in rows)


def test_a_model_and_a_run_that_preempts():
    pytest.importorskip("torch")
    from kvlab import LLM

    recorder = Recorder()
    llm = LLM("tiny", num_gpu_blocks_override=10, block_size=4, max_model_len=36, enable_prefix_caching=False,
              recorder=recorder)  # fmt: skip
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    llm.generate([[1, 2, 3, 4, 5, 6, 7, 8 + i] for i in range(3)], params)
    assert llm.engine.scheduler.stats.num_preemptions_recompute > 0
    player = views.budget(trace=recorder)
    end = player.states[-1]
    assert len(end.done) == 3 and sum(len(step.came) for step in end.steps) == 60
    with pytest.raises(ValueError, match="recorder=recorder"):
        views.budget(trace=[event for event in recorder.events() if event.kind != "compute"])


def test_the_figures_of_the_page_on_demonstrations_are_those_of_the_views():
    page = " ".join((Path(__file__).parents[2] / "docs" / "demos.md").read_text(encoding="utf-8").split())
    players = {name: views.budget(name) for name in SCENARIOS}
    (gap, ttft), (less, later), (half, far) = (figures(players[name]) for name in ("whole", "chunks", "half"))
    usual = players["whole"].states[BEFORE].steps[-1].ms
    slices = [step.ms for step in players["chunks"].states[-1].steps if step.chunks and step.start]
    for said in (
        f"After {gap:.0f} ms, where it had one every {usual:.1f}.",
        f"falls from {gap} to {less} ms, and D's first token comes after {later} ms, not {ttft}",
        f"takes {min(slices):.0f} to {max(slices):.0f} ms",
        "where 128 gave {1} ms and {2} ms".format(*players["half"].states[-1].reference),
        f"The gap is {half:.1f} ms, hardly shorter, and D waits for {far} ms",
        "until A ends, in step 13",
    ):
        assert said in page
