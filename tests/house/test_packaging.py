"""pyproject.toml and constraints.txt agree with each other and with what is in the folders."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")


def pins() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+==[0-9][0-9.]*", line) for line in lines), lines
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def requirements() -> list[Requirement]:
    texts = PROJECT["project"]["dependencies"] + [text for extra in EXTRAS.values() for text in extra]
    return [requirement for requirement in map(Requirement, texts) if requirement.name != "kvlab"]


def test_every_requirement_has_a_pin_that_satisfies_it():
    pinned = pins()
    wrong = [
        str(requirement)
        for requirement in requirements()
        if not requirement.specifier.contains(pinned.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_no_pin_has_a_local_part():
    assert "+cpu" not in CONSTRAINTS + (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_triton_is_asked_for_on_linux_only():
    (triton,) = (requirement for requirement in requirements() if requirement.name == "triton")
    assert triton.marker.evaluate({"sys_platform": "linux"})
    assert not triton.marker.evaluate({"sys_platform": "win32"})
    assert not triton.marker.evaluate({"sys_platform": "darwin"})


def test_dev_is_all_the_other_extras():
    (text,) = EXTRAS["dev"]
    assert Requirement(text).extras == set(EXTRAS) - {"dev"}


def test_every_package_is_listed():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    folders = {
        ".".join((name, *path.parent.relative_to(ROOT / top).parts))
        for top, name in (("kvlab", "kvlab"), ("kernels", "kvlab_kernels"))
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert listed == folders


def test_the_base_is_pure_python():
    """Everything that comes with `pip install kvlab`, followed through the metadata of what is installed."""
    todo, seen = [Requirement(text) for text in PROJECT["project"]["dependencies"]], set()
    while todo:
        requirement = todo.pop()
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        distribution = metadata.distribution(requirement.name)
        wheel = distribution.read_text("WHEEL") or ""
        assert "Root-Is-Purelib: true" in wheel, f"{requirement.name} {distribution.version} is compiled"
        todo += [Requirement(text) for text in distribution.requires or ()]
    assert {"rich", "typer"} <= seen


@pytest.mark.slow
def test_a_wheel_has_everything_and_calls_nothing_kernels(tmp_path):
    if find_spec("setuptools") is None:
        pytest.skip("needs setuptools in this environment")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "kvlab", "kernels"):
        path = ROOT / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, source / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)], check=True
    )
    (wheel,) = tmp_path.glob("kvlab-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"kvlab_kernels/__init__.py", "kvlab_kernels/aot_budget.json"} <= names
    assert not any(name.startswith("kernels/") for name in names)
    for path in (ROOT / "kvlab").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(ROOT).as_posix() in names
