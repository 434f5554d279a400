"""The tree that a class clones: labs, what grades them, the package; no solutions, nothing that tests the checks.

What goes in is listed, so that a new file of ours stays out until somebody decides otherwise. Then every line of every
solution is looked for in what was copied.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvlab.lab.source import Source

COPIED = (
    "pyproject.toml", "constraints.txt", "Makefile", "LICENSE", "CHANGELOG.md", ".gitignore", "docs/architecture.md",
    "figures/**/*", "kernels/**/*", "kvlab/**/*", "labs/*.ipynb", "labs/README.md", "tests/labs/conftest.py",
    "tests/labs/test_notebook.py",
    "tests/labs/lab_*/checks.py", "tests/labs/lab_*/driver.py", "tests/labs/lab_*/zh.json",
)  # fmt: skip
README = "docs/student.md"  # becomes README.md
OURS = ("kvlab", "kernels")  # our implementation may read like a solution
LONG = 30  # a solution's line of more characters says more than `return self`


def build(root: Path, dest: Path, sources: Iterable[Source]) -> list[str]:
    """Make the tree at `dest`, which must be new, empty, or an emptied git checkout. Returns the files in it.
    ValueError, and no tree, if a solution's line would be in it."""
    if dest.exists() and any(path.name != ".git" for path in dest.iterdir()):
        raise ValueError(f"{dest} is not empty: name a new folder, or empty it first (its .git may stay)")
    if dest.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{dest} is inside {root}: name a folder outside the repository")
    files = {name: root / name for name in _files(root)} | {"README.md": root / README}
    if found := list(leaks(files, sources)):
        raise ValueError("a solution would be in the student's tree: " + "; ".join(found))
    for name, path in files.items():
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, dest / name)
    return sorted(files)


def _files(root: Path) -> Iterator[str]:
    for pattern in COPIED:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(root).as_posix()


def leaks(files: dict[str, Path], sources: Iterable[Source]) -> Iterator[str]:
    """The files with a marker, or a line of a solution that is neither in the stubs nor in our own code."""
    secret = {line for source in sources for line in _secret_lines(source)}
    texts = {name: lines for name, path in files.items() if (lines := _lines(path)) is not None}
    for name, lines in texts.items():
        if name.partition("/")[0] in OURS:
            secret -= lines
    for name, lines in texts.items():
        if name.partition("/")[0] not in OURS:
            marked = {line for line in lines if line in ("### BEGIN SOLUTION", "### END SOLUTION")}
            yield from (f"{name}: {line!r}" for line in sorted(lines & secret | marked))


def _secret_lines(source: Source) -> set[str]:
    shown = {line.strip() for lang in source.languages for cell in source.notebook(lang).cells
             for line in cell["source"].splitlines()}  # fmt: skip
    solved = {line.strip() for cell in source.cells if cell.ex for line in cell.source.splitlines()}
    return {line for line in solved - shown if len(line) > LONG}


def _lines(path: Path) -> set[str] | None:
    """The lines of a text file, of a notebook those of its cells; None for other files."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return {line.strip() for line in text.splitlines()}
