"""The benchmark without a GPU: all of it runs, at toy sizes, says what is right, and gives no time for a speed."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

from kvlab_kernels.bench import four_bits, speed, tune
from kvlab_kernels.bench.__main__ import SECTIONS
from kvlab_kernels.bench.cases import TOY, in_8_bits, paged, useful_bytes
from kvlab_kernels.bench.correct import compare
from kvlab_kernels.bench.machine import Machine, Times
from kvlab_kernels.bench.table import goals, table


def bench(*arguments: str, command=("-m", "kvlab_kernels.bench")) -> subprocess.CompletedProcess:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, *command, *arguments], env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_all_sections_run_without_a_gpu(tmp_path):
    done = bench("--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["machine"]["toy"] and result["ceilings"] == {"copy_bytes_per_second": None, "gemm_flops": None}
    sections = result["sections"]
    assert all(sections.values()) and set(sections) == set(SECTIONS)
    assert all(row["right"] for name in ("correctness", "graphs") for row in sections[name])
    timed = [row for name, rows in sections.items() if name not in ("correctness", "graphs") for row in rows]
    assert timed and all(row.get("p50") is None and row.get("rate") is None for row in timed)
    assert "TB/s" not in done.stdout and " us" not in done.stdout  # no column of a speed
    assert [goal["reached"] for goal in result["goals"]] == ["yes", None, None, None]


def test_one_section_by_the_command_of_kvlab(tmp_path):
    done = bench("bench", "kernels", "--only", "prefill", "--json", str(tmp_path / "o.json"), command=("-m", "kvlab"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Toy sizes" in done.stdout and "not measured" in done.stdout
    assert list(json.loads((tmp_path / "o.json").read_text())["sections"]) == ["prefill"]


@pytest.mark.slow
def test_the_sweep_runs_and_finds_nothing_best_without_times(tmp_path):
    done = bench("--tune", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["best"]["decode sizes"] == result["best"]["varlen sizes"] == {}
    assert all(rows and not any("note" in row for row in rows) for rows in result["sections"].values())


def test_a_wrong_kernel_makes_the_command_fail():
    code = """
import sys
from kvlab_kernels import launch
from kvlab_kernels.bench import correct
from kvlab_kernels.bench.__main__ import main
ones, dtype = correct.torch.ones(2), correct.torch.float32
correct.checks = lambda machine: [correct.Check("right", dtype, 1e-5, lambda: (ones, ones)),
                                  correct.Check("raises", dtype, 1e-5, lambda: 1 / 0)]
correct.checks_of_8_bits = correct.checks_of_4_bits = lambda machine: []
sys.exit(main(["--only", "correctness"]))
"""
    done = bench(code, command=("-c",))
    assert done.returncode == 1 and "ZeroDivisionError" in done.stdout and "1 of 2" in done.stdout, done.stdout


def test_times_become_rates_fractions_goals_and_the_best_sizes():
    """Toy sizes with made-up times: what a GPU's would be turned into."""
    machine = Machine(toy=True)
    seconds = itertools.cycle((4e-5, 2e-5, 3e-5))

    def time(call, graph):
        call()
        p50 = next(seconds)
        return Times(p50 / 2, p50, p50 * 2, "graph")

    machine.time = time
    rows = speed.decodes(machine, 1e9)
    bytes_read = 2 * 20 * TOY.num_kv_heads * TOY.head_dim * 2
    assert rows[0]["rate"] == bytes_read / 4e-5 and rows[0]["fraction"] == bytes_read / 4e-5 / 1e9
    assert [row["splits"] for row in rows if row["chosen"]] == [1, 1]
    faster = [row["faster"] for row in speed.quantised(machine, 1e9)]
    assert faster[0] == "1.00x" and float(faster[1][:-1]) != 1.0
    rows = four_bits.products(machine, 1e9)
    seconds = [row["p50"] for row in rows]
    assert [row["rate"] * second for row, second in zip(rows[:2], seconds, strict=False)] == pytest.approx(
        [384 * 96 * 2, 384 * 96 / 2 + 3 * 96 * 2.5]
    )
    assert rows[1]["faster"] == f"{seconds[0] / seconds[1]:.2f}x"
    seconds = itertools.cycle((4e-5, 2e-5, 3e-5))
    found = {"decode sizes": tune.decode_sizes(machine, 1e9), "varlen sizes": tune.varlen_sizes(machine, 1e9),
             "awq sizes": tune.awq_sizes(machine, 1e9)}  # fmt: skip
    best = tune.best(machine, found)
    assert list(best["awq sizes"])[0] == "layer=qkv rows=1"
    for section, names in (("decode sizes", 3), ("varlen sizes", 4), ("awq sizes", 5)):
        sizes = next(iter(best[section].values()))
        first = [row for row in found[section] if row.get("rows") == found[section][0].get("rows")]
        quickest = min([row for row in first if row.get("layer") == first[0].get("layer")], key=lambda row: row["p50"])
        assert len(sizes) == names and sizes == [quickest[name] for name in quickest if name in tune.NAMES[section]]


def test_a_time_is_the_median_of_launches_between_two_events(monkeypatch):
    class Event:
        made = 0

        def __init__(self, enable_timing):
            Event.made += 1
            self.number, self.recorded = Event.made, False

        def record(self):
            self.recorded = True

        def elapsed_time(self, stop):
            assert self.recorded and stop.recorded
            return float(stop.number)  # milliseconds: 2, 4, ... 60

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    machine = Machine(toy=True)
    machine.toy, machine._flush = False, torch.ones(4)
    times = machine.time(lambda: None)
    assert (times.p50, times.how) == (0.031, "graph") and times.p10 < times.p50 < times.p90
    assert machine._flush.sum() == 0


def test_useful_bytes():
    case = paged(TOY, [3, 10], 4, torch.float16, torch.device("cpu"))
    assert useful_bytes(case) == 2 * 13 * 2 * 32 * 2
    assert useful_bytes(in_8_bits(case, torch.int8)) == 2 * 13 * 2 * (32 + 4)


@pytest.mark.parametrize("shuffled", [False, True])
def test_tables_hold_every_block_once(shuffled):
    case = paged(TOY, [9, 1, 8], 4, torch.float16, torch.device("cpu"), shuffled=shuffled)
    used = [block for row, pages in zip(case.block_tables.tolist(), (3, 1, 2), strict=True) for block in row[:pages]]
    assert sorted(used) == list(range(1, 7)) and (used == sorted(used)) != shuffled


def test_an_error_beyond_tolerance_and_nan_are_wrong():
    one = torch.ones(3)
    assert compare(one + 1e-6, one, 2e-5)[1]
    assert not compare(one + 1e-4, one, 2e-5)[1]
    assert not compare(torch.tensor([1.0, torch.nan, 1.0]), one, 2e-5)[1]
    assert compare(torch.tensor([4.03]).bfloat16(), torch.tensor([4.0]), 1.5e-2)[1]
    assert not compare(torch.tensor([4.03]).bfloat16(), torch.tensor([4.0]), 0.0)[1]


def decode(batch, length, fraction, page=16, chosen=True):
    return {"batch": batch, "length": length, "page": page, "chosen": chosen, "fraction": fraction}


def test_goals_are_judged_by_the_worst_case_that_counts():
    sections = {
        "correctness": [{"right": True}, {"right": False}],
        "decodes": [decode(64, 4096, 0.85), decode(128, 8192, 0.79), decode(1, 32768, 0.45), decode(1, 1024, 0.01),
                    decode(128, 8192, 0.99, chosen=False), decode(128, 8192, 0.5, page=64)],
        "order": [{"page": 16, "order": "in order", "p50": 1.0},
                           {"page": 16, "order": "shuffled", "p50": 1.02}],
    }  # fmt: skip
    judged = [(row["measured"], row["reached"]) for row in goals(sections)]
    assert judged == [("1 of 2", "NO"), ("79.0%", "NO"), ("45.0%", "yes"), ("2.0%", "yes")]
    assert [row["reached"] for row in goals({})] == [None] * 4


def test_a_table_shows_times_in_microseconds_and_leaves_empty_columns_out():
    row = {"kernel": "split", "p50": 12.34e-6, "rate": 2.5e12, "fraction": 0.615, "note": None}
    text = table("decodes", [row, row | {"kernel": "x"}])
    assert text.splitlines()[0].split() == ["kernel", "p50", "us", "TB/s", "of", "copy"]
    assert text.splitlines()[1].split() == ["split", "12.3", "2.50", "62%"]
    assert "out of time" in table("decodes", [])
