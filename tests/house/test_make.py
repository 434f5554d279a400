"""make: what each target installs, the check of the interpreter, and that the twin does the work."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


@pytest.fixture
def tree(tmp_path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(tree: Path, *arguments: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=tree, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        *[("demo", "engine"), ("test", "test"), ("test-all", "test"), ("lab", "engine,labs"), ("lint", "lint")],
        *[("serve", "engine,serve"), ("labs", "labs"), ("solutions", "engine,labs"), ("student", "labs")],
    ],
)
def test_a_target_installs_its_extra_under_the_constraints_and_calls_its_twin(tree, target, extras):
    done = make(tree, "-n", target, "ARGS=--more")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f'.venv/bin/python -m pip install -c constraints.txt -e ".[{extras}]"' in lines
    assert lines[-1] == f".venv/bin/python -m kvlab {target} --more"


def test_pip_runs_again_only_when_what_it_was_run_from_has_changed(tree):
    (tree / ".venv").mkdir()
    for name in (".made", ".has-test"):
        (tree / ".venv" / name).touch()
    assert "pip install" not in make(tree, "-n", "test").stdout
    assert "pip install" in make(tree, "-n", "demo").stdout  # another extra
    for name in ("pyproject.toml", "constraints.txt"):
        after = (tree / ".venv" / ".has-test").stat().st_mtime + 10
        os.utime(tree / name, (after, after))
        assert "pip install" in make(tree, "-n", "test").stdout
        os.utime(tree / name, (0, 0))
    assert "pip install" not in make(tree, "-n", "test").stdout


@pytest.mark.parametrize("answer", ["exit 1", "exit 127"])
def test_an_unfit_interpreter_is_refused_before_anything_is_made(tree, answer):
    """A python that says it is 3.9, and one that is not there."""
    python = tree / "python3.9"
    if answer == "exit 1":
        python.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac\n')
        python.chmod(0o755)
    done = make(tree, "test", f"PYTHON={python}")
    assert done.returncode != 0
    assert "kvlab needs Python 3.11, 3.12 or 3.13" in done.stdout
    assert ("is Python 3.9.2" in done.stdout) == (answer == "exit 1")
    assert "make test PYTHON=python3.12" in done.stdout
    assert not (tree / ".venv").exists()


def test_clean_keeps_the_environment(tree):
    for name in (".venv/keep", "build/x", "kvlab.egg-info/x", "kvlab/__pycache__/x", ".hypothesis/x"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    assert make(tree, "clean").returncode == 0
    assert sorted(path.name for path in tree.iterdir()) == sorted(
        [".venv", "Makefile", "constraints.txt", "kvlab", "pyproject.toml"]
    )
    assert (tree / ".venv" / "keep").exists() and not list((tree / "kvlab").iterdir())
