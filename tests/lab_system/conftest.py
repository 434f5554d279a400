"""A small repository with one sample lab, in a folder of its own."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """The sample lab's source and checks; the commands take this for the checkout."""
    root = tmp_path / "repository"
    shutil.copytree(Path(__file__).parent / "sample", root)
    (root / "labs").mkdir()
    monkeypatch.setattr("kvlab.machine.checkout", lambda: root)
    return root
