"""The commands around notebooks: `lab start` and `lab update`; for those who write labs: labs, solutions, student.

Each imports what it needs when it runs. start and update need no package; labs, solutions and student the extra "labs".
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class OpensJupyter(TyperGroup):
    """`kvlab lab`, and `kvlab lab --no-browser` with JupyterLab's own options, mean `kvlab lab open`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["open", *args]
        return super().parse_args(ctx, args)


lab_app = typer.Typer(cls=OpensJupyter, help="Your copies of the labs, in work/; alone: open JupyterLab (make lab).")
Number = Annotated[str, typer.Argument(metavar="NN", help="The lab's number, such as 03.")]
Lang = Annotated[str, typer.Option(help="en or zh.")]


def repository() -> Path:
    """The repository's folder. ValueError if kvlab was installed without it."""
    from kvlab.machine import checkout

    root = checkout()
    if root is None:
        raise ValueError(
            "this command works on the repository, and kvlab was installed without it: clone it first"
        )
    return root


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def show_log() -> None:
    """Let the logger "kvlab" speak on stderr: what memory was found, and how many requests fit."""
    log = logging.getLogger("kvlab")
    if not log.handlers:
        log.addHandler(_Stderr())
        log.handlers[0].setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"))
    log.setLevel(logging.INFO)


@contextmanager
def needs(*extras: str) -> Iterator[None]:
    """Answer a missing package of one of these extras with the command that gets it."""
    from kvlab.doctor import pip_command
    from kvlab.machine import LOOKED_AT

    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        for extra in extras:
            if package in LOOKED_AT[extra]:
                command = pip_command(extra)
                raise ValueError(f"this needs {package}, which is not installed. Type: {command}") from None
        raise


def parts_of(notebooks: list[str]) -> Any:
    """The solved parts of all notebooks (--with), the later ones' first; says on stderr which are yours."""
    from rich.console import Console

    from kvlab.doctor import pip_command

    try:
        from kvlab.lab.yours import parts_from_notebook
    except ImportError as error:
        raise ValueError(f"--with needs {error.name}, which is not installed. Type: {pip_command('labs')}") from None
    from kvlab.parts import Parts

    notes, parts = Console(stderr=True, highlight=False), Parts()
    for notebook in notebooks:
        more, found = parts_from_notebook(notebook)
        parts |= more
        for one in found:
            whose = f"yours, {one.name}" if one.is_yours else f"ours: {one.why}"
            notes.print(f"{one.part:18} {whose}", style="green" if one.is_yours else "dim", markup=False)
    return parts


# --- for students --------------------------------------------------------------------------------------------


@lab_app.command()
def start(number: Number, lang: Lang = "en") -> None:
    """Copy a lab to work/, where you write; a copy that is there is left alone."""
    from kvlab.lab.work import start

    root = repository()
    path, made = start(root, number, lang)
    name = path.relative_to(root).as_posix()
    if made:
        print(f"{name} is yours now. Open it with `kvlab lab` (make lab), or in your editor.")
    else:
        print(f"{name} is there already and was left as it is. `kvlab lab update {number}` brings in corrections.")


@lab_app.command()
def update(
    number: Annotated[str | None, typer.Argument(metavar="[NN]", help="All labs if none is named.")] = None,
) -> None:
    """Bring corrected labs into work/; your answers and your own cells stay, and so does a backup."""
    from kvlab.lab.work import copies, update

    root, refused = repository(), False
    for path in copies(root, number):
        name = path.relative_to(root).as_posix()
        try:
            merged, backup = update(root, path)
        except ValueError as error:  # the other labs can still be brought up to date
            print(f"{name}: left as it is. {error}")
            refused = True
            continue
        if backup is None:
            print(f"{name}: nothing new.")
            continue
        kept = f"kept: your answers ({len(merged.answers)}), other cells of yours ({merged.own})"
        print(f"{name}: corrected; {kept}; as it was: {backup.relative_to(root).as_posix()}")
        if merged.new_stub:
            print(f"  What is given has changed in {', '.join(merged.new_stub)}: compare yours with labs/.")
        if merged.gone:
            print(f"  No longer asked for, your answer is at the end: {', '.join(merged.gone)}.")
        print("  If it is open in JupyterLab: File > Reload Notebook from Disk.")
    raise typer.Exit(1 if refused else 0)


# --- for those who write labs --------------------------------------------------------------------------------


def _sources(root: Path) -> list[Any]:
    from kvlab.lab.source import read_sources

    if not (root / "solutions").is_dir():
        raise ValueError(f"{root} has no solutions/: this is a student's tree, and its labs/ are made already")
    return read_sources(root)


def labs(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 if something is stale.")] = False,
) -> None:
    """Make the notebooks in labs/ from their sources in solutions/ (make labs)."""
    root = repository()
    with needs("labs"):
        from kvlab.lab.build import made_from, stale, write

        texts = made_from(_sources(root))
        found = stale(root, texts) if check else write(root, texts)
    for name, how in found.items():
        print(f"labs/{name} {how}")
    print(f"{len(texts)} notebooks, {len(found)} {'stale: make labs' if check else 'of them changed'}")
    raise typer.Exit(1 if check and found else 0)


def solutions(
    numbers: Annotated[list[str] | None, typer.Argument(metavar="[NN...]", help="All labs if none is named.")] = None,
    lang: Lang = "en",
) -> None:
    """Run the solved labs from top to bottom, to solutions/html (make solutions)."""
    root = repository()
    failed = False
    with needs("labs"):
        from kvlab.lab.solve import LabFailed, planned_seconds, run_solved, write_html

        for source in _sources(root):
            if lang not in source.languages or (numbers and source.number not in numbers):
                continue
            try:
                node, seconds = run_solved(source, lang)
            except LabFailed as error:
                print(f"lab {source.number}: FAILED. {error}")
                failed = True
                continue
            planned = planned_seconds(source.number)
            path = root / "solutions" / "html" / source.file_name(lang).replace(".ipynb", ".html")
            write_html(node, path)
            slow = f", longer than the {planned} s that it should take" if seconds > planned else ""
            print(f"lab {source.number}: {seconds:.1f} s{slow}, {path.relative_to(root).as_posix()}")
    raise typer.Exit(1 if failed else 0)


def student(dest: Annotated[Path, typer.Argument(help="A new or empty folder outside the repository.")]) -> None:
    """Build the tree that a class clones: without solutions, and without the tests of the checks (make student)."""
    root = repository()
    with needs("labs"):
        from kvlab.lab.build import made_from, stale
        from kvlab.lab.student import build

        sources = _sources(root)
        if found := stale(root, made_from(sources)):
            raise ValueError(f"labs/ is not what solutions/ makes ({', '.join(found)}): run `kvlab labs` first")
        files = build(root, dest, sources)
    print(f"{dest}: {len(files)} files. To hand it out: cd {dest} && git init && git add . && git commit")
