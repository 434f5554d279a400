"""`kvlab demo`: what its text claims is true of the run, and it reads well at every width."""

import io
import re

import pytest
import torch
from rich.console import Console
from rich.text import Text

import kvlab.demo
from kvlab.demo import report, view
from kvlab.demo.race import POOL, SEATS
from kvlab.demo.workload import ASKS, LETTERS
from kvlab.tiny import load_glossary

SECTIONS = ("where does the KV cache go?", "The three pools after step", "The same requests, model and pool",
            "How to read it", "Three of the answers", "Where to go next")  # fmt: skip


@pytest.fixture(scope="module")
def shown():
    """(lanes, text) of one run on something that is no terminal, 80 columns wide."""
    console = Console(file=io.StringIO(), width=80, highlight=False)
    threads = torch.get_num_threads()
    lanes = kvlab.demo.run(console=console)
    assert torch.get_num_threads() == threads  # what it sets for itself it puts back
    return lanes, console.file.getvalue()


@pytest.fixture(scope="module")
def lanes(shown):
    return shown[0]


def drawn(lanes, step: int, width: int, **options) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(view.picture(lanes, [lane.frames[min(step, len(lane.frames)) - 1] for lane in lanes], console))
    return console.file.getvalue()


def test_the_workload_is_what_the_intro_says():
    assert len(ASKS) == 24
    assert [(letter, ask.n) for letter, ask in zip(LETTERS, ASKS, strict=False) if ask.n > 1] == [("F", 3)]


def test_all_are_answered_and_alike_in_all_engines(lanes):
    for lane in lanes:
        assert sorted(lane.outputs) == list(LETTERS)
        assert sorted(lane.answered_at) == list(LETTERS)
        assert lane.llm.engine.scheduler.manager.usage == 0
        lane.llm.engine.scheduler.manager.check()
    assert report.differences(lanes) == []


def test_a_difference_would_be_told(lanes):
    tokens = lanes[1].outputs["K"]
    lanes[1].outputs["K"] = [*tokens[:-1], tokens[-1] + 1]
    try:
        assert report.differences(lanes) == ["K"]
        assert "25 of 26 answers are the same" in report.verdict(lanes).plain
    finally:
        lanes[1].outputs["K"] = tokens


def test_greedy_answers_are_the_glossary(lanes):
    """A demo that shows nonsense teaches nothing: whole greedy answers to single questions are word for word."""
    answers = {entry["term"]: entry["answer"] for entry in load_glossary()}
    decode = lanes[2].llm.tokenizer.decode
    asked = [(letter, ask) for letter, ask in zip(LETTERS, ASKS, strict=False) if ask.n == 1 and ask.max_tokens == 96]
    wrong = [letter for letter, ask in asked if decode(lanes[2].outputs[letter]) != answers[ask.question]]
    assert not set(wrong) & set("ABE"), "one of the answers that are printed is wrong"
    assert len(wrong) <= len(asked) // 5, wrong


def test_what_the_text_claims_holds(lanes):
    contiguous, static, paged = lanes
    assert contiguous.stats.peak_running == 4
    assert static.stats.peak_running < paged.stats.peak_running == SEATS
    assert paged.stats.num_steps < static.stats.num_steps < contiguous.stats.num_steps
    assert paged.mean_answered_at < static.mean_answered_at < contiguous.mean_answered_at
    assert contiguous.utilisation < 0.5 < 0.8 < paged.utilisation
    assert paged.stats.num_prefix_hit_tokens > paged.stats.num_prefix_queried_tokens / 2
    assert contiguous.stats.num_prefix_hit_tokens == static.stats.num_prefix_hit_tokens == 0
    assert paged.stats.num_copy_on_writes == 2  # three write into one shared block: the last one needs no copy
    assert paged.num_preemptions >= 1
    assert contiguous.num_preemptions == 0  # a reservation cannot run dry
    assert static.stats.num_idle_seats > 0 == paged.stats.num_idle_seats


def test_frames_agree_with_the_counters(lanes):
    for lane in lanes:
        frames = lane.frames
        assert [frame.step for frame in frames] == list(range(1, lane.stats.num_steps + 1))
        assert sum(f.prefill_tokens + f.decode_tokens for f in frames) == lane.stats.num_scheduled_tokens
        assert sum(f.decode_tokens for f in frames) == sum(len(tokens) - 1 for tokens in lane.outputs.values())
        for frame in frames:
            assert len(frame.cells) == POOL
            owned = sum(cell.kind in ("held", "reserved", "shared") for cell in frame.cells)
            assert frame.slots_owned == 16 * owned
            assert 0 <= frame.slots_filled <= frame.slots_owned
            if frame.finished < 24:  # children that are not born yet are neither here nor there
                assert 24 <= frame.running + frame.waiting + frame.finished <= 26
        assert frames[-1].slots_owned == 0
    kinds = [{cell.kind for frame in lane.frames for cell in frame.cells} for lane in lanes]
    assert kinds[0] == {"held", "reserved", "free"}
    assert kinds[1] == {"held", "shared", "free"}
    assert kinds[2] == {"held", "shared", "cached", "free"}


def test_every_sentence_fits_its_place(lanes):
    for lane in lanes:
        for note in {frame.note for frame in lane.frames}:
            for wide, width in ((True, 32), (False, 72)):
                lines = Text(note).wrap(Console(width=width), width)
                assert len(lines) <= view.NOTE_LINES[wide], note


def test_the_sentences_tell_the_story(lanes):
    stories = ["\n".join(frame.note for frame in lane.frames) for lane in lanes]
    assert re.search(r"and \d+ more wait, though \d\d% of what is reserved is empty: no 24 blocks", stories[0])
    for word in ("A batch enters", "Idle seats", "The batch has ended"):
        assert word in stories[1]
    for word in ("Prefix hit", "Fork: F, Y, Z", "Copy-on-write", "Preemption", "is back", "decodes first", "once"):
        assert word in stories[2]
    assert [frame.is_news for frame in lanes[2].frames].count(True) == 6  # each kind of event once


def test_plain_text_has_every_section_and_fits_80_columns(shown):
    lanes, text = shown
    positions = [text.index(section) for section in SECTIONS]
    assert positions == sorted(positions)
    assert "\x1b" not in text
    assert max(Text(line.rstrip()).cell_len for line in text.splitlines()) <= 80
    assert "All 26 answers are the same" in text
    assert "为什么分页能提高吞吐？" in text
    for lane in lanes:
        assert str(lane.stats.num_steps) in text
    assert "…" not in text  # nothing was cut off


@pytest.mark.parametrize("step", [1, 38, 60, 10_000])
@pytest.mark.parametrize("width", [80, 110, 160])
def test_panels_keep_their_shape(lanes, width, step):
    text = drawn(lanes, step, width)
    lines = text.splitlines()
    tops = [line for line in lines if "╭" in line]
    assert [line.count("╭") for line in tops] == ([3] if width >= view.WIDE else [1, 1, 1])
    edges = [position for position, char in enumerate(tops[0]) if char in "╭╮"]
    for line in lines[1 : lines.index(next(line for line in lines if "╰" in line))]:
        assert [position for position, char in enumerate(line) if char in "│"] == edges
    assert len(lines) <= 23 or width < view.WIDE  # a terminal of 24 lines shows it whole


@pytest.mark.parametrize("width", [80, 110])
def test_nothing_jumps_from_step_to_step(lanes, width):
    heights = {len(drawn(lanes, step, width).splitlines()) for step in range(1, 330, 7)}
    assert len(heights) == 1


def test_the_legend_takes_three_lines():
    assert [len(line) <= 78 for line in view.legend().plain.splitlines()] == [True, True, True]


def test_a_letter_is_enough_without_colour(lanes):
    plain = drawn(lanes, 38, 80)
    coloured = drawn(lanes, 38, 80, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_the_live_view_draws_and_ends_like_the_fast_one(lanes, monkeypatch):
    """Twice through a pretended terminal, wide and narrow, on lanes of a few steps: every lane ends, panels come."""
    monkeypatch.setattr(kvlab.demo, "sleep", lambda seconds: None)
    monkeypatch.setattr(kvlab.demo, "FRAME_SECONDS", 0.0)

    class Replay:
        """A lane that has been run already, run again from its frames."""

        def __init__(self, lane):
            self.setup, self.frames, self._left = lane.setup, [], list(lane.frames[:12])

        @property
        def done(self):
            return not self._left

        def step(self):
            self.frames.append(self._left.pop(0))
            return self.frames[-1]

    for width in (80, 120):
        replays = [Replay(lane) for lane in lanes]
        console = Console(file=io.StringIO(), width=width, height=40, force_terminal=True, color_system=None)
        kvlab.demo.watch(console, replays)
        assert all(replay.done for replay in replays)
        text = console.file.getvalue()
        for setup, step in ((replay.setup, 12) for replay in replays):
            assert setup.rest in text and f"step {step}" in text
