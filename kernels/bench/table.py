"""What the benchmark prints: a table for each section, and the goals beside what was measured."""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
# Columns of p10, p50 and p90 are in microseconds; a rate's unit is its section's.
UNITS = {"prefill": ("TFLOP/s", 1e12, "of GEMM")}
BANDWIDTH = ("TB/s", 1e12, "of copy")
BIG = 256 * 1024  # tokens in the batch, from which on memory alone should be the bound


def table(section: str, rows: list[Row]) -> str:
    """Rows with the same keys in columns, times in microseconds."""
    if not rows:
        return "  nothing: out of time"
    unit, scale, of = UNITS.get(section, BANDWIDTH)
    names: dict[str, str] = {}  # columns that hold something
    for row in rows:
        names |= {key: key for key, value in row.items() if value is not None}
    names |= {key: label for key, label in {"rate": unit, "fraction": of}.items() if key in names}
    names |= {key: f"{key} us" for key in ("p10", "p50", "p90") if key in names}

    def cell(key: str, value: Any) -> str:
        if value is None:
            return "-"
        if key in ("p10", "p50", "p90"):
            return f"{value * 1e6:.1f}"
        if key == "rate":
            return f"{value / scale:.2f}"
        if key == "fraction":
            return f"{value:.0%}"
        if isinstance(value, bool):
            return "yes" if value else "NO" if key == "right" else ""
        return f"{value:.1e}" if isinstance(value, float) else str(value)

    cells = [[cell(key, row.get(key)) for key in names] for row in rows]
    widths = [max(len(line[i]) for line in [list(names.values()), *cells]) for i in range(len(names))]
    first = next(iter(names))
    left = isinstance(rows[0][first], str)
    lines = []
    for line in [list(names.values()), *cells]:
        padded = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        if left:
            padded[0] = line[0].ljust(widths[0])
        lines.append("  " + "  ".join(padded).rstrip())
    return "\n".join(lines)


def goals(sections: dict[str, list[Row]]) -> list[Row]:
    """What was aimed at, and what was measured; None where it was not."""
    chosen = [row for row in sections.get("decodes", []) if row["chosen"] and row["page"] == 16 and row["fraction"]]
    big = [row["fraction"] for row in chosen if row["batch"] * row["length"] >= BIG]
    alone = [row["fraction"] for row in chosen if (row["batch"], row["length"]) == (1, 32768)]
    order = {row["order"]: row["p50"] for row in sections.get("order", []) if row["page"] == 16 and row["p50"]}
    paging = order["shuffled"] / order["in order"] - 1 if len(order) == 2 else None
    checks = [row["right"] for name in ("correctness", "graphs") for row in sections.get(name, [])]
    right = f"{sum(checks)} of {len(checks)}" if checks else None
    return [
        goal("checks that are right", "all", right, lambda _: all(checks)),
        goal("decodes of 256K tokens and more, of copy", "80%, aim 90%", min(big, default=None), lambda x: x >= 0.8),
        goal("one sequence of 32K, of copy", "40%, aim 50%", min(alone, default=None), lambda x: x >= 0.4),
        goal("pages in random order cost", "at most 3%", paging, lambda x: x <= 0.03),
    ]


def goal(what: str, aim: str, measured: Any, reached: Callable[[Any], bool]) -> Row:
    if measured is None:
        return {"goal": what, "aim": aim, "measured": "not measured", "reached": None}
    shown = f"{measured:.1%}" if isinstance(measured, float) else measured
    return {"goal": what, "aim": aim, "measured": shown, "reached": "yes" if reached(measured) else "NO"}
