"""kvlab doctor: true on any machine, on one without torch as well."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvlab import doctor
from kvlab.doctor import Verdict, pip_command, verdicts
from kvlab.machine import LOOKED_AT, examine

ROOT = Path(__file__).parents[2]
GIB = 2**30
# Installed, says the metadata, but neither imports.
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ImportError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
"""
# Not installed at all.
ABSENT = """
from importlib import metadata
known = metadata.version
def version(name):
    if name in ("torch", "triton", "transformers"):
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
"""


def facts(**changes):
    """A Linux machine with everything on it and a GPU."""
    names = [name for names in LOOKED_AT.values() for name in names]
    return {
        "python": "3.12.4",
        "executable": "/usr/bin/python3",
        "system": "Linux 6.1 x86_64",
        "cores": 8,
        "memory": 32 * GIB,
        "packages": dict.fromkeys(names, "1.0"),
        "torch": {"error": None, "cuda": "13.0", "threads": 8},
        "gpus": [gpu()],
        "triton_error": None,
        "tiny_bytes": 5_000_000,
        "hub": "hf",
        "hub_known": True,
        "hub_cache": "/home/me/.cache/huggingface/hub",
        "disk_free": 80 * GIB,
        "checkout": "/home/me/kvlab",
        "shipped": {"labs": True, "kernels": True, "serve": True},
    } | changes


def gpu(capability=8.9, usable=True):
    return {"name": "GeForce", "memory": 24 * GIB, "capability": capability, "usable": usable}


def without(*names):
    packages = facts()["packages"]
    return {name: None if name in names else version for name, version in packages.items()}


def verdict(part, **changes) -> Verdict:
    (found,) = (verdict for verdict in verdicts(facts(**changes)) if verdict.part == part)
    return found


def test_the_parts_and_their_order():
    assert [verdict.part for verdict in verdicts(facts())] == [
        "Labs 00-09 (plain Python)",
        "engine on CPU",
        "kernels interpreted",
        "kernels on the GPU",
        "notebooks",
        "server",
    ]


def test_a_machine_with_everything_runs_everything():
    assert all(verdict[1:] == (True, "", "") for verdict in verdicts(facts()))


@pytest.mark.parametrize(
    ("part", "changes", "note", "command"),
    [
        ("engine on CPU", {"packages": without("torch"), "torch": None, "gpus": []}, "missing: torch", "[engine]"),
        ("engine on CPU", {"torch": {"error": "OSError: x"}, "gpus": []}, "OSError: x", "--force-reinstall"),
        ("kernels interpreted", {"packages": without("triton")}, "missing: triton", "[engine]"),
        ("kernels interpreted", {"triton_error": "ImportError: x"}, "ImportError: x", "--force-reinstall"),
        ("kernels interpreted", {"packages": without("jinja2")}, "needs the engine", "[engine]"),
        ("kernels interpreted", {"packages": without("triton"), "system": "Windows 11"}, "Linux only", ""),
        ("kernels on the GPU", {"gpus": []}, "no NVIDIA GPU", ""),
        ("kernels on the GPU", {"gpus": [gpu(7.5)]}, "8.0 or newer, here 7.5: torch is used", ""),
        ("kernels on the GPU", {"packages": without("triton")}, "missing: triton", "[engine]"),
        (
            "kernels on the GPU",
            {"gpus": [gpu(usable=False)], "torch": {"error": None, "cuda": None, "threads": 8}},
            "CPU build",
            "--force-reinstall",
        ),
        ("kernels on the GPU", {"gpus": [gpu(usable=False)]}, "update the driver", ""),
        ("notebooks", {"packages": without("jupyterlab", "pandas")}, "missing: jupyterlab, pandas", "[labs]"),
        ("server", {"packages": without("uvicorn")}, "missing: uvicorn", "[serve]"),
        ("server", {"packages": without("torch"), "torch": None}, "needs the engine", "[engine]"),
        ("Labs 00-09 (plain Python)", {"python": "3.10.2"}, "needs Python 3.11, 3.12 or 3.13", ""),
        ("Labs 00-09 (plain Python)", {"python": "3.14.0"}, "needs Python 3.11, 3.12 or 3.13", ""),
    ],
)
def test_what_does_not_run_says_why_and_how_to_get_it(part, changes, note, command):
    found = verdict(part, **changes)
    assert not found.runs
    assert note in found.note
    assert command in found.command and bool(command) == bool(found.command)


def test_what_is_missing_for_one_part_does_not_touch_the_others():
    found = verdicts(facts(packages=without("torch", "triton", "fastapi"), torch=None, gpus=[]))
    assert [verdict.runs for verdict in found] == [True, False, False, False, True, False]


def test_what_is_not_written_yet_is_said():
    found = verdicts(facts(shipped={"labs": False, "kernels": False, "serve": False}))
    assert all(verdict.runs for verdict in found)
    assert [verdict.part for verdict in found if "none yet" in verdict.note] == [
        verdict.part for verdict in found if verdict.part != "engine on CPU"
    ]


def test_a_missing_model_is_told():
    assert "shipped model is missing" in verdict("engine on CPU", tiny_bytes=None).note


@pytest.mark.parametrize(
    "changes",
    [{}, {"packages": without("torch"), "torch": None, "memory": None, "gpus": [], "tiny_bytes": None}],
)
def test_the_tables_fit_80_columns_and_show_what_was_found(changes):
    console = Console(width=80)
    with console.capture() as captured:
        console.print(doctor.render(facts(**changes), verdicts(facts(**changes))))
    text = captured.get()
    assert max(map(len, text.splitlines())) == 80
    assert all(verdict.part in text for verdict in verdicts(facts()))
    assert ("GeForce, 24.0 GiB, compute capability 8.9" in text) == (not changes)


@pytest.mark.parametrize("hub", ["hf", "modelscope", "https://mirror.example", "nowhere"])
def test_the_hub_setting_is_reported(hub, monkeypatch):
    monkeypatch.setenv("KVLAB_HUB", hub)
    monkeypatch.setenv("HF_HOME", "/a")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("MODELSCOPE_CACHE", "/b")
    found = examine()
    assert found["hub"] == hub and found["hub_known"] == (hub != "nowhere")
    assert Path(found["hub_cache"]) == (Path("/b") if hub == "modelscope" else Path("/a/hub"))
    assert ("use hf, modelscope" in dict(doctor._lines(found))["model hub"]) == (hub == "nowhere")


def run(prelude: str, *arguments: str) -> str:
    code = f"{prelude}\nimport sys; sys.argv = {['kvlab', 'doctor', *arguments]!r}\nfrom kvlab.cli import main; main()"
    env = os.environ | {"COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_runs_without_torch():
    text = run(ABSENT + BLOCKED)
    assert "not installed" in text
    assert f"  {pip_command('engine')}\n" in text  # on a line of its own, to be copied
    assert json.loads(run(ABSENT + BLOCKED, "--json"))["torch"] is None


def test_it_runs_with_a_torch_that_does_not_import():
    pytest.importorskip("torch")
    found = json.loads(run(BLOCKED, "--json"))
    assert found["torch"] == {"error": "ImportError: torch is blocked"}
    assert {verdict["part"]: verdict["runs"] for verdict in found["verdicts"]} == {
        "Labs 00-09 (plain Python)": True,
        "engine on CPU": False,
        "kernels interpreted": False,
        "kernels on the GPU": False,
        "notebooks": bool(found["packages"]["jupyterlab"]),
        "server": False,
    }


def test_json_is_about_this_machine():
    found = json.loads(run("", "--json"))
    assert found["executable"] == sys.executable
    assert found["memory"] is None or found["memory"] > 2**28
    assert found["disk_free"] > 0 and found["checkout"] == str(ROOT)
