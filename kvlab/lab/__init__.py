"""The labs: what a notebook calls, and how notebooks, workspaces and the student tree are made (docs/labs.md).

    Lab("03"): notebook      parse -> source -> build: labs/      work, merge: work/      solve, student: for authors
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlab.lab.notebook import Lab

__all__ = ["Lab"]


def __getattr__(name: str):
    # Copying and updating a lab needs no package at all; grading, behind Lab, needs hypothesis.
    if name != "Lab":
        raise AttributeError(f"module 'kvlab.lab' has no attribute {name!r}")
    from kvlab.lab.notebook import Lab

    return Lab
