"""A cost fitted to measured steps: seconds for each unit of work, found by least squares.

    measured (work, seconds), ... --fit--> FittedCost --save--> JSON --FittedCost.load--> the simulator

Each coefficient is 0 or more, for no work makes a step shorter, and residuals are relative to what the cost says: a
step of 1 ms that is 10% off counts as much as one of 100 ms that is, and those above and below cancel out. (Relative to
what was measured they would not: the same error weighs more where the measured time came out short, so the fit would be
low, by the variance of the noise.) `kvlab.calibrate` measures; here is only the arithmetic.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from operator import mul
from pathlib import Path
from typing import Any

from kvlab.costs.work import Breakdown, Part, StepWork

FORMAT = "kvlab step cost 1"
TERMS = ("step", *StepWork._fields)


@dataclass(frozen=True)
class FittedCost:
    """seconds_per: by term, "step" (any step at all) or a field of StepWork. about: where it was measured."""

    seconds_per: dict[str, float]
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        for term, seconds in self.seconds_per.items():
            if term not in TERMS:
                raise ValueError(f"unknown term {term!r} in seconds_per: known are {', '.join(TERMS)}")
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
                raise ValueError(f"seconds_per[{term!r}] is {seconds!r}: give seconds, 0 or more")
        object.__setattr__(self, "_vector", tuple(self.seconds_per.get(term, 0.0) for term in TERMS))

    def step_seconds(self, work: StepWork) -> float:
        """Seconds of one step."""
        step, *vector = self._vector
        return step + sum([a * b for a, b in zip(vector, work, strict=True)])

    def explain(self, work: StepWork) -> Breakdown:
        """Seconds by term. What bounds them nobody knows: they are as they were measured."""
        units = (1, *work)
        parts = (Part(t, s * n, "measured") for t, s, n in zip(TERMS, self._vector, units, strict=True) if s * n)
        return Breakdown(tuple(parts))

    def save(self, path: str | Path) -> None:
        text = {"format": FORMAT, "seconds_per": self.seconds_per, "about": self.about}
        Path(path).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "FittedCost":
        """From what `save` or `kvlab calibrate` wrote; ValueError says what is wrong with the file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as a cost ({error}): make one with kvlab calibrate") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f'{path} is no cost: it lacks "format": "{FORMAT}"; make one with kvlab calibrate')
        try:
            return cls(content["seconds_per"], content.get("about", {}))
        except (KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}: {error}; make a new one with kvlab calibrate") from None


def fit(works: Sequence[StepWork], seconds: Sequence[float], terms: Sequence[str] = TERMS,
        about: dict[str, Any] | None = None) -> FittedCost:  # fmt: skip
    """The cost with the least sum of squared relative errors over measured steps, no coefficient below 0.

    Relative to the cost itself, whose weights are found by fitting again (iteratively reweighted least squares); then
    the mean of measured / modelled is 1 over the steps.
    terms: what may have a coefficient; a term that never occurs in `works` gets none. ValueError for no steps, or a
    step without time.
    """
    if not works or len(works) != len(seconds):
        raise ValueError(f"{len(works)} works and {len(seconds)} durations: give one for each step, at least one")
    if not all(0 < s < math.inf for s in seconds):
        raise ValueError("a step's duration is not above 0: give seconds")
    columns = [[(1, *work)[TERMS.index(term)] for work in works] for term in terms]
    terms, columns = zip(*[(t, c) for t, c in zip(terms, columns, strict=True) if any(c)], strict=True)
    per_unit, modelled = [0.0] * len(terms), list(seconds)
    for _ in range(4):  # the weights settle to some 5 digits
        # Rows over their seconds make the residuals relative; columns of length 1 make the sums well scaled.
        rows = [[value / s for value, s in zip(column, modelled, strict=True)] for column in columns]
        scales = [math.hypot(*row) for row in rows]
        rows = [[value / scale for value in row] for row, scale in zip(rows, scales, strict=True)]
        found = nonnegative_least_squares(rows, [t / s for t, s in zip(seconds, modelled, strict=True)])
        per_unit = [x / scale for x, scale in zip(found, scales, strict=True)]
        sums = [sum(map(mul, per_unit, row)) for row in zip(*columns, strict=True)]
        modelled = [m if m > 0 else s for m, s in zip(sums, seconds, strict=True)]  # 0: no term knows of this step
    return FittedCost(dict(zip(terms, per_unit, strict=True)), about or {})


def nonnegative_least_squares(columns: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """x >= 0 with the least |sum x[j] columns[j] - target|^2; columns of length 1.

    The best x is the plain solution of those columns that it uses, so all subsets are tried: 1,024 for ten.
    A column that says nothing new stays at 0.
    """
    dot = lambda a, b: math.fsum(x * y for x, y in zip(a, b, strict=True))  # noqa: E731
    gram = [[dot(a, b) for b in columns] for a in columns]
    right = [dot(column, target) for column in columns]
    best, least = [0.0] * len(columns), dot(target, target)
    for size in range(1, len(columns) + 1):
        for used in combinations(range(len(columns)), size):
            x = solve([[gram[a][b] for b in used] for a in used], [right[a] for a in used])
            if x is None or min(x) < 0:
                continue
            made = [sum(map(mul, x, row)) for row in zip(*[columns[j] for j in used], strict=True)]
            left = [t - m for t, m in zip(target, made, strict=True)]
            if (error := dot(left, left)) < least * (1 - 1e-9) - 1e-20 * len(target):
                least, best = error, [0.0] * len(columns)
                for j, value in zip(used, x, strict=True):
                    best[j] = value
    return best


def solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """x with matrix x = right, by elimination with pivots; None if the matrix is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    n = len(rows)
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-13:
            return None
        for r in range(i + 1, n):
            factor = rows[r][i] / rows[i][i]
            for c in range(i, n + 1):
                rows[r][c] -= factor * rows[i][c]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (rows[i][n] - math.fsum(rows[i][c] * x[c] for c in range(i + 1, n))) / rows[i][i]
    return x
