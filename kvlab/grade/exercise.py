"""What an exercise is: who must define what, an oracle, operations to do to both, and words for what went wrong.

    Trace = (init, ops)      init: arguments of driver and oracle;  op: ("method", argument, ...), plain values
    Oracle(*init).method(*arguments)  ->  a plain value | a matcher | an exception that the student must raise too

An oracle's method with a keyword `got` is told what the student gave (None if that was an exception): for
operations with several right answers.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isclose
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hypothesis import strategies as st

from kvlab.grade.text import Catalogue, Text, read_catalogue

CHECKOUT = Path(__file__).parents[2]
SPECS = CHECKOUT / "tests" / "labs"
Op = tuple  # (method, *arguments)


class Trace(NamedTuple):
    """Arguments of driver and oracle, then what is done to them. `why`: a sentence to show if this one fails."""

    init: tuple = ()
    ops: Sequence[Op] = ()
    why: Text | None = None


# ---- what may be expected, other than one plain value


@dataclass(frozen=True)
class AtMost:
    """A number of at most `limit` (and at least 0): for counted accesses."""

    limit: float

    def accepts(self, value: Any) -> bool:
        return isinstance(value, int | float) and 0 <= value <= self.limit

    def __str__(self) -> str:
        return f"at most {self.limit}"


@dataclass(frozen=True)
class Approx:
    """A number (or a list of numbers, of any shape) within `rel` of `value`, or within `abs`."""

    value: Any
    rel: float = 1e-9
    abs: float = 1e-12

    def accepts(self, value: Any) -> bool:
        return self._close(self.value, value)

    def _close(self, expected: Any, value: Any) -> bool:
        if isinstance(expected, list | tuple):
            if not isinstance(value, list | tuple) or len(value) != len(expected):
                return False
            return all(map(self._close, expected, value))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return isclose(expected, value, rel_tol=self.rel, abs_tol=self.abs)

    def __str__(self) -> str:
        return f"about {self.value}"


@dataclass(frozen=True)
class OneOf:
    """Any of these plain values."""

    values: tuple

    def accepts(self, value: Any) -> bool:
        return any(same(expected, value) for expected in self.values)

    def __str__(self) -> str:
        return "one of " + ", ".join(map(repr, self.values))


def same(expected: Any, value: Any) -> bool:
    """Equal, and of the same kind: 1 is not True, a whole number is not a float; lists and tuples are alike."""
    if hasattr(expected, "accepts"):
        return expected.accepts(value)
    if isinstance(expected, list | tuple):
        return isinstance(value, list | tuple) and len(expected) == len(value) and all(map(same, expected, value))
    if isinstance(expected, dict):
        return isinstance(value, dict) and expected.keys() == value.keys() and all(
            same(expected[key], value[key]) for key in expected
        )  # fmt: skip
    if isinstance(expected, float) and type(value) is int:
        return expected == value
    return type(expected) is type(value) and expected == value


class Exercise:
    """Subclass it in tests/labs/lab_NN/checks.py; the docstring's first line is the title. See docs/labs.md."""

    name: ClassVar[str]
    points: ClassVar[int] = 1
    minutes: ClassVar[int] = 10
    stretch: ClassVar[bool] = False
    defines: ClassVar[tuple[str, ...]] = ()
    ours: ClassVar[dict[str, str]] = {}  # name -> "module:name" or ":Class.method", ours: fall-back, and barred
    is_compared: ClassVar[bool] = True  # with ours, as syntax; False where the task leads everybody to the same lines
    bars: ClassVar[tuple[str, ...]] = ()  # more of our own that would do the work, named in the same way
    part: ClassVar[dict[str, str]] = {}  # part of kvlab.parts.Parts -> name
    section: ClassVar[str] = ""  # of the textbook
    hints: ClassVar[tuple[Text, ...]] = ()
    driver: ClassVar[str | None] = None  # a class in driver.py; None: an op is a call of what is defined
    examples: ClassVar[tuple[Trace, ...]] = ()
    num_random: ClassVar[int] = 60
    seconds: ClassVar[float] = 5.0  # that one operation may take
    all_seconds: ClassVar[float] = 60.0  # that the whole check may take
    memory_mib: ClassVar[int] = 512
    Oracle: ClassVar[Callable[..., Any]]

    def traces(self) -> st.SearchStrategy[Trace] | None:
        """Random traces on top of the examples, as a hypothesis strategy (see `walks` and `calls`); None: no more."""
        return None

    def describe(self, op: Op) -> str:
        """How an operation is told to the student."""
        return f"{op[0]}({', '.join(map(repr, op[1:]))})"

    def describe_init(self, init: tuple) -> str:
        """The line above the operations; empty if there is nothing to say."""
        return ", ".join(map(repr, init))

    def explain(self, op: Op, expected: Any, got: Any) -> Text | None:
        """In the words of the chapter: what is wrong with having given `got`. An exception is its class name."""
        return None

    def explain_error(self, op: Op, expected: Any, error: str, message: str) -> Text | None:
        """The same for an exception, by class name and message, where a value was expected."""
        return None

    @property
    def title(self) -> str:
        return (self.__doc__ or self.name).strip().splitlines()[0].rstrip(".")


def calls(name: str, *arguments: st.SearchStrategy) -> st.SearchStrategy[Trace]:
    """Traces of one call of the function `name`."""
    return st.tuples(*arguments).map(lambda values: Trace((), ((name, *values),)))


@st.composite
def walks(draw, oracle: Callable[..., Any], init: st.SearchStrategy[tuple], max_ops: int = 20) -> Trace:
    """Random walks: `init`, then operations that the oracle's ops() offers. ops() -> list of ops, simplest first."""
    start = draw(init)
    model, ops = oracle(*start), []
    for _ in range(draw(st.integers(1, max_ops))):
        choices = model.ops()
        if not choices:
            break
        op = draw(st.sampled_from(choices))
        ops.append(op)
        expectation(model, op, got=UNKNOWN)
    return Trace(start, tuple(ops))


class _Unknown:
    """Stands for what the student will give while a trace is being drawn."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


def expectation(oracle: Any, op: Op, got: Any) -> Any:
    """What the oracle expects of `op`: a value, a matcher, or the exception it raises."""
    method = getattr(oracle, op[0])
    keywords = {"got": got} if "got" in inspect.signature(method).parameters else {}
    try:
        return method(*op[1:], **keywords)
    except Exception as error:
        return error


# ---- finding a lab's exercises


@dataclass(frozen=True)
class LabInfo:
    """What the first cell says of a lab. Define LAB = LabInfo(...) in checks.py."""

    title: Text
    sections: str  # of the textbook, "L33 2.2, 6.3; PAV 3.2"
    before: tuple[str, ...] = ()  # labs whose ideas this one uses; none of them must be solved


class LabSpec:
    """The exercises of one lab, and where its files are."""

    def __init__(self, number: str, folder: Path, info: LabInfo, exercises: Sequence[Exercise]):
        self.number, self.folder, self.info, self.exercises = number, folder, info, list(exercises)

    def __getitem__(self, name: str) -> Exercise:
        for exercise in self.exercises:
            if exercise.name == name:
                return exercise
        names = ", ".join(exercise.name for exercise in self.exercises)
        raise ValueError(f"lab {self.number} has no exercise {name!r}; it has {names}")

    def catalogue(self, lang: str) -> Catalogue:
        return {} if lang == "en" else read_catalogue(self.folder, lang)

    @cached_property
    def driver_path(self) -> Path | None:
        path = self.folder / "driver.py"
        return path if path.exists() else None


def lab_numbers(folder: Path = SPECS) -> list[str]:
    return sorted(path.parent.name.removeprefix("lab_") for path in folder.glob("lab_*/checks.py"))


def load_lab(number: str, folder: Path = SPECS) -> LabSpec:
    """The exercises of lab `number` ("03"), in the order in which checks.py defines them."""
    home = folder / f"lab_{number}"
    if not (home / "checks.py").exists():
        known = ", ".join(lab_numbers(folder)) or "none: labs need the repository, not only the installed package"
        raise ValueError(f"there are no checks for lab {number!r} in {folder}; there are for {known}")
    module = load_module(home / "checks.py")
    return LabSpec(number, home, module.LAB, [cls() for cls in _exercises(module)])


def _exercises(module: Any) -> Iterable[type[Exercise]]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Exercise) and value.__module__ == module.__name__:
            if not value.__name__.startswith("_"):
                yield value


def load_module(path: Path) -> Any:
    """Run a file as a module of its own, outside any package."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
