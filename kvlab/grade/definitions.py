"""What a notebook defines, and what of it an exercise needs.

    cells --parse--> top-level statements --from the names that the exercise defines, through all they use--> source

Only what is needed is run: not the demonstrations, not a cell with a syntax error elsewhere. Of several definitions
of a name the last one counts, as it would after running the notebook from top to bottom; where a cell stands, what it
is tagged with and how often it was copied does not matter.
"""

import ast
import json
import re
import symtable
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROVIDED = {"lab", "check", "hint"}  # the child gives stand-ins for these


@dataclass
class Definitions:
    """source: (label, text) of each statement to run, in order. missing: names that no cell defines."""

    source: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)  # names that several cells define: the last one counts
    broken: list[str] = field(default_factory=list)  # syntax errors, told, of cells that seem to define what is missing

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.source)

    @property
    def is_stub(self) -> bool:
        """Whether a part of it is as the lab hands it out."""
        return 'NotImplementedError("Lab ' in self.text


def notebook_cells(path: str | Path) -> tuple[list[str], dict]:
    """The sources of the code cells of an .ipynb, and the notebook's metadata. ValueError if it is no notebook."""
    try:
        notebook = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        cells = [cell for cell in notebook["cells"] if cell.get("cell_type") == "code"]
        sources = [cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"]) for cell in cells]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a notebook (.ipynb, JSON with cells): save it in Jupyter again") from None
    metadata = notebook.get("metadata")
    return [s.replace("\r\n", "\n") for s in sources], metadata if isinstance(metadata, dict) else {}


@dataclass
class _Statement:
    cell: int
    text: str
    binds: set[str]
    now: set[str]  # names that it reads when it is run: bases, decorators, right-hand sides
    later: set[str]  # names that its functions read when they are called
    patches: set[str]  # names whose attributes it sets
    line: int  # in its cell, from 1


def collect(cells: Sequence[str], names: Iterable[str]) -> Definitions:
    """The statements that define `names` and all that they use, in notebook order."""
    statements, errors = [], []
    for index, cell in enumerate(cells):
        text = without_magics(cell)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            told = f"{getattr(error, 'msg', None) or error}, line {getattr(error, 'lineno', '?')}"
            errors.append((index, cell, told))
            continue
        statements += [_statement(index, node, text) for node in tree.body]
    names, result = list(names), Definitions()
    wanted: set[int] = set()
    todo = [(name, len(statements)) for name in names]
    seen = set()
    while todo:
        name, before = todo.pop()
        if (name, before) in seen:
            continue
        seen.add((name, before))
        found = next((i for i in reversed(range(before)) if name in statements[i].binds), None)
        if found is not None and name in names:
            # The last attempt is what counts, also if it is one with a syntax error: an older one is no answer.
            attempts = [told for index, cell, told in errors if index > statements[found].cell and _defines(cell, name)]
            if attempts:
                found, result.broken = None, result.broken + attempts[-1:]
        if found is None:
            if name in names:
                result.missing.append(name)
            continue
        patching = [i for i in range(found + 1, len(statements)) if name in statements[i].patches]
        for i in [found, *patching]:
            if i not in wanted:
                wanted.add(i)
                # What is read now has been defined before (class Pool(Pool)); what is read later, last.
                todo += [(n, i) for n in statements[i].now - PROVIDED]
                todo += [(n, len(statements)) for n in statements[i].later - PROVIDED]
    result.source = [
        (f"<your notebook, code cell {statements[i].cell + 1}>", "\n" * (statements[i].line - 1) + statements[i].text)
        for i in sorted(wanted)
    ]
    for name in result.missing:
        result.broken += [told for _, cell, told in errors if name in cell and told not in result.broken]
    result.repeated = [name for name in names if len({s.cell for s in statements if name in s.binds}) > 1]
    return result


def _defines(cell: str, name: str) -> bool:
    """Whether a cell that cannot be parsed looks as if it were to define `name`."""
    return re.search(rf"^(?:def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", cell, re.M) is not None


def without_magics(cell: str) -> str:
    """IPython's %magic and !shell lines, made empty, so that the others keep their numbers.

    A cell magic that runs the cell as Python is such a line; under any other (%%bash) the cell is no Python.
    """
    first = cell.lstrip().split("\n")[0]
    if first.startswith("%%") and first[2:].split(" ")[0] not in ("time", "capture", "prun"):
        return ""
    return "\n".join("" if line.lstrip().startswith(("%", "!", "?")) else line for line in cell.split("\n"))


def _statement(cell: int, node: ast.stmt, text: str) -> _Statement:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    source = "\n".join(text.split("\n")[first - 1 : node.end_lineno])
    if node.col_offset or "\n" not in source:  # `a = 1; b = 2` stands on one line
        source = ast.get_source_segment(text, node) or source
    binds, patches = set(), set()
    for part in ast.walk(node) if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While) else [node]:
        _names(part, binds, patches)
    return _Statement(cell, source, binds, *_reads(source), patches, first)


def _names(node: ast.AST, binds: set[str], patches: set[str]) -> None:
    """Names that a statement binds in the notebook, and names whose attributes or items it sets."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        binds.add(node.name)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        binds |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in [part for whole in targets for part in ast.walk(whole)]:
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                binds.add(target.id)
            elif isinstance(target, ast.Attribute | ast.Subscript) and isinstance(target.value, ast.Name):
                patches.add(target.value.id)


def _reads(source: str) -> tuple[set[str], set[str]]:
    """Names that the statement reads from the notebook: when it is run, and when its functions are called."""
    try:
        top = symtable.symtable(source, "cell", "exec")
    except SyntaxError:
        return set(), set()
    now = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    later: set[str] = set()
    tables = [(table, False) for table in top.get_children()]
    while tables:
        table, in_function = tables.pop()
        in_function |= table.get_type() == "function"
        names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        (later if in_function else now).update(names)
        tables += [(child, in_function) for child in table.get_children()]
    return now, later
