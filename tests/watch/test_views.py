"""Every view: nothing before the answer depends on it, the surprise is there, and the marks can be told apart."""

import re

import pytest

from kvlab.blocks import BlockPool
from kvlab.events import Recorder
from kvlab.parts import Parts
from kvlab.watch import style, svg, views
from kvlab.watch.player import Player
from kvlab.watch.view import LONGEST_SENTENCE

SHOWN = [(name, scenario) for name in views.NAMES for scenario in views.show(name).view.scenarios]


@pytest.fixture(params=SHOWN, ids="-".join)
def shown(request) -> Player:
    return views.show(*request.param)


def events_of(name, scenario, seed=0, parts=None):
    return views.show(name).view.scenarios[scenario].play(seed, parts or Parts())


@pytest.mark.parametrize(("name", "scenario"), SHOWN)
def test_no_spoiler_nothing_up_to_the_question_knows_what_comes(name, scenario):
    """The run is cut off at the question: pictures, sentences, words, the question and its options are the same."""
    whole = views.show(name, scenario)
    events = [event for event in events_of(name, scenario) if event.step <= whole.question.step]
    cut = Player(whole.view, events)
    assert whole.frames[: whole.question.step + 1] == cut.frames
    text, options = whole.question.ask(cut.states[-1])
    assert (text, list(options)) == whole.ask()
    assert whole.answer()[1] not in whole.text()
    assert whole.frames[whole.question.step + 1].say not in whole.text()


def test_the_still_picture_folds_the_answer_away(shown):
    before, _, folded = shown.still().partition("<details>")
    why = shown.answer()[1]
    assert why not in before and why in folded
    assert shown.svg(shown.question.reveal) in folded and shown.svg(shown.question.reveal) not in before


def test_a_sentence_for_each_frame_short_enough_to_be_read_aloud(shown):
    for frame in shown.frames:
        assert 0 < len(frame.say) <= LONGEST_SENTENCE and frame.alt
    assert len(shown.answer()[1]) <= LONGEST_SENTENCE


def test_the_same_run_the_same_bytes_and_another_seed_another_run(shown):
    name = shown.view.name
    scenario = re.search(r'"(\w+)"', shown.line)[1]
    assert views.show(name, scenario).page() == shown.page()
    assert any(views.show(name, scenario, seed=seed).frames != shown.frames for seed in range(1, 4))


def test_letters_are_large_colours_are_few_and_nothing_comes_from_elsewhere(shown):
    allowed = {style.INK, style.PAPER, style.QUIET, style.SHARED_FILL, *(o.hue for o in style.OWNERS.values())}
    for step in range(len(shown.frames)):
        drawn = shown.svg(step)
        assert min(map(int, re.findall(r'font-size="(\d+)"', drawn))) >= style.SMALLEST
        assert set(re.findall(r"#[0-9A-Fa-f]{6}", drawn)) <= allowed
        assert not re.search(r'<rect(?![^>]*stroke="#)', drawn), "a fill without an outline"
    page = shown.page().replace("http://www.w3.org/2000/svg", "")
    assert "http" not in page and "@import" not in page and "url(" not in page


def test_what_is_drawn_stays_within_the_picture(shown):
    for frame in shown.frames:
        for x, y, w, h in re.findall(r'<rect x="([-.\d]+)" y="([-.\d]+)" width="([.\d]+)" height="([.\d]+)"',
                                     "".join(frame.marks)):  # fmt: skip
            assert float(x) >= 0 and float(x) + float(w) <= style.WIDTH
            assert float(y) >= 0 and float(y) + float(h) <= style.HEIGHT


def test_marks_are_sent_once(shown):
    """Packed, a run is less than its pictures; and unpacked it is each of them."""
    data = shown.data
    for step, frame in enumerate(data["runs"][data["run"]]["frames"]):
        drawn = "".join(data["marks"][i] for i in frame["marks"])
        assert svg.wrap(drawn, frame["alt"]) == shown.svg(step)
    packed, pictures = shown.num_bytes
    assert len(set(data["marks"])) == len(data["marks"]) and packed < pictures / 1.5


def luminance(colour: str) -> float:
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_contrast_and_owners_differ_without_hue():
    for fill in (style.PAPER, style.SHARED_FILL, *(owner.hue for owner in style.OWNERS.values())):
        assert (luminance(fill) + 0.05) / (luminance(style.INK) + 0.05) >= 4.5
    assert 1.05 / (luminance(style.QUIET) + 0.05) >= 4.5
    textures = [owner.texture for owner in style.OWNERS.values()]
    assert len(set(textures)) == len(textures) and set(textures) <= set(svg.TEXTURES)
    drawn = set()
    for texture in textures:
        pen = svg.Svg()
        pen.texture(0, 0, 80, 14, texture)
        drawn.add(str(pen))
    assert len(drawn) == len(textures)


# ---- the surprises, as the engine makes them


@pytest.mark.parametrize("seed", range(6))
def test_pool_what_was_freed_is_not_what_is_taken(seed):
    player = views.pool("fragmented", seed=seed)
    before, now = (player.states[step] for step in (player.question.step, player.question.reveal))
    freed = {i for state in player.states[: player.question.reveal] for i in state.freed}
    assert len(freed) == 4 and not freed & set(now.tables["E"])
    right, why = player.answer()
    assert player.ask()[1][right] == f"blocks {before.queue[0]} and {before.queue[1]}" and "head of the queue" in why
    assert len(player.ask()[1]) == 4


@pytest.mark.parametrize("seed", range(6))
def test_tight_scattered_blocks_serve_as_well(seed):
    player = views.pool("tight", seed=seed)
    before, now = (player.states[step] for step in (player.question.step, player.question.reveal))
    free = sorted(before.queue)
    assert len(free) == 4 and all(b - a > 1 for a, b in zip(free, free[1:], strict=False))
    assert len(now.tables["E"]) == 3 and player.ask()[1][player.answer()[0]] == "yes, at once"


@pytest.mark.parametrize(("scenario", "copies", "held"), [("half_full", 3, 6), ("full", 0, 7)])
@pytest.mark.parametrize("seed", range(4))
def test_fork_four_writers_and_how_many_copies(seed, scenario, copies, held):
    player = views.fork(scenario, seed=seed)
    now = player.states[player.question.reveal]
    assert (now.num_copies, sum(count > 0 for count in now.refs)) == (copies, held)
    assert player.ask()[1][player.answer()[0]].startswith(str(copies or "no"))
    for name, word in (("A", "figs"), ("D", "peas")):
        assert word in now.words[now.tables[name][-1]]


# ---- a student's parts


class LastFreedFirst(BlockPool):
    """A stack: what was freed last is handed out first."""

    def free_blocks(self, ordered_blocks):
        freed = list(ordered_blocks)
        waiting = self.free_block_queue.get_all_free_blocks()
        for block in waiting:
            self.free_block_queue.remove(block)
        super().free_blocks(freed)
        self.free_block_queue.append_n(waiting)


def test_another_pool_is_what_is_seen_and_the_answer_is_its_own():
    player = views.pool("fragmented", parts=Parts(block_pool=LastFreedFirst))
    freed = {i for state in player.states[: player.question.reveal] for i in state.freed}
    right, why = player.answer()
    assert set(player.states[player.question.reveal].tables["E"]) <= freed
    assert player.ask()[1][right] != "other blocks" and "parts=parts" in player.line


def never_copies(pool, table, index):
    """The barrier that only pretends: it hands the shared block out as its own copy."""
    return table[index], table[index]


def test_a_barrier_that_does_not_copy_changes_what_the_others_read():
    player = views.fork("half_full", parts=Parts(ensure_writable=never_copies))
    now = player.states[player.question.reveal]
    assert len({now.tables[name][-1] for name in "ABCD"}) == 1
    assert sum(word in now.words[now.tables["A"][-1]] for word in ("figs", "nuts", "rice", "peas")) == 1


class CountsNothing(BlockPool):
    def touch(self, blocks):
        pass


def test_books_that_disagree_are_ringed():
    player = views.fork("half_full", parts=Parts(block_pool=CountsNothing))
    forked = player.states[player.ask() and player.question.step]
    assert set(forked.wrong.values()) == {"miscounted"}
    assert ">wrong<" in player.svg() and "miscounted" in player.frames[player.question.step].alt


def breaks(pool, blocks):
    raise RuntimeError("not yet written")


def test_a_part_that_raises_ends_the_play_with_its_words():
    player = views.fork("half_full", parts=Parts(fork=breaks))
    assert len(player.frames) == 3 and "fork" in player.frames[-1].say
    with pytest.raises(ValueError, match="asks nothing"):
        player.ask()


# ---- traces, steps, names


def test_a_saved_trace_is_the_same_view(tmp_path):
    recorder = Recorder()
    for event in events_of("pool", "fragmented"):
        recorder.step = event.step
        recorder.emit(*event[1:])
    recorder.save(tmp_path / "run.jsonl")
    for trace in (recorder, tmp_path / "run.jsonl", recorder.events()):
        assert views.pool(trace=trace).frames == views.pool("fragmented").frames


def test_what_cannot_be_shown_is_told_with_the_remedy():
    recorder = Recorder()
    recorder.emit("alloc", None, [1])
    with pytest.raises(ValueError, match="probe"):
        views.pool(trace=recorder)
    with pytest.raises(ValueError, match="fragmented, tight"):
        views.pool("defragmented")
    with pytest.raises(ValueError, match="0 to 14"):
        views.pool("fragmented", step=99)
    with pytest.raises(ValueError, match="leave parts= out"):
        views.strip(parts=Parts())
    with pytest.raises(ValueError, match="pool, fork, prefix"):
        views.show("radix")


@pytest.mark.parametrize("block_size", [4, 8])
def test_a_live_engine_can_be_watched(block_size):
    from kvlab.config import EngineConfig
    from kvlab.sampling_params import SamplingParams
    from kvlab.schedule.request import Request
    from kvlab.watch import probe

    recorder = Recorder()
    engine = Parts().make_engine(EngineConfig(num_gpu_blocks_override=16, block_size=block_size), recorder=recorder)
    for name in "AB":
        engine.add_request(Request(name, [1, 2, 3, ord(name), 5, 6], SamplingParams(max_tokens=6)))
    while engine.has_unfinished_requests():
        engine.step()
        probe(engine.scheduler.manager, recorder)
    player = views.pool(trace=recorder)
    assert any(set(state.tables) == {"A", "B"} for state in player.states)
    assert {state.block_size for state in player.states if state.tables} == {block_size}
    assert not any(state.wrong for state in player.states) and player.states[-1].tables == {}


def test_without_anywidget_the_still_picture_stands(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "anywidget", None)
    bundle = views.pool()._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"} and bundle["text/html"].startswith("<div")


def test_in_a_notebook_the_player_and_the_still_picture_come_together():
    pytest.importorskip("anywidget")
    player = views.fork()
    bundle, _ = player._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle and bundle["text/html"] == player.still()
    assert player.widget.data == player.data


def test_the_command_writes_the_same_page(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from kvlab import cli, cli_watch

    def kvlab(*arguments):
        return CliRunner().invoke(cli.app, ["demo", *arguments])

    path = tmp_path / "fork.html"
    assert kvlab("fork", "--scenario", "full", "--seed", "2", "--html", str(path)).exit_code == 0
    assert path.read_text(encoding="utf-8") == views.fork("full", seed=2).page()
    opened = []
    monkeypatch.setattr(cli_watch.webbrowser, "open", lambda address: opened.append(address))
    assert "Open this file" in kvlab("pool").output and opened[0].endswith("pool.html")
    for wrong in (("radix",), ("pool", "--scenario", "no"), ("--html", "x.html")):
        assert isinstance(kvlab(*wrong).exception, ValueError)
