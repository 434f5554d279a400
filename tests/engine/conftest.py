"""Small random checkpoints, and the reference that every engine output is held against."""

import pytest
import torch
import transformers

GROUP_7 = dict(num_attention_heads=14, num_key_value_heads=2, hidden_size=112, intermediate_size=96,
               num_hidden_layers=2, vocab_size=211, max_position_embeddings=256)  # fmt: skip
CHECKPOINTS = {
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-untied": ("Qwen2", dict(tie_word_embeddings=False)),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True, head_dim=16)),
    "llama": ("Llama", dict(tie_word_embeddings=False, head_dim=8)),
}


def build_checkpoint(folder, kind: str):
    """Random weights scaled so that greedy decoding wanders (a fixed point would hide every fault)."""
    family, extra = CHECKPOINTS[kind]
    config = getattr(transformers, f"{family}Config")(
        **GROUP_7, **extra, eos_token_id=0, bos_token_id=None, pad_token_id=None
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.5 if weight.ndim == 1 or "embed" in name else 1.5 / weight.shape[-1] ** 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale + ("norm.weight" in name))
    model.float().save_pretrained(folder)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(kind): the folder of a random model, made once a session."""
    folders = {}

    def get(kind: str):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            build_checkpoint(folders[kind], kind)
        return folders[kind]

    return get


class Reference:
    """`transformers` on the same checkpoint. Every token must be the argmax given what stands before it."""

    def __init__(self, folder, dtype: torch.dtype, tolerance: float):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()
        self.tolerance = tolerance
        self.num_tokens = self.num_near_ties = 0

    @torch.inference_mode()
    def check(self, prompt: list[int], output: list[int]) -> None:
        """AssertionError unless `output` is the greedy continuation; near-ties are allowed and counted."""
        logits = self.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        for position, token in enumerate(output):
            best = int(logits[position].argmax())
            self.num_tokens += 1
            if token != best:
                gap = float(logits[position, best] - logits[position, token])
                assert gap < self.tolerance, f"output {position} is {token}, transformers says {best} by {gap:.2e}"
                self.num_near_ties += 1


@pytest.fixture(scope="session")
def reference(checkpoint):
    """reference(kind, dtype, tolerance): made once a session."""
    made = {}

    def get(kind: str, dtype: torch.dtype, tolerance: float) -> Reference:
        key = (kind, dtype, tolerance)
        if key not in made:
            made[key] = Reference(checkpoint(kind), dtype, tolerance)
        return made[key]

    return get
