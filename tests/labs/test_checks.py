"""The tests are tested: a check fails on the stub, passes on our solution and others', fails on wrong ones."""

import pytest

from kvlab.grade import grade_exercise, load_lab
from kvlab.grade.exercise import SPECS, lab_numbers, load_module
from kvlab.lab.source import code_cells

LABS = {number: load_lab(number) for number in lab_numbers()}
OTHERS = {number: load_module(SPECS / f"lab_{number}" / "others.py") for number in LABS}


def cases(kind):
    for number, others in OTHERS.items():
        for name, marks in ((kind, []), (f"MORE_{kind}", [pytest.mark.slow])):
            for exercise, sources in getattr(others, name, {}).items():
                for title, source in sources.items():
                    yield pytest.param(number, exercise, source, id=f"{number}-{exercise}-{title}", marks=marks)


def exercises():
    return [pytest.param(n, e.name, id=f"{n}-{e.name}") for n, lab in LABS.items() for e in lab.exercises]


@pytest.mark.parametrize("number, name", exercises())
def test_solved_passes_and_stub_fails(number, name):
    result = grade_exercise(LABS[number], name, code_cells(number, solved=True))
    assert result.passed, result.render()
    result = grade_exercise(LABS[number], name, code_cells(number, solved=False))
    assert not result.passed
    assert "not written yet" in result.render() or "NotImplementedError" in result.render()


@pytest.mark.parametrize("number, name, source", list(cases("CORRECT")))
def test_other_designs_pass(number, name, source):
    result = grade_exercise(LABS[number], name, [*code_cells(number, solved=True), source])
    assert result.passed, result.render()


@pytest.mark.parametrize("number, name, source", list(cases("WRONG")))
def test_wrong_ones_fail_and_are_told_why(number, name, source):
    result = grade_exercise(LABS[number], name, [*code_cells(number, solved=True), source])
    assert not result.passed
    assert "->" in result.render(), "a wrong solution is told the operation at which it went wrong"


@pytest.mark.parametrize("number, name", exercises())
def test_every_exercise_has_its_tests_hints_and_another_design(number, name):
    exercise, others = LABS[number][name], OTHERS[number]
    assert len(others.CORRECT.get(name, {})) >= 1 and len(others.WRONG.get(name, {})) >= 3
    assert 1 <= len(exercise.hints) <= 3
    assert exercise.section and exercise.defines


def test_what_a_check_says_in_chinese_is_translated_where_a_lab_ships_in_chinese():
    """Every say() of a translated lab has a translation."""
    for lab in LABS.values():
        catalogue = lab.catalogue("zh")
        if catalogue:
            said = {hint.template for e in lab.exercises for hint in e.hints}
            assert said <= set(catalogue), f"lab {lab.number}: {said - set(catalogue)}"
