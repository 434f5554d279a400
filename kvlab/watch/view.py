"""What a view is: a start, a pure step from state to state by events, a drawing, a sentence; and its scenarios.

    events --by step--> after(state, events) --> states --> draw, say, alt --> frames (kvlab.watch.player shows them)

Step, back, scrub, the static picture and the tests come from this alone: nothing else holds a state.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kvlab.events import Event, Recorder
from kvlab.parts import Parts
from kvlab.watch.svg import Svg

State = Any
LONGEST_SENTENCE = 140
RECORD_A_RUN = "record a run: recorder = Recorder(), then LLM(..., recorder=recorder), or Simulator with the same"


@dataclass(frozen=True)
class Question:
    """What is asked on frame `step`, before the surprise; the answer is seen on frame `reveal`, -1 for the last.

    ask(state) -> (question, options): from the state on which it is asked, and no other: it cannot give anything away.
    answer(states) -> which option is right, 0 for the first. why(states) -> one sentence: the outcome and its reason.
    """

    step: int
    reveal: int
    ask: Callable[[State], tuple[str, Sequence[str]]]
    answer: Callable[[Sequence[State]], int]
    why: Callable[[Sequence[State]], str]


@dataclass(frozen=True)
class Scenario:
    """play(seed, parts) -> the events of a run of the real structures, numbered by frame; question: None for none."""

    play: Callable[[int, Parts], Iterable[Event]]
    question: Question | None = None


@dataclass(frozen=True)
class View:
    """begin: the state before all events. after(state, events of one step) -> the next state; changes nothing.
    draw(state, pen), say(state) and alt(state): the picture, the sentence of the step, the picture in words.
    kinds: the kinds of events without which there is nothing to see. remedy: what to do if a trace has none of them.
    legend: what marks mean, in a line. takes_parts: can a student's part change what is seen?"""

    name: str
    title: str
    begin: State
    after: Callable[[State, Sequence[Event]], State]
    draw: Callable[[State, Svg], None]
    say: Callable[[State], str]
    alt: Callable[[State], str]
    scenarios: Mapping[str, Scenario]
    kinds: frozenset[str] = frozenset()
    remedy: str = "call kvlab.watch.probe(manager, recorder) after each step while recording"
    legend: str = ""
    takes_parts: bool = True


@dataclass(frozen=True)
class Frame:
    marks: tuple[str, ...]
    say: str
    alt: str


def states_of(view: View, events: Iterable[Event]) -> list[State]:
    """One state for each step that the events name, in their order."""
    states, state = [], view.begin
    for _, group in groupby(events, key=lambda event: event.step):
        state = view.after(state, list(group))
        states.append(state)
    return states


def frame_of(view: View, state: State) -> Frame:
    pen = Svg(view.alt(state))
    view.draw(state, pen)
    return Frame(tuple(pen.marks), view.say(state), pen.alt)


def read_trace(view: View, trace: str | Path | Recorder | Iterable[Event]) -> list[Event]:
    """The events of a recorder, a saved file or a list. ValueError if they lack what the view shows."""
    if isinstance(trace, str | Path):
        trace = Recorder.load(trace)
    events = trace.events() if isinstance(trace, Recorder) else list(trace)
    missing = view.kinds - {event.kind for event in events}
    if missing:
        raise ValueError(
            f"the trace has no events of kind {', '.join(sorted(missing))}, which the view {view.name!r} draws: "
            f"{view.remedy}"
        )
    return events
