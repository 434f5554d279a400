"""One source to the notebooks: what is in them, that nothing of a solution is, and what is refused."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.lab.source import read_source

SAMPLE = Path(__file__).parent / "sample" / "solutions" / "03_sample.py"
POINTS = {"num_blocks": 2, "free_list": 3}


def sample(lang: str = "en", solved: bool = False):
    return read_source(SAMPLE, POINTS).notebook(lang, solved)


def by_id(notebook) -> dict:
    return {cell["id"]: cell for cell in notebook.cells}


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("solved", [False, True])
def test_it_is_a_notebook_without_outputs(lang, solved):
    text = sample(lang, solved).text()
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert nbformat.writes(notebook) + "\n" == text  # Jupyter would save the same bytes
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert notebook.metadata.kvlab.lab == "03" and notebook.metadata.kvlab.lang == lang


def test_a_stub_names_lab_exercise_and_function_at_the_indentation_of_the_solution():
    cells = by_id(sample())
    assert cells["num_blocks"]["source"] == '''def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens need."""
    raise NotImplementedError("Lab 03, exercise 1: num_blocks")'''
    lines = cells["free_list"]["source"].split("\n")
    assert [line for line in lines if "raise" in line] == [
        '        raise NotImplementedError("Lab 03, exercise 2: free_list, __init__")',
        '            raise NotImplementedError("Lab 03, exercise 2: free_list, first")',
        'raise NotImplementedError("Lab 03, exercise 2: free_list")',
    ]


def test_the_solved_notebook_runs():
    names = {"check": lambda name: None}
    for cell in sample(solved=True).cells:
        if cell["cell_type"] == "code":
            exec(cell["source"], names)
    assert names["num_blocks"](33, 16) == 3


def test_no_line_of_a_solution_is_in_what_students_get():
    solutions = re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", SAMPLE.read_text(encoding="utf-8"), re.S)
    lines = {line.strip() for solution in solutions for line in solution.splitlines() if line.strip()}
    assert len(lines) == 5
    for lang in ("en", "zh"):
        text = "\n".join(cell["source"] for cell in sample(lang).cells)
        assert not [line for line in lines if line in text] and "SOLUTION" not in text
    solved = "\n".join(cell["source"] for cell in sample(solved=True).cells)
    assert all(line in solved for line in lines)


def test_nbgrader_finds_its_cells():
    cells = by_id(sample())
    both = {"schema_version": 3, "task": False}
    assert cells["free_list"]["metadata"]["nbgrader"] == both | {
        "grade": False, "grade_id": "free_list", "locked": False, "solution": True,
    }  # fmt: skip
    assert cells["check-free_list"]["metadata"]["nbgrader"] == both | {
        "grade": True, "grade_id": "check-free_list", "locked": True, "solution": False, "points": 3,
    }  # fmt: skip


def test_prose_in_two_languages():
    english, chinese = ([cell["source"] for cell in sample(lang).cells] for lang in ("en", "zh"))
    assert english[0].startswith("# Lab 03: a sample") and chinese[0].startswith("# 实验 03")
    assert english[1:] == chinese[1:]
    assert "Nobody has translated this." in chinese
    assert not [cell for cell in english if "实验" in cell]


def test_code_may_differ_between_languages(tmp_path):
    path = tmp_path / "01_x.py"
    path.write_text('# %% lang="en"\nx = "hello"\n\n# %% lang="zh"\nx = "你好"\n\n# %%\nx', encoding="utf-8")
    source = read_source(path, {})
    made = {lang: [cell["source"] for cell in source.notebook(lang).cells] for lang in source.languages}
    assert made == {"en": ['x = "hello"', "x"], "zh": ['x = "你好"', "x"]}


def test_a_lab_without_chinese_has_one_notebook(tmp_path):
    path = tmp_path / "01_x.py"
    path.write_text('# %% [markdown] lang="en"\n# Hello', encoding="utf-8")
    assert read_source(path, {}).languages == ["en"] and read_source(SAMPLE, POINTS).languages == ["en", "zh"]


# --- stable ids ----------------------------------------------------------------------------------------------

PROSE = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=30)
EXERCISE = """# %% ex="{0}"
def {0}():
    ### BEGIN SOLUTION
    return {1!r}
    ### END SOLUTION

# %% check="{0}"
check("{0}")"""


def written(parts: list[tuple[str, str]]) -> tuple[str, dict[str, int]]:
    """(source text, points) of prose, code and exercises."""
    cells, points = [], {}
    for kind, text in parts:
        if kind == "exercise":
            name = f"exercise_{len(points)}"
            points[name] = 1
            cells.append(EXERCISE.format(name, text))
        else:
            cells.append(f"# %% [markdown]\n# {text}" if kind == "prose" else f"# %%\nx = {text!r}")
    return "\n\n".join(cells) + "\n", points


PARTS = st.lists(st.tuples(st.sampled_from(["prose", "code", "exercise"]), PROSE), min_size=1, max_size=8)


def made(folder: Path, parts: list[tuple[str, str]]):
    text, points = written(parts)
    path = folder / "07_random.py"
    path.write_text(text, encoding="utf-8")
    return read_source(path, points).notebook("en")


@settings(max_examples=30)
@given(PARTS)
def test_generated_twice_is_the_same_bytes_and_ids_are_valid(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("twice")
    first = made(folder, parts)
    assert first.text() == made(folder, parts).text()
    nbformat.validate(json.loads(first.text()))
    assert len(by_id(first)) == len(first.cells)


@settings(max_examples=30)
@given(PARTS, st.data())
def test_an_inserted_prose_cell_changes_no_other_id(tmp_path_factory, parts, data):
    folder = tmp_path_factory.mktemp("inserted")
    where = data.draw(st.integers(0, len(parts)))
    before = [cell["id"] for cell in made(folder, parts).cells]
    after = [cell["id"] for cell in made(folder, [*parts[:where], ("prose", "a new cell"), *parts[where:]]).cells]
    assert len(after) == len(before) + 1
    assert any(after[:i] + after[i + 1 :] == before for i in range(len(after)))


def test_a_folded_cell_is_hidden_and_still_there(tmp_path):
    path = tmp_path / "07_x.py"
    path.write_text('# %% fold="yes"\nx = 1\n\n# %%\ny = 2', encoding="utf-8")
    cells = read_source(path, {}).notebook("en").cells
    assert [cell["metadata"].get("jupyter") for cell in cells] == [{"source_hidden": True}, None]
    assert cells[0]["source"] == "x = 1"


# --- what is refused -----------------------------------------------------------------------------------------

BEGIN, END = "    ### BEGIN SOLUTION\n", "    ### END SOLUTION"
SOLVED = "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION"
CHECK = '# %% check="a"\ncheck("a")'


def exercise(body: str = SOLVED, check: str = CHECK, name: str = "a") -> str:
    return f'# %% ex="{name}"\n{body}\n\n{check}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (exercise() + "\n" + exercise(name="b", check=CHECK.replace('"a"', '"b"')), "checks.py has no exercise b"),
        (exercise(SOLVED.replace(END, "")), "cell 1, line 1: ### BEGIN SOLUTION in line 2 of the cell has no"),
        (exercise(SOLVED.replace(BEGIN, "")), "END SOLUTION in line 3 of the cell, but nothing was begun"),
        (exercise(SOLVED.replace("    return", BEGIN + "    return")), "line 3 of the cell, but the one in line 2 is"),
        (exercise(SOLVED.replace("    return 1\n", "\n") + "\n    pass"), "between the markers in lines 2 and 4"),
        (exercise("def f():\n    return 1"), "has nothing to solve"),
        (exercise(SOLVED.replace("### END", "###END")), "marker would survive, line 4 of the cell, '###END SOLUTION'"),
        (exercise(SOLVED.replace("### BEGIN", "# ## begin")), "survive, line 2 of the cell, '# ## begin SOLUTION'"),
        ("# %%\n### BEGIN SOLUTION\nx = 1\n### END SOLUTION", "only a cell with ex= has solutions"),
        ("# %% [markdown]\n# ### END SOLUTION", "cell 1, line 1: a marker would survive"),
        (exercise() + "\n" + exercise(), "cell 3, line 10: exercise a is already at 03_x.py, cell 1, line 1"),
        (exercise() + CHECK, "cell 3, line .*a is already checked at 03_x.py, cell 2"),
        (exercise(check=""), 'cell 1, line 1: no cell with check="a" follows'),
        (CHECK, 'cell 1, line 1: no cell with ex="a" stands before its check'),
        (CHECK + "\n\n" + exercise(check=""), 'cell 1, line 1: no cell with ex="a" stands before'),
        (exercise(name="b", check=CHECK.replace('"a"', '"b"')), "checks.py has no exercise b; it has a"),
        ("# %%\nx = 1", 'no cell with ex="a", which is an exercise'),
        (exercise(check=CHECK + "\nprint(1)"), r"a check cell is exactly check\(\"a\"\)"),
        (exercise(check=CHECK.replace('check("a")', "check('a')")), "a check cell is exactly"),
        ('# %% [markdown] lang="fr"\n# x', "lang='fr' is unknown: use one of en, zh"),
        ('# %% [markdown] lang="zh"\n# x', "must directly follow the same cell"),
        ('# %% [markdown] lang="en"\n# x\n\n# %% lang="zh"\nx = 1', "cell 2, line 4: .* must directly follow"),
        (exercise(SOLVED.replace("return 1", "return (")), "the solution does not parse"),
        (exercise(f"def f():\n    return [\n{BEGIN}    1\n{END}\n    ]"), "the stub does not parse"),
        ('# %% ex="A b"\nx = 1', "use small letters"),
        ('# %% [markdown] ex="a"\n# x', "is a code cell with ex= or check= and nothing else"),
        ('# %% fold="no"\nx = 1', 'fold="yes" is for ordinary code cells'),
        ('# %% [markdown] fold="yes"\n# x', 'fold="yes" is for ordinary code cells'),
        ('# %% ex="a" fold="yes"\nx = 1', 'fold="yes" is for ordinary code cells'),
        ('# %% ex="a" lang="en"\nx = 1', "is a code cell with ex= or check= and nothing else"),
        ('# %% ex="a" check="a"\nx = 1', "is a code cell with ex= or check= and nothing else"),
        ('# %% exercise="a"\nx = 1', "exercise='a' is not known here"),
        ("# %% a title\nx = 1", "title='a title' is not known here"),
        ("# %% ex=1\nx = 1", "a value is not quoted"),
        ("# %% [raw]\n# x", "it is a raw cell"),
    ],
)  # fmt: skip
def test_a_faulty_source_is_refused_with_file_cell_and_line(tmp_path, text, message):
    path = tmp_path / "03_x.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        read_source(path, {"a": 1})
    assert str(caught.value).startswith("03_x.py")


def test_exercises_come_in_the_order_of_the_checks(tmp_path):
    """Their numbers are in the stubs and in the table that the first cell shows."""
    path = tmp_path / "03_x.py"
    path.write_text(exercise() + "\n" + exercise(name="b", check=CHECK.replace('"a"', '"b"')), encoding="utf-8")
    assert read_source(path, {"a": 1, "b": 1}).stubs["b"].endswith('"Lab 03, exercise 2: b, f")')
    with pytest.raises(ValueError, match="exercises come as a, b, in checks.py as b, a"):
        read_source(path, {"b": 1, "a": 1})


def test_the_line_is_right_behind_a_string_that_looks_like_a_header(tmp_path):
    path = tmp_path / "03_x.py"
    path.write_text('# %%\nx = """\n# %% no header\n"""\n\n# %% lang="fr"\ny = 1\n', encoding="utf-8")
    with pytest.raises(ValueError, match="cell 2, line 6"):
        read_source(path, {})


def test_the_name_of_the_file_gives_the_number(tmp_path):
    path = tmp_path / "helper.py"
    path.write_text("# %%\nx = 1")
    with pytest.raises(ValueError, match="helper.py: the file of a lab is called NN_name.py"):
        read_source(path, {})
