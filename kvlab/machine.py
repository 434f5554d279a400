"""The facts about this machine that `kvlab doctor` judges: examine() -> a dict of plain values.

It needs nothing but the base dependencies: torch and the rest are looked at only if they are there, and a
package that is installed but does not import is told apart from one that is missing.
"""

import csv
import os
import platform
import shutil
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from kvlab.sizing import MIB

PACKAGE = Path(__file__).parent
LOOKED_AT = {
    "engine": ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "triton"),
    "labs": (
        *("jupyterlab", "ipywidgets", "matplotlib", "pandas", "anywidget"),
        *("jupytext", "nbformat", "nbclient", "nbconvert", "hypothesis"),
    ),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
}


def checkout() -> Path | None:
    """The folder of the repository that kvlab runs from; None when it was installed without one."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "labs").is_dir() else None


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
