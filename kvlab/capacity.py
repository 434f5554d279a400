"""From a model's config.json to how many requests fit: the short formulas that lab 01 builds, and our fall-back there.

    config.json --> token_bytes                        K/V bytes that one token keeps
                --> layer_parameters, num_parameters --> quantised_bytes
    "29.80 GiB" --> to_bytes
    lengths     --> compare_reservation                max_len for everybody, or whole blocks as they are needed
    state       --> break_even_tokens                  a state of constant size against K/V that grows

A config is a dict with the names of Hugging Face's config.json. kvlab.sizing counts the same from a ModelShape, which
is checked field by field; each is the other's oracle in the tests.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from kvlab.sizing import MODELS

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
Config = Mapping[str, Any]


def model_config(name: str) -> dict[str, Any]:
    """What the config.json of a model in kvlab.sizing.MODELS says about its size. ValueError: an unknown name."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r} in the table: known are {', '.join(MODELS)}")
    shape, is_qwen = MODELS[name], name.startswith("Qwen")
    config = {"model_type": "qwen2" if is_qwen else "llama"}
    for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        config[field] = getattr(shape, field)
    if shape.num_key_value_heads != shape.num_attention_heads:  # older files do not name them: as many as query heads
        config["num_key_value_heads"] = shape.num_key_value_heads
    config["tie_word_embeddings"] = shape.tie_word_embeddings
    return config


def _heads(config: Config) -> tuple[int, int, int]:
    """Query heads, K/V heads, head_dim."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    return heads, kv_heads, config.get("head_dim", config["hidden_size"] // heads)


def token_bytes(config: Config, dtype_bytes: int = 2) -> int:
    """Bytes of K and V that one token keeps in all layers (L33 0.1).

    num_key_value_heads and head_dim may be missing: then as many K/V heads as query heads, and hidden_size divided
    by the query heads. dtype_bytes: of one number, 2 for bf16.
    """
    _, kv_heads, head_dim = _heads(config)
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * dtype_bytes


def layer_parameters(config: Config) -> int:
    """Parameters of one layer of a llama, mistral or qwen2 decoder: matrices, norms, and qwen2's biases on q, k, v."""
    heads, kv_heads, head_dim = _heads(config)
    hidden, rows = config["hidden_size"], (heads + 2 * kv_heads) * head_dim
    attention = hidden * rows + heads * head_dim * hidden
    bias = rows if config["model_type"] == "qwen2" else 0
    return attention + bias + 3 * hidden * config["intermediate_size"] + 2 * hidden


def num_parameters(config: Config) -> int:
    """All parameters, each counted once: a tied head is its embedding."""
    tables = 1 if config.get("tie_word_embeddings", False) else 2
    layers = config["num_hidden_layers"] * layer_parameters(config)
    return tables * config["vocab_size"] * config["hidden_size"] + layers + config["hidden_size"]


def to_bytes(text: str) -> int:
    """'79.35 GiB' in bytes, to the nearest whole one. Units: B, and KB MB GB (1000s), KiB MiB GiB (1024s).

    ValueError: not a number, one space, and one of these units, spelled exactly so.
    """
    number, _, unit = text.partition(" ")
    if unit not in UNITS:
        raise ValueError(f"{text!r}: give a number, a space and one of {', '.join(UNITS)}")
    try:
        return round(Decimal(number) * UNITS[unit])
    except ArithmeticError:
        raise ValueError(f"{text!r}: {number!r} is not a number") from None


def compare_reservation(lengths: Sequence[int], max_len: int, block_size: int) -> tuple[float, float, float]:
    """What two ways to hold `lengths` tokens waste, and how many times as many requests fit with the second (L33 0.2).

    The first reserves max_len slots for every request, the second gives each the whole blocks that it fills.
    Returns (share of slots idle with the first, share idle with the second, slots of the first / slots of the second).
    """
    used = sum(lengths)
    reserved = len(lengths) * max_len
    paged = sum(-(-length // block_size) for length in lengths) * block_size
    return 1 - used / reserved, 1 - used / paged, reserved / paged


def quantised_bytes(num_weights: int, bits: int = 4, group_size: int = 128, rest_bytes: int = 2) -> int:
    """Bytes of a matrix of num_weights weights, quantised (量化) in groups as AWQ and GPTQ do (PAV 3.1).

    Each group, the last one full or not, has a scale of rest_bytes and a zero point of `bits` bits. Weights and zero
    points are packed without gaps, and their bits rounded up to a whole byte together.
    """
    groups = -(-num_weights // group_size)
    return -(-(num_weights + groups) * bits // 8) + groups * rest_bytes


def break_even_tokens(state_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """The fewest tokens whose K/V, in whole blocks, take more bytes than a state of constant size (L33 9.3)."""
    return state_bytes // (bytes_per_token * block_size) * block_size + 1
