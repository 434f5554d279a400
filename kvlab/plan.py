"""Before anything is bought or downloaded: does a model fit a GPU, and how many requests with it (PAV 3.1)?

    config.json -> weights, K/V of a token, largest step, graphs --.
    a GPU's bytes x gpu_memory_utilization ------------------------+--> Plan: blocks, tokens, requests at once
                                                                   '--> alternatives, where it does not fit

The same arithmetic as the engine's (kvlab.sizing); what the engine measures when it starts is estimated here. Estimates
are marked, and come with their formula. Plain Python.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvlab.blocks import cdiv
from kvlab.model.config import _awq_group_size
from kvlab.sampling_params import SAMPLED_AT_ONCE
from kvlab.sizing import GIB, MIB, ModelShape, num_gpu_blocks

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}
INT8_SCALE_BYTES = 4  # of each token's K and V in each KV head
CONTEXT_BYTES = GIB // 2  # what CUDA, its libraries and the compiled kernels take: an estimate
LOGIT_BYTES = 8  # for each seat and word of the vocabulary: fp32 logits, and a copy of rows that are drawn again
WEIGHT_BYTES = 64  # for each number that the sampler works on: float64 weights and sums, ranks, orders
GRAPH_BYTES = 2 * MIB  # what a captured graph keeps for itself: an estimate


@dataclass(frozen=True)
class Card:
    """memory_gib: as it is sold. usable: the share of it that CUDA sees, an estimate by kind of memory. note: what else
    to know, if anything."""

    memory_gib: int
    usable: float
    note: str = ""

    @property
    def total_bytes(self) -> int:
        return int(self.memory_gib * GIB * self.usable)


# HBM, whose error correction has memory of its own; GDDR without error correction; GDDR that gives up 1/16 for it.
_HBM, _GDDR, _GDDR_ECC = 0.985, 0.98, 0.915
CARDS: dict[str, Card] = {
    "RTX 3060": Card(12, _GDDR),
    "T4": Card(16, _GDDR_ECC, "compute capability 7.5: use --dtype float16 and attention_backend 'torch'"),
    "RTX 4080": Card(16, _GDDR),
    "L4": Card(24, _GDDR_ECC),
    "A10": Card(24, _GDDR_ECC),
    "RTX 3090": Card(24, _GDDR),
    "RTX 4090": Card(24, _GDDR),
    "RTX 5090": Card(32, _GDDR),
    "A100 40GB": Card(40, _HBM),
    "L40S": Card(48, _GDDR_ECC),
    "A100": Card(80, _HBM),
    "H100": Card(80, _HBM),
    "H20": Card(96, _HBM),
    "H200": Card(141, _HBM),
}


def find_card(name: str) -> str:
    """The name in CARDS that `name` means: '4090', 'rtx4090' and 'NVIDIA GeForce RTX 4090' are one. ValueError else."""

    def bare(text: str) -> str:
        text = text.lower()
        for word in ("nvidia", "geforce", "rtx", "gb", " ", "-", "_"):
            text = text.replace(word, "")
        return text

    for card in CARDS:
        if bare(card) == bare(name) or bare(card) == bare(name).removesuffix(str(CARDS[card].memory_gib)):
            return card
    raise ValueError(f"no GPU {name!r} in the table: known are {', '.join(CARDS)}; or give --memory, such as '24 GiB'")


@dataclass(frozen=True)
class Settings:
    """What an engine is told, in its own names. quantization: None, or "awq" for weights in 4 bits, groups of 128."""

    max_model_len: int
    gpu_memory_utilization: float = 0.9
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    group_size: int = 128

    def __post_init__(self):
        kinds = [("dtype", ("bfloat16", "float16", "float32")), ("quantization", (None, "awq"))]
        kinds.append(("kv_cache_dtype", ("auto", *DTYPE_BYTES)))
        for name, allowed in kinds:
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(map(str, allowed))}")
        for name in ("max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: use a whole number >= 1")

    @property
    def kv_dtype(self) -> str:
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


@dataclass(frozen=True)
class Plan:
    """Bytes of each use of a GPU, and what they leave. `*_bytes` of activations, cudagraphs and context: estimates.

    num_gpu_blocks: one of them is the engine's null block. missing_bytes: to hold a single block; 0 if there is one.
    """

    shape: ModelShape
    settings: Settings
    total_bytes: int
    weight_bytes: int
    activation_bytes: int
    cudagraph_bytes: int
    kv_bytes_per_token: int
    num_gpu_blocks: int
    missing_bytes: int
    context_bytes: int = CONTEXT_BYTES

    @property
    def num_tokens(self) -> int:
        """Tokens whose K/V the pool holds."""
        return max(0, self.num_gpu_blocks - 1) * self.settings.block_size

    @property
    def fits(self) -> bool:
        """Whether a sequence of max_model_len fits."""
        return self.num_tokens >= self.settings.max_model_len

    def concurrency(self, num_tokens: int) -> float:
        """How many times a request of so many tokens fits the pool, in whole blocks, sharing nothing."""
        return max(0, self.num_gpu_blocks - 1) / cdiv(num_tokens, self.settings.block_size)


def activation_bytes(shape: ModelShape, dtype_bytes: int, max_num_batched_tokens: int, max_num_seqs: int,
                     quantized: bool = False) -> int:  # fmt: skip
    """**Estimate** of what the largest step takes: that of its layers or that of its sampler, they do not coincide.

    Layers: for each token two hidden states, four times the MLP's width, three times q, k and v. Sampler: LOGIT_BYTES
    for each seat and word of the vocabulary, and WEIGHT_BYTES for as many of them as it works on together, where top-p
    must rank them all. quantized: weights in 4 bits, of which a long step writes the largest matrix out, gate and up.
    """
    heads = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    widest = 2 * shape.hidden_size + 4 * shape.intermediate_size + 3 * heads
    layers = max_num_batched_tokens * widest * dtype_bytes
    if quantized:
        layers += 2 * shape.intermediate_size * shape.hidden_size * dtype_bytes
    logits = min(max_num_seqs, max_num_batched_tokens) * shape.vocab_size
    return max(layers, logits * LOGIT_BYTES + min(logits, SAMPLED_AT_ONCE) * WEIGHT_BYTES)


def cudagraph_bytes(shape: ModelShape, dtype_bytes: int, max_num_seqs: int, max_model_len: int) -> int:
    """**Estimate** of what CUDA graphs of decodes take: a seat's widest tensor, fp32 logits twice, and each graph.

    Graphs: for 1, 2, 4 seats, then by 8 to 256 and by 16 beyond, and for all; for contexts of 1024, 8192, ... tokens.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs, 16)]
    num_sizes = 1 + sum(size < max_num_seqs for size in sizes)
    num_lengths = 1 + sum(1024 * 8**i < max_model_len for i in range(8))
    widest = max(2 * shape.hidden_size + 3 * shape.intermediate_size, shape.vocab_size)
    row = widest * dtype_bytes + 2 * shape.vocab_size * 4
    return max_num_seqs * row + num_sizes * num_lengths * GRAPH_BYTES


def make_plan(shape: ModelShape, total_bytes: int, settings: Settings) -> Plan:
    """What an engine with these settings would have on a GPU of total_bytes, used by nobody else."""
    weights = DTYPE_BYTES[settings.dtype]
    if settings.quantization:
        weight_bytes = shape.quantised_weight_bytes(4, settings.group_size, weights)
    else:
        weight_bytes = shape.weight_bytes(weights)
    kv_bytes = shape.kv_bytes_per_token(
        DTYPE_BYTES[settings.kv_dtype], INT8_SCALE_BYTES if settings.kv_dtype == "int8" else 0
    )
    activations = activation_bytes(shape, weights, settings.max_num_batched_tokens, settings.max_num_seqs,
                                   settings.quantization is not None)  # fmt: skip
    graphs = cudagraph_bytes(shape, weights, settings.max_num_seqs, settings.max_model_len)
    block_bytes = kv_bytes * settings.block_size
    missing, blocks = 0, 0
    try:
        blocks = num_gpu_blocks(total_bytes, settings.gpu_memory_utilization, weight_bytes + CONTEXT_BYTES,
                                activations, graphs, block_bytes)  # fmt: skip
    except ValueError:
        budget = int(total_bytes * settings.gpu_memory_utilization)
        missing = weight_bytes + CONTEXT_BYTES + activations + graphs + block_bytes - budget
        if missing <= 0:
            raise  # it was not for want of room
    most = settings.max_num_seqs * cdiv(settings.max_model_len, settings.block_size) + 1  # the engine makes no more
    return Plan(shape, settings, total_bytes, weight_bytes, activations, graphs, kv_bytes, min(blocks, most), missing)


def alternatives(plan: Plan, card: str | None = None) -> list[tuple[str, Plan]]:
    """Changes that let a sequence of max_model_len fit, each tried by itself: what to change, and the plan then.

    card: the plan's, so that larger ones of the table are tried too.
    """
    settings, found = plan.settings, []
    longest = plan.num_tokens // 256 * 256
    changes: list[tuple[str, dict[str, Any]]] = []
    if 256 <= longest < settings.max_model_len:
        changes.append((f"--max-model-len {longest}", {"max_model_len": longest}))
    fewer = {"max_num_seqs": 64}
    if settings.max_num_seqs > 64:
        changes.append(("--max-num-seqs 64", fewer))
    if settings.kv_dtype != "int8":
        changes.append(("--kv-cache-dtype int8", {"kv_cache_dtype": "int8"}))
    if settings.quantization is None:
        changes.append(("the model's AWQ checkpoint (4-bit weights)", {"quantization": "awq"}))
        changes.append(("AWQ, INT8 K/V and 64 seats", {"quantization": "awq", "kv_cache_dtype": "int8"} | fewer))
    for words, change in changes:
        other = make_plan(plan.shape, plan.total_bytes, replace(settings, **change))
        if other.fits:
            found.append((words, other))
    for name in sorted(CARDS, key=lambda name: CARDS[name].total_bytes):
        other = make_plan(plan.shape, CARDS[name].total_bytes, settings)
        if other.total_bytes > plan.total_bytes and other.fits and name != card:
            found.append((f"a larger GPU: {name}", other))
            break
    return found


def settings_of(config: Mapping[str, Any], **options: Any) -> Settings:
    """Settings for a model by its config.json: how its weights are stored, and its positions if no length is given.

    ValueError for weights in a format that kvlab does not read.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if quantization := config.get("quantization_config"):
        options = {"quantization": "awq", "group_size": _awq_group_size(quantization)} | options
    if "max_model_len" not in options:
        if not config.get("max_position_embeddings"):
            raise ValueError("nothing says how long sequences may become: give --max-model-len")
        options["max_model_len"] = config["max_position_embeddings"]
    return Settings(**options)
