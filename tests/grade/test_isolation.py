"""What a student's notebook may do, by accident or not, costs at most the exercise in which it does it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvlab.grade import grade_exercise, grade_notebook, load_lab
from kvlab.grade.child import walls
from kvlab.grade.exercise import load_module

SPECS = Path(__file__).parent / "specs"
LAB = load_lab("90", SPECS)
CDIV = "def cdiv(a, b):\n    return -(-a // b)"
STACK = """
from kvlab.blocks import OutOfBlocks
class Stack:
    def __init__(self):
        self.items = []
    def push(self, x):
        self.items.append(x)
    def pop(self):
        if not self.items:
            raise OutOfBlocks("empty")
        return self.items.pop()
"""
EXTRA = "def extra():\n    return {'a': (1, {2})}"


def graded(*cells, name="cdiv", lang="en"):
    return grade_exercise(LAB, name, cells, lang)


def body(statement):
    return f"import os, sys\ndef cdiv(a, b):\n    {statement}\n    return -(-a // b)"


@pytest.mark.parametrize(
    "cell, said",
    [
        (body("while True: pass"), "had not ended after 1 seconds"),
        (body("os._exit(0)"), "ended the Python process"),
        (body("sys.exit(0)"), "SystemExit"),
        (body("raise KeyboardInterrupt"), "KeyboardInterrupt"),
        (body("x = [0] * 10**9; y = [[0] * 10**8 for _ in range(50)]"), "MemoryError"),
        (body("return 'x' * (20 << 20)"), "MiB of data back"),
        (body("os.kill(os.getppid(), 9)"), "does not allow os.kill"),
        (body("os.fork()"), "does not allow os.fork"),
        (body("open('/tmp/kvlab-was-here', 'w').write('x')"), "does not allow writing"),
        (body("os.system('true')"), "does not allow os.system"),
        (body("import subprocess; subprocess.run(['true'])"), "does not allow"),
        (body("import kvlab.blocks.table as t; open(t.__file__)"), "does not allow reading kvlab's own files"),
        (body("return type('E', (int,), {'__eq__': lambda s, o: True})(7)"), "an object of class E"),
        (body("return float(-(-a // b))"), "gave 0.0; expected: 0"),
        (body("return True"), "gave True; expected: 0"),
        (body("raise ValueError('x' * 10**7)"), "ValueError: xxx"),
        (body("raise type('E', (Exception,), {'__str__': lambda s: 1 / 0})()"), "gave E"),
        (body("import threading as t; t.Thread(target=lambda: all(iter(lambda: 1, 0))).start(); 1/0"), ""),
        (body("os.write(3, b'x' * 100); [os.write(n, b'junk' * 9) for n in range(3, 20) if n not in (1, 2)]"), ""),
        ("def cdiv(a, b):\n    return cdiv(a, b)", "RecursionError"),
        ("def cdiv(a, b): yield a", "an object of class generator"),
        ("cdiv = 7", "TypeError"),
        ("class cdiv: pass", "TypeError"),
        ("import pytest\npytest.fail = pytest.raises = None\nimport builtins\nbuiltins.AssertionError = Exception\n"
         "import json\njson.dumps = lambda *a, **k: '{}'\ndef cdiv(a, b):\n    return 0", "expected: 2"),
        ("from kvlab.blocks import cdiv", "kvlab's own: in this exercise you build it yourself"),
        ("from kvlab.blocks.table import cdiv as ours\ndef cdiv(a, b): return ours(a, b)", "kvlab's own"),
        ("import kvlab.manager\ncdiv = kvlab.manager.cdiv", "kvlab's own"),
        ("from kvlab.blocks import BlockTable\ndef cdiv(a, b): return len(BlockTable())", "kvlab's own"),
        ("def cdiv(a, b): return lab.best('Later')(a, b)", "does your code use a variable"),
        ("from kvlab.blocks import BlockPool\ndef cdiv(a, b): return BlockPool(2).touch([])", "touch is kvlab's own"),
        ("def cdiv(a, b", "syntax error"),
        ("x = 1", "does not define cdiv"),
        ("", "does not define cdiv"),
    ],
)  # fmt: skip
def test_a_bad_cell_fails_in_plain_words(cell, said):
    result = graded(cell)
    assert not result.passed and result.points == 0
    assert said in result.render()
    assert len(result.render()) < 3000
    assert not Path("/tmp/kvlab-was-here").exists()


def test_prints_without_end_are_kept_short_and_cost_nothing():
    result = graded(body("print('x' * 10**6)"))
    assert result.passed, result.render()
    assert 10_000 < len(result.printed) < 30_000 and "bytes more" in result.printed


@pytest.mark.parametrize(
    "cells",
    [
        ["%matplotlib inline\n!ls\n" + CDIV],
        ["%%time\nx = 1", CDIV],
        ["while True: pass", CDIV, "import os\nos._exit(1)"],  # demonstrations are not run
        ["def broken(:\n", CDIV],
        [CDIV, CDIV, CDIV],  # duplicated
        ["def cdiv(a, b):\n    return 0", CDIV],  # the last one counts
        ["from math import ceil\nN = 1", "def up(x):\n    return ceil(x / N)", "def cdiv(a, b):\n    return up(a / b)"],
        ["import math as m", "cdiv = lambda a, b: m.ceil(a / b)"],
        ["try:\n    from math import ceil\nexcept ImportError:\n    pass", "def cdiv(a, b):\n    return ceil(a / b)"],
        ["def cdiv(a, b):\n    return a // b", "old = cdiv", "def cdiv(a, b):\n    return old(a + b - 1, b)"],
        ["class C: 1", "def f(s, a, b):\n    return -(-a // b)\nC.f = f", "def cdiv(a, b):\n    return C().f(a, b)"],
        ["x = 1; y = 2", "def cdiv(a, b):\n    return -(-a // b) * x * y // 2"],
        ["check('cdiv')\nlab.predict('x', 3)\n" + CDIV],
        ["def cdiv(a, b):\n    '''\n%not a magic\n    '''\n    return -(-a // b)"],
    ],
)  # fmt: skip
def test_odd_but_right_notebooks_pass(cells):
    result = graded(*cells)
    assert result.passed, result.render()


def test_an_error_where_a_value_was_expected_is_explained_if_the_exercise_can():
    assert "ZeroDivisionError" in (told := graded(body("1 / a")).render()) and "no token is no division" in told
    assert "no token" not in graded(body("{}[a]")).render()


def test_a_name_that_two_cells_define_is_told():
    wrong = "def cdiv(a, b):\n    return 0"
    assert "More than one cell defines cdiv" in graded(CDIV, wrong).render()
    assert "More than one" not in graded(wrong).render()
    twice = grade_exercise(LAB, "cdiv", [wrong, wrong], are_runs=True)
    assert "More than one" not in twice.render(), "run twice is not defined twice"


def test_numpy_is_welcome_and_other_compiled_packages_are_named():
    pytest.importorskip("numpy")
    result = graded("import numpy as np", "def cdiv(a, b):\n    return np.int64(-(-a // b))")
    assert result.passed, result.render()
    if find_spec("pandas"):
        assert "plain Python, or numpy" in graded(body("import pandas")).render()


def test_what_becomes_a_part_must_be_as_plain_as_the_engine_wants_it(monkeypatch):
    pytest.importorskip("numpy")
    monkeypatch.setattr(type(LAB["cdiv"]), "part", {"a_part": "cdiv"})
    assert graded(CDIV).passed
    told = graded("import numpy as np", "def cdiv(a, b):\n    return np.int64(-(-a // b))").render()
    assert "numpy's class int64 (its .tolist() is plain)" in told


def test_a_named_tuple_is_a_tuple():
    named = "from collections import namedtuple\nPair = namedtuple('Pair', 'a b')\n"
    assert graded(named + "def extra():\n    return {'a': Pair(1, {2})}", name="extra").passed


def test_the_last_attempt_counts_also_if_it_has_a_syntax_error():
    assert "syntax error" in graded(CDIV, "def cdiv(a, b:\n    return 0").render()
    assert graded(CDIV, "def cdiv(a, b:\n    return 0", CDIV).passed
    assert graded(CDIV, "cdiv(4, 2").passed, "that is a use of it, not an attempt"


def test_state_outside_the_object_is_named():
    result = graded("calls = []\ndef cdiv(a, b):\n    calls.append(a)\n    return -(-a // b) + (len(calls) > 30)")
    assert not result.passed
    assert "two different answers" in result.render() or "expected" in result.render()


def test_a_random_failure_is_shrunk():
    result = graded(body("if a >= 37 and b >= 5: return 0"))
    assert "cdiv(37, 5) gave 0; expected: 8" in result.render(), result.render()
    assert "37 tokens need 8 blocks" in result.render()


def test_a_failing_walk_is_shrunk_to_its_shortest():
    result = graded(STACK.replace("self.items.append(x)", "self.items.append(x) if x != 2 else None"), name="stack")
    assert result.render().count("\n") <= 3, result.render()


def test_matchers_and_got():
    assert graded(STACK, name="stack").passed
    result = graded(STACK.replace("self.items = []", "self.items = []; self.work = 4"), name="stack")
    assert "gave 4; expected: at most 3" in result.render()
    result = graded(STACK + "\nStack.items = property(lambda s: [9], lambda s, x: None)", name="stack")
    assert not result.passed


def test_an_exception_of_another_kind_is_not_the_one_asked_for():
    assert "expected: OutOfBlocks raised" in graded(
        STACK.replace('raise OutOfBlocks("empty")', "raise MemoryError"), name="stack").render()  # fmt: skip


def test_ours_copied_earns_nothing_and_one_s_own_short_code_is_not_called_a_copy():
    import inspect

    from kvlab.blocks import free_queue
    from kvlab.grade.originality import copied_from_ours

    ours = {"FreeQueue": "kvlab.blocks.free_queue:FreeKVCacheBlockQueue"}
    source = inspect.getsource(free_queue).replace("FreeKVCacheBlockQueue", "FreeQueue")
    assert copied_from_ours(source, ours) == "FreeKVCacheBlockQueue"
    assert copied_from_ours("# mine\n" + source.replace('"""', "'''"), ours)
    method = "kvlab.blocks.free_queue:FreeKVCacheBlockQueue.popleft_n"
    assert copied_from_ours(source, {"popleft_n": method}) == "FreeKVCacheBlockQueue.popleft_n"
    assert copied_from_ours(STACK, {"popleft_n": method}) is None
    assert copied_from_ours(STACK, ours) is None
    assert copied_from_ours(CDIV, {"cdiv": "kvlab.blocks.table:cdiv"}) is None, "a line is alike whoever writes it"


def write(path, cells, metadata=None):
    cells = [{"cell_type": "code", "source": c, "metadata": {}, "outputs": []} for c in cells]
    notebook = {"cells": cells, "metadata": metadata or {"kvlab": {"lab": "90"}}, "nbformat": 4}
    path.write_text(json.dumps(notebook), "utf-8")
    return path


def test_one_bad_exercise_leaves_the_others_their_points(tmp_path):
    path = write(tmp_path / "mine.ipynb", [body("os._exit(1)"), STACK, EXTRA])
    report = grade_notebook(path, specs=SPECS, json_path=tmp_path / "r.json", junit_path=tmp_path / "r.xml")
    assert [r.points for r in report.results] == [0, 0, 3, 1]
    assert (report.points, report.max_points, report.stretch_points) == (3, 5, 1)
    read = json.loads((tmp_path / "r.json").read_text())
    assert [e["points"] for e in read["exercises"]] == [0, 0, 3, 1] and read["notebook"] == str(path)
    assert (tmp_path / "r.xml").read_text().count("<failure") == 2
    assert str(path) in report.to_text() and "cdiv" in report.to_text()


def test_results_are_there_before_grading_ends(tmp_path, monkeypatch):
    """A grader that dies leaves zeros to read, not nothing."""
    import kvlab.grade.report as module

    def die(*_):
        raise SystemExit(9)

    monkeypatch.setattr(module, "grade_exercise", die)
    with pytest.raises(SystemExit):
        grade_notebook(write(tmp_path / "x.ipynb", [CDIV]), specs=SPECS, json_path=tmp_path / "r.json")
    read = json.loads((tmp_path / "r.json").read_text())
    assert read["points"] == 0 and len(read["exercises"]) == 4


@pytest.mark.parametrize(
    "content, said",
    [("", "not a notebook"), ("[]", "not a notebook"), ('{"cells": 3}', "not a notebook"),
     ("[" * 9999, "not a notebook"), ('{"cells": [{"cell_type": "code"}]}', "not a notebook"),
     ('{"cells": []}', "does not say which lab")],
)  # fmt: skip
def test_a_file_that_is_no_notebook_is_a_clear_error(tmp_path, content, said):
    path = tmp_path / "x.ipynb"
    path.write_text(content)
    with pytest.raises(ValueError, match=said):
        grade_notebook(path, specs=SPECS)
    with pytest.raises(ValueError, match="cannot be read"):
        grade_notebook(tmp_path / "none.ipynb", specs=SPECS)


def test_sources_as_lists_crlf_and_a_byte_order_mark(tmp_path):
    path = write(tmp_path / "x.ipynb", [CDIV])
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["source"] = [line + "\r\n" for line in CDIV.split("\n")]
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(notebook).encode())
    assert grade_notebook(path, specs=SPECS).results[0].passed


def test_chinese(tmp_path):
    path = write(tmp_path / "x.ipynb", [body("while True: pass")], {"kvlab": {"lab": "90", "lang": "zh"}})
    assert "死循环" in grade_notebook(path, specs=SPECS).to_text()


def test_every_sentence_of_the_grader_has_its_translation():
    import re

    from kvlab.grade.text import own_catalogue

    package = Path(__file__).parents[2] / "kvlab"
    joined = re.compile(r'say\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
    said = set()
    for path in [*package.glob("grade/*.py"), *package.glob("lab/*.py")]:
        for literals in joined.findall(path.read_text(encoding="utf-8")):
            said.add("".join(eval(part) for part in re.findall(r'"(?:[^"\\]|\\.)*"', literals)))  # noqa: S307
    said -= {"\n", "{call}", "{message}", "{message} ({where})", "block {id} was freed twice"}
    assert len(said) > 10
    assert said <= set(own_catalogue("zh")), said - set(own_catalogue("zh"))
    sources = "".join(p.read_text(encoding="utf-8") for f in ("grade", "lab") for p in (package / f).glob("*.py"))
    left_over = {template for template in own_catalogue("zh") if template not in said and template not in sources}
    assert not left_over, left_over


@pytest.mark.skipif(not walls(), reason="this system gives no namespaces")
def test_the_child_sees_neither_our_processes_nor_the_network():
    assert "expected" in graded(body("return os.getpid() * 1000")).render()
    assert int(graded(body("return os.getpid() * 1000")).render().split("gave ")[1].split(";")[0]) < 10_000


def test_a_hostile_notebook_does_not_outlive_its_grading():
    before = set(_children())
    graded(body("while True: pass"))
    assert set(_children()) <= before


def _children():
    done = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid="], capture_output=True, text=True)
    return [pid for pid in done.stdout.split() if Path(f"/proc/{pid}/cmdline").exists()
            and "worker.py" in Path(f"/proc/{pid}/cmdline").read_text()]  # fmt: skip


def test_the_three_front_doors_agree(tmp_path):
    """check() in a notebook, pytest --notebook and kvlab grade."""
    root = Path(__file__).parents[2]
    others = load_module(root / "tests/labs/lab_03/others.py").CORRECT["free_queue"]
    good = "from kvlab.blocks import KVCacheBlock, OutOfBlocks\n" + others["an ordered dict in place of links"]
    for cells, passes in (([good], True), (["class FreeQueue:\n    pass"], False)):
        path = write(tmp_path / "x.ipynb", cells, {"kvlab": {"lab": "03"}})
        report = grade_notebook(path, json_path=tmp_path / "r.json")
        by_grade = {r.exercise.name: r.passed for r in report.results}
        assert by_grade["free_queue"] is passes
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "tests/labs", "--notebook", str(path), "-q", "-rA"],
            cwd=root, capture_output=True, text=True,
        )  # fmt: skip
        passed = "PASSED tests/labs/test_notebook.py::test_exercise[{}]"
        by_pytest = {name: passed.format(name) in done.stdout for name in by_grade}
        assert by_pytest == by_grade, done.stdout
        from kvlab.lab import Lab

        lab = Lab("03", cells=cells, names={})
        for name in by_grade:
            lab.check(name)
        assert {name: result.passed for name, result in lab.results.items()} == by_grade
