"""Grading: the student's code in a limited child process, every judgement here. Plain Python and hypothesis.

    notebook cells --collect--> definitions --load--> Child: driver.py and the student's code
                                                        |  one operation with plain values at a time
    checks.py: examples and random traces --------------+
                        |                               v
                     Oracle --------- expected ------ compare ---> Result: points, or the shortest trace that fails

The same grade_exercise() stands behind check("name") in a notebook, `pytest tests/labs --notebook PATH` and
`kvlab grade PATH`.
"""

from kvlab.grade.definitions import Definitions, collect, notebook_cells
from kvlab.grade.exercise import Approx, AtMost, Exercise, LabInfo, LabSpec, OneOf, Trace, calls, load_lab, walks
from kvlab.grade.judge import Result, grade_exercise
from kvlab.grade.report import Report, grade_notebook
from kvlab.grade.text import Text, say

__all__ = [
    "Approx",
    "AtMost",
    "Definitions",
    "Exercise",
    "LabInfo",
    "LabSpec",
    "OneOf",
    "Report",
    "Result",
    "Text",
    "Trace",
    "calls",
    "collect",
    "grade_exercise",
    "grade_notebook",
    "load_lab",
    "notebook_cells",
    "say",
    "walks",
]
