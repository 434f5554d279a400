"""Notebook files as plain lists of plain cells, whoever saved them.

    .ipynb (Jupyter, VS Code, Colab)  --read_notebook-->  Notebook(metadata, cells)  --text-->  .ipynb

A generated cell's id is made from its content. So a cell whose id still fits its content is as we made it; any other
was typed by somebody and must not be lost. An exercise's two cells are named after the exercise instead, and the one
with the solution carries the digest of its stub, to the same end.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Cell = dict[str, Any]  # cell_type, id, metadata, source (one string); code cells also outputs and execution_count
OURS = ("nbgrader", "kvlab", "deletable", "editable")  # what the generator writes into a cell's metadata
VALID_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
DEFINES = re.compile(r"^(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]+)?=(?!=)", re.M)


@dataclass
class Notebook:
    """cells in order; metadata of the whole, ours under "kvlab": {lab, lang, version}."""

    metadata: dict[str, Any]
    cells: list[Cell]

    @property
    def about(self) -> Mapping[str, Any]:
        about = self.metadata.get("kvlab")
        return about if isinstance(about, dict) else {}

    def text(self) -> str:
        """The file's text (nbformat 4.5), keys sorted and sources split into lines: made for diffs."""
        cells = [cell | {"source": cell["source"].splitlines(keepends=True)} for cell in self.cells]
        data = {"cells": cells, "metadata": self.metadata, "nbformat": 4, "nbformat_minor": 5}
        return json.dumps(data, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def digest(cell_type: str, source: str) -> str:
    """12 hexadecimal digits that stand for a cell's content."""
    return hashlib.sha256(f"{cell_type}\n{source}".encode("utf-8", "surrogatepass")).hexdigest()[:12]


def free_id(wanted: str, taken: set[str]) -> str:
    """`wanted`, or wanted-2, -3, ... if that is taken; the answer is added to `taken`."""
    number, candidate = 1, wanted
    while candidate in taken:
        number += 1
        candidate = f"{wanted}-{number}"
    taken.add(candidate)
    return candidate


def read_notebook(path: Path) -> Notebook:
    """The notebook in a file, what frontends leave out filled in. ValueError if it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
        cells = [_read_cell(cell) for cell in data["cells"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a notebook ({type(error).__name__}: {error}): save it in Jupyter again, or move it away"
        ) from None
    metadata = data.get("metadata")
    return Notebook(metadata if isinstance(metadata, dict) else {}, cells)


def _read_cell(data: Mapping[str, Any]) -> Cell:
    source = data["source"] if isinstance(data["source"], str) else "".join(data["source"])
    metadata = data.get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    # Colab writes nbformat 4.0, which has no ids, and keeps them in the metadata.
    name = data.get("id") or metadata.get("id")
    cell = {key: value for key, value in data.items() if key in ("attachments", "outputs", "execution_count")}
    return as_type(
        cell
        | {
            "cell_type": data["cell_type"],
            "id": name if isinstance(name, str) and VALID_ID.fullmatch(name) else "",
            "metadata": metadata,
            "source": source.replace("\r\n", "\n").replace("\r", "\n"),
        },
        data["cell_type"],
    )


def as_type(cell: Cell, cell_type: str) -> Cell:
    """The cell as one of that type, with the fields that such a cell must have and without those it must not have."""
    cell = cell | {"cell_type": cell_type}
    if cell_type == "code":
        cell.pop("attachments", None)
        return cell | {"outputs": cell.get("outputs", []), "execution_count": cell.get("execution_count")}
    return {key: value for key, value in cell.items() if key not in ("outputs", "execution_count")}


def write_text(path: Path, text: str) -> None:
    """All of it or nothing: a crash leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8", newline="\n", errors="surrogatepass")
    os.replace(beside, path)


def grade_id(cell: Cell) -> str | None:
    """The nbgrader name of an exercise's cell: NAME with the solution, check-NAME with the check."""
    tag = cell["metadata"].get("nbgrader")
    name = tag.get("grade_id") if isinstance(tag, dict) else None
    return name if isinstance(name, str) else None


def is_solution(cell: Cell) -> bool:
    """Whether the student is to write in this cell."""
    return grade_id(cell) is not None and bool(cell["metadata"]["nbgrader"].get("solution"))


def stub_digest(cell: Cell) -> str | None:
    """The digest of the stub that a solution cell was handed out with."""
    tag = cell["metadata"].get("kvlab")
    return tag.get("stub") if isinstance(tag, dict) else None


def defined_names(source: str) -> set[str]:
    """What a cell defines at its left margin; also of a cell that does not parse."""
    return {function or variable for function, variable in DEFINES.findall(source)}
