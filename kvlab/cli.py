"""The command `kvlab` (also `python -m kvlab`): demo, generate, serve, simulate, doctor, the make targets' twins.

Each command imports what it needs when it runs, so that `kvlab --help` starts at once and works without
torch. A ValueError is the user's to mend, so it is shown as one red line and the exit code is 2; any other
error is ours and keeps its traceback.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import kvlab
from kvlab import cli_labs, cli_plan, cli_serve, cli_sim, cli_watch

app = typer.Typer(
    help="An LLM inference engine you can read. Start with kvlab doctor and kvlab demo.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure parts of kvlab on this machine.", no_args_is_help=True)
PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
}  # the rest of the line goes to pytest, ruff, ...
ENGINE, COURSE, LABS, VIEW = "Engine", "Labs", "For work on kvlab", "A view"


def main() -> None:
    """The console script: run a command, and turn a ValueError into one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # an old Windows console lacks the Chinese terms
    try:
        app(prog_name="kvlab")
    except ValueError as error:
        _fail(str(error))


def _fail(message: str, code: int = 2) -> NoReturn:
    from rich.console import Console

    line = " ".join(message.split())
    Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(code)


@contextmanager
def _engine_extra() -> Iterator[None]:
    """Answer a missing package of the engine extra with the command that gets it."""
    from kvlab.doctor import pip_command
    from kvlab.machine import LOOKED_AT

    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in LOOKED_AT["engine"]:
            raise
        _fail(f"the engine needs {package}, which is not installed. Type: {pip_command('engine')}")


def _version(show: bool) -> None:
    if show:
        print(f"kvlab {kvlab.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    view: Annotated[
        str | None, typer.Argument(help="A view for the browser, such as pool (docs/demos.md has all); none: the tour.")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="No live view: the last frames and the tables.")] = False,
    scenario: Annotated[str | None, typer.Option(help="One of the view's runs.", rich_help_panel=VIEW)] = None,
    seed: Annotated[int, typer.Option(help="The same seed, the same run.", rich_help_panel=VIEW)] = 0,
    step: Annotated[int | None, typer.Option(help="The frame to open on.", rich_help_panel=VIEW)] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page here, open nothing.", rich_help_panel=VIEW)] = None,
    projector: Annotated[bool, typer.Option("--projector", help="Large letters.", rich_help_panel=VIEW)] = False,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NOTEBOOK", help="See your solved parts of this lab.", rich_help_panel=VIEW),
    ] = None,
) -> None:
    """The tour: one workload through three ways of managing the KV cache, live. With a VIEW: that, in the browser."""
    if view is not None:
        cli_watch.open_view(view, scenario, seed, step, html, projector, with_)
        return
    if html is not None:
        raise ValueError("--html writes a view: say which, as in kvlab demo pool --html pool.html")
    with _engine_extra():
        from kvlab.demo import run

        run(fast=fast)


@app.command()
def generate(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="One or more, each its own request.")
    ],
    model: Annotated[str, typer.Option(help="'tiny' (shipped), a model's folder, or a hub id.")] = "tiny",
    max_tokens: Annotated[int, typer.Option(help="Outputs at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="In (0, 1]; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same text; none: another each time.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Continuations of each prompt.")] = 1,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template, or not.")] = True,
    stream: Annotated[bool, typer.Option("--stream", help="Show the text as it comes (one prompt).")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say what memory the KV cache gets.")] = False,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NOTEBOOK", help="Run on your solved parts of this lab; may be given again."),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per block.", rich_help_panel=ENGINE)] = None,
    num_gpu_blocks: Annotated[
        int | None, typer.Option(help="Blocks in the pool.", rich_help_panel=ENGINE)
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Seats.", rich_help_panel=ENGINE)] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="The token budget of a step.", rich_help_panel=ENGINE)
    ] = None,
    swap_space: Annotated[
        float | None, typer.Option(help="GiB of CPU memory for swapped blocks.", rich_help_panel=ENGINE)
    ] = None,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Share no prefixes.", rich_help_panel=ENGINE)
    ] = False,
) -> None:
    """Generate text: the answers go to stdout, everything else to stderr."""
    from kvlab import SamplingParams

    if stream and (len(prompts) > 1 or n > 1):
        raise ValueError(
            f"--stream shows one text: give one prompt and n = 1, not {len(prompts)} and n = {n}"
        )
    params = SamplingParams(
        n=n, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens
    )
    options: dict[str, Any] = {
        "block_size": block_size,
        "num_gpu_blocks_override": num_gpu_blocks,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "swap_space": swap_space,
        "seed": int.from_bytes(os.urandom(4)) if seed is None and temperature > 0 else None,
        "enable_prefix_caching": False if no_prefix_caching else None,
        "parts": cli_labs.parts_of(with_) if with_ else None,
    }
    if options["parts"] and options["parts"].arena:
        options |= {"reservation": "contiguous", "max_model_len": 512}  # an arena places whole requests, not blocks
        print("reservation: contiguous, 512 slots a request, placed by your arena", file=sys.stderr)
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with _engine_extra():
        from kvlab import LLM

        if verbose:
            cli_labs.show_log()
        llm = LLM(model=model, **{name: value for name, value in options.items() if value is not None})
        if stream:
            _show_stream(llm.stream(conversations[0] if chat else prompts[0], params))
        else:
            _show(prompts, llm.chat(conversations, params) if chat else llm.generate(prompts, params))


def _show_stream(deltas: Iterable[Any]) -> None:
    error = None
    for delta in deltas:
        print(delta.text, end="", flush=True)
        error = error or delta.error
    print()
    if error:
        _fail(error, code=1)


def _show(prompts: list[str], outputs: list[Any]) -> None:
    """The texts on stdout; prompts (where there are several) and figures on stderr."""
    from rich.console import Console

    notes = Console(stderr=True, highlight=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        if len(prompts) > 1:
            notes.print(prompt, style="bold cyan", markup=False)
        for number, completion in enumerate(output.outputs, 1):
            if len(output.outputs) > 1:
                notes.print(f"{number} of {len(output.outputs)}", style="dim")
            print(completion.text, flush=True)
        tokens = sum(len(completion.token_ids) for completion in output.outputs)
        ends = ", ".join(dict.fromkeys(str(completion.finish_reason) for completion in output.outputs))
        notes.print(f"{tokens} tokens, {output.num_cached_tokens} cached, ended by: {ends}\n", style="dim")
    if errors := [output.error for output in outputs if output.error]:
        _fail("; ".join(errors), code=1)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """What this machine can run, what is missing, and how to get it."""
    from kvlab.doctor import run

    run(as_json)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="'tiny' (shipped), a model's folder, or a hub id.")] = "tiny",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the cost for the simulator.")] = None,
    rounds: Annotated[int, typer.Option(help="Runs of each workload; of each step the median counts.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch.")] = 1,
    seconds: Annotated[float, typer.Option(help="Leave out workloads that would take longer, each.")] = 5.0,
) -> None:
    """Time the engine's steps on this machine and fit the cost model to them: measured against modelled."""
    with _engine_extra():
        from kvlab.calibrate import main

        main(model, json_path, rounds=rounds, threads=threads, seconds=seconds)


app.command()(cli_serve.serve)
app.command()(cli_plan.plan)
app.command()(cli_plan.random_model)
app.command()(cli_sim.simulate)


@bench_app.command("kernels", context_settings=PASS_ON | {"help_option_names": []})
def bench_kernels(context: typer.Context) -> None:
    """The Triton kernels: right in every dtype, and on a GPU their speed. Options: kvlab bench kernels --help."""
    with _engine_extra():
        from kvlab_kernels.bench.__main__ import main

        raise typer.Exit(main(context.args))


app.add_typer(bench_app, name="bench")


@app.command(rich_help_panel=COURSE)
def grade(
    notebooks: Annotated[list[Path], typer.Argument(help="One or more .ipynb files.")],
    lab_number: Annotated[str | None, typer.Option("--lab", help="If the notebook does not say which it is.")] = None,
    lang: Annotated[str | None, typer.Option(help="en or zh; else the notebook's own.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write results as JSON, of one notebook.")] = None,
    junit_path: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML, of one notebook.")] = None,
) -> None:
    """Grade notebooks: points and a reason for each exercise. Exit code 1 if a core exercise failed."""
    from kvlab.grade import grade_notebook

    if len(notebooks) > 1 and (json_path or junit_path):
        raise ValueError("--json and --junit hold one notebook each: grade them one by one")
    complete = True
    for path in notebooks:
        report = grade_notebook(path, lab=lab_number, lang=lang, json_path=json_path, junit_path=junit_path)
        print(report.to_text())
        complete &= all(result.passed or result.exercise.stretch for result in report.results)
    raise typer.Exit(0 if complete else 1)


@app.command(context_settings=PASS_ON, rich_help_panel=LABS)
def test(context: typer.Context) -> None:
    """Run the tests without the slow ones (make test)."""
    _pytest("-m", "not slow", *context.args)


@app.command(context_settings=PASS_ON, rich_help_panel=LABS)
def test_all(context: typer.Context) -> None:
    """Run all tests, long fuzzing too, on examples drawn anew (make test-all)."""
    _pytest("--hypothesis-profile", "new", *context.args)


@cli_labs.lab_app.command("open", context_settings=PASS_ON)
def open_lab(context: typer.Context, lang: cli_labs.Lang = "en") -> None:
    """Open JupyterLab on work/, with a copy of each lab in it; other options are JupyterLab's (make lab)."""
    from kvlab.lab.work import start_missing

    for path in start_missing(cli_labs.repository(), lang):
        print(f"work/{path.name} is new")
    _run_module("jupyterlab", "labs", "--ServerApp.root_dir=work", *context.args)


app.add_typer(cli_labs.lab_app, name="lab", rich_help_panel=COURSE)
for command in (cli_labs.labs, cli_labs.solutions, cli_labs.student):
    app.command(rich_help_panel=LABS)(command)


@app.command(context_settings=PASS_ON, rich_help_panel=LABS)
def lint(context: typer.Context) -> None:
    """Check the code with ruff (make lint)."""
    _run_module("ruff", "lint", "check", ".", *context.args)


def _pytest(*arguments: str) -> None:
    # Two workers with as many torch threads as cores each would wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _run_module("pytest", "test", "-n", "2", *arguments)


def _run_module(module: str, extra: str, *arguments: str) -> None:
    """`python -m module arguments` in the repository's folder; its exit code becomes ours."""
    from kvlab.doctor import pip_command

    root = cli_labs.repository()
    if find_spec(module) is None:
        raise ValueError(f"{module} is not installed. Type: {pip_command(extra)}")
    raise typer.Exit(subprocess.run([sys.executable, "-m", module, *arguments], cwd=root).returncode)
