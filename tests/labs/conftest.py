"""`pytest tests/labs --notebook PATH` grades that notebook; without it, the solved labs and the checks are tested."""

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--notebook", type=Path, help="grade the exercises of this notebook")
    parser.addoption("--lab", help="which lab it is, when it does not say so itself")


def pytest_generate_tests(metafunc):
    if "graded" in metafunc.fixturenames:
        path = metafunc.config.getoption("--notebook")
        metafunc.parametrize("graded", _exercises(metafunc.config, path) if path else [])


def _exercises(config, path):
    from kvlab.grade import load_lab, notebook_cells
    from kvlab.grade.report import lab_of

    cells, metadata = notebook_cells(path)
    own = metadata.get("kvlab")
    spec = load_lab(config.getoption("--lab") or lab_of(path, metadata))
    lang = own.get("lang", "en") if isinstance(own, dict) else "en"
    return [pytest.param((spec, e.name, cells, lang), id=e.name) for e in spec.exercises]


def pytest_ignore_collect(collection_path, config):
    """With --notebook, only the exercises of that notebook."""
    if config.getoption("--notebook") and collection_path.name.startswith("test_"):
        return collection_path.name != "test_notebook.py"
    return None
