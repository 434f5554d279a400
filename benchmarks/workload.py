"""The fixed workload of benchmarks/offline.py, and the random models it runs on. Seeded: the same everywhere.

    tiny    32 requests, prompts of 16-256 tokens, outputs of 8-128; a Qwen2 of 4 layers, hidden 256 (about 5M)
    small   16 requests, prompts of 16-128 tokens, outputs of 8-48; the shape of Qwen2.5-0.5B, vocabulary 8,192
"""

import random
from pathlib import Path

REQUESTS = {
    "tiny": dict(n=32, prompt=(16, 256), output=(8, 128)),
    "small": dict(n=16, prompt=(16, 128), output=(8, 48)),
}
SHAPES = {
    "tiny": dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=4096),
    "small": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                  num_key_value_heads=2, vocab_size=8192),
}  # fmt: skip


def make_requests(model: str, seed: int = 0) -> list[tuple[list[int], int]]:
    """(prompt token ids, number of outputs) of each request."""
    spec, rng = REQUESTS[model], random.Random(seed)
    requests = []
    for _ in range(spec["n"]):
        prompt_len, output_len = rng.randint(*spec["prompt"]), rng.randint(*spec["output"])
        requests.append(([rng.randrange(3, SHAPES[model]["vocab_size"]) for _ in range(prompt_len)], output_len))
    return requests


def make_model(model: str, folder: Path) -> None:
    """Write the random model (fp32) unless it is there. Weights are scaled so that greedy decoding wanders."""
    if (folder / "model.safetensors").is_file():
        return
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
                         rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **SHAPES[model])  # fmt: skip
    network = Qwen2ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.1 * noise)
            else:
                fan_in = 1.4 / weight.shape[-1] ** 0.5
                weight.copy_(noise * (0.2 if weight.ndim == 1 else 0.5 if "embed" in name else fan_in))
    network.save_pretrained(folder)
