"""The shape of a radix tree on paper: which edge stands in which row, after how many blocks (lab 06; the live view)."""

from typing import Any


def outline(root: Any) -> list[tuple[Any, int, int]]:
    """(edge, blocks before it, row) for all below `root`, parents first; None is an empty tree.

    root: a node with chunks and children, as RadixNode. An edge shares its row with its first child; each leaf has a
    row of its own.
    """
    edges: list[tuple[Any, int, int]] = []

    def place(node: Any, depth: int, row: int) -> int:
        """Give `node` and all below it their rows; the next free row."""
        edges.append((node, depth, row))
        for child in node.children.values():
            row = place(child, depth + len(node.chunks), row)
        return row + (not node.children)

    num_rows = 0
    for child in root.children.values() if root is not None else ():
        num_rows = place(child, 0, num_rows)
    return edges
