"""One source, solutions/NN_name.py, to the notebooks of a lab.

    read_source(path, points) -> Source      checked: ex= and check= in pairs, each an exercise of the lab's checks.py
    Source.notebook("en" | "zh") -> Notebook      stubs for solutions, stable ids, nbgrader's metadata, no outputs

The form of the source is in docs/labs.md. What it makes depends on nothing but the file and the points, so making it
twice gives the same bytes.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab import __version__
from kvlab.grade import load_lab
from kvlab.lab.cells import Cell, Notebook, digest, free_id
from kvlab.lab.parse import LANGUAGES, SourceCell, make_stub, read_cells, refuse

FILE_NAME = re.compile(r"(\d\d)_\w+")
CHECKOUT = Path(__file__).parents[2]
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
PointsOf = Callable[[str], Mapping[str, int]]  # a lab's number -> its exercises, in order, and what each is worth


@dataclass(frozen=True)
class Source:
    """One lab's source, made and found in order by read_source()."""

    path: Path
    cells: list[SourceCell]
    points: Mapping[str, int]
    stubs: Mapping[str, str]  # exercise -> its cell without the solution

    @property
    def number(self) -> str:
        """The lab's number, two digits."""
        return self.path.stem[:2]

    @property
    def languages(self) -> list[str]:
        """Those that the lab has a notebook in: Chinese if any of its cells is."""
        return [lang for lang in LANGUAGES if lang == "en" or any(cell.lang == lang for cell in self.cells)]

    def file_name(self, lang: str) -> str:
        return self.path.stem + ("" if lang == "en" else f".{lang}") + ".ipynb"

    def in_language(self, lang: str) -> Iterator[SourceCell]:
        """The cells of one language's notebook; English prose that nobody has translated stands in for the Chinese."""
        for cell, following in zip(self.cells, [*self.cells[1:], None], strict=True):
            translated = following is not None and following.lang == lang != "en"
            if cell.lang in ("", lang) or (cell.lang == "en" and not translated):
                yield cell

    def notebook(self, lang: str, solved: bool = False) -> Notebook:
        """What a student opens; with `solved`, the same with the solutions in it."""
        taken = {name for exercise in self.points for name in (exercise, f"check-{exercise}")}
        cells = [self._cell(cell, taken, solved) for cell in self.in_language(lang)]
        about = {"lab": self.number, "lang": lang, "version": __version__}
        return Notebook({**KERNEL, "kvlab": about}, cells)

    def _cell(self, cell: SourceCell, taken: set[str], solved: bool) -> Cell:
        name, metadata, source = "", {}, cell.source
        if cell.ex:
            name, stub = cell.ex, self.stubs[cell.ex]
            source = source if solved else stub
            metadata = _nbgrader(name, solution=True) | {"deletable": False, "kvlab": {"stub": digest("code", stub)}}
        elif cell.check:
            name = f"check-{cell.check}"
            metadata = _nbgrader(name, points=self.points[cell.check]) | {"deletable": False, "editable": False}
        elif cell.fold:
            metadata = {"jupyter": {"source_hidden": True}}
        made = {"cell_type": cell.cell_type, "metadata": metadata, "source": source}
        if cell.cell_type == "code":
            made |= {"outputs": [], "execution_count": None}
        return made | {"id": name or free_id(digest(cell.cell_type, source), taken)}


def _nbgrader(name: str, solution: bool = False, points: int | None = None) -> dict[str, Any]:
    """A cell's tag in nbgrader's schema 3: the student's own, or one that is locked and graded."""
    tag = {"grade": not solution, "grade_id": name, "locked": not solution, "schema_version": 3}
    return {"nbgrader": tag | {"solution": solution, "task": False} | ({} if solution else {"points": points})}


# --- reading -------------------------------------------------------------------------------------------------


def read_source(path: Path, points: Mapping[str, int]) -> Source:
    """The source at `path`, checked against its exercises' points. ValueError: file, cell, line, and what is wrong."""
    if not FILE_NAME.fullmatch(path.stem):
        raise ValueError(f"{path.name}: the file of a lab is called NN_name.py, with letters, digits and _ in the name")
    cells = list(read_cells(path))
    stubs: dict[str, str] = {}
    by_name: dict[str, SourceCell] = {}
    checked: dict[str, SourceCell] = {}
    for cell in cells:
        if cell.ex:
            if cell.ex in by_name:
                refuse(cell, f"exercise {cell.ex} is already at {by_name[cell.ex].where}")
            by_name[cell.ex] = cell
            stubs[cell.ex] = make_stub(cell, f"Lab {path.stem[:2]}, exercise {len(by_name)}: {cell.ex}")
        elif cell.check:
            if cell.check in checked:
                refuse(cell, f"{cell.check} is already checked at {checked[cell.check].where}")
            checked[cell.check] = cell
            if cell.check not in by_name:
                refuse(cell, f'no cell with ex="{cell.check}" stands before its check')
            if cell.source != f'check("{cell.check}")':
                refuse(cell, f'a check cell is exactly check("{cell.check}"), this one is {cell.source!r}')
    for name, cell in by_name.items():
        if name not in checked:
            refuse(cell, f'no cell with check="{name}" follows')
        if name not in points:
            refuse(cell, f"the lab's checks.py has no exercise {name}; it has {', '.join(points) or 'none'}")
    if missing := [name for name in points if name not in by_name]:
        raise ValueError(f'{path.name}: no cell with ex="{missing[0]}", which is an exercise in the lab\'s checks.py')
    if list(by_name) != list(points):
        raise ValueError(f"{path.name}: exercises come as {', '.join(by_name)}, in checks.py as {', '.join(points)}")
    return Source(path, cells, points, stubs)


# --- all labs ------------------------------------------------------------------------------------------------


def points_of(root: Path) -> PointsOf:
    """The points that the checks under `root` give."""

    def points(number: str) -> dict[str, int]:
        return {exercise.name: exercise.points for exercise in load_lab(number, root / "tests" / "labs").exercises}

    return points


def read_sources(root: Path = CHECKOUT) -> list[Source]:
    """Every lab of the repository at `root`, in order. ValueError: a fault in one, or two with one number."""
    paths = sorted((root / "solutions").glob("*.py"))
    for before, path in zip(paths, paths[1:], strict=False):
        if before.name[:2] == path.name[:2]:
            raise ValueError(f"{before.name} and {path.name} have the same number: rename one")
    points = points_of(root)
    return [read_source(path, points(path.stem[:2]) if FILE_NAME.fullmatch(path.stem) else {}) for path in paths]


def code_cells(number: str, solved: bool, root: Path = CHECKOUT) -> list[str]:
    """The code of lab `number` ("03") from top to bottom, with or without the solutions: what grading is tested on."""
    paths = sorted((root / "solutions").glob(f"{number}_*.py"))
    if not paths:
        raise ValueError(f"there is no source of lab {number} in {root / 'solutions'}")
    notebook = read_source(paths[0], points_of(root)(number)).notebook("en", solved)
    return [cell["source"] for cell in notebook.cells if cell["cell_type"] == "code"]
