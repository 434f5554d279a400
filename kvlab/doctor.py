"""`kvlab doctor`: what this machine can run, what is missing, and the command that gets it.

    kvlab.machine.examine() -> facts (a dict, plain values)  ->  verdicts(facts)  ->  run(): a table, or JSON
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvlab.machine import LOOKED_AT, examine
from kvlab.sizing import GIB, MIB, to_gib

PYTHONS = ((3, 11), (3, 14))  # from the first, before the second
KERNEL_CAPABILITY = 8.0  # Ampere: the first GPUs with bf16 and asynchronous copies
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class Verdict(NamedTuple):
    """Whether a part runs here; if not, why, and the command that changes it ("" when no command can)."""

    part: str
    runs: bool
    note: str = ""
    command: str = ""


def pip_command(extra: str) -> str:
    """The command that installs one of the extras, to be typed in the repository's folder."""
    return f'python -m pip install -c constraints.txt -e ".[{extra}]"'


REINSTALL = pip_command("engine") + " --force-reinstall"


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
