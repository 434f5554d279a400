"""What is printed after the race: the table, how to read it, a few answers, and where to go next."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvlab.demo.race import Lane
from kvlab.demo.view import colour

READABLE = 100  # columns; longer lines are hard to read

# (what, how to compute it from a Lane, section of the textbook)
ROWS: tuple[tuple[str, Callable[[Lane], str], str], ...] = (
    ("steps until all are done", lambda lane: f"{lane.stats.num_steps}", "L33 3.2"),
    ("steps until an answer is done, mean", lambda lane: f"{lane.mean_answered_at:.0f}", "L33 3.1"),
    ("time in those steps, s", lambda lane: f"{lane.seconds:.2f}", ""),
    ("tokens computed", lambda lane: f"{lane.stats.num_scheduled_tokens}", "L33 6.1"),
    ("prompt tokens found in the pool", lambda lane: f"{lane.stats.num_prefix_hit_tokens}", "L33 6.1"),
    ("running at once, most", lambda lane: f"{lane.stats.peak_running}", "PAV 4"),
    ("running at once, mean", lambda lane: f"{lane.mean_running:.1f}", "L33 3.3"),
    ("owned slots that hold a token", lambda lane: f"{lane.utilisation:.0%}", "L33 1.3"),
    ("idle seats, sum over steps", lambda lane: f"{lane.stats.num_idle_seats}", "L33 3.1"),
    ("blocks copied on write", lambda lane: f"{lane.stats.num_copy_on_writes}", "L33 2.4"),
    ("preemptions", lambda lane: f"{lane.num_preemptions}", "L33 5.3"),
)


def table(lanes: list[Lane]) -> Table:
    """The three engines in numbers; fits 80 columns."""
    result = Table(title="The same requests, model and pool", title_justify="left", title_style="bold", box=None,
                   pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)  # fmt: skip
    result.add_column("", no_wrap=True)
    for lane in lanes:
        result.add_column(f"{lane.setup.name}\n{lane.setup.zh}", justify="right", no_wrap=True)
    result.add_column("see", style="dim", no_wrap=True)
    for what, value, section in ROWS:
        result.add_row(what, *map(value, lanes), section)
    return result


def differences(lanes: list[Lane]) -> list[str]:
    """Letters of the sequences whose tokens are not the same in all engines."""
    first = lanes[0].outputs
    return sorted(letter for letter in first if any(lane.outputs[letter] != first[letter] for lane in lanes))


def verdict(lanes: list[Lane]) -> Text:
    """Were the answers the same? Compared here, token for token."""
    count = len(lanes[0].outputs)
    if letters := differences(lanes):
        return Text(
            f"{count - len(letters)} of {count} answers are the same in all three engines, not those of "
            f"{', '.join(letters)}. Batches of other sizes round differently, which can tip a choice between two "
            f"tokens of almost equal logits (L33 8.1).", "bold yellow")  # fmt: skip
    return Text(
        f"All {count} answers are the same in all three engines, token for token: "
        f"memory and scheduling change when a token comes, not which one.", "bold green")  # fmt: skip


def takeaways(lanes: list[Lane]) -> list[str]:
    """What to read in the table, each with its section. Every number is taken from the run."""
    contiguous, static, paged = lanes
    hits, queried = paged.stats.num_prefix_hit_tokens, paged.stats.num_prefix_queried_tokens
    seat_steps = static.stats.num_idle_seats + sum(frame.running for frame in static.frames)
    lines = [
        f"Reservation (预留浪费, L33 1.3): {contiguous.setup.name} admits {contiguous.stats.peak_running} requests and "
        f"its pool is full, but only {contiguous.utilisation:.0%} of the slots they own hold a "
        f"token. On pages (块表, L33 2.2) up to {paged.stats.peak_running} run in the same memory.",
        f"The batch (静态批处理, L33 3.1): {static.setup.name} has pages too, but "
        f"{static.stats.num_idle_seats / seat_steps:.0%} of its seats idle: nobody enters before all have left. "
        f"Continuous batching (连续批处理, L33 3.2) lets one in wherever one leaves: {paged.stats.num_steps} steps "
        f"instead of {static.stats.num_steps}.",
        f"Sharing (前缀缓存, L33 6.1): {hits} of {queried} prompt tokens were found, not computed. F was sampled 3 "
        f"times by fork (分叉), with {paged.stats.num_copy_on_writes} blocks copied on write (写时复制, L33 2.4).",
    ]
    if paged.num_preemptions:
        lines.append(
            f"The price (抢占, L33 5.3): where the pool ran dry, the youngest gave way, {paged.num_preemptions} in "
            f"all, and {paged.stats.num_recomputed_tokens} tokens were computed twice."
        )
    steps, time = contiguous.stats.num_steps / paged.stats.num_steps, contiguous.seconds / paged.seconds
    why = ", for a fuller step takes longer (L33 3.4)" if time < steps else ""
    lines.append(
        f"Steps are not seconds: {contiguous.setup.name} took {steps:.1f} times the steps of {paged.setup.name}, and "
        f"{time:.1f} times the time, measured here{why}."
    )
    return lines


def print_report(console: Console, lanes: list[Lane]) -> None:
    """Everything after the race, in an order that reads well from top to bottom."""
    console.print(table(lanes))
    console.print()
    console.print(verdict(lanes))
    console.print()
    console.print("How to read it", style="bold")
    for line in takeaways(lanes):
        bullet(console, Text(line))
    console.print()
    console.print("Three of the answers", style="bold")
    paged = lanes[-1]
    questions = {job.letter: job.question for job in paged.jobs}
    for letter in "ABE":
        answer = paged.llm.tokenizer.decode(paged.outputs[letter])
        bullet(console, Text(questions[letter], "bold"), letter)
        bullet(console, Text(answer), " ")
    console.print()
    console.print("Where to go next", style="bold")
    for command, what in (
        ('kvlab generate "What is a KV block?"', "ask the model something; --help shows the engine's options"),
        ("make lab", "build each of these layers yourself"),
        ("make test", "what holds the engine to its word"),
        ("docs/architecture.md", "the way of a token through the house"),
    ):
        bullet(console, Text.assemble((f"{command:<38}", "cyan"), what))


def bullet(console: Console, text: Text, mark: str = "-") -> None:
    """`text` behind a mark, wrapped with a hanging indent; a letter is drawn like its cells in the pool."""
    lines = text.wrap(console, min(console.width, READABLE) - 4)
    style = f"bold #000000 on {colour(mark)}" if mark.isalpha() else ""
    head = Text.assemble(" ", (mark, style), " ", lines[0])
    console.print(head)
    for line in lines[1:]:
        console.print(Text.assemble("   ", line))
