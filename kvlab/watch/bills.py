"""The state of the view crossover, and its words: what swapping and recomputing cost, where they cross (L33 5.4).

A step that recomputes also reads all weights, which L33 5.4 leaves out: a floor for a step that does nothing else.
Others' decodes pay it anyway; beside them, the bill is what their steps take longer (lab 09, after exercise 5).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from kvlab.costs import GPUCost, work_of_step
from kvlab.costs.preemption import effective_bandwidth, recompute_seconds, swap_seconds
from kvlab.events import Event
from kvlab.primer import GPU, GPUS
from kvlab.sizing import KIB, ModelShape, model_shape

LENGTHS = (64, 65_536)  # tokens: the ends of the axis
LATENCY = 10e-6  # seconds of each copy besides its bytes: an estimate, as in lab 09
OVERHEAD = f"{1e6 * LATENCY:g} µs"
MEMORY_RATE = GPUS["H100"].bandwidth * 0.8  # bytes/s at which a step reads the weights: an estimate
CHUNK, CONTEXT = 125, 500  # beside decodes: tokens recomputed a step; context of each decode, as in lab 09


@dataclass(frozen=True)
class Bills:
    """The constants. tokens: of the victim. block_size: of blocks copied layer by layer, K and V apart; 0: all at once.

    decodes: of others, in the steps that recompute; 0: they do nothing else.
    found: percent still in the prefix cache on return. curve: all lengths are drawn, not the victim's alone.
    changed: what this step changed. before: as it was. policy: what a student's policy says, along the axis.
    """

    model: str = "Llama-3-8B"
    kv_heads: int = 8
    bandwidth: float = 32e9
    block_size: int = 0
    flops_rate: float = 500e12
    decodes: int = 0
    found: float = 0
    tokens: int = 4000
    curve: bool = True
    changed: str = ""
    before: "Bills | None" = None
    policy: tuple[str, ...] = ()
    error: str = ""

    @property
    def shape(self) -> ModelShape:
        return replace(model_shape(self.model), num_key_value_heads=self.kv_heads)

    @property
    def piece_bytes(self) -> float | None:
        """Bytes of a copy; None: all go in one."""
        shape = self.shape
        return self.block_size * shape.kv_bytes_per_token() / (2 * shape.num_hidden_layers) or None

    @property
    def floor(self) -> float:
        """Seconds in which a step reads the layers' weights (bf16)."""
        return 2 * self.shape.num_layer_weights / MEMORY_RATE

    def seconds(self, tokens: int) -> tuple[float, float]:
        """(to swap out and in, to recompute) a victim of so many tokens."""
        shape, found = self.shape, int(tokens * self.found / 100)
        swap = swap_seconds(tokens, shape.kv_bytes_per_token(), self.bandwidth, latency=LATENCY,
                            transfer_bytes=self.piece_bytes, found=found)  # fmt: skip
        if self.decodes:
            return swap, self._beside(tokens, found)
        return swap, max(self.floor, recompute_seconds(tokens, shape, self.flops_rate, found=found))

    def _beside(self, tokens: int, found: int) -> float:
        """Seconds by which steps of decodes take longer that recompute CHUNK tokens each."""
        gpu = GPU(self.flops_rate, MEMORY_RATE, GPUS["H100"].memory, self.bandwidth)
        cost = GPUCost(gpu=gpu, shape=self.shape, compute_efficiency=1, memory_efficiency=1, launch_seconds=0)
        others, longer = [(1, CONTEXT)] * self.decodes, 0.0
        alone = work_of_step(others)
        for done in range(found, tokens, CHUNK):
            new = min(CHUNK, tokens - done)
            both = work_of_step([*others, (new, done)])._replace(num_logits=len(others))  # a chunk samples nothing
            longer += cost.step_seconds(both) - cost.step_seconds(alone)
        return longer

    @property
    def reached(self) -> float:
        """Bytes/s of the link, in copies of this size."""
        size = self.piece_bytes
        return effective_bandwidth(size, self.bandwidth, LATENCY) if size else self.bandwidth

    def ratio(self, tokens: int | None = None) -> float:
        swap, recompute = self.seconds(tokens or self.tokens)
        return recompute / swap


def after(bills: Bills, events: Sequence[Event]) -> Bills:
    """The bills once the constants of one step are set."""
    values = {event.request_id: event.values[0] for event in events if event.kind == "constant"}
    policy = [event.values for event in events if event.kind == "policy"]
    errors = [event.values[0] for event in events if event.kind == "error"]
    now = replace(bills, **values, error=(errors or [""])[0], policy=tuple(policy[0]) if policy else bills.policy)
    if not bills.changed:
        return replace(now, changed="start")
    return replace(now, changed="".join(values), before=replace(bills, before=None))


@lru_cache(maxsize=256)
def borders(bills: Bills) -> tuple[int, ...]:
    """The lengths on the axis from which on the other one is cheaper, in order."""
    wins = lambda tokens: bills.ratio(tokens) > 1  # noqa: E731
    points, found = grid(), []
    for low, high in zip(points, points[1:], strict=False):
        if wins(low) != wins(high):
            first = wins(low)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if wins(middle) == first else (low, middle)
            found.append(high)
    return tuple(found)


def grid() -> list[int]:
    """Lengths along the axis, four for each doubling."""
    return [round(LENGTHS[0] * 2 ** (i / 4)) for i in range(41)]


SHARES = ("all of them", "the short ones", "the long ones", "those in the middle", "none of them")


def share(bills: Bills) -> int:
    """Where recomputing is cheaper: the number of one of SHARES; -1: anywhere else."""
    swap_first = bills.ratio(LENGTHS[0]) > 1
    kinds = {(0, False): 0, (1, False): 1, (1, True): 2, (2, True): 3, (0, True): 4}
    return kinds.get((len(borders(bills)), swap_first), -1)


def where(bills: Bills) -> str:
    """Where recomputing is cheaper, in words."""
    at, kind = [f"{tokens:,}" for tokens in borders(bills)], share(bills)
    return ("recomputing is cheaper at every length", f"recomputing is cheaper below {at[0] if at else ''} tokens",
            f"recomputing is cheaper from {at[0] if at else ''} tokens on",
            f"recomputing is cheaper from {' to '.join(at)} tokens", "swapping is cheaper at every length",
            "who is cheaper changes at " + ", ".join(at))[kind]  # fmt: skip


# ---- in words


def _times(new: float, old: float) -> str:
    return {4: "4 times", 2: "twice", 0.5: "half", 0.25: "a quarter of"}.get(new / old, f"{new / old:.3g} times")


def _changed(bills: Bills, old: Bills) -> str:
    """What the one change does, in words."""
    match bills.changed:
        case "tokens":
            return f"{bills.tokens:,} tokens: the victim moves along the line, the line stays"
        case "bandwidth":
            return f"{bills.bandwidth / 1e9:g} GB/s: swapping takes {_times(old.bandwidth, bills.bandwidth)} the time"
        case "flops_rate":
            times = _times(old.flops_rate, bills.flops_rate)
            return f"{bills.flops_rate / 1e12:g} TFLOP/s: recomputing takes {times} the time"
        case "decodes":
            return f"Beside {bills.decodes} decodes, which wait for memory, {CHUNK} tokens more a step cost little"
        case "kv_heads":
            return f"{bills.kv_heads} KV heads: {_times(bills.kv_heads, old.kv_heads)} the bytes to move"
        case "block_size" if bills.block_size:
            pieces = f"Pieces of {bills.piece_bytes / KIB:g} KiB, {OVERHEAD} more for each"
            return f"{pieces}: the link reaches {bills.reached / 1e9:.1f} GB/s"
        case "block_size":
            return "All in one copy: the link reaches its speed"
        case "found":
            return f"{bills.found:g}% found: not computed, not copied in; but the way out is paid"
    return "Both grow alike with the length"


def say(bills: Bills) -> str:
    if bills.error:
        return f"The policy failed: {bills.error}"[:140]
    if bills.before is not None:
        return f"{_changed(bills, bills.before)}; {where(bills)}."
    swap, recompute = bills.seconds(bills.tokens)
    told = f"{1e3 * swap:.0f} ms to swap it out and in, {1e3 * recompute:.0f} ms to recompute it"
    return f"A victim of {bills.tokens:,} tokens: {told}."


def rows(bills: Bills) -> list[tuple[str, str, str]]:
    """(constant, its name, its value) as they stand beside the picture."""
    shape = bills.shape
    copies = f"{bills.piece_bytes / KIB:g} KiB each" if bills.block_size else "all in one"
    return [
        ("model", "model", bills.model),
        ("kv_heads", "KV heads", f"{bills.kv_heads} of {shape.num_attention_heads}: "
                                 f"{shape.kv_bytes_per_token() // KIB} KiB a token"),
        ("bandwidth", "link", f"{bills.bandwidth / 1e9:g} GB/s each way"),
        ("block_size", "copies", f"{copies}, +{OVERHEAD}"),
        ("flops_rate", "GPU", f"{bills.flops_rate / 1e12:g} TFLOP/s reached"),
        ("decodes", "a step", f"{CHUNK} beside {bills.decodes} decodes" if bills.decodes
                              else f"alone; weights: {1e3 * bills.floor:.1f} ms"),
        ("found", "found", f"{bills.found:g}% on return"),
    ]  # fmt: skip


def alt(bills: Bills) -> str:
    swap, recompute = bills.seconds(bills.tokens)
    told = ", ".join(f"{name} {value}" for _, name, value in rows(bills))
    lengths = f" Over {LENGTHS[0]} to {LENGTHS[1]:,} tokens {where(bills)}." if bills.curve else ""
    victim = f"A victim of {bills.tokens:,} tokens: swap {1e3 * swap:.1f} ms, recompute {1e3 * recompute:.1f} ms."
    return f"A model of swap against recompute. {told}. {victim}{lengths}"
