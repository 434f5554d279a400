"""Lab 13's pictures and scenes."""

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")
pytest.importorskip("torch")

from kvlab.engine.engine_steps import careful_execute, draws, sample, worst_batch  # noqa: E402
from kvlab.lab.draw import engine as draw  # noqa: E402
from kvlab.lab.scenes import engine as scenes  # noqa: E402
from kvlab.parts import Parts  # noqa: E402
from kvlab.sim import closed_batch  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_an_interval_shows_all_tokens_and_the_kept_ones_filling_it():
    figure = draw.interval([1, 4, 2, 1], [1, 2], ["A", "B", "C", "D"], 0.7, 2)
    (ax,) = figure.axes
    widths = [patch.get_width() for patch in ax.patches]
    assert widths == pytest.approx([1 / 8, 4 / 8, 2 / 8, 1 / 8, 4 / 6, 2 / 6])
    assert [patch.get_linewidth() > 2 for patch in ax.patches] == [False] * 5 + [True]
    assert "uniform 0.700 draws C" in texts(ax)


def test_a_step_is_cut_into_stages_that_fill_it():
    stages = (*scenes.STAGES, "other")
    forward = {**dict.fromkeys(stages, 0.0), "forward": 2e-3}
    figure = draw.steps({"1": dict.fromkeys(stages, 1e-3), "8": forward}, stages, "forward")
    ax, rest = figure.axes
    assert sum(patch.get_width() for patch in ax.patches) == pytest.approx(200)
    assert {"7.00 ms", "2.00 ms", "100"} <= set(texts(ax))
    assert texts(rest) == [" 6,000", " 0"], "the forward pass is left out here"


def test_memory_that_is_missing_is_told():
    plans = {"worst": {"weights": 15, "K and V": 6}, "average": {"weights": 15, "K and V": 10}}
    figure = draw.memory(plans, 24, [22, 23])
    assert texts(figure.axes[0]) == ["21.00 GB", "25.00 GB\n1.00 too many"]


def test_a_ladder_has_a_bar_for_each_rung_in_each_column():
    row = scenes.Row(1, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9)
    figure = draw.ladder({"a": row, "b": row._replace(steps=10)}, {"steps": "steps", "makespan": "s"}, "title")
    assert [texts(ax) for ax in figure.axes] == [["1", "10"], ["2", "2"]]


def test_a_seeded_reply_is_the_same_in_any_company_and_its_company_matters_to_a_global_generator():
    import random

    alone = scenes.reply(max_tokens=8)
    assert scenes.reply(neighbours=1, max_tokens=8).tokens == alone.tokens
    tight = scenes.reply(Parts(sampler=sample), neighbours=6, blocks=34)
    assert tight.tokens == scenes.reply().tokens and tight.preempted > 0
    rng = random.Random(7)
    wrong = Parts(sampler=lambda logits, t, k, p, _: sample(logits, t, k, p, rng.random()))
    assert scenes.reply(wrong, neighbours=1).tokens != alone.tokens


def test_anatomy_names_where_the_time_goes():
    found = scenes.anatomy(2, steps=3, chunk=16)
    assert list(found) == [*scenes.STAGES, "other"]
    assert all(found[stage] > 0 for stage in scenes.STAGES)


def test_the_peak_of_a_step_grows_with_its_tokens_and_its_rows():
    small, rows, large = (scenes.peak_bytes(counts) for counts in ([1], [1] * 8, [64]))
    assert 2048 * 4 < small < rows < large


def test_every_rung_gives_the_same_answers_and_the_simulator_counts_the_same_steps_for_all_of_a_closed_batch():
    found = {rung: scenes.climb(rung) for rung in ("contiguous", "+ prefix cache")}
    (slow, tokens), (fast, same) = found.values()
    assert tokens == same and slow.steps > fast.steps and slow.computed > fast.computed and slow.filled < fast.filled
    workload = closed_batch([(100, 20), (300, 5), (50, 60)])
    rows = [scenes.simulate(rung, workload) for rung in scenes.RUNGS]
    assert rows[0].tokens_per_s == rows[1].tokens_per_s, "three requests fit, reserved or not"
    assert rows[2].steps <= rows[1].steps
    assert scenes.simulate("+ chunks", closed_batch([(16_000, 5)]), longest=16_384).steps > 1


def test_a_forward_that_fails_for_one_is_computed_for_the_others():
    """As the engine's own way, which EngineCore takes."""
    from types import SimpleNamespace

    from kvlab.schedule import SchedulerOutput

    class Runner:
        def execute(self, output):
            if any(request.request_id == "b" for request, _ in output.scheduled):
                raise ValueError("NaN")
            return {request.request_id: [1] for request, _ in output.scheduled}

    output = SchedulerOutput(1, [(SimpleNamespace(request_id=name), 1) for name in "abc"], [[], [], []])
    assert careful_execute(Runner(), output) == ({"a": [1], "c": [1]}, {"b": "NaN"})


def test_draws_are_those_of_the_runner():
    """The runner's rows, seeds and positions of a real run, preemptions and children included."""
    from kvlab import LLM, SamplingParams
    from kvlab.engine.engine_steps import Entry
    from kvlab.sampling_params import uniform

    llm = LLM("tiny", num_gpu_blocks_override=14, block_size=4, max_model_len=48, max_num_batched_tokens=7)
    runner, seen = llm.engine.runner, []
    prepare, draw_tokens = runner.prepare, runner.sampler

    def noting(output):
        step = prepare(output)
        decodes = [e for e in output.scheduled if e[1] == 1]
        ordered = decodes + [e for e in output.scheduled if e[1] != 1]
        entries = [Entry(r.seed, r.num_prompt_tokens, r.num_tokens, r.num_computed_tokens, n, r.num_to_fork)
                   for r, n in ordered]  # fmt: skip
        seen.append((entries, step.logits_rows))
        return step

    def comparing(logits, rows):
        entries, indices = seen[-1]
        mine = draws(entries)
        assert [(indices[r.row], r.uniform) for r in rows] == [(row, uniform(s, p)) for row, s, p in mine]
        return draw_tokens(logits, rows)

    runner.prepare, runner.sampler = noting, comparing
    params = [SamplingParams(temperature=1.0, seed=i, n=1 + (i == 1), max_tokens=30, ignore_eos=True)
              for i in range(4)]  # fmt: skip
    llm.generate([list(range(5 + i, 15 + i)) for i in range(4)], params)
    stats = llm.stats()
    assert stats["num_preemptions_recompute"] + stats["num_preemptions_swap"] > 0 and len(seen) > 20


def test_the_worst_batch_is_the_largest_of_all_that_the_limits_allow():
    from itertools import product

    for budget, seats, longest in ((5, 2, 3), (4, 3, 2), (3, 4, 9), (9, 2, 3)):
        every = [sorted(c, reverse=True) for k in range(1, seats + 1) for c in product(range(1, longest + 1), repeat=k)
                 if sum(c) <= budget]  # fmt: skip
        assert worst_batch(budget, seats, longest) == max(every, key=lambda c: (sum(c), len(c), c))
