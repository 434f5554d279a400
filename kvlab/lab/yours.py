"""A notebook's solved parts, without Jupyter: `kvlab generate --with work/03_block_allocator.ipynb`.

    cells --collect--> what each part's exercise defines --does it pass its check? is it of its kind?--> Parts
                                                              '-- no: ours, and Found says why

What passes runs in a module of its own, in this process: only open notebooks that you trust.
"""

import linecache
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kvlab.grade import Exercise, LabSpec, collect, grade_exercise, load_lab, notebook_cells
from kvlab.grade.report import lab_of
from kvlab.parts import KINDS, Parts


@dataclass(frozen=True)
class Found:
    """One part that a lab can replace. name: what the notebook calls it. why: it is ours, if it is not yours."""

    part: str
    name: str
    exercise: str
    is_yours: bool
    why: str = ""


def parts_from_notebook(path: str | Path, number: str | None = None) -> tuple[Parts, list[Found]]:
    """The parts that are solved in the notebook at `path`, and for each part of its lab whose it is and why.

    number: of the lab ("03"); None: what the notebook's metadata say, else the digits that its name begins with.
    ValueError if `path` is no notebook, or nobody can tell which lab it is of.
    """
    path = Path(path)
    cells, metadata = notebook_cells(path)
    spec = load_lab(number or lab_of(path, metadata))
    names: dict[str, str] = {}  # part -> name, of those that are yours so far
    found, module = [], None
    for exercise in spec.exercises:
        for part, name in exercise.part.items():
            why = _unsolved(spec, cells, exercise)
            if not why:
                why, tried = _try(spec, cells, path.name, names | {part: name}, part)
            if not why:
                names[part], module = name, tried
            found.append(Found(part, name, exercise.name, not why, why))
    return Parts(**{part: getattr(module, name) for part, name in names.items()}), found


def written_parts(folder: Path) -> dict[str, str]:
    """Part -> notebook, of all that is written in the notebooks NN_*.ipynb of `folder`. Reads them, runs nothing."""
    written = {}
    for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        try:
            cells, metadata = notebook_cells(path)
            exercises = load_lab(lab_of(path, metadata)).exercises
        except ValueError:
            continue  # no notebook, or not one of a lab that is here
        for exercise in exercises:
            definitions = collect(cells, exercise.defines)
            if not definitions.missing and not definitions.is_stub:
                written |= dict.fromkeys(exercise.part, path.name)
    return written


def _unsolved(spec: LabSpec, cells: Sequence[str], exercise: Exercise) -> str:
    """Why what the exercise defines cannot be taken; empty if it can."""
    definitions = collect(cells, exercise.defines)
    if definitions.missing:
        return "; ".join([f"{', '.join(definitions.missing)} is not defined", *definitions.broken])
    if definitions.is_stub:
        return "not written yet"
    if not grade_exercise(spec, exercise.name, cells).passed:
        return f"does not pass its check: kvlab grade says why (exercise {exercise.name})"
    return ""


def _try(spec: LabSpec, cells: Sequence[str], file: str, names: dict[str, str], part: str) -> tuple[str, ModuleType]:
    """Define `names` (part -> name) in a fresh module; why `part` cannot be taken (empty if it can), and the module."""
    module = ModuleType(f"notebook {file}")
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class's module up by its name
    module.lab = SimpleNamespace(best=lambda name: _best(spec, module, name))
    module.check = module.hint = lambda *_: None
    for label, text in collect(cells, names.values()).source:
        label = label.replace("your notebook", file)
        number = int(re.search(r"\d+(?=>$)", label).group())
        lines = cells[number - 1].splitlines(keepends=True)
        linecache.cache[label] = (len(cells[number - 1]), None, lines, label)  # so that a traceback shows the cell
        try:
            exec(compile(text, label, "exec"), module.__dict__)
        except Exception as error:
            return f"{label[1:-1]}: {type(error).__name__}: {error}", module
    try:
        KINDS[part].check(part, getattr(module, names[part]))
    except ValueError as error:
        return str(error), module
    return "", module


def _best(spec: LabSpec, module: ModuleType, name: str) -> Any:
    """lab.best in a notebook's cell: what the module has defined by now, else ours."""
    if name in module.__dict__:
        return module.__dict__[name]
    for exercise in spec.exercises:
        if name in exercise.ours:
            where, attribute = exercise.ours[name].split(":")
            return attrgetter(attribute)(import_module(where))
    raise ValueError(f"no exercise of lab {spec.number} defines {name!r}")
