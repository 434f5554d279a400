"""Many clients, a third of whom leave: benchmarks/serve_load.py, whose exit code says whether its claims hold."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")
@pytest.mark.parametrize(
    ("clients", "requests", "different"),
    [(40, 120, 60), pytest.param(200, 2000, 240, marks=pytest.mark.slow)],
)
def test_answers_are_right_and_nothing_is_left_behind(clients, requests, different):
    command = [sys.executable, "benchmarks/serve_load.py", "--clients", str(clients), "--requests", str(requests)]
    command += ["--different", str(different)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
