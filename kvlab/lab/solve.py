"""The solved labs, run from top to bottom as a student would run them, to HTML.

    Source.notebook(lang, solved=True)  --a kernel of its own, in an empty folder-->  outputs, seconds --> NN_name.html

A check that fails raises here (KVLAB_STRICT), and torch gets one thread, so that several labs can run side by side.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from kvlab.lab.source import Source

PLANNED = {"10": 180, "13": 180, "14": 180}  # seconds on a laptop with two cores; other labs 60
SLOWER = 3  # a machine may be so much slower before a lab is stopped


class LabFailed(Exception):
    """A solved lab that does not run: the message names file, cell, line and error."""


def planned_seconds(number: str) -> int:
    """How long the solved lab may take on a small laptop."""
    return PLANNED.get(number, 60)


def run_solved(source: Source, lang: str = "en", seconds: float | None = None) -> tuple[Any, float]:
    """(the executed notebook as nbformat has it, seconds it took). LabFailed: a cell raised, hung or killed the kernel,
    or its output holds a traceback or a failed check. `seconds`: for the whole lab."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    cells = list(source.in_language(lang))
    node = nbformat.reads(source.notebook(lang, solved=True).text(), as_version=4)
    limit = seconds or SLOWER * planned_seconds(source.number)
    began, at = time.monotonic(), 0

    def on_cell_start(cell: Any, cell_index: int) -> None:
        nonlocal at
        at = cell_index

    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            node,
            kernel_name="python3",
            timeout_func=lambda cell: max(1, round(limit - (time.monotonic() - began))),
            store_widget_state=False,  # a saved state would hide the pictures that stand in for widgets
            on_cell_start=on_cell_start,
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute(env=_environment())
        except CellExecutionError as error:
            raise LabFailed(f"{cells[at].where}: {error.ename}: {error.evalue}") from None
        except CellTimeoutError:
            raise LabFailed(f"{cells[at].where}: still running after {limit:.0f} s for the whole lab") from None
        except DeadKernelError:
            raise LabFailed(f"{cells[at].where}: the kernel died") from None
    for written, cell in zip(cells, node.cells, strict=True):
        if fault := next(filter(None, map(_fault, cell.get("outputs", []))), None):
            raise LabFailed(f"{written.where}: {fault}")
    return node, time.monotonic() - began


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])  # kvlab need not be installed
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "KVLAB_STRICT": "1"}


def _fault(output: Any) -> str:
    """What is wrong in an output that was shown without being raised; "" if nothing is."""
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    if "Traceback (most recent call last)" in text:
        return "a traceback was shown: " + text.strip().splitlines()[-1]
    return "a check failed: " + text.splitlines()[0] if text.startswith("✗") else ""


def write_html(node: Any, path: Path) -> None:
    """An executed notebook as one page."""
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_notebook_node(node, resources={"metadata": {"name": path.stem}})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
