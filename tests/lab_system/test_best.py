"""What a notebook says where it uses ours in the place of the student's: once in each run of a cell, and truly."""

from kvlab.lab import Lab
from kvlab.lab.source import code_cells

RIGHT = "def ghost_idle(lengths):\n    steps = max(lengths)\n    idle = steps * len(lengths) - sum(lengths)\n" \
        "    return steps, idle, idle / (steps * len(lengths))\n"  # fmt: skip
WRONG = RIGHT.replace("return steps,", "return steps + 1,")
ONE_TOO_MANY = """
def admit(num_running, max_num_seqs, batch_is_forming):
    return num_running <= max_num_seqs

def admit_static(num_running, max_num_seqs, batch_is_forming):
    return batch_is_forming and num_running < max_num_seqs
"""


def lab_after(source):
    """Lab 07 in a notebook in which `source` has been run, and the list of its cells."""
    cells, names = [source], {}
    exec(source, names)
    return Lab("07", cells=cells, names=names), cells


def test_it_is_said_in_each_run_of_a_cell_that_ours_is_used(capsys):
    lab, cells = lab_after(WRONG)
    lab.check("ghost_idle")
    for _ in range(2):
        cells.append("ghost = lab.best('ghost_idle')")  # the student runs this cell, after the check and once more
        capsys.readouterr()
        found = [lab.best("ghost_idle")([3, 1]) for _ in range(3)]
        assert found == [(3, 2, 1 / 3)] * 3
        assert capsys.readouterr().out.count("does not pass its check yet") == 1


def test_nothing_is_said_where_it_passes_or_is_not_written(capsys):
    stub = next(cell for cell in code_cells("07", solved=False) if "def ghost_idle" in cell)
    for source in (RIGHT, stub):
        lab, _ = lab_after(source)
        capsys.readouterr()
        assert lab.best("ghost_idle")([3, 1]) == (3, 2, 1 / 3)
        assert capsys.readouterr().out == ""


def test_an_engine_with_a_part_that_fails_its_check_says_so(capsys):
    lab, _ = lab_after(ONE_TOO_MANY)
    capsys.readouterr()
    assert lab.run_engine(stand_in=True, num_requests=2, max_tokens=3).same_tokens
    said = capsys.readouterr().out
    assert "Your admit, admit_static does not pass its check yet" in said
    assert "No part of yours passes its check yet" in said
