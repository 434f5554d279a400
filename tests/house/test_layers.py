"""A module imports only what stands above it in the plan of layers (docs/architecture.md)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the ground up. Modules on one line are one layer.
LAYERS = [
    "events",
    "config",
    "sampling_params",
    "sizing",
    "capacity",
    "primer",
    "standin",
    "arena",
    "blocks",
    "prefix",
    "swap",
    "manager contiguous",
    "schedule",
    "costs",
    "tiny",
    "model",
    "plan",
    "engine",
    "serve",
    "sim",
    "parts",
    "calibrate",
    "watch",
    "grade",
    "lab",
    "demo",
    "machine",
    "doctor",
    "cli_labs",
    "cli_plan",
    "cli_serve",
    "cli_sim",
    "cli_watch",
    "cli",
    "__main__",
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
# `from kvlab import LLM` names no layer: it is the front door, for those who stand on the engine.
FRONT_DOOR = RANK["engine"]


def layer_of(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported(tree: ast.AST, package_of_file: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a module imports, anywhere in it, also by import_module("...")."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package_of_file.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "import_module" and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def violations(package: Path) -> list[str]:
    """Every import of a layer that does not stand above the importer's own; modules without a place, too."""
    found = []
    for path in sorted(package.rglob("*.py")):
        layer = layer_of(path, package)
        where = path.relative_to(package.parent).as_posix()
        if layer == "__init__":
            rank = -1  # the front door itself imports nothing by a statement; it names modules in a table
        elif layer in RANK:
            rank = RANK[layer]
        else:
            found.append(f"{where}: {layer} has no place among the layers; give it one in LAYERS")
            continue
        package_of_file = ".".join(path.relative_to(package.parent).parent.parts)
        for line, name in imported(ast.parse(path.read_text(encoding="utf-8")), package_of_file):
            root, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if root == "kvlab_kernels" and rank < RANK["model"]:
                found.append(f"{where}:{line}: {layer} is plain Python and imports {name}")
            if root != "kvlab" or target == layer or not rest:
                continue
            is_layer = (package / target).is_dir() or (package / f"{target}.py").is_file()
            if is_layer and target not in RANK:
                continue  # reported above, as a module without a place
            if (RANK[target] if is_layer else FRONT_DOOR) >= rank and not (is_layer and RANK[target] == rank):
                found.append(f"{where}:{line}: {layer} imports {name}, which does not stand above it")
    return found


def test_kvlab_keeps_its_layers():
    assert violations(ROOT / "kvlab") == []


def test_kernels_stand_on_no_module_that_stands_on_them():
    """kvlab.model has both: what the kernels must equal, which they import, and the backend that launches them."""
    below, todo = set(), [ROOT / "kernels"]
    while todo:
        path = todo.pop()
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            if "bench" in file.parts:
                continue  # stands on everything, and nothing on it
            for line, name in imported(ast.parse(file.read_text(encoding="utf-8")), ""):
                assert path.name == "kernels" or not name.startswith("kvlab_kernels"), f"{file}:{line} imports {name}"
                found = ROOT.joinpath(*name.split(".")[:3]).with_suffix(".py")
                if name.startswith("kvlab.model") and found.is_file() and found not in below:
                    below.add(found)
                    todo.append(found)
    assert {path.stem for path in below} >= {"layers", "quantize", "kv_cache"}


def package(tmp_path: Path, **modules: str) -> Path:
    root = tmp_path / "kvlab"
    for name, code in ({"__init__": ""} | modules).items():
        path = root / (name.replace("__in__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    return root


@pytest.mark.parametrize(
    "code",
    [
        "import kvlab.schedule",
        "from kvlab.schedule import Scheduler",
        "from kvlab import schedule",
        "from . import schedule",
        "from .schedule import Scheduler",
        "def later():\n    from kvlab.schedule import Scheduler",
        "if TYPE_CHECKING:\n    from kvlab.schedule import Scheduler",
        "importlib.import_module('kvlab.schedule')",
        "from kvlab import LLM",
        "import kvlab_kernels",
    ],
)
def test_an_import_from_below_is_found(tmp_path, code):
    (found,) = violations(package(tmp_path, blocks=code, schedule=""))
    assert found.startswith("kvlab/blocks.py:")


@pytest.mark.parametrize(
    "code",
    [
        "from kvlab.blocks import BlockPool",
        "from kvlab import blocks",
        "import kvlab",
        "from .x import y",
        "import os",
    ],
)
def test_an_import_from_above_or_beside_is_not(tmp_path, code):
    modules = {"schedule__in____init__": "", "schedule__in__queue": code, "schedule__in__x": "", "blocks": ""}
    assert violations(package(tmp_path, **modules)) == []


def test_a_module_without_a_place_is_found(tmp_path):
    (found,) = violations(package(tmp_path, attic=""))
    assert "attic has no place" in found
