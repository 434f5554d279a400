"""One source, solutions/NN_name.py, to the notebooks of a lab.

    read_source(path) -> Source: cells, each with its line
       checked: markers, ex= and check= in pairs, points for each, lang= in pairs, everything parses
    Source.notebook("en" | "zh", solved=False) -> Notebook: stubs for solutions, stable ids, nbgrader's metadata, no outputs

The form of the source is in docs/labs.md. What it makes depends on nothing but the file and the points, so making it twice
gives the same bytes.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import kvlab
from kvlab.lab.cells import Cell, Notebook, digest, free_id

LANGUAGES = ("en", "zh")
FILE_NAME = re.compile(r"(\d\d)_\w+")
EXERCISE_NAME = re.compile(r"[a-z][a-z0-9_]*")
HEADER = re.compile(r"# %%(?:[ \t].*)?$")
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
LIKE_A_MARKER = re.compile(r"#\s*(?:BEGIN|END)\s+SOLUTION", re.I)
KEYS = {"ex", "check", "lang"}
OF_JUPYTEXT = {"lines_to_next_cell", "cell_marker"}  # how the source was laid out: no business of the notebook
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@dataclass(frozen=True)
class SourceCell:
    """One cell as written. ex or check: the exercise it belongs to, "" if none. lang: "" is both languages."""

    where: str  # file, cell and line, for messages
    line: int
    cell_type: str
    source: str
    ex: str = ""
    check: str = ""
    lang: str = ""


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
        about = {"lab": self.number, "lang": lang, "version": kvlab.__version__}
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
    cells = list(_cells(path))
    stubs: dict[str, str] = {}
    by_name: dict[str, SourceCell] = {}
    checked: dict[str, SourceCell] = {}
    for cell in cells:
        if cell.ex:
            if cell.ex in by_name:
                _refuse(cell, f"exercise {cell.ex} is already at {by_name[cell.ex].where}")
            by_name[cell.ex] = cell
            stubs[cell.ex] = _stub(cell, f"Lab {path.stem[:2]}, exercise {len(by_name)}: {cell.ex}")
        elif cell.check:
            if cell.check in checked:
                _refuse(cell, f"{cell.check} is already checked at {checked[cell.check].where}")
            checked[cell.check] = cell
            if cell.check not in by_name:
                _refuse(cell, f'no cell with ex="{cell.check}" stands before its check')
            if cell.source != f'check("{cell.check}")':
                _refuse(cell, f'a check cell is exactly check("{cell.check}"), this one is {cell.source!r}')
    for name, cell in by_name.items():
        if name not in checked:
            _refuse(cell, f'no cell with check="{name}" follows')
        if name not in points:
            _refuse(cell, f"the lab's checks.py has no exercise {name}; it has {', '.join(points) or 'none'}")
    if missing := [name for name in points if name not in by_name]:
        raise ValueError(f'{path.name}: no cell with ex="{missing[0]}", which is an exercise in the lab\'s checks.py')
    return Source(path, cells, points, stubs)


def _cells(path: Path) -> Iterator[SourceCell]:
    import jupytext  # takes a second or two, so only here

    text = path.read_text(encoding="utf-8-sig")
    parsed = jupytext.reads(text, fmt="py:percent").cells
    headers = [number for number, line in enumerate(text.split("\n"), 1) if HEADER.match(line)]
    previous = None
    for number, cell in enumerate(parsed, 1):
        line = headers.pop(0) if headers else 1
        # A line like a header inside a string is no header: jupytext has left it in the cell.
        del headers[: sum(bool(HEADER.match(inner)) for inner in cell.source.split("\n"))]
        tags = {key: value for key, value in cell.metadata.items() if key not in OF_JUPYTEXT}
        found = SourceCell(f"{path.name}, cell {number}, line {line}", line, cell.cell_type, cell.source.rstrip())
        if unknown := [key for key in tags if key not in KEYS]:
            _refuse(found, f"{unknown[0]}={tags[unknown[0]]!r} is not known here; a header may have ex=, check= and lang=")
        if not all(isinstance(value, str) for value in tags.values()):
            _refuse(found, f'a value is not quoted, as in ex="name": {tags}')
        found = SourceCell(found.where, line, found.cell_type, found.source, **tags)
        _check_cell(found, previous)
        yield found
        previous = found
    if headers:
        raise ValueError(f"{path.name}, line {headers[0]}: jupytext makes no cell of this; is a string before it open?")


def _check_cell(cell: SourceCell, previous: SourceCell | None) -> None:
    """What can be said of a cell by itself, and of a translation beside what it translates."""
    exercise = cell.ex or cell.check
    if cell.cell_type not in ("code", "markdown"):
        _refuse(cell, f"it is a {cell.cell_type} cell: use [markdown] or none")
    if exercise and (cell.cell_type != "code" or cell.lang or (cell.ex and cell.check)):
        _refuse(cell, "an exercise's cell is a code cell with ex= or check= and nothing else")
    if exercise and not EXERCISE_NAME.fullmatch(exercise):
        _refuse(cell, f"exercise {exercise!r}: use small letters, digits and _")
    if cell.lang and cell.lang not in LANGUAGES:
        _refuse(cell, f"lang={cell.lang!r} is unknown: use one of {', '.join(LANGUAGES)}")
    if cell.lang == "zh" and not (previous and previous.lang == "en" and previous.cell_type == cell.cell_type):
        _refuse(cell, 'lang="zh" must directly follow the same cell in lang="en"')
    for offset, line in enumerate(cell.source.split("\n"), 1):
        if LIKE_A_MARKER.search(line) and not (cell.ex and line.strip() in (BEGIN, END)):
            remedy = f"write exactly {BEGIN} or {END}" if cell.ex else "only a cell with ex= has solutions"
            _refuse(cell, f"a marker would survive, line {offset} of the cell, {line.strip()!r}: {remedy}")


def _refuse(cell: SourceCell, message: str) -> NoReturn:
    raise ValueError(f"{cell.where}: {message}")


# --- stubs ---------------------------------------------------------------------------------------------------


def _stub(cell: SourceCell, title: str) -> str:
    """The cell with a raise in place of each solution, naming the function that it stands in."""
    tree = _parse(cell, cell.source, "the solution")
    lines: list[str] = []
    begun, body = 0, []  # line of the open marker; the solution's (line number, text) so far
    for number, line in enumerate(cell.source.split("\n"), 1):
        if line.strip() == BEGIN:
            if begun:
                _refuse(cell, f"{BEGIN} in line {number} of the cell, but the one in line {begun} is still open")
            begun, body = number, []
        elif line.strip() == END:
            if not begun:
                _refuse(cell, f"{END} in line {number} of the cell, but nothing was begun")
            if not body:
                _refuse(cell, f"nothing between the markers in lines {begun} and {number} of the cell")
            first, text = body[0]
            function = _enclosing_function(tree, begun, first)
            indent = text[: len(text) - len(text.lstrip())]
            lines.append(f'{indent}raise NotImplementedError("{title}{", " + function if function else ""}")')
            begun = 0
        elif begun:
            body += [(number, line)] if line.strip() else []
        else:
            lines.append(line)
    if begun:
        _refuse(cell, f"{BEGIN} in line {begun} of the cell has no {END}")
    stub = "\n".join(lines)
    if stub == cell.source:
        _refuse(cell, f"an exercise without {BEGIN} and {END} has nothing to solve")
    _parse(cell, stub, "the stub")
    return stub


def _parse(cell: SourceCell, source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        _refuse(cell, f"{what} does not parse: {error.msg}, line {error.lineno} of the cell")


def _enclosing_function(tree: ast.AST, marker: int, first: int) -> str:
    """The innermost function that begins before the marker and holds the region's first line; "" if there is none."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    around = [node for node in functions if node.lineno < marker and first <= node.end_lineno]
    return max(around, key=lambda node: node.lineno).name if around else ""
