"""One exercise graded: from the notebook's cells to points, or to the shortest case that fails.

    collect -> copied? -> Child.load -> examples, then random traces -> play each beside the oracle -> Result

A trace is played on a fresh driver and a fresh oracle, one operation at a time; the first difference ends it. Random
traces that fail are shrunk by hypothesis, on examples that are the same at every run.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky

from kvlab.grade.child import Child, Lost, Raised, Value
from kvlab.grade.definitions import collect
from kvlab.grade.exercise import Exercise, LabSpec, Op, Trace, expectation, same
from kvlab.grade.originality import copied_from_ours
from kvlab.grade.text import Catalogue, Text, say

SHOWN = 12  # operations of a failing trace that are shown


@dataclass
class Result:
    """What one exercise earned, and why it did not earn all. `message` is what the student reads."""

    exercise: Exercise
    passed: bool
    message: Text | None = None
    printed: str = ""
    seconds: float = 0.0
    catalogue: Catalogue | None = None

    @property
    def points(self) -> int:
        return self.exercise.points if self.passed else 0

    def render(self, lang: str = "en") -> str:
        return self.message.render(lang, self.catalogue) if self.message else ""


class _Failure(Exception):
    """The student and the oracle part ways."""

    def __init__(self, text: Text):
        super().__init__(str(text))
        self.text = text


def grade_exercise(lab: LabSpec, name: str, cells: Sequence[str], lang: str = "en", are_runs: bool = False,
                   child: Child | None = None) -> Result:  # fmt: skip
    """Grade exercise `name` of `lab` by what the code cells define. Whatever they hold, it does not raise.

    are_runs: `cells` are what has been run so far, the same cell perhaps several times. child: one of this exercise's,
    to be used and left open; None starts a fresh one, as everything that gives points must.
    """
    exercise, started = lab[name], time.perf_counter()
    result = Result(exercise, passed=False, catalogue=lab.catalogue(lang))
    try:
        _grade(exercise, lab, cells, result, child)
        result.passed = True
    except (_Failure, Lost) as failure:
        result.message = failure.text
        if not are_runs and (repeated := collect(cells, exercise.defines).repeated):
            result.message = say("{message}\n(More than one cell defines {names}; the last one counts.)",
                                 message=result.message, names=", ".join(repeated))  # fmt: skip
    result.seconds = time.perf_counter() - started
    return result


def _grade(exercise: Exercise, lab: LabSpec, cells: Sequence[str], result: Result, given: Child | None) -> None:
    found = collect(cells, exercise.defines)
    if found.missing:
        raise _Failure(_not_defined(lab, found.missing, found.broken))
    if exercise.is_compared and (name := copied_from_ours(found.text, exercise.ours)):
        raise _Failure(say("this reads exactly like kvlab's own {name}, and a copy earns nothing. If you wrote it "
                           "yourself, say one line of it in another way and check again; hint(\"{exercise}\") helps",
                           name=name, exercise=exercise.name))  # fmt: skip
    child = given or Child(exercise, lab, uses_numpy=re.search(r"\bnumpy\b", found.text) is not None)
    try:
        loaded = child.load(found.source)
        if isinstance(loaded, Raised):
            raise _Failure(say("your definitions cannot be run: {error}", error=_told(loaded)))
        for trace in exercise.examples:
            _play(child, exercise, trace)
        _play_random(child, exercise)
    finally:
        if given is None:
            child.close()
        result.printed = child.output


def _not_defined(lab: LabSpec, missing: list[str], broken: list[str]) -> Text:
    if broken:
        return say("the cell that should define {names} has a syntax error: {errors}", names=", ".join(missing),
                   errors="; ".join(broken))  # fmt: skip
    return say("the notebook does not define {names}. Has the name been changed, the cell been deleted, or has it not "
               "been run? `kvlab lab update {lab}` brings a deleted cell back and keeps your answers",
               names=", ".join(missing), lab=lab.number)  # fmt: skip


def _play(child: Child, exercise: Exercise, trace: Trace) -> None:
    """Do `trace` to the student's code and to the oracle. _Failure at the first difference."""
    oracle, lines = exercise.Oracle(*trace.init), []
    made = child.new(trace.init)
    _refuse_stub(made)
    if isinstance(made, Raised):
        lines.append(say("making it: {error}", error=_told(made)))
        raise _Failure(_case(exercise, trace, lines, None))
    for op in trace.ops:
        got = child.do(op)
        _refuse_stub(got)
        value = got.value if isinstance(got, Value) else None
        expected = expectation(oracle, op, value)
        if _agree(expected, got):
            call = exercise.describe(op)
            lines.append(say("{call}", call=call) if got == Value(None) else say("{call} gave {got}", call=call,
                                                                                got=_outcome(got)))  # fmt: skip
            continue
        lines.append(say("{call} gave {got}; expected: {expected}", call=exercise.describe(op), got=_outcome(got),
                         expected=_expected(expected)))  # fmt: skip
        raise _Failure(_case(exercise, trace, lines, _explanation(exercise, op, expected, got)))


def _refuse_stub(got: Value | Raised) -> None:
    """An exercise that is not written yet is told so, and no more: what is expected is for later."""
    if isinstance(got, Raised) and got.names[0] == "NotImplementedError" and got.message.startswith("Lab "):
        raise _Failure(say("This part is not written yet: {what}.", what=got.message))


def _play_random(child: Child, exercise: Exercise) -> None:
    strategy = exercise.traces()
    if strategy is None:
        return
    shortest: list[_Failure] = []

    @settings(max_examples=exercise.num_random, derandomize=True, database=None, deadline=None, print_blob=False,
              phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def run(trace: Trace) -> None:
        try:
            _play(child, exercise, trace)
        except _Failure as failure:
            shortest.append(failure)
            raise

    try:
        run()
    except _Failure:
        raise shortest[-1] from None  # the last one that hypothesis ran is the shortest
    except Flaky:
        raise _Failure(say("the same operations gave two different answers: does your code keep something outside its "
                           "object, in a global or a class variable?")) from None  # fmt: skip


# ---- telling


def _agree(expected: Any, got: Value | Raised) -> bool:
    if isinstance(expected, Exception):
        return isinstance(got, Raised) and type(expected).__name__ in got.names
    return isinstance(got, Value) and same(expected, got.value)


def _case(exercise: Exercise, trace: Trace, lines: list[Text], explanation: Text | None) -> Text:
    head = exercise.describe_init(trace.init) if trace.init else ""
    values: dict[str, object] = {f"line{i}": line for i, line in enumerate(lines)}
    shown = range(max(0, len(lines) - SHOWN), len(lines))
    rows = [f"    {head.replace('{', '{{').replace('}', '}}')}"] if head else []
    if shown.start:
        rows.append("    ...")
    rows += [f"    {'->' if i == len(lines) - 1 else '  '} {{line{i}}}" for i in shown]
    text: list[object] = [say("\n".join(rows), **values)]
    text += [part for part in (explanation, trace.why) if part is not None]
    return say("\n".join(f"{{part{i}}}" for i in range(len(text))), **{f"part{i}": part for i, part in enumerate(text)})


def _explanation(exercise: Exercise, op: Op, expected: Any, got: Value | Raised) -> Text | None:
    value = got.value if isinstance(got, Value) else got.names[0]
    if isinstance(expected, Exception):
        return exercise.explain(op, type(expected).__name__, value)
    if isinstance(got, Raised):  # mostly it speaks for itself
        return exercise.explain_error(op, expected, got.names[0], got.message)
    return exercise.explain(op, expected, value)


def _outcome(got: Value | Raised) -> object:
    return _shown(got.value) if isinstance(got, Value) else _told(got)


def _expected(expected: Any) -> object:
    if isinstance(expected, Exception):
        return say("{name} raised", name=type(expected).__name__)
    if expected is None:
        return say("None, and no error")
    return _cut(str(expected)) if hasattr(expected, "accepts") else _shown(expected)


def _shown(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 300 else text[:290] + " ..."


def _told(raised: Raised) -> Text:
    """An exception in a line, with the student's own line if it went through one."""
    name = raised.names[0]
    if name == "NotPlain":
        return say("{what}, where a plain value is expected", what=raised.message)
    if name == "OursIsBarred":
        return say("an error: {message}", message=raised.message)
    message = f"{name}: {raised.message}" if raised.message else name
    if raised.where:
        return say("{message} ({where})", message=message, where=raised.where)
    return say("{message}", message=message)


def as_json(result: Result, lang: str = "en") -> dict[str, Any]:
    """A result for programs."""
    e = result.exercise
    return json.loads(json.dumps({
        "name": e.name, "title": e.title, "points": result.points, "max_points": e.points, "stretch": e.stretch,
        "passed": result.passed, "message": result.render(lang), "printed": result.printed[:4000],
        "seconds": round(result.seconds, 3),
    }))  # fmt: skip
