"""How many bytes, how many blocks, how many requests: the arithmetic done before anything is allocated (lab
01).

    ModelShape --> parameters --> weight bytes ---------------------.
        |                                                           v
        '--> K/V bytes per token --> bytes per block --> num_gpu_blocks --> max_concurrency
                                                                    ^
    GPU bytes x gpu_memory_utilization, activations, CUDA graphs ---'

Everything is in bytes and exact. GB (10**9) and GiB (2**30) are 7% apart, enough to move an answer by several
requests, so nothing here is ever in "G": convert with to_gb or to_gib at the edge, and say which.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

KB, MB, GB = 10**3, 10**6, 10**9
KIB, MIB, GIB = 2**10, 2**20, 2**30


def to_gb(num_bytes: float) -> float:
    """Bytes in decimal gigabytes (10**9), as weights and datasheets are quoted."""
    return num_bytes / GB


def to_gib(num_bytes: float) -> float:
    """Bytes in binary gibibytes (2**30), as nvidia-smi and PyTorch's out-of-memory error count (L33 0.1)."""
    return num_bytes / GIB


def format_bytes(num_bytes: float) -> str:
    """Bytes for people, in binary units, without trailing zeros: 57344 -> '56 KiB'."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{num_bytes:g} bytes"


# --- K/V cache ----------------------------------------------------------------------------------------------


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int = 2, scale_bytes: int = 0
) -> int:
    """Bytes of K and V that a token keeps: 2 x layers x KV heads x (head_dim x dtype_bytes + scale_bytes) (L33 0.1).

    num_kv_heads counts K/V heads, not query heads: under GQA (分组查询注意力) they are fewer, and that is its
    point. dtype_bytes: 2 for bf16 and fp16, 4 for fp32, 1 for fp8 and int8. scale_bytes: of the scale that each
    head's K and V have where they are quantised one by one, 4 with kv_cache_dtype="int8" (量化).
    Qwen2.5-7B in bf16: 2 x 28 x 4 x 128 x 2 = 57,344 bytes = 56 KiB.
    """
    _positive(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)
    _not_negative(scale_bytes=scale_bytes)
    return 2 * num_layers * num_kv_heads * (head_dim * dtype_bytes + scale_bytes)


def bytes_per_block(bytes_per_token: int, block_size: int) -> int:
    """Bytes of one block (块): block_size tokens' K and V in all layers (L33 2.2)."""
    _positive(bytes_per_token=bytes_per_token, block_size=block_size)
    return bytes_per_token * block_size


def num_gpu_blocks(
    total_bytes: int,
    gpu_memory_utilization: float,
    weight_bytes: int,
    activation_bytes: int,
    cudagraph_bytes: int,
    block_bytes: int,
) -> int:
    """Blocks in what is left of a GPU: total x utilization - weights - activations - graphs (PAV 3.1).

    total_bytes: the GPU's whole memory. activation_bytes: the peak of a forward pass at
    max_num_batched_tokens. One of the blocks becomes the engine's null block, so requests can use one fewer
    than this. Raises ValueError when utilization is outside (0, 1], or when not even one block is left: it
    says how many bytes are missing.
    """
    _positive(total_bytes=total_bytes, block_bytes=block_bytes)
    _not_negative(
        weight_bytes=weight_bytes, activation_bytes=activation_bytes, cudagraph_bytes=cudagraph_bytes
    )
    if not 0 < gpu_memory_utilization <= 1:  # also refuses NaN
        raise ValueError(
            f"gpu_memory_utilization is {gpu_memory_utilization!r}: give the share of the GPU's memory to "
            "use, more than 0 and at most 1, such as 0.92"
        )
    budget = int(total_bytes * gpu_memory_utilization)
    taken = weight_bytes + activation_bytes + cudagraph_bytes
    if budget - taken < block_bytes:
        missing = taken + block_bytes - budget
        raise ValueError(
            f"no room for a single K/V block: {missing} bytes ({format_bytes(missing)}) are missing. The "
            f"budget is {format_bytes(budget)} of {format_bytes(total_bytes)}; weights, activations and CUDA "
            f"graphs take {format_bytes(taken)} and one block {format_bytes(block_bytes)}. Use a smaller or "
            "quantised model, fewer max_num_batched_tokens, more gpu_memory_utilization, or a larger GPU"
        )
    return (budget - taken) // block_bytes


def max_concurrency(num_blocks: int, block_size: int, tokens_per_request: int) -> int:
    """Requests of tokens_per_request that hold their K/V at the same time when they share nothing (PAV 3.1).

    num_blocks: the blocks that requests can use (an engine's num_gpu_blocks less its null block). A request
    takes whole blocks, so its last one is partly empty; 0 says that not one request fits.
    """
    _positive(num_blocks=num_blocks, block_size=block_size, tokens_per_request=tokens_per_request)
    return num_blocks // -(-tokens_per_request // block_size)


# --- weights ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a Qwen2- or Llama-shaped decoder that decide its size; field names are Hugging Face's.

    attention_bias: on the q, k and v projections. o_bias: on the attention's output projection. mlp_bias: on
    the three of the MLP. qk_norm: an RMSNorm of head_dim on q and on k (Qwen3).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From the contents of a config.json with model_type qwen2, qwen3 or llama; else ValueError."""
        kind = config.get("model_type")
        if kind not in ("qwen2", "qwen3", "llama"):
            raise ValueError(f"model_type is {kind!r}: only qwen2, qwen3 and llama are known here")
        needed = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
        missing = [name for name in needed if not config.get(name)]
        if missing:
            raise ValueError(
                f"the config lacks {', '.join(missing)}: give the whole of a model's config.json"
            )
        heads = config["num_attention_heads"]
        bias = bool(config.get("attention_bias", False))
        return cls(
            **{name: config[name] for name in needed},
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bias or kind == "qwen2",  # Qwen2 always has it and its config does not say so
            o_bias=bias and kind != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)) and kind == "llama",
            qk_norm=kind == "qwen3",
        )

    @property
    def num_layer_weights(self) -> int:
        """Entries of all layers' matrices: q, k, v, o, gate, up and down. These are what 4-bit models quantise."""
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_parameters(self) -> int:
        """All parameters, each counted once (a tied head is its embedding)."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        biases = self.attention_bias * (q + 2 * kv) + self.o_bias * hidden + self.mlp_bias * (2 * inner + hidden)
        norms = 2 * hidden + self.qk_norm * 2 * self.head_dim
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layer_weights + self.num_hidden_layers * (biases + norms) + hidden  # + last norm

    def weight_bytes(self, dtype_bytes: float = 2) -> int:
        """Bytes of the weights. dtype_bytes: 2 for bf16, 4 for fp32, 0.5 for 4-bit (scales not counted)."""
        if not (isfinite(dtype_bytes) and dtype_bytes > 0):
            raise ValueError(
                f"dtype_bytes is {dtype_bytes!r}: give the bytes of one weight, such as 2 for bf16"
            )
        return int(self.num_parameters * dtype_bytes)

    def quantised_weight_bytes(self, bits: int = 4, group_size: int = 128, rest_bytes: int = 2) -> int:
        """Bytes of the weights when the layers' matrices are quantised (量化) in groups, as AWQ and GPTQ do.

        bits: of a weight. Each group_size weights share a scale (of rest_bytes) and a zero point (of `bits`).
        Embedding, head, norms and biases stay at rest_bytes: in small models they are most of it.
        """
        _positive(bits=bits, group_size=group_size, rest_bytes=rest_bytes)
        groups = -(-self.num_layer_weights // group_size)
        matrices = -(-(self.num_layer_weights + groups) * bits // 8) + groups * rest_bytes
        return matrices + (self.num_parameters - self.num_layer_weights) * rest_bytes

    def kv_bytes_per_token(self, dtype_bytes: int = 2, scale_bytes: int = 0) -> int:
        """Bytes of K and V that one token keeps (see the function of the same name)."""
        return kv_bytes_per_token(
            self.num_hidden_layers, self.num_key_value_heads, self.head_dim, dtype_bytes, scale_bytes
        )


def _llama2(hidden: int, inner: int, layers: int, heads: int) -> ModelShape:
    return ModelShape(32_000, hidden, inner, layers, heads, heads, 128)  # full multi-head attention


def _llama3(hidden: int, inner: int, layers: int, heads: int) -> ModelShape:
    return ModelShape(128_256, hidden, inner, layers, heads, 8, 128)


def _qwen25(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> ModelShape:
    tied = vocab == 151_936  # the small ones tie their head to the embedding
    return ModelShape(
        vocab, hidden, inner, layers, heads, kv_heads, hidden // heads, tied, attention_bias=True
    )


# From the models' public configurations; tests/test_sizing.py checks each parameter count.
MODELS: dict[str, ModelShape] = {
    "Llama-2-7B": _llama2(4096, 11_008, 32, 32),
    "Llama-2-13B": _llama2(5120, 13_824, 40, 40),
    "Llama-3-8B": _llama3(4096, 14_336, 32, 32),
    "Llama-3-70B": _llama3(8192, 28_672, 80, 64),
    "Qwen2.5-0.5B": _qwen25(151_936, 896, 4864, 24, 14, 2),
    "Qwen2.5-1.5B": _qwen25(151_936, 1536, 8960, 28, 12, 2),
    "Qwen2.5-3B": _qwen25(151_936, 2048, 11_008, 36, 16, 2),
    "Qwen2.5-7B": _qwen25(152_064, 3584, 18_944, 28, 28, 4),
    "Qwen2.5-14B": _qwen25(152_064, 5120, 13_824, 48, 40, 8),
    "Qwen2.5-32B": _qwen25(152_064, 5120, 27_648, 64, 40, 8),
    "Qwen2.5-72B": _qwen25(152_064, 8192, 29_568, 80, 64, 8),
}


def model_shape(name: str) -> ModelShape:
    """The shape of a model in MODELS; ValueError lists the names known."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r} in the table: known are {', '.join(MODELS)}")
    return MODELS[name]


# --- checks -------------------------------------------------------------------------------------------------


def _positive(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a whole number of at least 1")


def _not_negative(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} is {value!r}: give a whole number of bytes, 0 or more")
