"""The tree that a class clones: it works on its own, and no solution is in it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.lab.build import made_from, write
from kvlab.lab.source import points_of, read_source, read_sources
from kvlab.lab.student import build

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).parent / "sample"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    dest = tmp_path_factory.mktemp("class") / "kvlab-class"
    build(ROOT, dest, read_sources(ROOT))
    return dest


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=tree, env=env, capture_output=True, text=True)


def test_what_is_in_it(tree):
    names = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert {"README.md", "Makefile", "pyproject.toml", "kvlab/cli.py", "kernels/__init__.py"} <= names
    assert {"tests/labs/lab_03/checks.py", "tests/labs/lab_03/driver.py", "tests/labs/test_notebook.py"} <= names
    unwanted = re.compile("solutions|others|mutants|test_checks|test_solved|lab_system|__pycache__")
    assert not [name for name in names if unwanted.search(name)]
    assert (tree / "README.md").read_text(encoding="utf-8").startswith("# kvlab: the labs")


def test_links_of_its_readme_lead_somewhere(tree):
    links = re.findall(r"\]\(([^)h][^)]*)\)", (tree / "README.md").read_text(encoding="utf-8"))
    assert links and all((tree / link).exists() for link in links)


def test_no_solution_is_in_it(tree):
    """By other means than build() looks for them: whole files, markers and the longer lines of every solution."""
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in tree.rglob("*") if path.is_file()}
    ours = "\n".join(text for path, text in texts.items() if path.relative_to(tree).parts[0] in ("kvlab", "kernels"))
    others = {p: json.dumps(t) for p, t in texts.items() if p.relative_to(tree).parts[0] not in ("kvlab", "kernels")}
    assert not [path for path, text in others.items() if "### BEGIN SOLUTION" in text]
    for source in (ROOT / "solutions").glob("*.py"):
        text = source.read_text(encoding="utf-8")
        given = re.sub(r"### BEGIN SOLUTION\n.*?### END SOLUTION", "", text, flags=re.S)
        for solution in re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", text, re.S):
            for line in map(str.strip, solution.splitlines()):
                if len(line) > 30 and line not in ours and line not in given:
                    inside = json.dumps(line)[1:-1]
                    found = [p for p, t in others.items() if inside in t or json.dumps(inside)[1:-1] in t]
                    assert not found, (line, found)


@pytest.fixture
def made(repository) -> Path:
    """The sample repository with what build() needs, its notebooks made."""
    write(repository, made_from(read_sources(repository)))
    (repository / "docs").mkdir()
    (repository / "docs" / "student.md").write_text("# For students")
    return repository


def test_a_copied_solution_is_found_wherever_it_hides(made, tmp_path):
    sources = read_sources(made)
    leaked = "        self.blocks_in_order_of_release = list(range(num_blocks))\n"
    for name in ("tests/labs/lab_03/driver.py", "docs/architecture.md", "labs/README.md"):
        path = made / name
        path.write_text(f"x = 1\n{leaked}")
        with pytest.raises(ValueError, match=f"a solution would be in the student's tree: {name}: 'self.blocks_in"):
            build(made, tmp_path / "class", sources)
        path.write_text("def f():\n    ### BEGIN SOLUTION\n    return 1")
        with pytest.raises(ValueError, match=f"{name}: '### BEGIN SOLUTION'"):
            build(made, tmp_path / "class", sources)
        path.unlink()
    assert not (tmp_path / "class").exists()
    solved = sources[0].notebook("en", solved=True)
    (made / "labs" / "03_sample.ipynb").write_text(solved.text(), encoding="utf-8")
    with pytest.raises(ValueError, match="labs/03_sample.ipynb: '### BEGIN"):
        build(made, tmp_path / "class", sources)


def test_our_own_code_may_read_like_a_solution(made, tmp_path):
    (made / "kvlab").mkdir()
    for name in ("kvlab/queue.py", "tests/labs/lab_03/driver.py"):  # and so may what uses the same words
        (made / name).write_text("self.blocks_in_order_of_release = list(range(num_blocks))\n")
    files = build(made, tmp_path / "class", read_sources(made))
    assert files == [
        "README.md", "kvlab/queue.py", "labs/03_sample.ipynb", "labs/03_sample.zh.ipynb", "tests/labs/lab_03/checks.py",
        "tests/labs/lab_03/driver.py",
    ]  # fmt: skip
    assert (tmp_path / "class" / "README.md").read_text() == "# For students"


def test_a_folder_with_something_in_it_is_refused(made, tmp_path):
    dest = tmp_path / "class"
    (dest / ".git").mkdir(parents=True)
    build(made, dest, read_sources(made))  # an emptied checkout
    with pytest.raises(ValueError, match="class is not empty"):
        build(made, dest, read_sources(made))
    with pytest.raises(ValueError, match="is inside"):
        build(made, made / "class", read_sources(made))


def test_the_commands_work_in_it(tree):
    """Start, grade and update, on our labs where there are some, else on the sample put beside lab 03's checks."""
    if not list((tree / "labs").glob("03_*.ipynb")):
        path = SAMPLE / "solutions" / "03_sample.py"
        notebook = read_source(path, points_of(SAMPLE)("03")).notebook("en")
        (tree / "labs" / "03_sample.ipynb").write_text(notebook.text(), encoding="utf-8")
    started = run(tree, "-m", "kvlab", "lab", "start", "03")
    assert started.returncode == 0 and "is yours now" in started.stdout, started.stderr
    (copy,) = (tree / "work").glob("03_*.ipynb")
    graded = run(tree, "-m", "kvlab", "grade", str(copy))
    assert graded.returncode == 1 and re.search(r"\b0 of \d+ points", graded.stdout), graded.stdout + graded.stderr
    updated = run(tree, "-m", "kvlab", "lab", "update")
    assert updated.returncode == 0 and "nothing new" in updated.stdout, updated.stderr
    tests = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/labs", "--notebook", str(copy))
    told = tests.stdout.splitlines()[-1]  # a message of a check may well speak of errors
    assert tests.returncode == 1 and "failed" in told and "error" not in told, tests.stdout
    assert run(tree, "-m", "kvlab", "labs").returncode == 2
