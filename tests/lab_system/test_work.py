"""start and update: nothing that a student typed is ever lost, whatever saved the notebook."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.lab.cells import digest, grade_id, read_notebook
from kvlab.lab.work import copies, start, start_missing, update

STUB = 'def {0}():\n    """{1}"""\n    raise NotImplementedError("Lab 03, exercise 1: {0}, {0}")'


def prose(text: str) -> dict:
    return {"cell_type": "markdown", "id": digest("markdown", text), "metadata": {}, "source": text}


def code(text: str, name: str = "", **tag) -> dict:
    metadata = {"nbgrader": {"grade_id": name, "schema_version": 3} | tag} if name else {}
    if tag.get("solution"):
        metadata["kvlab"] = {"stub": digest("code", text)}
    cell = {"cell_type": "code", "id": name or digest("code", text), "metadata": metadata, "source": text}
    return cell | {"outputs": [], "execution_count": None}


def exercise(name: str, doc: str = "Do it.") -> list[dict]:
    stub = code(STUB.format(name, doc), name, solution=True, grade=False)
    return [stub, code(f'check("{name}")', f"check-{name}", solution=False, grade=True, points=1)]


def notebook(cells: list[dict], lang: str = "en") -> dict:
    kernel = {"name": "python3", "display_name": "Python 3"}
    metadata = {"kvlab": {"lab": "03", "lang": lang, "version": "1"}, "kernelspec": kernel}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def save(path: Path, data: dict, newline: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8", newline=newline)


@pytest.fixture
def course(tmp_path):
    """A lab of two exercises in labs/, started."""
    cells = [prose("# Lab"), *exercise("one"), prose("Between."), code("lab.predict('x', None)"), *exercise("two")]
    save(tmp_path / "labs" / "03_x.ipynb", notebook(cells))
    start(tmp_path, "3")
    return Course(tmp_path)


class Course:
    """A student's work on lab 03, and the corrections that come."""

    def __init__(self, root: Path):
        self.root, self.copy, self.lab = root, root / "work" / "03_x.ipynb", root / "labs" / "03_x.ipynb"

    def work(self, change) -> None:
        data = json.loads(self.copy.read_text(encoding="utf-8"))
        change(data["cells"])
        save(self.copy, data)

    def correct(self, change) -> None:
        data = json.loads(self.lab.read_text(encoding="utf-8"))
        change(data["cells"])
        save(self.lab, data)

    def update(self):
        self.merged, self.backup = update(self.root, self.copy)
        nbformat.validate(json.loads(self.copy.read_text(encoding="utf-8")))
        return [cell["source"] for cell in read_notebook(self.copy).cells]

    @property
    def text(self) -> list[str]:
        return [cell["source"] for cell in read_notebook(self.copy).cells]


def answer(cells: list[dict], name: str, source: str) -> None:
    next(cell for cell in cells if cell["id"] == name)["source"] = source


ONE, TWO = "def one():\n    return 1", "def two():\n    return 2"


# --- start ---------------------------------------------------------------------------------------------------


def test_start_copies_the_lab_once(course):
    assert course.copy.read_bytes() == course.lab.read_bytes()
    course.copy.write_text("mine")
    assert start(course.root, "03") == (course.copy, False)
    assert course.copy.read_text() == "mine"


def test_start_in_chinese_and_what_is_not_there(course):
    with pytest.raises(ValueError, match="no lab 03 in 'zh' in .*; there is: none"):
        start(course.root, "03", "zh")
    save(course.root / "labs" / "03_x.zh.ipynb", notebook([], "zh"))
    assert start(course.root, "3", "zh") == (course.root / "work" / "03_x.zh.ipynb", True)
    with pytest.raises(ValueError, match="no lab 7 in .*; there is: 03"):
        start(course.root, "7")


def test_all_that_are_missing_are_started_and_no_other(course):
    for name in ("00_a", "01_b", "01_b.zh", "03_x.zh"):
        save(course.root / "labs" / f"{name}.ipynb", notebook([]))
    assert [path.name for path in start_missing(course.root, "zh")] == ["00_a.ipynb", "01_b.zh.ipynb"]
    assert start_missing(course.root) == []


# --- update --------------------------------------------------------------------------------------------------


def test_nothing_new_writes_nothing(course):
    course.work(lambda cells: answer(cells, "one", ONE))
    before = course.copy.read_bytes()
    course.update()
    assert course.backup is None and course.copy.read_bytes() == before
    assert not (course.root / "work" / "backup").exists()


def test_answers_are_carried_and_the_rest_is_corrected(course):
    course.work(lambda cells: answer(cells, "two", TWO))
    before = course.copy.read_bytes()
    new = [prose("# Lab, corrected"), *exercise("one", "Do it well."), *exercise("two", "Do it well.")]
    course.correct(lambda cells: cells.__setitem__(slice(None), deepcopy(new)))
    text = course.update()
    assert text == ["# Lab, corrected", new[1]["source"], 'check("one")', TWO, 'check("two")']
    assert course.merged.answers == ["two"] and course.merged.new_stub == ["two"] and course.merged.own == 0
    assert course.backup.read_bytes() == before
    course.update()
    assert course.backup is None  # the second time there is nothing to do


def test_own_cells_and_changed_ones_keep_their_place(course):
    def work(cells):
        cells[4]["source"] = "lab.predict('x', 40)"
        cells.insert(4, prose("my note before the guess") | {"id": "n1"})
        cells.insert(1, code("mine = 1") | {"id": "n2"})
        cells.insert(0, code("top = 1") | {"id": "n3"})
        cells.append(code("end = 1") | {"id": "n4"})

    course.work(work)
    course.correct(lambda cells: cells.__setitem__(3, prose("Between, corrected.")))
    text = course.update()
    assert text[:3] == ["top = 1", "# Lab", "mine = 1"] and text[-1] == "end = 1"
    at = text.index("Between, corrected.")
    assert text[at + 1 : at + 3] == ["my note before the guess", "lab.predict('x', 40)"]
    assert course.merged.own == 5


def test_a_changed_cell_that_the_lab_has_changed_too_is_kept_beside_it(course):
    course.work(lambda cells: cells[4].update(source="lab.predict('x', 40)"))
    course.correct(lambda cells: cells.__setitem__(4, code("lab.predict('x', None, unit='%')")))
    text = course.update()
    at = text.index("lab.predict('x', None, unit='%')")
    assert "lab.predict('x', 40)" in (text[at - 1], text[at + 1])


def test_an_answer_whose_exercise_is_gone_is_at_the_end_once(course):
    course.work(lambda cells: answer(cells, "one", ONE))
    course.correct(lambda cells: cells.__delitem__(slice(1, 3)))
    text = course.update()
    assert text[-1] == ONE and text[-2].startswith("## Kept from an earlier version")
    assert course.merged.gone == ["one"] and 'check("one")' not in text
    course.work(lambda cells: answer(cells, "two", TWO))
    course.correct(lambda cells: [cells.__delitem__(slice(-2, None)), cells.insert(0, prose("And again."))])
    assert course.update() == ["And again.", *text[:-4], *text[-2:], TWO]


def test_an_old_answer_does_not_redefine_what_another_exercise_asks_for(course):
    """Both defined two(); the first exercise is gone. Of several definitions the last counts, also in grading."""
    course.work(lambda cells: [answer(cells, "one", "def two():\n    return 'old'"), answer(cells, "two", TWO)])
    course.correct(lambda cells: cells.__delitem__(slice(1, 3)))
    text = course.update()
    assert text.index("def two():\n    return 'old'") < text.index(TWO)


def test_a_renamed_exercise_keeps_its_answer(course):
    course.work(lambda cells: answer(cells, "one", ONE))

    def rename(cells):
        cells[1:3] = exercise("one")
        cells[1]["id"] = cells[1]["metadata"]["nbgrader"]["grade_id"] = "first"

    course.correct(rename)
    text = course.update()
    assert text[1] == ONE and text.count(ONE) == 1 and course.merged.answers == ["first"]


def test_code_that_the_lab_once_gave_is_no_answer(course):
    given_away = code("def three():\n    return 3")
    course.correct(lambda cells: cells.append(given_away))
    course.update()
    course.correct(lambda cells: cells.__setitem__(slice(-1, None), exercise("three")))
    assert given_away["source"] not in course.update() and course.merged.answers == []


def test_a_doubled_cell_the_last_answer_counts_and_the_other_stays_before_it(course):
    def work(cells):
        answer(cells, "one", ONE)
        again = deepcopy(cells[1]) | {"id": "copy", "source": "def one():\n    return 11"}
        cells.insert(2, again)
        cells.insert(2, code("between = 1") | {"id": "b"})

    course.work(work)
    course.correct(lambda cells: cells.append(prose("New.")))
    text = course.update()
    assert text[1:4] == [ONE, "between = 1", "def one():\n    return 11"]
    (cell,) = (cell for cell in read_notebook(course.copy).cells if grade_id(cell) == "one")
    assert cell["source"] == "def one():\n    return 11" and course.merged.answers == ["one"]


def test_a_check_is_restored_and_what_was_written_over_it_is_kept(course):
    course.work(lambda cells: cells[2].update(source="print('my test')\ncheck('one')"))
    text = course.update()
    assert text[2:4] == ['check("one")', "print('my test')\ncheck('one')"]


def test_a_deleted_cell_comes_back(course):
    course.work(lambda cells: cells.__delitem__(slice(0, 3)))
    assert course.update() == [cell["source"] for cell in read_notebook(course.lab).cells]


def test_the_kernel_that_the_student_chose_and_the_outputs_stay(course):
    data = json.loads(course.copy.read_text())
    data["metadata"]["kernelspec"] = {"name": "my-venv", "display_name": "Mine"}
    data["cells"][1]["source"] = ONE
    output = {"output_type": "stream", "name": "stdout", "text": "1"}
    for cell in (data["cells"][1], data["cells"][2]):
        cell |= {"outputs": [output], "execution_count": 7}
        data["cells"][data["cells"].index(next(c for c in data["cells"] if c["id"] == cell["id"]))] = cell
    save(course.copy, data)
    course.correct(lambda cells: cells.append(prose("New.")))
    course.update()
    after = read_notebook(course.copy)
    assert after.metadata["kernelspec"] == {"name": "my-venv", "display_name": "Mine"}
    assert [cell["outputs"] for cell in after.cells[1:3]] == [[output], [output]]


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": 3}', '{"cells": [{}]}', '{"worksheets": []}'])
def test_what_is_no_notebook_is_refused_and_left_alone(course, text):
    course.copy.write_text(text)
    with pytest.raises(ValueError, match="03_x.ipynb is not a notebook"):
        update(course.root, course.copy)
    assert course.copy.read_text() == text
    assert copies(course.root, "3") == [course.copy]


def test_a_renamed_copy_is_found_by_what_it_says_and_backups_are_numbered(course):
    renamed = course.copy.with_name("allocator (mine).ipynb")
    shutil.move(course.copy, renamed)
    course.copy = renamed
    assert copies(course.root, "3") == [renamed]
    for number in (1, 2):
        course.correct(lambda cells, text=f"{number}": cells.append(prose(text)))
        course.update()
        assert course.backup == course.root / "work" / "backup" / f"allocator (mine)-{number}.ipynb"
    with pytest.raises(ValueError, match="lab 4 is not in .*kvlab lab start 4"):
        copies(course.root, "4")


# --- whoever saved it ----------------------------------------------------------------------------------------


def by_vscode(data: dict) -> dict:
    return data  # nothing is lost


def without_ids(data: dict) -> dict:
    cells = [{key: value for key, value in cell.items() if key != "id"} for cell in data["cells"]]
    return data | {"nbformat_minor": 4, "cells": cells}


def by_colab(data: dict) -> dict:
    cells = [cell | {"metadata": cell["metadata"] | {"id": cell["id"]}} for cell in data["cells"]]
    return without_ids(data | {"cells": cells}) | {"nbformat_minor": 0}


def in_lines(data: dict) -> dict:
    return data | {"cells": [cell | {"source": cell["source"].splitlines(keepends=True)} for cell in data["cells"]]}


def with_crlf(data: dict) -> dict:
    return data | {"cells": [cell | {"source": cell["source"].replace("\n", "\r\n")} for cell in data["cells"]]}


def without_metadata(data: dict) -> dict:
    return data | {"cells": [cell | {"metadata": {}} for cell in data["cells"]], "metadata": {}}


def bare(data: dict) -> dict:
    return without_ids(without_metadata(data))


SAVED = [by_vscode, without_ids, by_colab, in_lines, with_crlf, without_metadata, bare]


@pytest.mark.parametrize("saved", SAVED)
def test_answers_are_found_whoever_saved_the_notebook(course, saved):
    course.work(lambda cells: [answer(cells, "one", ONE), answer(cells, "two", "def two(:  # not done yet")])
    save(course.copy, saved(json.loads(course.copy.read_text())), newline="\r\n")
    course.correct(lambda cells: cells.insert(3, prose("New.")))
    text = course.update()
    expected = ["# Lab", ONE, 'check("one")', "New.", "Between.", "lab.predict('x', None)", "def two(:  # not done yet"]
    assert text == [*expected, 'check("two")']


@pytest.mark.parametrize("saved", [by_vscode, by_colab, in_lines, with_crlf])
def test_an_untouched_copy_becomes_the_new_lab(course, saved):
    save(course.copy, saved(json.loads(course.copy.read_text())))
    new = [prose("# Lab, corrected"), *exercise("one", "Do it well."), code("new = 1"), *exercise("three")]
    course.correct(lambda cells: cells.__setitem__(slice(None), deepcopy(new)))
    assert course.update() == [cell["source"] for cell in new]


LAB_CELLS = st.lists(st.sampled_from(["p1", "p2", "p3", "c1", "c2", "one", "two", "three"]), unique=True, max_size=8)


def lab_of(names: list[str], doc: str) -> list[dict]:
    cells = []
    for name in names:
        if name[0] in "pc" and name[1].isdigit():
            cells.append(prose(f"prose {name}") if name[0] == "p" else code(f"{name} = {doc!r}"))
        else:
            cells += exercise(name, doc)
    return cells


@st.composite
def students(draw):
    """(the old lab's cells after a student's work, the new lab's cells, the lines that the student typed)."""
    cells = lab_of(draw(LAB_CELLS), "Old.")
    typed = []

    def line() -> str:
        typed.append(f"typed_{len(typed)} = 1")
        return typed[-1]

    for _ in range(draw(st.integers(0, 8))):
        where = draw(st.integers(0, max(0, len(cells) - 1)))
        action = draw(st.sampled_from(["answer", "replace", "own", "copy", "delete", "move", "retype", "untag"]))
        if action == "own" or not cells:
            own = draw(st.sampled_from([prose, code]))(line()) | {"id": f"own{len(typed)}"}
            cells.insert(where, own)
        elif action == "answer":
            cells[where]["source"] += "\n" + line()
        elif action == "replace" and "typed" not in cells[where]["source"]:
            cells[where]["source"] = line()
        elif action == "copy":
            again = deepcopy(cells[where])
            again["id"] = draw(st.sampled_from([again["id"], f"copy{len(typed)}"]))
            cells.insert(draw(st.integers(0, len(cells))), again)
        elif action == "delete" and "typed" not in cells[where]["source"]:
            del cells[where]
        elif action == "move":
            cells.insert(draw(st.integers(0, len(cells) - 1)), cells.pop(where))
        elif action == "retype" and cells[where]["cell_type"] == "markdown":
            cells[where] = code(cells[where]["source"]) | {"id": cells[where]["id"]}
        elif action == "untag":
            cells[where]["metadata"] = {}
    return cells, lab_of(draw(LAB_CELLS), draw(st.sampled_from(["Old.", "New."]))), typed


@settings(max_examples=400)
@given(students(), st.sampled_from(SAVED))
def test_no_line_that_a_student_typed_is_ever_lost(tmp_path_factory, student, saved):
    cells, new, typed = student
    root = tmp_path_factory.mktemp("course")
    copy = root / "work" / "03_x.ipynb"
    save(root / "labs" / "03_x.ipynb", notebook(new))
    save(copy, saved(notebook(cells)))
    before = copy.read_bytes()
    _, backup = update(root, copy)
    after = read_notebook(copy)
    text = "\n".join(cell["source"] for cell in after.cells).split("\n")
    assert [line for line in typed if line not in text] == []
    assert backup is None or backup.read_bytes() == before
    # The whole new lab is there, in order, and it is a notebook.
    ids = [cell["id"] for cell in after.cells]
    assert len(set(ids)) == len(ids)
    assert [name for name in ids if name in {cell["id"] for cell in new}] == [cell["id"] for cell in new]
    nbformat.validate(json.loads(after.text()))
    # A second update finds nothing to do.
    assert update(root, copy)[1] is None
    shutil.rmtree(root)


ALL_CELLS = ["p1", "one", "p2", "c1", "two", "c2", "p3", "three"]


@given(st.sets(st.sampled_from(["p1", "p2", "p3", "c1", "c2"])), st.data())
def test_what_a_student_typed_keeps_its_order(tmp_path_factory, gone, data):
    """Cells of the lab are taken out or added, exercises stay: the last definition of a name stays the last."""
    old, new = (ALL_CELLS, [name for name in ALL_CELLS if name not in gone])
    if data.draw(st.booleans()):
        old, new = new, old
    cells, typed = [], 0
    for cell in [*lab_of(old, "Old."), None]:
        for _ in range(data.draw(st.integers(0, 2))):
            cells.append(code(f"typed = {typed}") | {"id": f"own{typed}"})
            typed += 1
        if cell and data.draw(st.booleans()):
            cell["source"] += f"\ntyped = {typed}"
            typed += 1
        cells += [cell] if cell else []
    root = tmp_path_factory.mktemp("course")
    save(root / "labs" / "03_x.ipynb", notebook(lab_of(new, "New.")))
    save(root / "work" / "03_x.ipynb", notebook(cells))
    update(root, root / "work" / "03_x.ipynb")
    text = "\n".join(cell["source"] for cell in read_notebook(root / "work" / "03_x.ipynb").cells).split("\n")
    found = [line for line in text if line.startswith("typed = ")]
    assert found == [f"typed = {number}" for number in range(typed)]
