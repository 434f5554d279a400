"""The plain layers run on the standard library alone: torch, triton and numpy may be missing altogether."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN = [
    "kvlab",
    "kvlab.events",
    "kvlab.config",
    "kvlab.sampling_params",
    "kvlab.sizing",
    "kvlab.capacity",
    "kvlab.primer",
    "kvlab.arena",
    "kvlab.blocks",
    "kvlab.prefix",
    "kvlab.manager",
    "kvlab.contiguous",
    "kvlab.schedule",
    "kvlab.costs",
    "kvlab.plan",
    "kvlab.model.hub",
    "kvlab.model.known",
    "kvlab.grade",
    "kvlab.lab",
    "kvlab.sim",
    "kvlab.parts",
    "kvlab.watch.views",
    "kvlab.watch.pool",
    "kvlab.watch.fork",
    "kvlab.watch.prefix",
    "kvlab.watch.strip",
    "kvlab.watch.address",
    "kvlab.machine",
    "kvlab.doctor",
    "kvlab.cli",
    "kvlab_kernels",
]
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "numpy"):
            raise ImportError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
"""


def run_blocked(code: str, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *flags, "-c", BLOCKER + code], cwd=ROOT, capture_output=True, text=True)


def test_the_blocker_blocks():
    done = run_blocked("import torch")
    assert done.returncode == 1 and "torch is blocked" in done.stderr


@pytest.mark.parametrize("module", PLAIN)
def test_imports_with_torch_triton_and_numpy_blocked(module):
    if module == "kvlab_kernels":
        pytest.importorskip(module, reason="kvlab is not installed here; make test installs it")
    done = run_blocked(f"import {module}")
    assert done.returncode == 0, done.stderr


def test_the_layers_that_labs_build_on_need_no_package_at_all():
    """-S: no site-packages. (Those on top of them use typer and rich, or hypothesis.)"""
    on_top = ("kvlab.cli", "kvlab.grade", "kvlab.lab", "kvlab_kernels")
    layers = [module for module in PLAIN if module not in on_top]
    done = run_blocked(f"import {', '.join(layers)}", "-S")
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_none_of_its_layers():
    done = run_blocked("import kvlab; print([name for name in sys.modules if name.startswith('kvlab.')])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
