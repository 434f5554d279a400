"""The one player: frames computed here once, shown by player.js without the kernel; and what stands where nothing runs.

    Player(view, events, ...)     in a notebook: buttons, slider, keys; elsewhere the still picture
    .text()                       every frame as a sentence, for a terminal and a screen reader
    .page(), .save(path)          one HTML file with all in it, which needs no network
    .svg(step)                    one picture

Frames are lists of marks, and a mark that occurs in several is sent once. The frames behind an open question travel
with the others, so that the answer needs no kernel; they are not in the page before the reader has committed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from kvlab.events import Event
from kvlab.watch.svg import wrap
from kvlab.watch.view import Question, View, frame_of, states_of

HERE = Path(__file__).parent


class Player:
    """A view of `events`. step: the frame to open on, and to reset to; None is the question's, or the first.

    line: the call that makes it again. projector: open in large letters. name: of its scenario; runs() -> the players
    of all scenarios by name, made when the page is, for its drop-down. ValueError if there is no such frame.
    """

    def __init__(self, view: View, events: Sequence[Event], question: Question | None = None, step: int | None = None,
                 line: str = "", projector: bool = False, name: str = "",
                 runs: Callable[[], Mapping[str, "Player"]] = dict):  # fmt: skip
        self.view, self.line, self.projector, self.name, self._runs = view, line, projector, name, runs
        self.states = states_of(view, events)
        if not self.states:
            raise ValueError("there are no events, so there is nothing to see: record a run first")
        last = len(self.states) - 1
        if question is not None and question.reveal < 0:
            question = replace(question, reveal=last)
        self.question = question if question is not None and question.step < question.reveal <= last else None
        if step is not None and not 0 <= step <= last:
            raise ValueError(f"step is {step}: this run has frames 0 to {last}")
        asked = self.question.step if self.question else 0
        self.step = asked if step is None else step
        self.frames = [frame_of(view, state) for state in self.states]

    # ---- the question

    def ask(self) -> tuple[str, list[str]]:
        """The question and its options. ValueError if there is none."""
        question = self._has_question()
        text, options = question.ask(self.states[question.step])
        return text, list(options)

    def answer(self) -> tuple[int, str]:
        """(which option is right, from 0, or -1 for none of them; one sentence why), from what the engine did."""
        question = self._has_question()
        return question.answer(self.states), question.why(self.states)

    def _has_question(self) -> Question:
        if self.question is None:
            raise ValueError("this run asks nothing: take a scenario with a question, and a seed that reaches it")
        return self.question

    # ---- what is shown

    def svg(self, step: int | None = None) -> str:
        frame = self.frames[self.step if step is None else step]
        return wrap("".join(frame.marks), frame.alt)

    def text(self, until: int | None = None) -> str:
        """The frames up to `until` in sentences; None is up to the question, with the question."""
        until = self.step if until is None else until
        lines = [f"{i}. {frame.say}" for i, frame in enumerate(self.frames[: until + 1])]
        if self.question and until == self.question.step:
            text, options = self.ask()
            lines += ["", text, *(f"   {i}) {option}" for i, option in enumerate(options, 1))]
        return "\n".join(lines)

    @cached_property
    def data(self) -> dict[str, Any]:
        """All that player.js needs, as plain values: every run of the drop-down, and in which to begin."""
        marks: dict[str, int] = {}
        runs = dict(self._runs()) | {self.name: self}
        packed = [run._packed(marks) for run in runs.values()]
        return {"title": self.view.title, "legend": self.view.legend, "projector": self.projector,
                "svg": wrap("", "").removesuffix("</svg>"), "marks": list(marks), "runs": packed,
                "run": list(runs).index(self.name)}  # fmt: skip

    def _packed(self, marks: dict[str, int]) -> dict[str, Any]:
        """This run with each mark as its number in `marks`, which grows."""
        frames = [
            {"marks": [marks.setdefault(mark, len(marks)) for mark in frame.marks], "say": frame.say, "alt": frame.alt}
            for frame in self.frames
        ]
        run = {"name": self.name.replace("_", " "), "line": self.line, "start": self.step, "frames": frames}
        if self.question:
            (text, options), (right, why) = self.ask(), self.answer()
            run["question"] = {"step": self.question.step, "reveal": self.question.reveal, "text": text,
                               "options": options, "right": right, "why": why}  # fmt: skip
        return run

    @property
    def num_bytes(self) -> tuple[int, int]:
        """(bytes of `data` as JSON, bytes of its pictures if each were sent whole), of all its runs."""
        runs = dict(self._runs()) | {self.name: self}
        whole = sum(len(run.svg(step).encode()) for run in runs.values() for step in range(len(run.frames)))
        return len(json.dumps(self.data, ensure_ascii=False).encode()), whole

    def still(self) -> str:
        """HTML without scripts: the picture and its sentence, the question, and the answer folded away."""
        parts = [self.svg(), f"<p>{escape(self.frames[self.step].say)}</p>", f"<p>{escape(self.view.legend)}</p>"]
        if self.question and self.step <= self.question.step:
            (text, options), (_, why) = self.ask(), self.answer()
            listed = "".join(f"<li>{escape(option)}</li>" for option in options)
            parts.append(f"<p><b>{escape(text)}</b></p><ol>{listed}</ol>")
            parts.append(f"<details><summary>Decide first, then open the answer</summary><p>{escape(why)}</p>"
                         f"{self.svg(self.question.reveal)}</details>")  # fmt: skip
        return f'<div style="max-width:960px">{"".join(parts)}</div>'

    def page(self) -> str:
        """The whole player as one HTML page."""
        css, js = ((HERE / name).read_text(encoding="utf-8") for name in ("player.css", "player.js"))
        data = json.dumps(self.data, ensure_ascii=False).replace("<", "\\u003c")
        title = escape(f"kvlab: {self.view.title}")
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
            f'<meta name="viewport" content="width=device-width">\n'
            f"<style>\nbody {{ margin: 8px }}\n{css}</style></head>\n"
            f'<body><div id="watch"></div><noscript>{self.still()}</noscript>\n'
            f'<script type="application/json" id="data">{data}</script>\n<script type="module">\n{js}\n'
            f'mount(document.getElementById("watch"), JSON.parse(document.getElementById("data").textContent));\n'
            f"</script></body></html>\n"
        )

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.write_text(self.page(), encoding="utf-8")
        return path

    @cached_property
    def widget(self) -> Any:
        """The anywidget; None where anywidget is not installed."""
        try:
            import anywidget
            import traitlets
        except ImportError:
            return None

        class Watch(anywidget.AnyWidget):
            _esm = HERE / "player.js"
            _css = HERE / "player.css"
            data = traitlets.Dict().tag(sync=True)

        return Watch(data=self.data)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        still = {"text/plain": self.text(), "text/html": self.still()}
        if self.widget is None:
            return still
        live = self.widget._repr_mimebundle_(**kwargs)
        bundle, metadata = live if isinstance(live, tuple) else (live, {})
        return bundle | still, metadata
