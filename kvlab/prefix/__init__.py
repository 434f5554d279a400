"""Prefix reuse (L33 6, PAV 3.4): which blocks already hold the beginning of a prompt. Plain Python; lab 05."""

from kvlab.prefix.hash_chain import HashChainIndex

__all__ = ["HashChainIndex"]
