"""Random checkpoints on disk, made once a session."""

import pytest
import torch
import transformers
from random_checkpoints import random_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(kind, dtype=..., **save_options) -> (folder, transformers' fp32 model of it)."""
    made = {}

    def get(kind: str, dtype: torch.dtype = torch.float32, **save_options):
        key = (kind, dtype, *save_options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp(kind)
            random_model(kind).to(dtype).save_pretrained(folder, **save_options)
            # Read back, for `.to(bfloat16).float()` would also round the rotary frequencies, which are not stored.
            reference = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
            made[key] = folder, reference.eval()
        return made[key]

    return get
