"""Parts from a notebook: what is solved is yours, what is not is ours, and for each it is said why."""

import json
import sys
import traceback
from types import SimpleNamespace

import pytest

from kvlab import cli, grade
from kvlab.blocks import FreeKVCacheBlockQueue
from kvlab.lab import yours
from kvlab.parts import PartError, survive

CHECKS = '''
from kvlab.grade import Exercise, LabInfo, say

LAB = LabInfo(title=say("A sample"), sections="")


class Queue(Exercise):
    """A queue."""
    name, defines, part = "queue", ("Queue",), {"free_queue": "Queue"}
    ours = {"Queue": "kvlab.blocks.free_queue:FreeKVCacheBlockQueue"}


class Fork(Exercise):
    """A fork."""
    name, defines, part = "fork", ("fork",), {"fork": "fork"}
    ours = {"fork": "kvlab.blocks.sharing:fork"}


class Barrier(Exercise):
    """Two names, one part."""
    name, defines = "barrier", ("ensure_writable", "copy_of")
    part = {"ensure_writable": "ensure_writable"}
'''
FIRST = "from kvlab.lab import Lab\nlab = Lab('77')\ncheck, hint = lab.check, lab.hint"
QUEUE = """%matplotlib inline
from dataclasses import dataclass
from kvlab.blocks import FreeKVCacheBlockQueue as Base

@dataclass
class Counted:
    number: int = 0

class Queue(Base):
    counted = Counted()
    def popleft_n(self, n):
        self.counted.number += n
        return super().popleft_n(n)
"""
FORK = "def fork(pool, blocks):\n    pool.touch(blocks)\n    return list(blocks)\n"
STUB = 'def fork(pool, blocks):\n    raise NotImplementedError("Lab 77, exercise 2: fork")\n'
BARRIER = """from kvlab.blocks import sharing
def copy_of(pool):
    return pool.get_new_blocks(1)[0]
def ensure_writable(pool, table, index):
    shared, table[index] = table[index], copy_of(pool)
    pool.free_blocks([shared])
    return shared, table[index]
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """read(cell, ...): parts and findings of a notebook of these cells."""
    (tmp_path / "specs" / "lab_77").mkdir(parents=True)
    (tmp_path / "specs" / "lab_77" / "checks.py").write_text(CHECKS)
    monkeypatch.setattr(yours, "load_lab", lambda number: grade.load_lab(number, tmp_path / "specs"))
    # The sample has no checks: what is written passes. That a check decides is tested on a real lab below.
    monkeypatch.setattr(yours, "grade_exercise", lambda spec, name, cells: SimpleNamespace(passed=True))

    def write(*cells, name="77_sample.ipynb", metadata=None):
        cells = [{"cell_type": "code", "source": source} for source in (FIRST, *cells)]
        path = tmp_path / name
        path.write_text(json.dumps({"cells": cells, "metadata": metadata or {}}))
        return path

    read = lambda *cells, **more: yours.parts_from_notebook(write(*cells, **more))  # noqa: E731
    read.write = write
    return read


def test_what_fails_its_check_is_ours(tmp_path):
    """A queue that hands out the last block first is of its kind, and wrong."""
    cell = """
from kvlab.blocks import OutOfBlocks

class FreeQueue(list):
    num_free_blocks = property(len)
    def popleft(self): return self.pop()
    def popleft_n(self, n): return [self.pop() for _ in range(n)]
    def append_n(self, blocks): self.extend(blocks)
    def get_all_free_blocks(self): return list(self)
"""
    path = tmp_path / "03_mine.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell}], "metadata": {}}))
    parts, found = yours.parts_from_notebook(path)
    assert not parts.replaced
    assert whose(found)["free_queue"] == "does not pass its check: kvlab grade says why (exercise free_queue)"


def test_what_is_written_in_a_folder(read, tmp_path):
    read.write(QUEUE, STUB, BARRIER)
    read.write("x = 1", name="88_of_no_lab.ipynb")
    (tmp_path / "77_broken.ipynb").write_text("{")
    assert yours.written_parts(tmp_path) == dict.fromkeys(("free_queue", "ensure_writable"), "77_sample.ipynb")


def test_running_a_class_cell_again_leaves_nothing_of_the_old_class(capsys):
    """lab.parts() and lab.best() are what the notebook defines now."""
    from kvlab.lab import Lab

    fork = "def fork(pool, blocks):\n    pool.touch(blocks)\n    return [b for b in blocks]"
    barrier = "def ensure_writable(pool, table, index):\n    raise NotImplementedError(\"Lab 04, exercise 3: x\")"
    cells, names = [fork, barrier], {}
    lab = Lab("04", cells=cells, names=names)
    exec(fork, names)
    exec(barrier, names)
    first = lab.parts().fork
    assert first is names["fork"] is lab.best("fork") and lab.parts().ensure_writable is None
    exec(fork, names)  # the cell is run again
    assert lab.parts().fork is names["fork"] is not first


def whose(found):
    return {one.part: "yours" if one.is_yours else one.why for one in found}


def test_what_is_solved_is_yours_and_drives_the_engine(read):
    parts, found = read(QUEUE, FORK, BARRIER, "1 / 0", 'check("queue")')
    assert whose(found) == {"free_queue": "yours", "fork": "yours", "ensure_writable": "yours"}
    assert [o for o in survive(parts) if not o.survived] == []
    assert parts.free_queue.counted.number > 0


def test_what_is_not_is_ours_and_why(read):
    parts, found = read(QUEUE, STUB, "def copy_of(pool):\n    return 1 +")
    why = whose(found)
    assert list(parts.replaced) == ["free_queue"]
    assert why["free_queue"] == "yours" and why["fork"] == "not written yet"
    for word in ("ensure_writable", "copy_of", "is not defined; invalid syntax, line 2"):
        assert word in why["ensure_writable"]


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("fork = {}['x']", "77_sample.ipynb, code cell 3: KeyError: 'x'"),
        ("def fork(pool):\n    return []", "part `fork`: fork must be a function called with (pool, blocks)"),
        ("fork = 3", "part `fork` is 3"),
    ],
)
def test_a_part_that_cannot_be_used_leaves_the_others(read, cell, why):
    parts, found = read(QUEUE, cell)
    assert list(parts.replaced) == ["free_queue"] and whose(found)["fork"].startswith(why)


def test_what_builds_on_something_unsolved_is_ours(read):
    helper = STUB.replace("fork", "helper")
    _, found = read("def fork(pool, blocks):\n    return helper(pool, blocks)", helper)
    assert whose(found)["fork"] == "not written yet"


def test_best_is_yours_by_now_or_ours(read):
    cell = "Mine = lab.best('Queue')\ndef fork(pool, blocks):\n    pool.touch(blocks)\n    return Mine and list(blocks)"
    assert read(cell)[0].fork.__globals__["Mine"] is FreeKVCacheBlockQueue
    parts, _ = read(QUEUE, cell)
    assert parts.fork.__globals__["Mine"].__name__ == "Queue"


def test_a_traceback_shows_the_notebook_s_own_line(read):
    parts, _ = read(QUEUE, "# a comment\ndef fork(pool, blocks):\n    return 1 / 0  # here\n")
    (error,) = [o.error for o in survive(parts) if o.part == "fork"]
    assert isinstance(error, PartError)
    shown = "".join(traceback.format_exception(error))
    assert 'File "<77_sample.ipynb, code cell 3>", line 3, in fork' in shown and "return 1 / 0  # here" in shown


def test_the_lab_is_known_by_metadata_then_by_name(read):
    assert read(QUEUE, name="mine.ipynb", metadata={"kvlab": {"lab": "77"}})[1]
    with pytest.raises(ValueError, match="mine.ipynb does not say which lab it is of: name the lab, or let its"):
        read(QUEUE, name="mine.ipynb")


def test_later_notebooks_go_over_earlier_ones(read):
    one, two = read(QUEUE, FORK)[0], read(FORK, BARRIER)[0]
    both = one | two
    assert set(both.replaced) == {"free_queue", "fork", "ensure_writable"} and both.fork is two.fork


def test_generate_with_a_notebook(read, monkeypatch, capsys):
    path = read.write(QUEUE, STUB)
    rest = ["--max-tokens", "4", "--num-gpu-blocks", "16"]
    monkeypatch.setattr(sys, "argv", ["kvlab", "generate", "What is a block?", "--with", str(path), *rest])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    assert not ended.value.code and shown.out.strip()
    assert "free_queue         yours, Queue" in shown.err and "fork               ours: not written yet" in shown.err


def test_simulate_with_a_notebook(read, monkeypatch, capsys):
    """The student's queue hands out the blocks of every simulated request."""
    queue = QUEUE.replace("self.counted.number += n", "print('asked for', n)")
    path = read.write(queue, STUB)
    rest = ["--prompt", "40", "--output", "1", "--step-ms", "1", "--num-gpu-blocks", "9", "--with", str(path)]
    monkeypatch.setattr(sys, "argv", ["kvlab", "simulate", "closed", "-n", "3", *rest])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    assert not ended.value.code and shown.out.count("asked for 3\n") == 3 and "3 requests (0 refused)" in shown.out
    assert "free_queue         yours, Queue" in shown.err and "fork               ours: not written yet" in shown.err
