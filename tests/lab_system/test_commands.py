"""kvlab labs, solutions, lab start and update, as typed."""

import sys

import pytest
from typer.testing import CliRunner

from kvlab import cli

runner = CliRunner()
NAMES = ["03_sample.ipynb", "03_sample.zh.ipynb"]


def kvlab(*arguments: str) -> tuple[int, str]:
    result = runner.invoke(cli.app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def source(repository, old: str, new: str) -> None:
    path = repository / "solutions" / "03_sample.py"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_labs_writes_and_check_names_what_is_stale(repository):
    code, text = kvlab("labs", "--check")
    assert code == 1 and all(f"labs/{name} is missing" in text for name in NAMES)
    assert not list((repository / "labs").iterdir())
    assert kvlab("labs")[0] == 0
    assert sorted(path.name for path in (repository / "labs").iterdir()) == NAMES
    assert kvlab("labs", "--check") == (0, "2 notebooks, 0 stale: make labs\n")
    source(repository, "样例", "例子")
    code, text = kvlab("labs", "--check")
    assert code == 1 and "labs/03_sample.zh.ipynb is not what its source makes" in text and "sample.ipynb" not in text
    assert kvlab("labs") == (0, "labs/03_sample.zh.ipynb written\n2 notebooks, 1 of them changed\n")


def test_a_notebook_without_a_source_is_named_and_left_alone(repository):
    (repository / "labs" / "mine.ipynb").write_text("mine")
    assert kvlab("labs")[0] == 0
    code, text = kvlab("labs", "--check")
    assert code == 1 and "labs/mine.ipynb has no source" in text
    assert (repository / "labs" / "mine.ipynb").read_text() == "mine"


def test_two_labs_with_one_number_are_refused(repository):
    (repository / "solutions" / "03_other.py").write_text("# %%\nx = 1")
    with pytest.raises(ValueError, match="03_other.py and 03_sample.py have the same number"):
        kvlab("labs")


@pytest.mark.parametrize("command", [("labs",), ("solutions",), ("student", "class")])
def test_a_students_tree_has_nothing_to_make(repository, command):
    for path in (repository / "solutions").iterdir():
        path.unlink()
    (repository / "solutions").rmdir()
    with pytest.raises(ValueError, match="this is a student's tree"):
        kvlab(*command)


@pytest.mark.parametrize(("package", "command"), [("jupytext", "labs"), ("nbclient", "solutions")])
def test_without_the_labs_extra_the_pip_command_is_told(repository, monkeypatch, package, command):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf'this needs {package}, .*install -c constraints.txt -e "\.\[labs\]"'):
        kvlab(command)


def test_start_and_update(repository):
    kvlab("labs")
    assert kvlab("lab", "start", "3")[1].startswith("work/03_sample.ipynb is yours now.")
    assert "is there already" in kvlab("lab", "start", "3")[1]
    assert kvlab("lab", "start", "3", "--lang", "zh")[1].startswith("work/03_sample.zh.ipynb is yours now.")
    assert kvlab("lab", "update") == (0, "work/03_sample.ipynb: nothing new.\nwork/03_sample.zh.ipynb: nothing new.\n")
    work = repository / "work" / "03_sample.ipynb"
    stub = 'raise NotImplementedError(\\"Lab 03, exercise 1: num_blocks\\")'
    text = work.read_text(encoding="utf-8")
    assert stub in text
    work.write_text(text.replace(stub, "return 42"), encoding="utf-8")
    source(repository, "Blocks that so many tokens need.", "Blocks for tokens.")
    kvlab("labs")
    (repository / "work" / "03_sample.zh.ipynb").write_text("{", encoding="utf-8")
    code, text = kvlab("lab", "update", "03")
    assert code == 1  # one could not be read, the other is corrected
    assert "work/03_sample.ipynb: corrected; kept: your answers (1), other cells of yours (0);" in text
    assert "as it was: work/backup/03_sample-1.ipynb" in text
    assert "What is given has changed in num_blocks" in text
    assert "work/03_sample.zh.ipynb: left as it is." in text
    assert "return 42" in work.read_text(encoding="utf-8")


def test_solutions_runs_the_labs_and_names_the_cell_that_fails(repository):
    code, text = kvlab("solutions")
    assert code == 0 and text.startswith("lab 03: ") and text.endswith(" s, solutions/html/03_sample.html\n")
    page = (repository / "solutions" / "html" / "03_sample.html").read_text(encoding="utf-8")
    assert "num_blocks: passed" in page and "a sample" in page
    source(repository, "FreeList(num_blocks(100, seats)).popleft()", "print('before')\n1 / 0")
    code, text = kvlab("solutions", "03")
    line = (repository / "solutions" / "03_sample.py").read_text(encoding="utf-8").split("\n").index("1 / 0") - 1
    assert code == 1 and "lab 03: FAILED. 03_sample.py, cell 10, line" in text
    assert f"line {line}: ZeroDivisionError: division by zero" in text
