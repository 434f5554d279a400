"""The folder kernels/ is the package kvlab_kernels, and does not get in the way of PyPI's `kernels`.

Python started in the repository has the folder on its path under that name, and transformers looks for it
there.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_A_QWEN2 = """
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config
config = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1)
print("built", type(AutoModelForCausalLM.from_config(config)).__name__)
"""
# Anything asked of the stand-in is a decorator factory that decorates nothing.
STAND_IN = """
__version__ = "{version}"
origin = "stand-in"
def nothing(*args, **kwargs):
    return lambda target: target
def __getattr__(name):
    return nothing
"""


def run(code: str, *paths: Path, cwd: Path = ROOT) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def stand_in(tmp_path) -> Path:
    """A folder with a package `kernels` in it, and the metadata that says it is installed, in a version wanted."""
    transformers = pytest.importorskip("transformers.utils.import_utils")
    version = getattr(transformers, "KERNELS_MIN_VERSION", "99.0")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(STAND_IN.format(version=version))
    info = tmp_path / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    (info / "RECORD").write_text(f"kernels/__init__.py,,\n{info.name}/METADATA,,\n")
    return tmp_path


def test_transformers_works_from_the_root_without_the_other_package():
    pytest.importorskip("transformers")
    assert run(BUILD_A_QWEN2) == "built Qwen2ForCausalLM"


def test_transformers_works_from_the_root_with_the_other_package(stand_in):
    used = "import sys; print(sys.modules['kernels'].origin)"
    assert run(BUILD_A_QWEN2 + used, stand_in).splitlines() == ["built Qwen2ForCausalLM", "stand-in"]


def test_the_name_leads_to_the_other_package_where_there_is_one(stand_in):
    code = "import kernels; print(kernels.origin, kernels.nothing.__module__)"
    assert run(code, stand_in) == "stand-in kernels"


def test_alone_it_passes_for_a_version_too_old_to_use():
    """Some transformers parse the version and fail without one."""
    assert run("import kernels; print(kernels.__version__)") == "0"


def test_the_installed_name(tmp_path):
    if find_spec("kvlab_kernels") is None:
        pytest.skip("kvlab is not installed here; make test installs it")
    code = "import kvlab_kernels, kvlab, sys; print(kvlab_kernels.__file__); print('triton' in sys.modules)"
    file, triton = run(code, cwd=tmp_path).splitlines()
    assert Path(file).parent.name in ("kernels", "kvlab_kernels") and triton == "False"
    there = "import importlib.util; spec = importlib.util.find_spec('kernels'); print(spec and spec.origin)"
    assert str(ROOT) not in run(there, cwd=tmp_path)  # away from the root, the name is not ours
