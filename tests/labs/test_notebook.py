"""`pytest tests/labs --notebook labs/03_block_allocator.ipynb`: a student's notebook, one test an exercise."""

import pytest

from kvlab.grade import grade_exercise


def test_exercise(graded):
    spec, name, cells, lang = graded
    result = grade_exercise(spec, name, cells, lang)
    if not result.passed and result.exercise.stretch:
        pytest.skip(f"stretch: {result.render(lang)}")  # what is optional fails nobody, here as in `kvlab grade`
    if not result.passed:
        pytest.fail(result.render(lang), pytrace=False)
