"""Which mode kernels run in, and what a user is told when it cannot be. Each in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, kernels are compiled unless asked otherwise"
)


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True)


@needs_no_gpu
def test_without_a_gpu_kernels_are_interpreted_and_one_sentence_says_so():
    done = run("from kvlab_kernels import launch, naive, varlen; print(launch.INTERPRETED)")
    assert done.stdout == "True\n"
    assert done.stderr.count("no NVIDIA GPU found, so Triton's interpreter runs the kernels") == 1


def test_who_asked_for_it_is_not_told():
    done = run("from kvlab_kernels import launch; print(launch.INTERPRETED)", TRITON_INTERPRET="1")
    assert (done.stdout, done.stderr) == ("True\n", "")


@needs_no_gpu
@pytest.mark.parametrize("late", ["", "import os; os.environ['TRITON_INTERPRET'] = '1'; "])
def test_triton_imported_before_in_the_other_mode(late):
    done = run(f"import triton; {late}import kvlab_kernels.launch")
    assert "RuntimeError: kernels are to be interpreted here, but Triton was imported for the other mode" in done.stderr
    assert "set TRITON_INTERPRET=1 before Python starts, or import kvlab_kernels.launch first" in done.stderr


def test_triton_imported_before_in_the_same_mode():
    code = "import triton; from kvlab_kernels import launch; print(launch.INTERPRETED)"
    assert run(code, TRITON_INTERPRET="1").stdout == "True\n"
    assert run(code, TRITON_INTERPRET="0").stdout == "False\n"


def test_compiled_kernels_refuse_tensors_on_the_cpu():
    code = (
        "import torch; from kvlab_kernels.naive import naive_attention as a; z = torch.zeros; i = torch.int32\n"
        "a(z(1, 2, 8), z(2, 2, 4, 1, 8), z(1, 1, dtype=i), z(1, dtype=i))"
    )
    done = run(code, TRITON_INTERPRET="0")
    assert "RuntimeError: the tensors are on cpu, but kernels are compiled for a GPU" in done.stderr
    assert "move the tensors to cuda, or start Python with TRITON_INTERPRET=1" in done.stderr


def test_without_triton():
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "import kvlab_kernels.naive"
    )
    done = run(code)
    assert "ImportError: the kernels need Triton, which is not installed" in done.stderr
    assert "pip install triton" in done.stderr
