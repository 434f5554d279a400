"""The config.json of well-known models by name, as far as it says what to compute: for plans and for random weights.

From the models' public configurations; the tests compare each parameter count with the published one. No torch.
"""

from typing import Any

_QWEN = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}


def _qwen25(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, positions: int,
            vocab: int = 151_936) -> dict[str, Any]:  # fmt: skip
    return _QWEN | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": positions, "tie_word_embeddings": vocab == 151_936,
        "bos_token_id": 151_643, "eos_token_id": 151_643,
    }  # fmt: skip


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return _QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "attention_bias": False,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 151_936,
        "max_position_embeddings": 40_960, "tie_word_embeddings": tied,
        "bos_token_id": 151_643, "eos_token_id": 151_645,
    }  # fmt: skip


def _llama3(hidden: int, inner: int, layers: int, heads: int, head_dim: int, factor: float,
            tied: bool) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": head_dim, "attention_bias": False,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "mlp_bias": False, "dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 131_072, "tie_word_embeddings": tied,
        "bos_token_id": 128_000, "eos_token_id": 128_001,
        "rope_scaling": {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    }  # fmt: skip


KNOWN: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _qwen25(896, 4864, 24, 14, 2, 32_768),
    "Qwen2.5-1.5B": _qwen25(1536, 8960, 28, 12, 2, 131_072),
    "Qwen2.5-3B": _qwen25(2048, 11_008, 36, 16, 2, 32_768),
    "Qwen2.5-7B": _qwen25(3584, 18_944, 28, 28, 4, 131_072, 152_064),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "Qwen3-8B": _qwen3(4096, 12_288, 36, 32, False),
    "Llama-3.2-1B": _llama3(2048, 8192, 16, 32, 64, 32.0, True),
    "Llama-3.1-8B": _llama3(4096, 14_336, 32, 32, 128, 8.0, False),
}


def known_config(name: str) -> dict[str, Any]:
    """A copy of the configuration of `name`, with or without its owner ("Qwen/"). ValueError lists the names known."""
    base = name.rpartition("/")[2]
    if base not in KNOWN:
        raise ValueError(f"no configuration of {name!r} is known by name: known are {', '.join(KNOWN)}")
    return dict(KNOWN[base])
