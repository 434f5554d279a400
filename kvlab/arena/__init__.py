"""Allocation on paper: memory in contiguous regions, and what is wasted by that (L33 1.1-1.4; lab 02)."""

from kvlab.arena.contiguous import ArenaBase, ContiguousArena, FirstFit, Region, choose_hole
from kvlab.arena.waste import Waste, external_waste, internal_waste, measure, reservation_waste

__all__ = [
    "ArenaBase",
    "ContiguousArena",
    "FirstFit",
    "Region",
    "Waste",
    "choose_hole",
    "external_waste",
    "internal_waste",
    "measure",
    "reservation_waste",
]
