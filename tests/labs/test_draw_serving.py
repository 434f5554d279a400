"""A server drawn, and the crowd before it: what the marks say is what was given, and who comes also goes."""

from types import SimpleNamespace

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

from kvlab.lab import show  # noqa: E402
from kvlab.lab.draw import serving as draw  # noqa: E402
from kvlab.lab.scenes import serving as scene  # noqa: E402


@pytest.fixture
def ax():
    figure, ax = pyplot.subplots()
    yield ax
    pyplot.close(figure)


def moments(*rows):
    return [scene.Moment(*row) for row in rows]


FEW = moments((0, 1, 0, 2, 1, 7), (1, 2, 1, 5, 2, 3), (3, 0, 0, 0, 8, 2))


def test_squares_say_who_holds_what(ax):
    draw.squares(ax, ["r7", "", "cached", "shared", "gone"], {"r7": "B"}, columns=3)
    assert [text.get_text() for text in ax.texts] == ["B", "", "", "2+", "?"]
    hatches = [patch.get_hatch() for patch in ax.patches]
    assert hatches == [None, None, "///", None, None]
    assert [patch.get_xy() for patch in ax.patches][3] == (0, 1)


def test_breath_stacks_up_to_the_whole_pool(ax):
    draw.breath(ax, FEW)
    assert ax.get_ylim() == (0, 10) and ax.get_xlim() == (0, 3)
    assert [area.get_hatch() for area in ax.collections] == [None, "///", None]
    tops = [max(y for path in area.get_paths() for _, y in path.vertices) for area in ax.collections]
    assert tops == [5, 8, 10]


def test_crowd_draws_both_and_the_seats(ax):
    draw.crowd(ax, FEW, 8)
    running, waiting, seats = ax.lines
    assert list(running.get_ydata()) == [1, 2, 0] and list(waiting.get_ydata()) == [0, 1, 0]
    assert set(seats.get_ydata()) == {8}


def test_lanes_wait_then_read_and_a_cross_is_where_somebody_left(ax):
    ask = scene.Ask(0, "", 5)
    leaving = scene.Visit(ask, 2, 3, 4, 1, left=True)
    draw.lanes(ax, [scene.Visit(ask, 1, 2, 5, 5), leaving, scene.Visit(ask, 3, None, 6)])
    widths = [patch.get_width() for patch in ax.patches]
    assert widths == [1, 3, 1, 1, 3, 0]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines] == [(4, 1)]


def test_saturation_hatches_who_is_more_than_the_seats():
    figure, axes = pyplot.subplots(1, 2)
    draw.saturation(axes, [(4, 1000.0, 0.2), (16, 1100.0, 0.7)], 8)
    assert [patch.get_hatch() for patch in axes[0].patches] == [None, "///"]
    assert [text.get_text() for text in axes[1].texts] == ["0.20", "0.70"]
    pyplot.close(figure)


def test_live_draws_until_it_is_over_and_once_more(monkeypatch):
    IPython = pytest.importorskip("IPython")
    pytest.importorskip("IPython.display")
    updates, left = [], [True, True, False]
    shown = SimpleNamespace(update=lambda *args, **more: updates.append(args[0]))

    monkeypatch.setattr(IPython.display, "display", lambda *args, **more: shown)
    number = show.live(lambda: pyplot.figure(), lambda: left.pop(0), "words", every=0.001)
    assert number == 3 and len(updates) == 2 and updates[0]["text/plain"] == "words"
    assert not pyplot.get_fignums()


# ---- the crowd


def test_asks_come_from_the_seed_at_the_rate():
    found = scene.asks(50, 20, seed=1)
    assert found == scene.asks(50, 20, seed=1) != scene.asks(50, 20, seed=2)
    assert 900 < len(found) < 1100 and all(a.at < b.at < 20 for a, b in zip(found, found[1:], strict=False))
    leaving = [ask for ask in found if ask.leave_after is not None]
    assert 0.25 < len(leaving) / len(found) < 0.42 and all(ask.leave_after < ask.max_tokens for ask in leaving)


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    from kvlab.serve import serving

    with serving("tiny", num_gpu_blocks_override=65, max_num_seqs=2, max_waiting=1) as server:
        yield server


def test_who_leaves_costs_little_and_nobody_holds_a_block_afterwards(server):
    before = server.metrics()["vllm:generation_tokens_total"]
    with scene.Watch(server, every=0.002) as watch:
        stays, leaves = scene.Load(server, [scene.Ask(0, "Why?", 20), scene.Ask(0.01, "How?", 800, 3)]).join()
        server.wait_until_idle()
    assert (stays.num_pieces > 0, stays.left, leaves.left, leaves.num_pieces) == (True, False, True, 3)
    assert stays.arrival <= stays.first <= stays.last and stays.latency >= stays.ttft > 0
    assert server.metrics()["vllm:generation_tokens_total"] - before < 400
    assert max(moment.held for moment in watch.moments) > 0 == watch.moments[-1].held
    assert all(m.held + m.cached + m.free == 64 == len(m.owners) for m in watch.moments)


def test_whoever_is_too_many_is_refused(server):
    visits = scene.Load(server, [scene.Ask(0, "Why?", 40) for _ in range(12)]).join()
    assert {visit.refused for visit in visits} == {0, 429}
    assert all(visit.num_pieces == 0 and visit.ttft is None for visit in visits if visit.refused)


def test_a_reader_that_raises_is_heard(server):
    class Reader:
        def feed(self, piece):
            raise KeyError("boom")

    with pytest.raises(Exception, match="boom"):
        scene.Load(server, [scene.Ask(0, "Why?", 4)], Reader).join()


def test_rounds_ask_again_and_again(server):
    visits = scene.rounds(server, 2, 0.3, max_tokens=4)
    assert len(visits) > 2 and all(visit.tpot is None or visit.tpot >= 0 for visit in visits)


def test_the_mean_is_over_time_and_not_over_looks():
    watch = scene.Watch(None, moments=list(FEW))
    assert watch.mean(lambda m: m.running) == pytest.approx((1 * 1 + 2 * 2) / 3)
    assert watch.mean(lambda m: m.held, start=1) == 5
