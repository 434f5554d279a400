"""What a lab's notebook calls: check, hint, predict, compare, best, parts, run_engine.

    lab = Lab("03")        the cells run so far are read from IPython's history, so a check sees what was last run,
                           and nothing of an earlier definition lives on in parts() or best()
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from hypothesis.configuration import set_hypothesis_home_dir

from kvlab import __version__
from kvlab.grade import Definitions, Exercise, Result, collect, grade_exercise, load_lab, say
from kvlab.grade.text import Text

STRICT = ("KVLAB_STRICT", "NBGRADER_EXECUTION", "NBGRADER_VALIDATING")  # a failed check raises when one of these is set


class CheckFailed(AssertionError):
    """A check that failed where somebody asked for an error (nbgrader, our own tests)."""


class Lab:
    """The lab `number` ("03") in a running notebook. Shows what is installed and what is to be done.

    lang: of hints and messages, "en" or "zh". cells, names: for use outside Jupyter: the sources run so far and
    what they defined.
    """

    def __init__(self, number: str, lang: str = "en", cells: Sequence[str] | None = None,
                 names: dict[str, Any] | None = None):  # fmt: skip
        # hypothesis would leave a folder of its own beside the notebook.
        set_hypothesis_home_dir(str(Path(tempfile.gettempdir()) / "kvlab-hypothesis"))
        self.spec, self.lang = load_lab(number), lang
        self._catalogue = self.spec.catalogue(lang)
        self._given = cells, names
        self._hints_shown: dict[str, int] = {}
        self._guesses: dict[str, tuple[Any, str]] = {}
        self.results: dict[str, Result] = {}
        self._graded: dict[tuple[str, str], Result] = {}  # by exercise and the source of what it defines
        self._told: set[tuple[str, int]] = set()  # in which run of a cell ours was said to be used, by exercise
        self._collected: dict[str, tuple[list[str], Definitions]] = {}  # by exercise: of which cells
        self._show_start()

    # ---- exercises

    def check(self, name: str) -> None:
        """Grade one exercise as it was last run, and show the result."""
        result = self.results[name] = self._grade(self.spec[name], afresh=True)
        e = result.exercise
        if result.passed:
            head = say("{name}: passed, {points} of {all} points", name=e.name, points=e.points, all=e.points)
        else:
            head = say("{name}: not yet, 0 of {all} points", name=e.name, all=e.points)
        body = result.render(self.lang)
        if result.printed:
            body += "\n" * bool(body) + self._say(say("Your code printed:")) + "\n" + result.printed[:2000]
        _show(("✓ " if result.passed else "✗ ") + self._say(head), body, good=result.passed)
        if not result.passed and any(os.environ.get(variable) for variable in STRICT):
            raise CheckFailed(f"{e.name}: {body}")

    def hint(self, name: str) -> None:
        """The next hint of an exercise, one at each call; after the last one it starts again."""
        hints = self.spec[name].hints
        if not hints:
            _show(self._say(say("{name} has no hints", name=name)))
            return
        shown = self._hints_shown.get(name, 0) % len(hints)
        self._hints_shown[name] = shown + 1
        head = say("Hint {i} of {n} for {name}", i=shown + 1, n=len(hints), name=name)
        _show(self._say(head), self._say(hints[shown]))

    # ---- predictions

    def predict(self, name: str, guess: Any, unit: str = "") -> None:
        """Commit a guess before running on. None: no guess made."""
        self._guesses[name] = guess, unit
        if guess is None:
            _show(self._say(say("No guess yet: replace None by yours, run this cell, then go on.")))
        else:
            _show(self._say(say("Your guess stands: {guess}", guess=f"{guess} {unit}".strip())))

    def compare(self, name: str, result: Any) -> None:
        """The guess beside what came out."""
        guess, unit = self._guesses.get(name, (None, ""))
        shown = f"{result:.4g}" if isinstance(result, float) else str(result)
        if guess is None:
            text = say("It is {result}. (You made no guess.)", result=f"{shown} {unit}".strip())
        else:
            text = say("You guessed {guess}; it is {result}.", guess=guess, result=f"{shown} {unit}".strip())
        _show(self._say(text))

    # ---- the student's own parts

    def best(self, name: str) -> Any:
        """What the student defined as `name` if it passes its check, else our own with the same interface."""
        for exercise in self.spec.exercises:
            if name in exercise.ours:
                if self._solved(exercise):
                    return self._names()[name]
                from importlib import import_module

                module, ours = exercise.ours[name].split(":")
                return attrgetter(ours)(import_module(module))
        raise ValueError(f"no exercise of lab {self.spec.number} defines {name!r}")

    def parts(self) -> Any:
        """kvlab.parts.Parts made of the parts of this notebook that pass their checks; ours for the rest."""
        from kvlab.parts import Parts

        chosen = {}
        for exercise in self.spec.exercises:
            for part, name in exercise.part.items():
                if self._solved(exercise):
                    chosen[part] = self._names()[name]
        return Parts(**chosen)

    def run_engine(self, **options: Any) -> Any:
        """Run the engine with the student's parts and with ours on the same requests; show both; return the Comparison.

        options: see kvlab.lab.beside.run_beside_ours.
        """
        from kvlab.lab.beside import run_beside_ours

        result = run_beside_ours(self.parts(), **options)
        parts, good = ", ".join(result.replaced), result.same_tokens and result.same_texts if result.replaced else None
        if good is None:
            head = say("No part of yours passes its check yet: this is our engine, twice.")
        elif good:
            head = say("The engine ran on your {parts}: every token is right.", parts=parts)
        elif result.yours.error:
            head = say("The engine stopped on your {parts}.", parts=parts)
        elif result.same_tokens:
            head = say("The engine ran on your {parts}: every token is right, and a text is not.", parts=parts)
        else:
            head = say("The engine ran on your {parts}: some tokens are wrong.", parts=parts)
        lines = [result.yours.error] if result.yours.error else []
        if good is False and (difference := result.first_difference):
            yours, ours = (f"step {e.step} {e.kind} {list(e.values)[:8]}" if e else "nothing" for e in difference)
            lines.append(self._say(say("The first difference: yours {yours}, ours {ours}.", yours=yours, ours=ours)))
        _show(self._say(head), "\n".join(lines), good=good)
        _show_table("", [(self._say(say(what)), f"{yours}   (ours: {ours})") for what, yours, ours in result.rows()])
        if result.yours.texts:
            _show(self._say(say("What it wrote:")), result.yours.texts[-1])
        return result

    def _solved(self, exercise: Exercise) -> bool:
        """Whether what the exercise defines is written and passes its check.

        Says so, once in each run of a cell, if it is written and does not: what follows then shows ours.
        """
        names = self._names()
        found = self._collect(exercise)
        if found.missing or found.is_stub or not all(name in names for name in exercise.defines):
            return False
        now = exercise.name, len(self._cells())
        if not (result := self._grade(exercise)).passed and now not in self._told:
            self._told.add(now)
            names = ", ".join(exercise.defines)
            text = say("Your {names} does not pass its check yet, so ours is used here.", names=names)
            _show(self._say(text), good=False)
        return result.passed

    def _grade(self, exercise: Exercise, afresh: bool = False) -> Result:
        key = exercise.name, self._collect(exercise).text
        if afresh or key not in self._graded:
            self._graded[key] = grade_exercise(self.spec, exercise.name, self._cells(), self.lang, are_runs=True)
        return self._graded[key]

    def _collect(self, exercise: Exercise) -> Definitions:
        """What the exercise defines, looked for once for the same cells: a student's function may ask in a loop."""
        cells = self._cells()
        if exercise.name not in self._collected or self._collected[exercise.name][0] != cells:
            self._collected[exercise.name] = cells, collect(cells, exercise.defines)
        return self._collected[exercise.name][1]

    # ---- reading the notebook

    def _cells(self) -> list[str]:
        if self._given[0] is not None:
            return list(self._given[0])
        return [cell for cell in self._shell().user_ns["In"] if cell]

    def _names(self) -> dict[str, Any]:
        return self._given[1] if self._given[1] is not None else self._shell().user_ns

    @staticmethod
    def _shell() -> Any:
        if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
            return shell
        raise ValueError("a Lab lives in a notebook: open it with `make lab`, or pass cells= and names=")

    def _say(self, text: Text) -> str:
        return text.render(self.lang, self._catalogue)

    # ---- the first cell

    def _show_start(self) -> None:
        info, exercises = self.spec.info, self.spec.exercises
        core = [e for e in exercises if not e.stretch]
        head = f"{self._say(say('Lab'))} {self.spec.number}: {self._say(info.title)}"
        rows = [
            (say("textbook"), info.sections),
            (say("before it"), ", ".join(info.before) or "-"),
            (say("time"), self._say(say("{minutes} minutes for the exercises, {points} points",
                                        minutes=sum(e.minutes for e in core), points=sum(e.points for e in core)))),
            (say("engine"), self._say(engine_found())),
            (say("kvlab"), f"{__version__}, Python {sys.version.split()[0]}"),
        ]  # fmt: skip
        from kvlab.lab.yours import written_parts

        if mine := written_parts(Path.cwd()):
            told = ", ".join(f"{part} ({file})" for part, file in mine.items())
            rows.append((say("written by you"), self._say(say("{parts}; all other parts are ours", parts=told))))
        for e in exercises:
            what = f"{self._say(say(e.title))} ({e.points} {self._say(say('points'))}, {e.minutes} min)"
            part = ", ".join(e.part)
            plugs = self._say(say("; becomes the engine's {part}", part=part)) if part else ""
            stretch = self._say(say("stretch")) + ": " if e.stretch else ""
            rows.append((e.name, f"{stretch}{what}{plugs}"))
        _show_table(head, [(self._say(k) if isinstance(k, Text) else k, v) for k, v in rows])


def engine_found() -> Text:
    """Whether the last step of a lab can run the real engine, or the slot-echo model in its place."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        return say("torch is not installed: the last step uses a stand-in for the model (make lab installs it)")
    return say("torch found: the last step runs the real engine with the model we ship")


def _show(head: str, body: str = "", good: bool | None = None) -> None:
    """A small card in the notebook, plain text elsewhere."""
    text = head + ("\n" + body if body else "")
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
        print(text)
        return
    from IPython.display import display

    colour = {True: "#009E73", False: "#D55E00", None: "#0072B2"}[good]
    inner = f"<pre style='margin:4px 0 0;white-space:pre-wrap'>{escape(body)}</pre>" if body else ""
    html = f"<div style='border-left:4px solid {colour};padding:4px 12px'><b>{escape(head)}</b>{inner}</div>"
    display({"text/plain": text, "text/html": html}, raw=True)


def _show_table(head: str, rows: Sequence[tuple[str, str]]) -> None:
    text = head + "\n" + "\n".join(f"  {key:16} {value}" for key, value in rows)
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
        print(text)
        return
    from IPython.display import display

    cells = "".join(
        f"<tr><td style='text-align:left;padding-right:16px'><b>{escape(key)}</b></td>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for key, value in rows
    )
    display({"text/plain": text, "text/html": f"<h4>{escape(head)}</h4><table>{cells}</table>"}, raw=True)
