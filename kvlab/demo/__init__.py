"""`kvlab demo`: one workload through three ways of managing the KV cache, side by side.

    workload   24 requests, the same in every run
    race       three engines, stepped together; a Frame shows what one sees after each step
    narrate    one sentence for each step
    view       the pools, live in the terminal, or as a picture of one step
    report     the table, how to read it, some answers, where to go next

On a terminal it takes about half a minute, most of it to watch; elsewhere (a pipe, CI) it prints a picture of one step.
"""

from time import monotonic, sleep

from rich.console import Console
from rich.live import Live

PICTURED_STEP = 38  # what stays on the page: the pools after this step
SECONDS_PER_STEP = 0.1  # while the paged engine runs
SECONDS_PER_STEP_OTHERWISE = 0.03  # where little changes
SECONDS_FOR_NEWS = 1.5  # to read a sentence about something that had not happened before
FRAME_SECONDS = 0.08  # a redraw takes time too, most of all over a slow line

INTRO = (
    "24 requests, A to X (F is sampled 3 times, as F, Y and Z), go through three engines: the same model, 24 seats, "
    "the same pool of 96 blocks of 16 tokens. They differ in how they hand out memory (L33 1, 2) and in when they let "
    "a request in (L33 3)."
)


def run(fast: bool = False, model: str = "tiny", console: Console | None = None):
    """Show the demo; returns the three lanes (kvlab.demo.race.Lane) with their frames, outputs and counters.

    fast: no live view, as where the console is no terminal. model: what LLM takes; its tokenizer needs a chat template.
    """
    console = console or Console(highlight=False)
    console.print("\nkvlab demo: where does the KV cache go?", style="bold")
    console.print(INTRO + "\n")
    with console.status("Loading PyTorch and the model ..."):
        from kvlab.demo.race import make_lanes, one_thread  # seconds, so the title comes first
        from kvlab.demo.report import print_report
        from kvlab.demo.view import picture

        lanes = make_lanes(model)
    with one_thread():
        if fast or not console.is_terminal or console.is_dumb_terminal:
            for lane in lanes:
                while not lane.done:
                    lane.step()
        else:
            watch(console, lanes)

    console.print(f"The three pools after step {PICTURED_STEP}", style="bold")
    console.print(picture(lanes, [lane.frames[:PICTURED_STEP][-1] for lane in lanes], console))
    console.print()
    print_report(console, lanes)
    return lanes


def watch(console: Console, lanes: list) -> None:
    """Step the lanes to their ends in a live view: together where the terminal is wide, else one after the other."""
    from kvlab.demo.view import is_wide, picture

    paged = lanes[-1]
    for group in [lanes] if is_wide(console) else [[lane] for lane in lanes]:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            drawn = 0.0
            while any(not lane.done for lane in group):
                started = monotonic()
                stepped = [lane for lane in group if not lane.done]
                news = any([lane.step().is_news for lane in stepped])
                if news or started - drawn >= FRAME_SECONDS:
                    live.update(picture(group, [lane.frames[-1] for lane in group], console), refresh=True)
                    drawn = started
                pause = SECONDS_PER_STEP if paged in stepped else SECONDS_PER_STEP_OTHERWISE
                sleep(max(0.0, started + (SECONDS_FOR_NEWS if news else pause) - monotonic()))
