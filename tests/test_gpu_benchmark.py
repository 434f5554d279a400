"""benchmarks/gpu_engine.py, as far as a CPU can try it: its formulas, its table, and all sections at toy sizes."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.sizing import MODELS

ROOT = Path(__file__).parents[1]
SEVEN = MODELS["Qwen2.5-7B"]


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules: gpu_engine, and gpu.roofline."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("gpu_engine"), importlib.import_module("gpu.roofline")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_the_roofline_of_the_7b_by_hand(bench):
    """7,615,616,512 parameters; the embedding's 152,064 x 3,584 are looked up, not read; 57,344 bytes a token."""
    _, roofline = bench
    read = roofline.head_and_layer_bytes(SEVEN, 15_231_233_024, 2)
    assert read == 15_231_233_024 - 2 * 152_064 * 3584 == 14_141_238_272
    assert roofline.decode_bytes(read, 57_344, 64, 1000) == 14_141_238_272 + 64 * 1000 * 57_344
    tied = MODELS["Qwen2.5-0.5B"]
    assert roofline.head_and_layer_bytes(tied, 1000, 2) == 1000


def test_the_operations_of_a_prompt_by_hand(bench):
    _, roofline = bench
    layers = 7_615_616_512 - 2 * 152_064 * 3584
    pairs = 2048 * 2049 // 2
    expected = 2 * layers * 2048 + 4 * 28 * 28 * 128 * pairs + 2 * 152_064 * 3584
    assert roofline.prefill_flops(SEVEN, 2048) == expected
    assert roofline.prefill_flops(SEVEN, 1) == pytest.approx(2 * layers + 2 * 152_064 * 3584, rel=1e-4)


def test_goals_are_told_only_of_what_was_measured(bench):
    engine, _ = bench
    row = {"graphs": True, "of_roofline": 0.8}
    made = {"decode": {"rows": [row | {"batch": 1}, row | {"batch": 64, "of_roofline": 0.6}, row | {"batch": 2}]}}
    assert [line.rpartition(", ")[2] for line in engine.goals(made)] == ["reached", "MISSED"]
    made |= {"workload": {"rows": [{"tokens_per_s": 900}]}, "transformers": {"rows": [{"error": "no flash"}]}}
    assert len(engine.goals(made)) == 2
    made["transformers"]["rows"].append({"tokens_per_s": 300})
    assert engine.goals(made)[-1].endswith("3.00x, reached")
    assert engine.goals({}) == []


def test_a_table_has_a_column_for_every_key_and_a_dash_for_what_is_missing(bench):
    lines = bench[0].table([{"batch": 1, "ok": True}, {"batch": 20_000, "rate": 0.5}]).splitlines()
    assert [line.split() for line in lines] == [["batch", "ok", "rate"], ["1", "yes", "-"], ["20,000", "-", "0.5"]]


def run(tmp_path: Path, *options: str) -> dict:
    report = tmp_path / "report.json"
    folders = ["--folder", tmp_path / "toy", "--awq-folder", tmp_path / "toy-awq", "--json", report]
    command = [sys.executable, ROOT / "benchmarks" / "gpu_engine.py", "--toy", *options, *folders]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text())


def test_a_section_runs_without_a_gpu(tmp_path):
    report = run(tmp_path, "--sections", "decode")
    assert list(report["sections"]) == ["decode"] and report["goals"] == []
    assert [row["batch"] for row in report["sections"]["decode"]["rows"]] == [1, 3, 1]


@pytest.mark.slow
def test_all_sections_run_without_a_gpu(tmp_path):
    sections = run(tmp_path)["sections"]
    assert {name: made["error"] for name, made in sections.items()} == dict.fromkeys(sections)
    assert all(row["right"] for row in sections["right"]["rows"] if "right" in row)
    assert len(sections["right"]["rows"]) == 4
    usual = [row for row in sections["variants"]["rows"] if row["how"] == "attention by PyTorch"]
    assert all(row["same_tokens"] == row["of"] for row in usual)


def test_without_a_gpu_it_says_what_to_do(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_engine.py"), "--sections", "decode"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 2 and "no CUDA GPU here: use --toy" in done.stderr
