"""The state of the kernel's view: what the walk over the pages has read and computed so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvlab.events import Event
from kvlab.watch.kernel_run import BLOCKS, LENGTH, SIZE


@dataclass(frozen=True)
class Walk:
    """source: the kernel's lines from the loop on. edited: which of them was changed, -1 for none. rows: those that ran
    in this frame. values, before: name -> its numbers, now and a frame ago. fresh: names that this turn of
    the loop has set. right: what _right says."""

    source: tuple[str, ...] = ()
    edited: int = -1
    size: int = SIZE
    length: int = LENGTH
    num_blocks: int = BLOCKS
    table: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    before: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()
    right: tuple[float, ...] = ()

    def one(self, name: str) -> float:
        return self.values[name][0]

    @property
    def tile(self) -> int:
        """The index in the table of the block that is being read; -1 before and behind the walk."""
        return int(self.one("block_index")) if "block_index" in self.values and not self.done else -1

    @property
    def done(self) -> bool:
        return "out" in self.values

    @property
    def dim(self) -> int:
        return len(self.values["query"])

    def equals(self) -> tuple[bool, bool, bool]:
        """Whether largest, total and output at the end are those of softmax over all tokens at once."""
        largest, total, *output = self.right
        pairs = (("largest", largest), ("total", total), ("out", output))
        return tuple(bool(np.allclose(self.values[name], right, rtol=1e-5)) for name, right in pairs)


def after(walk: Walk, events: Sequence[Event]) -> Walk:
    now, values, rows, changed = walk, dict(walk.values), [], set()
    for event in events:
        if event.kind == "source":
            edited, *lines = event.values
            now = replace(now, source=tuple(lines), edited=edited)
        elif event.kind == "cache":
            size, length, num_blocks, *table = event.values
            now = replace(now, size=size, length=length, num_blocks=num_blocks, table=tuple(table))
        elif event.kind == "right":
            now = replace(now, right=tuple(event.values))
        elif event.kind == "line":
            row, name, *numbers = event.values
            rows.append(row)
            if name:
                values[name] = tuple(float(x) for x in numbers)
                changed.add(name)
    return replace(now, rows=tuple(r for r in rows if r >= 0), values=values, before=walk.values,
                   changed=frozenset(changed),
                   fresh=frozenset(changed if "block" in changed else changed | walk.fresh))  # fmt: skip
