"""Running a solved lab: what is a failure, and how it is told."""

import os

import pytest

from kvlab.lab.solve import LabFailed, run_solved
from kvlab.lab.source import read_source


def lab(tmp_path, *cells: str):
    path = tmp_path / "03_x.py"
    path.write_text("\n\n".join(f"# %%\n{cell}" for cell in cells), encoding="utf-8")
    return read_source(path, {})


def test_it_runs_like_a_students_copy(tmp_path):
    probe = "import os, kvlab\nprint(os.environ['OMP_NUM_THREADS'], os.environ['KVLAB_STRICT'], os.listdir('.'))"
    node, seconds = run_solved(lab(tmp_path, probe))
    assert node.cells[0].outputs[0].text == "1 1 []\n" and seconds > 0
    assert "KVLAB_STRICT" not in os.environ


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import traceback\ntry: 1 / 0\nexcept ArithmeticError: traceback.print_exc()", "a traceback was shown: Zero"),
        ("print('✗ free_queue: not yet')", "a check failed: ✗ free_queue: not yet"),
        ("from IPython.display import display\ndisplay({'text/plain': '✗ no'}, raw=True)", "a check failed: ✗ no"),
        ("import os\nos._exit(1)", "the kernel died"),
    ],
)
def test_a_failure_names_file_cell_and_line(tmp_path, cell, message):
    with pytest.raises(LabFailed, match=f"^03_x.py, cell 2, line 4: {message}"):
        run_solved(lab(tmp_path, "x = 1", cell))


def test_a_lab_that_hangs_is_stopped(tmp_path):
    with pytest.raises(LabFailed, match="cell 1, line 1: still running after 2 s for the whole lab"):
        run_solved(lab(tmp_path, "while True: pass"), seconds=2)
