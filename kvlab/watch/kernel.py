"""View 9, one query's walk (L33 2.3): pages, tiles, and the running maximum, sum and result of online softmax.

    kernels/online_softmax.py --source--> kvlab.standin (NumPy as `tl`) --a line at a time--> events "line"

One program of the real kernel's source runs on a cache of 7 blocks; no Triton is needed. After each line the names that
it has changed are noted. Head dim 2, blocks of 4, 10 tokens. `scale_log2e` is 1, so that every weight is a power of 2.
Scenarios: "rises": the largest score comes in the last tile. "reversed": the last tile first. "mask_off" and
"rescale_off": the same source with one line spoilt, which is marked.
"""

from collections.abc import Callable, Sequence

from kvlab.events import Event
from kvlab.parts import Parts
from kvlab.watch.kernel_picture import alt, draw, say
from kvlab.watch.kernel_run import LENGTH, SIZE, record_walk
from kvlab.watch.view import Question, Scenario, View
from kvlab.watch.walk import Walk, after

# ---- questions


def _run(scenario: str) -> Callable[[int, Parts], list[Event]]:
    return lambda seed, _: record_walk(scenario, seed)


FIND, LOAD, LARGEST, ALPHA = 17, 18, 20, 21  # frames of the third tile; frame 0 is the set-up, a tile has 8


def _ask_rises(walk: Walk) -> tuple[str, Sequence[str]]:
    old, new = walk.one("largest"), walk.one("new_largest")
    total = walk.one("total")
    return f"The largest score goes from {old:g} to {new:g}. total is {total:g} so far: by what is it multiplied?", [
        "by 0", f"by {2 ** (old - new):g}", "by 1", f"by {2 ** (new - old):g}"]  # fmt: skip


def _answer_rises(states: Sequence[Walk]) -> int:
    before = states[LARGEST]
    gap, alpha = before.one("new_largest") - before.one("largest"), states[ALPHA].one("alpha")
    return [0, 2**-gap, 1, 2**gap].index(alpha)


def _why_rises(states: Sequence[Walk]) -> str:
    now = states[ALPHA]
    old, new = now.one("largest"), now.one("new_largest")
    alpha = now.one("alpha")
    return (f"total and result hold weights relative to {old:g}; times {alpha:g} they are relative to {new:g}, as all "
            "weights from now on.")  # fmt: skip


def _ask_reversed(walk: Walk) -> tuple[str, Sequence[str]]:
    return "The loop is turned round: the last tile comes first. What ends up otherwise than in table order?", [
        "largest", "total", "the output", "nothing: all three are equal"]  # fmt: skip


def _why_reversed(states: Sequence[Walk]) -> str:
    if not all(states[-1].equals()):
        return "The walk depends on the order, and it must not."
    return ("After each tile the sums are right for the tiles seen so far, relative to their largest: any order and "
            "place, up to rounding.")  # fmt: skip


def _ask_mask(walk: Walk) -> tuple[str, Sequence[str]]:
    own = LENGTH - walk.tile * SIZE
    return (f"Without its mask the kernel reads 4 slots of block {walk.table[walk.tile]}, of which {own} are this "
            "request's. What comes out?"), (
        "the right output: they weigh 0", "an error", "a wrong output, no error")  # fmt: skip


def _why_mask(states: Sequence[Walk]) -> str:
    now, own = states[-1], LENGTH % SIZE
    if now.equals()[2]:
        return "The output is right: what lay in the unused slots got no weight."
    strange = sum(now.values["weights"][own:]) / now.one("total")
    return (f"The old slots hold K and V of another request; they lie in the cache, so nothing fails, and they get "
            f"{100 * strange:.0f}% of the weight.")  # fmt: skip


def _ask_rescale(walk: Walk) -> tuple[str, Sequence[str]]:
    old, new = walk.one("largest"), walk.one("new_largest")
    return f"The largest score goes from {old:g} to {new:g}, but alpha is now always 1. What comes out?", (
        "the right output: the division by total mends it", "early tokens count too much",
        "the last tile counts too much", "an error")  # fmt: skip


def _answer_rescale(states: Sequence[Walk]) -> int:
    gap = states[LARGEST].one("new_largest") - states[LARGEST].one("largest")
    return 0 if states[-1].equals()[2] else 1 if states[ALPHA].one("alpha") > 2**-gap else 2


def _why_rescale(states: Sequence[Walk]) -> str:
    gap = states[LARGEST].one("new_largest") - states[LARGEST].one("largest")
    return (f"Tiles 0 and 1 were weighed relative to a maximum that is {gap:g} lower: each of their tokens counts "
            f"{2**gap:g} times too much.")  # fmt: skip


VIEW = View(
    "kernel", "One query's walk (在线 softmax)", Walk(), after, draw, say, alt,
    kinds=frozenset({"source", "line"}),
    legend="bar: lines that ran; broken frame: the edited one; thick: changed; crossed: masked; ?: another's old slot",
    scenarios={
        "rises": Scenario(_run("rises"), Question(LARGEST, ALPHA, _ask_rises, _answer_rises, _why_rises)),
        "reversed": Scenario(_run("reversed"), Question(
            0, -1, _ask_reversed, lambda states: [*states[-1].equals(), False].index(False), _why_reversed)),
        "mask_off": Scenario(_run("mask_off"), Question(
            FIND, -1, _ask_mask, lambda states: 0 if states[-1].equals()[2] else 2, _why_mask)),
        "rescale_off": Scenario(_run("rescale_off"), Question(
            LARGEST, -1, _ask_rescale, _answer_rescale, _why_rescale)),
    },
    takes_parts=False,
    remedy="this view walks through one kernel line by line, which no engine records: take a trace of its scenarios",
)  # fmt: skip
