"""Allocation on paper: memory in contiguous regions or pages, and what is wasted by that (L33 1.1-1.4; lab 02)."""

from kvlab.arena.buddy import BuddyArena, BuddyBase
from kvlab.arena.contiguous import ArenaBase, ContiguousArena, FirstFit, Region, choose_hole
from kvlab.arena.expectation import Utilisation, expected_utilisation, tail_waste
from kvlab.arena.paged import PagedArena, PagedBase, measure_paged
from kvlab.arena.trace import Job, Moment, Span, make_jobs, run_contiguous, run_paged
from kvlab.arena.waste import Waste, external_waste, internal_waste, measure, reservation_waste

__all__ = [
    "ArenaBase",
    "BuddyArena",
    "BuddyBase",
    "ContiguousArena",
    "FirstFit",
    "Job",
    "Moment",
    "PagedArena",
    "PagedBase",
    "Region",
    "Span",
    "Utilisation",
    "Waste",
    "choose_hole",
    "expected_utilisation",
    "external_waste",
    "internal_waste",
    "make_jobs",
    "measure",
    "measure_paged",
    "reservation_waste",
    "run_contiguous",
    "run_paged",
    "tail_waste",
]
