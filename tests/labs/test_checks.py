"""The tests are tested: a check fails on the stub, passes on our solution and others', fails on wrong ones."""

import pytest

from kvlab.grade import grade_exercise, load_lab
from kvlab.grade.child import Child
from kvlab.grade.exercise import SPECS, lab_numbers, load_module
from kvlab.lab.source import code_cells

LABS = {number: load_lab(number) for number in lab_numbers()}
OTHERS = {number: load_module(SPECS / f"lab_{number}" / "others.py") for number in LABS}


@pytest.fixture(scope="module")
def grade():
    """Grades one variant after the other. All of one exercise share a child: most of a check is the child's start."""
    current, child = None, None

    def graded(number, name, cells):
        nonlocal current, child
        if current != (number, name) or not child.is_open:
            if child:
                child.close()
            current, child = (number, name), Child(LABS[number][name], LABS[number], uses_numpy=True)
        return grade_exercise(LABS[number], name, cells, child=child)

    yield graded
    if child:
        child.close()


def exercises():
    return [(number, exercise.name) for number, lab in LABS.items() for exercise in lab.exercises]


def cases():
    """(number, exercise, kind, source): exercise by exercise, so that each one's child is started once."""
    for number, name in exercises():
        yield pytest.param(number, name, "SOLVED", None, id=f"{number}-{name}-solved")
        yield pytest.param(number, name, "STUB", None, id=f"{number}-{name}-stub")
        for kind in ("CORRECT", "WRONG"):
            for group, marks in ((kind, []), (f"MORE_{kind}", [pytest.mark.slow])):
                for title, source in getattr(OTHERS[number], group, {}).get(name, {}).items():
                    yield pytest.param(number, name, kind, source, id=f"{number}-{name}-{title}", marks=marks)


@pytest.mark.parametrize("number, name, kind, source", list(cases()))
def test_right_ones_pass_and_wrong_ones_are_told_why(grade, number, name, kind, source):
    cells = code_cells(number, solved=kind != "STUB")
    result = grade(number, name, [*cells, source] if source else cells)
    said = result.render()
    if kind in ("SOLVED", "CORRECT"):
        assert result.passed, said
        return
    assert not result.passed
    if kind == "STUB":
        assert "not written yet" in said or "NotImplementedError" in said
    else:
        assert "->" in said, "a wrong solution is told the operation at which it went wrong"


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
