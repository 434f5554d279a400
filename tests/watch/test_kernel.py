"""One query's walk: the kernel's own source, line by line; what a larger score, the order, the mask and alpha do."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import kvlab
from kvlab.events import Recorder
from kvlab.parts import Parts
from kvlab.watch import views
from kvlab.watch.kernel import after
from kvlab.watch.kernel_run import EDITS, record_walk, short
from kvlab.watch.view import states_of

SEEDS = range(8)


def softmax(seed: int) -> np.ndarray:
    """By hand: the tokens that the mask lets through, as they are seen on the frames, in one go."""
    tiles = [state.values for state in views.kernel(seed=seed).states if "scores" in state.changed]
    scores = np.concatenate([tile["scores"] for tile in tiles])
    values = np.concatenate([np.reshape(tile["v"], (-1, 2)) for tile in tiles])
    weights = np.exp2(scores)
    return weights @ values / weights.sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_largest_score_comes_last_and_all_sums_are_rescaled(seed):
    player = views.kernel("rises", seed=seed)
    assert len(player.states) == 26
    before, alpha, total, result, end = (player.states[i] for i in (20, 21, 23, 24, 25))
    rise = before.one("new_largest") - before.one("largest")
    assert rise in (1, 2, 3) and alpha.one("alpha") == 2**-rise < 1
    assert [state.one("alpha") for state in player.states if "alpha" in state.changed] == [0, 1, 2**-rise]
    assert total.one("total") == before.one("total") * 2**-rise + sum(total.values["weights"])
    assert player.ask()[1][player.answer()[0]] == f"by {2**-rise:g}"
    added = np.array(total.values["weights"]) @ np.reshape(total.values["v"], (4, 2))
    assert np.array_equal(result.values["result"], np.array(before.values["result"]) * 2**-rise + added)
    assert np.allclose(end.values["out"], softmax(seed)) and all(end.equals())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_tile_first_another_path_and_the_same_end(seed):
    player, straight = views.kernel("reversed", seed=seed), views.kernel(seed=seed)
    assert [s.tile for s in player.states if "block" in s.changed] == [2, 1, 0]
    assert [s.one("alpha") for s in player.states if "alpha" in s.changed] == [0, 1, 1]
    assert player.states[8].values["total"] != straight.states[8].values["total"]
    for name in ("largest", "total", "out"):
        assert player.states[-1].values[name] == pytest.approx(straight.states[-1].values[name])
    assert player.ask()[1][player.answer()[0]].startswith("nothing")


@pytest.mark.parametrize("seed", SEEDS)
def test_without_the_mask_another_request_is_mixed_in_and_nothing_fails(seed):
    player = views.kernel("mask_off", seed=seed)
    end = player.states[-1]
    assert not end.equals()[2] and end.values["v"][4:] == (9, 9, 9, 9)
    assert all(out > right for out, right in zip(end.values["out"], end.right[2:], strict=True))
    assert end.values["weights"][2] == 1  # the largest score of all is a slot that is not this request's
    assert player.ask()[1][player.answer()[0]] == "a wrong output, no error"


@pytest.mark.parametrize("seed", SEEDS)
def test_without_alpha_early_tokens_count_too_much(seed):
    player, right = views.kernel("rescale_off", seed=seed), views.kernel(seed=seed)
    end, alpha = player.states[-1], right.states[21].one("alpha")
    assert not end.equals()[2]
    assert end.one("total") == right.states[20].one("total") + sum(end.values["weights"])
    assert player.ask()[1][player.answer()[0]] == "early tokens count too much"
    assert f"{1 / alpha:g} times" in player.answer()[1]


@pytest.mark.parametrize(
    ("scenario", "largest", "total", "out"),
    [
        ("rises", 5, 1.875, (2.117, 3.233)),
        ("reversed", 5, 1.875, (2.117, 3.233)),
        ("mask_off", 6, 1.969, (5.722, 6.254)),
        ("rescale_off", 5, 4.125, (1.667, 2.606)),
    ],
)
def test_the_numbers_of_docs_demos(scenario, largest, total, out):
    end = views.kernel(scenario).states[-1]
    assert (end.one("largest"), round(end.one("total"), 3)) == (largest, total)
    assert tuple(round(x, 3) for x in end.values["out"]) == out
    if scenario == "mask_off":
        assert "52% of the weight" in views.kernel(scenario).answer()[1]
    if scenario == "rescale_off":
        assert "4 times too much" in views.kernel(scenario).answer()[1]


def test_the_lines_are_those_of_the_kernels_file_and_one_of_them_is_changed():
    import kvlab_kernels

    text = (Path(kvlab_kernels.__file__).parent / "online_softmax.py").read_text(encoding="utf-8")
    of_file = [short(line) for line in text.splitlines() if line.startswith("    ")]
    for scenario in EDITS:
        walk = views.kernel(scenario).states[0]
        strange = [row for row, line in enumerate(walk.source) if line not in of_file]
        assert strange == ([walk.edited] if scenario != "rises" else [])
        assert walk.source[0].startswith("for block_index") and walk.source[-1].startswith("store(")


def test_every_line_of_the_loop_has_run_in_each_tile_and_the_bar_says_so():
    player = views.kernel()
    rows = [row for state in player.states for row in state.rows]
    assert rows == [*range(13), *range(13), *range(13), 0, 13, 14]
    bar = re.findall(r'fill="#ffffff"[^>]*>([^<]*)</text>', player.svg(7))
    assert bar == ["total = total * alpha + sum(weights)"]


def test_the_reducer_changes_nothing_and_a_saved_trace_is_the_same(tmp_path):
    events = record_walk("rises", 3)
    first = states_of(views.kernel().view, events)
    keep = first[5], dict(first[5].values)
    after(first[5], [event for event in events if event.step == 6])
    assert (first[5], dict(first[5].values)) == keep and first == states_of(views.kernel().view, events)
    recorder = Recorder()
    for event in events:
        recorder.step = event.step
        recorder.emit(*event[1:])
    recorder.save(tmp_path / "walk.jsonl")
    assert "Infinity" not in (tmp_path / "walk.jsonl").read_text()
    assert views.kernel(trace=tmp_path / "walk.jsonl").frames == views.kernel("rises", seed=3).frames


def test_a_debugger_keeps_its_trace_and_other_runs_are_refused_with_a_remedy():
    def debugger(frame, kind, what):
        return None

    old = sys.gettrace()
    sys.settrace(debugger)
    try:
        record_walk("rises", 0)
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(old)
    recorder = Recorder()
    recorder.emit("alloc", "A", [1])
    with pytest.raises(ValueError, match="no engine records"):
        views.kernel(trace=recorder)
    with pytest.raises(ValueError, match="leave parts= out"):
        views.kernel(parts=Parts())


def test_it_needs_neither_triton_nor_torch():
    import subprocess

    code = ("import sys; from kvlab.watch import views; views.kernel().page(); "
            "print([m for m in ('triton', 'torch', 'kvlab_kernels') if m in sys.modules])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(kvlab.__file__).parents[1])  # fmt: skip
    assert done.stdout.strip() == "[]"
