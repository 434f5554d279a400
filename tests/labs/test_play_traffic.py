"""Real traffic: the committed results are drawn, and a small trace goes the whole way that they went."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.lab.scenes import traffic as scene
from kvlab.lab.scenes.traffic import NAMES, draw, draw_admissions, draw_hit_rates, tell_admissions, tell_hit_rates
from kvlab.sizing import model_shape, num_gpu_blocks

ROOT = Path(__file__).parents[2]
ADMISSIONS = ("azure_conv", "azure_code")


@pytest.fixture(autouse=True)
def closed_figures():
    plt = pytest.importorskip("matplotlib.pyplot")
    yield
    plt.close("all")


def texts_of(figure) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_names_source_licence_and_command(name):
    found = scene.traffic(name)
    said = texts_of(draw(name))
    for what in ("title", "source", "licence", "paper"):
        assert found["trace"][what] in said
    assert found["command"] in said and f"--as {name} --json kvlab/lab/data/{name}.json" in said


@pytest.mark.parametrize("name", ADMISSIONS)
def test_the_lines_are_the_committed_numbers(name):
    ways = scene.traffic(name)["ways"]
    first, waiting, running, memory = draw_admissions(name).axes
    for line, way in zip(first.lines, ways, strict=True):
        assert line.get_label() == way and list(line.get_xdata()) == ways[way]["ttft_s"]
    for ax, series in ((waiting, "waiting"), (running, "running")):
        assert [list(line.get_ydata()) for line in ax.lines] == [got["per_minute"][series] for got in ways.values()]
    owned = [[100 * share for share in got["per_minute"]["kv_owned"]] for got in ways.values()]
    assert [list(line.get_ydata()) for line in memory.lines[:3]] == owned
    assert all(f"{way}: half of the requests" in tell_admissions(name) for way in ways)


@pytest.mark.parametrize("name", ADMISSIONS)
def test_the_committed_admissions_agree_with_themselves(name):
    """Time-averages over minutes against those over the run, quantiles against the summary, blocks against sizing."""
    found = scene.traffic(name)
    settings = found["settings"]
    shape = model_shape(settings["model"])
    per_block = settings["block_size"] * shape.kv_bytes_per_token()
    assert settings["blocks"] + 1 == num_gpu_blocks(80 * 10**9, 0.9, shape.weight_bytes(), 2 * 10**9, 10**9, per_block)
    for got in found["ways"].values():
        summary, minutes = got["summary"], got["per_minute"]
        assert summary["finished"] == found["trace"]["requests"]
        for level, key in ((0.5, "ttft_p50_s"), (0.9, "ttft_p90_s"), (0.99, "ttft_p99_s")):
            assert got["ttft_s"][found["levels"].index(level)] == summary[key]
        assert sum(minutes["kv_filled"]) / sum(minutes["kv_owned"]) == pytest.approx(summary["kv_filled"], rel=0.01)
        owned = sum(minutes["kv_owned"]) / sum(minutes["running"])  # idle time is in neither
        assert owned == pytest.approx(summary["kv_usage"] / summary["running"], rel=0.01)


def test_hit_rates_are_drawn_up_to_the_ceiling():
    found = scene.traffic("mooncake")
    ceiling, curve = draw_hit_rates().axes[0].lines
    assert list(curve.get_xdata()) == found["blocks"] == sorted(found["blocks"])
    assert list(curve.get_ydata()) == [100 * rate for rate in found["hit_rate"]]
    assert found["hit_rate"] == sorted(found["hit_rate"])
    assert ceiling.get_ydata()[0] == curve.get_ydata()[-1]  # room for all: the engine finds what counting finds
    assert "1,000 blocks, 94 GiB" in tell_hit_rates()


def test_an_unknown_name_is_told_which_there_are():
    with pytest.raises(ValueError, match="azure_conv, azure_code, mooncake"):
        scene.traffic("kimi")


def run_script(tmp_path: Path, lines: list[str], *options: str) -> dict:
    trace, out = tmp_path / "trace.txt", tmp_path / "found.json"
    trace.write_text("\n".join(lines) + "\n")
    command = [sys.executable, str(ROOT / "figures" / "real_traffic.py"), str(trace), "--json", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_a_small_trace_of_lengths_goes_the_whole_way(tmp_path):
    rng = random.Random(0)
    rows = [f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0000000,{rng.randint(1, 3000)},{rng.randint(1, 50)}"
            for i in range(0, 180, 3)]  # fmt: skip
    svg = tmp_path / "found.svg"
    found = run_script(tmp_path, ["TIMESTAMP,ContextTokens,GeneratedTokens", *rows], "--svg", str(svg), "--faster", "2")
    assert found["trace"]["requests"] == 60 and found["trace"]["licence"] == "not told"
    assert found["command"].endswith("trace.txt --faster 2.0")
    assert set(found["ways"]) == {"paged", "contiguous", "static"}
    for got in found["ways"].values():
        assert got["summary"]["finished"] == 60 and len(got["per_minute"]["running"]) == 2
    assert "arrivals 2 times as fast" in texts_of(draw(found)) and svg.read_text().startswith("<?xml")


def test_a_small_trace_with_prefixes_goes_the_whole_way(tmp_path):
    """Three prompts of two blocks and a token, the first block shared: 2 x 512 of 3 x 1025 tokens are found."""
    rows = [
        json.dumps({"timestamp": i, "input_length": 1025, "output_length": 9, "hash_ids": [0, 2 * i + 1, 2 * i + 2]})
        for i in range(3)
    ]
    found = run_script(tmp_path, rows, "--as", "mooncake")
    assert found["blocks"] == [9] and found["trace"]["licence"] == "Apache-2.0"
    assert found["hit_rate"] == [found["hit_rate_unbounded"]] == [pytest.approx(1024 / 3075, rel=1e-3)]
    assert "33.3%" in texts_of(draw(found))
