"""Random models in all the shapes that the loader and the decoder must know."""

import torch
import transformers

# Group 7 (14 query heads on 2 KV heads), as in Qwen2.5-0.5B.
SHAPE = dict(
    hidden_size=112,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=223,
    max_position_embeddings=256,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=50000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
KINDS = {
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "qwen2-untied": ("Qwen2", dict(tie_word_embeddings=False, num_attention_heads=8, num_key_value_heads=8)),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True, head_dim=32)),
    "qwen3-bias": ("Qwen3", dict(tie_word_embeddings=False, head_dim=16, attention_bias=True)),
    "llama": ("Llama", dict(tie_word_embeddings=False)),
    "llama-bias": ("Llama", dict(attention_bias=True, mlp_bias=True, num_attention_heads=7, num_key_value_heads=1)),
    "llama-llama3": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama-linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=10000.0))),
}


def random_model(kind: str) -> transformers.PreTrainedModel:
    """fp32 weights scaled by fan-in: every branch counts, and greedy decoding wanders instead of standing still."""
    family, extra = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **extra})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    generator = torch.Generator().manual_seed(len(kind))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.1 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise * (0.5 if "embed" in name else 1.4 / weight.shape[1] ** 0.5))
    return model
