"""`kvlab doctor`: what this machine can run, what is missing, and the command that gets it.

    examine() -> facts (a dict, plain values)  ->  verdicts(facts)  ->  run(): a table, or JSON

It needs nothing but the base dependencies: torch and the rest are looked at only if they are there, and a
package that is installed but does not import is told apart from one that is missing.
"""

import csv
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.sizing import GIB, MIB, to_gib

PACKAGE = Path(__file__).parent
PYTHONS = ((3, 11), (3, 14))  # from the first, before the second
KERNEL_CAPABILITY = 8.0  # Ampere: the first GPUs with bf16 and asynchronous copies
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LOOKED_AT = {
    "engine": ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "triton"),
    "labs": (
        *("jupyterlab", "ipywidgets", "matplotlib", "pandas", "anywidget"),
        *("jupytext", "nbformat", "nbclient", "nbconvert", "hypothesis"),
    ),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
}


class Verdict(NamedTuple):
    """Whether a part runs here; if not, why, and the command that changes it ("" when no command can)."""

    part: str
    runs: bool
    note: str = ""
    command: str = ""


def checkout() -> Path | None:
    """The folder of the repository that kvlab runs from; None when it was installed without one."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "labs").is_dir() else None


def pip_command(extra: str) -> str:
    """The command that installs one of the extras, to be typed in the repository's folder."""
    return f'python -m pip install -c constraints.txt -e ".[{extra}]"'


REINSTALL = pip_command("engine") + " --force-reinstall"


# --- facts --------------------------------------------------------------------------------------------------


def examine() -> dict[str, Any]:
    """What the verdicts rest on, sizes in bytes. Imports torch and triton if they are there."""
    packages = {name: _version(name) for names in LOOKED_AT.values() for name in names}
    torch, gpus = _look_at_torch(packages["torch"])
    weights = PACKAGE / "tiny" / "model" / "model.safetensors"
    hub = os.environ.get("KVLAB_HUB") or "hf"
    cache = _hub_cache(hub)
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _memory(),
        "packages": packages,
        "torch": torch,
        "gpus": gpus or _gpus_of_nvidia_smi(),
        "triton_error": _import_error("triton") if packages["triton"] else None,
        "tiny_bytes": weights.stat().st_size if weights.is_file() else None,
        "hub": hub,
        "hub_known": hub in ("hf", "modelscope") or hub.startswith(("https://", "http://")),
        "hub_cache": str(cache),
        "disk_free": _disk_free(cache),
        "checkout": str(checkout()) if checkout() else None,
        "shipped": _shipped(),
    }


def _shipped() -> dict[str, bool]:
    """Which parts this version of kvlab has at all: a machine may be ready for what is not written yet."""
    root = checkout()
    kernels = (path for path in (root / "kernels").glob("*.py") if path.name != "__init__.py") if root else ()
    return {
        "labs": bool(root and any((root / "labs").glob("*.ipynb"))),
        "kernels": any(kernels),
        "serve": (PACKAGE / "serve").is_dir(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _import_error(name: str) -> str | None:
    """Why `import name` fails; None if it works. A broken install can raise anything, OSError for one."""
    try:
        import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return None


def _look_at_torch(version: str | None) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    if version is None:
        return None, []
    if error := _import_error("torch"):
        return {"error": error}, []
    torch = import_module("torch")
    facts = {"error": None, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            gpus.append(_gpu(gpu.name, gpu.total_memory, float(f"{gpu.major}.{gpu.minor}"), usable=True))
    return facts, gpus


def _gpus_of_nvidia_smi() -> list[dict[str, Any]]:
    """GPUs that the driver knows but torch cannot use (a CPU build, or no torch at all)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    ask = [tool, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
        rows = csv.reader(answer.splitlines(), skipinitialspace=True)
        return [_gpu(name, int(mib) * MIB, float(capability), usable=False) for name, mib, capability in rows]
    except (OSError, ValueError, subprocess.SubprocessError):  # no driver loaded, or one too old to be asked
        return []


def _gpu(name: str, memory: int, capability: float, usable: bool) -> dict[str, Any]:
    return {"name": name, "memory": memory, "capability": capability, "usable": usable}


def _memory() -> int | None:
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sys.platform == "win32":
        import ctypes

        kib = ctypes.c_ulonglong()
        if ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kib)):
            return kib.value * 1024
    return None


def _hub_cache(hub: str) -> Path:
    """Where downloaded models go, by the hubs' own environment variables."""
    home = Path.home()
    if hub == "modelscope":
        return Path(os.environ.get("MODELSCOPE_CACHE") or home / ".cache" / "modelscope")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    hf_home = Path(os.environ.get("HF_HOME") or caches / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or hf_home / "hub").expanduser()


def _disk_free(path: Path) -> int:
    """Free bytes on the disk that `path` is on or would be made on."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


# --- verdicts --------------------------------------------------------------------------------------------


def verdicts(facts: Mapping[str, Any]) -> list[Verdict]:
    """Which parts run on a machine with these facts, and what to type for those that do not."""
    parts = [
        _labs(facts),
        _engine(facts),
        _interpreted(facts),
        _on_gpu(facts),
        _with_extra(facts, "notebooks", "labs"),
        _with_extra(facts, "server", "serve"),
    ]
    version = tuple(int(number) for number in facts["python"].split(".")[:2])
    if PYTHONS[0] <= version < PYTHONS[1]:
        return parts
    return [Verdict(part.part, False, "needs Python 3.11, 3.12 or 3.13") for part in parts]


def _runs(facts: Mapping[str, Any], part: str, shipped: str) -> Verdict:
    return Verdict(part, True, "" if facts["shipped"][shipped] else "ready, but this version ships none yet")


def _labs(facts: Mapping[str, Any]) -> Verdict:
    return _runs(facts, "Labs 00-09 (plain Python)", "labs")


def _engine(facts: Mapping[str, Any]) -> Verdict:
    part, packages, torch = "engine on CPU", facts["packages"], facts["torch"]
    missing = [name for name in LOOKED_AT["engine"] if name != "triton" and not packages[name]]
    if missing:
        return Verdict(part, False, f"missing: {', '.join(missing)}", pip_command("engine"))
    if torch["error"]:
        return Verdict(part, False, f"torch does not import: {torch['error']}", REINSTALL)
    if not facts["tiny_bytes"]:
        return Verdict(part, True, "the shipped model is missing: use --model, or get kvlab/tiny/model again")
    return Verdict(part, True)


def _interpreted(facts: Mapping[str, Any]) -> Verdict:
    part, version, error = "kernels interpreted", facts["packages"]["triton"], facts["triton_error"]
    if version is None and not facts["system"].startswith("Linux"):
        return Verdict(part, False, "triton has wheels for Linux only: use WSL2 or a hosted notebook")
    if version is None:
        return Verdict(part, False, "missing: triton", pip_command("engine"))
    if error:
        return Verdict(part, False, f"triton does not import: {error}", REINSTALL)
    engine = _engine(facts)
    if not engine.runs:
        return Verdict(part, False, "needs the engine", engine.command)
    return _runs(facts, part, "kernels")


def _on_gpu(facts: Mapping[str, Any]) -> Verdict:
    part, gpus = "kernels on the GPU", facts["gpus"]
    if not gpus:
        return Verdict(part, False, "no NVIDIA GPU found; a hosted notebook has one")
    newest = max(gpu["capability"] for gpu in gpus)
    if newest < KERNEL_CAPABILITY:
        note = f"need compute capability {KERNEL_CAPABILITY} or newer, here {newest}: torch is used instead"
        return Verdict(part, False, note)
    interpreted = _interpreted(facts)
    if not interpreted.runs:
        return Verdict(part, False, interpreted.note, interpreted.command)
    if not any(gpu["usable"] for gpu in gpus) and facts["torch"]["cuda"] is None:
        return Verdict(part, False, "torch is a CPU build", REINSTALL)
    if not any(gpu["usable"] for gpu in gpus):
        return Verdict(part, False, f"torch (CUDA {facts['torch']['cuda']}) cannot use it: update the driver")
    return _runs(facts, part, "kernels")


def _with_extra(facts: Mapping[str, Any], part: str, extra: str) -> Verdict:
    missing = [name for name in LOOKED_AT[extra] if not facts["packages"][name]]
    if missing:
        return Verdict(part, False, f"missing: {', '.join(missing)}", pip_command(extra))
    if extra == "serve" and not _engine(facts).runs:
        return Verdict(part, False, "needs the engine", _engine(facts).command)
    return _runs(facts, part, extra)


# --- what one sees ---------------------------------------------------------------------------------------


def run(as_json: bool = False) -> None:
    """Print what examine() and verdicts() found, as two tables or as JSON."""
    facts = examine()
    found = verdicts(facts)
    if as_json:
        print(json.dumps({**facts, "verdicts": [verdict._asdict() for verdict in found]}, indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(render(facts, found))
    commands = list(dict.fromkeys(verdict.command for verdict in found if verdict.command))
    if commands:  # outside any table and never wrapped, so that they can be copied
        where = facts["checkout"] or "the folder of the repository"
        console.print(f"\nTo get what is missing, in {where}:", markup=False, highlight=False)
        for command in commands:
            console.print("  " + command, style="bold", markup=False, highlight=False, soft_wrap=True)
        if not facts["gpus"] and facts["torch"] is None and facts["system"].startswith("Linux"):
            console.print("Without an NVIDIA GPU type this first: torch is then 200 MB, not 3 GB with CUDA.")
            console.print(f"  export PIP_EXTRA_INDEX_URL={CPU_INDEX}", style="bold", highlight=False)


def render(facts: Mapping[str, Any], found: Iterable[Verdict]) -> Any:
    """The facts and the verdicts as two rich tables that fit 80 columns."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    machine = Table(title="This machine", box=box.ROUNDED, show_header=False, title_style="bold", expand=True)
    machine.add_column(style="cyan", no_wrap=True)
    machine.add_column(overflow="fold", ratio=1)
    for name, value in _lines(facts):
        machine.add_row(name, Text(value))
    table = Table(title="What runs here", box=box.ROUNDED, show_header=False, title_style="bold", expand=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for verdict in found:
        mark = Text("yes", style="bold green") if verdict.runs else Text("no", style="bold yellow")
        table.add_row(Text(verdict.part), mark, Text(verdict.note, style="dim" if verdict.runs else ""))
    return Group(machine, table)


def _lines(facts: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    packages, torch = facts["packages"], facts["torch"]
    yield "Python", f"{facts['python']}, {facts['executable']}"
    yield "system", facts["system"]
    memory = f"{to_gib(facts['memory']):.1f} GiB of memory" if facts["memory"] else "memory unknown"
    yield "CPU", f"{facts['cores']} cores, {memory}"
    for gpu in facts["gpus"]:
        yield "GPU", _gpu_line(gpu)
    if not facts["gpus"]:
        yield "GPU", "no NVIDIA GPU found"
    if torch is None:
        yield "torch", "not installed"
    elif torch["error"]:
        yield "torch", f"{packages['torch']}, but it does not import: {torch['error']}"
    else:
        build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU build"
        yield "torch", f"{packages['torch']} ({build}), {torch['threads']} threads"
    for extra, names in LOOKED_AT.items():
        shown = [f"{name} {packages[name]}" for name in names if name != "torch" and packages[name]]
        yield f"for {extra}", ", ".join(shown) or "nothing installed"
    tiny = facts["tiny_bytes"]
    yield "model", f"tiny, shipped, {tiny / MIB:.1f} MiB" if tiny else "tiny is missing from this install"
    if facts["hub_known"]:
        yield "model hub", f"{facts['hub']} (set by KVLAB_HUB: hf, modelscope, or a mirror's https URL)"
    else:
        yield "model hub", f"KVLAB_HUB is {facts['hub']!r}: use hf, modelscope, or a mirror's https URL"
    yield "its models", f"{facts['hub_cache']}, {facts['disk_free'] / GIB:.0f} GiB free"


def _gpu_line(gpu: Mapping[str, Any]) -> str:
    line = f"{gpu['name']}, {to_gib(gpu['memory']):.1f} GiB, compute capability {gpu['capability']}"
    return line if gpu["usable"] else line + "; torch cannot use it"
