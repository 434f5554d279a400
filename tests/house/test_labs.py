"""labs/ is what solutions/ makes; student copies and executed notebooks are not in git."""

import subprocess
from pathlib import Path

from kvlab.lab.build import made_from, stale
from kvlab.lab.source import read_sources

ROOT = Path(__file__).parents[2]


def test_the_committed_notebooks_are_what_their_sources_make():
    assert stale(ROOT, made_from(read_sources(ROOT))) == {}, "run: make labs"


def test_copies_and_executed_notebooks_are_ignored_by_git():
    if not (ROOT / ".git").exists():
        return
    for name in ("work/03_x.ipynb", "work/backup/03_x-1.ipynb", "solutions/html/03_x.html"):
        assert subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT).returncode == 0, name
