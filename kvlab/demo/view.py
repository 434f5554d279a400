"""The picture: each engine's block pool as a grid of cells, its numbers, and the sentence of the step.

    +- paged ------------+
    | step 31  run 24 ..|      A   a block that holds tokens of request A      (its letter is its identity,
    | A A + B B B a . .  |     a   reserved for A, holds nothing yet            colour only helps the eye)
    | owned  #######     |     4 + one block that 4 (10 or more) requests share
    | sentence           |     :   nobody's, its tokens kept for a prefix hit   .  free
    +--------------------+

Cells are ASCII: the width of symbols such as squares differs between terminals, above all Chinese ones.
"""

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from kvlab.blocks import cdiv
from kvlab.demo.race import BLOCK_SIZE, BUDGET, Frame, Lane, Setup
from kvlab.demo.workload import LETTERS

WIDE = 110  # columns from which on three panels stand side by side
# Middle tones: black text reads well on them, and they read well as text on black and on white.
PALETTE = ("#e69f00", "#56b4e9", "#2fae84", "#d97fae", "#e0703a", "#8f9ff0", "#a8a432", "#c98b5b")
NOTE_LINES = {True: 3, False: 2}  # kept free for the sentence, so that nothing jumps; side by side or alone


def colour(letter: str) -> str:
    return PALETTE[LETTERS.index(letter.upper()) % len(PALETTE)]


def style_of(kind: str, text: str) -> str:
    """The rich style of a cell."""
    if kind == "held":
        return f"bold #000000 on {colour(text)}"
    if kind == "reserved":
        return colour(text)
    return {"shared": "bold #000000 on #dddddd", "cached": "cyan", "free": "dim"}[kind]


def grid(frame: Frame, per_row: int) -> Text:
    """The pool, `per_row` blocks to a row, two columns each."""
    text = Text()
    for index, cell in enumerate(frame.cells):
        if index and index % per_row == 0:
            text.append("\n")
        text.append(f"{cell.text:<2}", style_of(*cell))
    return text


def bar(label: str, share: float, width: int, style: str) -> Text:
    """A labelled bar of `share`, 0 to 1."""
    full = round(share * width)
    text = Text(f"{label:<7}")
    text.append("#" * full, style)
    text.append("-" * (width - full), "dim")
    return text.append(f" {share:>4.0%}")


def tokens_bar(frame: Frame, width: int) -> Text:
    """The step's tokens, one letter for each few: decodes, then prompt tokens; '>' where they run off the budget."""
    number = frame.decode_tokens + frame.prefill_tokens
    decode = min(width, cdiv(frame.decode_tokens * width, BUDGET))
    total = min(width, cdiv(number * width, BUDGET))
    text = Text(f"{'tokens':<7}")
    text.append("d" * decode, "bold green")
    text.append("p" * (total - decode), "bold magenta")
    text.append("-" * (width - total), "dim")
    return text.append(">" if number > BUDGET else " ").append(f"{number:>4}")


def panel(setup: Setup, frame: Frame, wide: bool) -> Panel:
    """One engine after one step; 36 columns wide side by side, 78 alone."""
    inner = 32 if wide else 72
    bar_width = inner - 7 - 5
    state = Text(f"step {frame.step:<4}", "bold")
    state.append(f"run {frame.running:<3}wait {frame.waiting:<3}done {frame.finished}", "not bold")
    lines: list[RenderableType] = [
        Text(setup.has, "green"),
        Text(setup.rest, "green" if setup.rest.startswith("+") else "red"),
        Text(),
        state,
        grid(frame, 16 if wide else 32),
        Text(),
        bar("owned", frame.slots_owned / (len(frame.cells) * BLOCK_SIZE), bar_width, "bold yellow"),
        bar("filled", frame.filled, bar_width, "bold cyan"),
        tokens_bar(frame, bar_width),
        Text(),
        sentence(frame.note, inner, NOTE_LINES[wide]),
    ]
    title = Text(setup.name, "bold")
    return Panel(Group(*lines), title=title, title_align="left", width=inner + 4, padding=(0, 1))


def sentence(note: str, width: int, lines: int) -> Text:
    """`note`, wrapped and filled up to `lines` lines."""
    wrapped = Text(note, "italic").wrap(Console(width=width), width)
    text = Text("\n").join(wrapped)
    return text.append("\n" * (lines - len(wrapped)))


def legend() -> Text:
    """How to read a panel, in three lines of at most 78 columns."""
    text = Text()
    for kind, sample, meaning in (
        ("held", "A", "holds A's tokens  "),
        ("reserved", "a", "reserved, empty  "),
        ("shared", "4", "shared by 4  "),
        ("shared", "+", "by 10 or more\n"),
        ("cached", ":", "free, tokens kept  "),
        ("free", ".", f"free    tokens: d decode, p prompt, > over {BUDGET}\n"),
    ):
        text.append(f" {sample} ", style_of(kind, sample)).append(f" {meaning}")
    return text.append("owned: blocks that requests hold   filled: slots of those that hold a token")


def picture(lanes: list[Lane], frames: list[Frame], console: Console) -> RenderableType:
    """The panels of `lanes` at `frames`, side by side where the console is wide enough, and the legend."""
    wide = is_wide(console)
    panels = [panel(lane.setup, frame, wide) for lane, frame in zip(lanes, frames, strict=True)]
    return Group(Columns(panels, padding=(0, 0)) if wide else Group(*panels), legend())


def is_wide(console: Console) -> bool:
    return console.width >= WIDE
