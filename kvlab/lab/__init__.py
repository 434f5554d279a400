"""The labs: what a notebook calls, and how notebooks, workspaces and the student tree are made (docs/labs.md)."""

from kvlab.lab.notebook import Lab

__all__ = ["Lab"]
