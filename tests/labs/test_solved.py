"""Every solved lab runs from top to bottom, as `make solutions` runs it: no error, no failed check."""

import pytest

from kvlab.lab.solve import run_solved
from kvlab.lab.source import read_sources

LONG = {"10", "12", "13", "14"}  # take more than 20 seconds: in make test-all only


def labs():
    found = []
    for source in read_sources():
        marks = [pytest.mark.slow] if source.number in LONG else []
        for lang in source.languages:
            found.append(pytest.param(source, lang, id=f"{source.number}-{lang}", marks=marks))
    return found


@pytest.mark.parametrize(("source", "lang"), labs())
def test_a_solved_lab_runs(source, lang):
    run_solved(source, lang)
