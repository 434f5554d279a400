"""A made-up lab: the grading is tested on it."""

from hypothesis import strategies as st

from kvlab.blocks import OutOfBlocks
from kvlab.grade import AtMost, Exercise, LabInfo, OneOf, Trace, calls, say, walks

LAB = LabInfo(title=say("A counter"), sections="none")


class Cdiv(Exercise):
    """Round up."""

    name, points, defines, section = "cdiv", 2, ("cdiv",), "L33 2.2"
    ours = {"cdiv": "kvlab.blocks.table:cdiv"}
    bars = ("kvlab.blocks.table:BlockTable", "kvlab.blocks.pool:BlockPool.touch")
    hints = (say("a"), say("b"))
    seconds, all_seconds = 1.0, 20.0
    examples = (Trace((), (("cdiv", 0, 4),)), Trace((), (("cdiv", 8, 4),)))

    class Oracle:
        def cdiv(self, a, b):
            return len(range(0, a, b))

    def traces(self):
        return calls("cdiv", st.integers(0, 10_000), st.integers(1, 64))

    def explain(self, op, expected, got):
        return say("{tokens} tokens need {blocks} blocks", tokens=op[1], blocks=expected)

    def explain_error(self, op, expected, error, message):
        return say("no token is no division") if error == "ZeroDivisionError" else None


class Later(Exercise):
    """What an earlier exercise would like to call."""

    name, points, stretch, defines, section = "later", 1, True, ("Later",), "L33 6.3"
    ours = {"Later": "kvlab.blocks.table:cdiv"}
    hints = (say("e"),)
    examples = (Trace((), (("Later", 4, 2),)),)

    class Oracle:
        def Later(self, a, b):
            return 2


class Stack(Exercise):
    """A stack that refuses to be empty."""

    name, points, defines, section = "stack", 3, ("Stack",), "L33 6.3"
    driver = "StackDriver"
    hints = (say("c"),)
    seconds = 1.0
    examples = (Trace((2,), (("pop",), ("pop",), ("pop",))),)

    class Oracle:
        def __init__(self, n):
            self.items = list(range(n))

        def push(self, x):
            self.items.append(x)

        def pop(self):
            if not self.items:
                raise OutOfBlocks
            return self.items.pop()

        def any(self, *, got):
            return OneOf(tuple(self.items)) if self.items else None

        def work(self):
            return AtMost(3)

        def ops(self):
            return [("pop",), ("push", len(self.items)), ("any",), ("work",)]

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(0, 3)))


class Extra(Exercise):
    """Something more."""

    name, points, stretch, defines, section = "extra", 1, True, ("extra",), "L33 6.3"
    hints = (say("d"),)
    examples = (Trace((), (("extra",),)),)

    class Oracle:
        def extra(self):
            return {"a": (1, {2})}
