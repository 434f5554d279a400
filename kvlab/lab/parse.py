"""The text of a lab's source to checked cells, and a solution cell to its stub.

    read_cells(path) -> SourceCell ...       each right in itself: header, language, markers
    make_stub(cell, title) -> str            a raise in place of each solution

Every fault is a ValueError with file, cell and line.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

LANGUAGES = ("en", "zh")
EXERCISE_NAME = re.compile(r"[a-z][a-z0-9_]*")
HEADER = re.compile(r"# %%(?:[ \t].*)?$")
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
LIKE_A_MARKER = re.compile(r"#\s*(?:BEGIN|END)\s+SOLUTION", re.I)
KEYS = {"ex", "check", "lang", "fold"}
OF_JUPYTEXT = {"lines_to_next_cell", "cell_marker"}  # how the source was laid out: no business of the notebook


@dataclass(frozen=True)
class SourceCell:
    """One cell as written. ex or check: the exercise it belongs to, "" if none. lang: "" is both languages.

    fold: "yes" for code that draws or counts and that nobody needs to read; a notebook shows it as one line.
    """

    where: str  # file, cell and line, for messages
    cell_type: str
    source: str
    ex: str = ""
    check: str = ""
    lang: str = ""
    fold: str = ""


def read_cells(path: Path) -> Iterator[SourceCell]:
    """The cells of a source, each checked by itself and beside the one before it."""
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
        where = f"{path.name}, cell {number}, line {line}"
        found = SourceCell(where, cell.cell_type, cell.source.rstrip())
        if unknown := [key for key in tags if key not in KEYS]:
            refuse(found, f"{unknown[0]}={tags[unknown[0]]!r} is not known here: use ex=, check=, lang= or fold=")
        if not all(isinstance(value, str) for value in tags.values()):
            refuse(found, f'a value is not quoted, as in ex="name": {tags}')
        found = SourceCell(where, found.cell_type, found.source, **tags)
        _check_cell(found, previous)
        yield found
        previous = found
    if headers:
        raise ValueError(f"{path.name}, line {headers[0]}: jupytext makes no cell of this; is a string before it open?")


def _check_cell(cell: SourceCell, previous: SourceCell | None) -> None:
    """What can be said of a cell by itself, and of a translation beside what it translates."""
    exercise = cell.ex or cell.check
    if cell.cell_type not in ("code", "markdown"):
        refuse(cell, f"it is a {cell.cell_type} cell: use [markdown] or none")
    if exercise and (cell.cell_type != "code" or cell.lang or (cell.ex and cell.check)):
        refuse(cell, "an exercise's cell is a code cell with ex= or check= and nothing else")
    if exercise and not EXERCISE_NAME.fullmatch(exercise):
        refuse(cell, f"exercise {exercise!r}: use small letters, digits and _")
    if cell.fold and (cell.fold != "yes" or exercise or cell.cell_type != "code"):
        refuse(cell, 'fold="yes" is for ordinary code cells')
    if cell.lang and cell.lang not in LANGUAGES:
        refuse(cell, f"lang={cell.lang!r} is unknown: use one of {', '.join(LANGUAGES)}")
    if cell.lang == "zh" and not (previous and previous.lang == "en" and previous.cell_type == cell.cell_type):
        refuse(cell, 'lang="zh" must directly follow the same cell in lang="en"')
    for offset, line in enumerate(cell.source.split("\n"), 1):
        if LIKE_A_MARKER.search(line) and not (cell.ex and line.strip() in (BEGIN, END)):
            remedy = f"write exactly {BEGIN} or {END}" if cell.ex else "only a cell with ex= has solutions"
            refuse(cell, f"a marker would survive, line {offset} of the cell, {line.strip()!r}: {remedy}")


def refuse(cell: SourceCell, message: str) -> NoReturn:
    raise ValueError(f"{cell.where}: {message}")


# --- stubs ---------------------------------------------------------------------------------------------------


def make_stub(cell: SourceCell, title: str) -> str:
    """The cell with a raise in place of each solution, naming the function that it stands in."""
    tree = _parse(cell, cell.source, "the solution")
    lines: list[str] = []
    begun, body = 0, []  # line of the open marker; the solution's (line number, text) so far
    for number, line in enumerate(cell.source.split("\n"), 1):
        if line.strip() == BEGIN:
            if begun:
                refuse(cell, f"{BEGIN} in line {number} of the cell, but the one in line {begun} is still open")
            begun, body = number, []
        elif line.strip() == END:
            if not begun:
                refuse(cell, f"{END} in line {number} of the cell, but nothing was begun")
            if not body:
                refuse(cell, f"nothing between the markers in lines {begun} and {number} of the cell")
            first, text = body[0]
            function = _enclosing_function(tree, begun, first)
            indent = text[: len(text) - len(text.lstrip())]
            part = f", {function}" if function not in ("", cell.ex) else ""
            lines.append(f'{indent}raise NotImplementedError("{title}{part}")')
            begun = 0
        elif begun:
            body += [(number, line)] if line.strip() else []
        else:
            lines.append(line)
    if begun:
        refuse(cell, f"{BEGIN} in line {begun} of the cell has no {END}")
    stub = "\n".join(lines)
    if stub == cell.source:
        refuse(cell, f"an exercise without {BEGIN} and {END} has nothing to solve")
    _parse(cell, stub, "the stub")
    return stub


def _parse(cell: SourceCell, source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        refuse(cell, f"{what} does not parse: {error.msg}, line {error.lineno} of the cell")


def _enclosing_function(tree: ast.AST, marker: int, first: int) -> str:
    """The innermost function that begins before the marker and holds the region's first line; "" if there is none."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    around = [node for node in functions if node.lineno < marker and first <= node.end_lineno]
    return max(around, key=lambda node: node.lineno).name if around else ""
