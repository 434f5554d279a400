"""Allocation on paper: memory in contiguous regions, and what is wasted by that (L33 1.1-1.4; lab 02)."""

from kvlab.arena.contiguous import ContiguousArena, Region
from kvlab.arena.waste import Waste, external_waste, internal_waste, measure, reservation_waste

__all__ = [
    "ContiguousArena",
    "Region",
    "Waste",
    "external_waste",
    "internal_waste",
    "measure",
    "reservation_waste",
]
