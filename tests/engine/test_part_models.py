"""Lab 12's functions as parts of other models: heads with norms of their own (Qwen3), and Llama."""

import pytest

from kvlab import LLM, Parts, SamplingParams
from kvlab.model import batch, layers, plain

PROMPTS = [[7, 8, 9, 10, 11] * 2, [7, 8, 9, 10, 11, 4, 5], [3]]
OPTIONS = dict(num_gpu_blocks_override=20, block_size=4, max_model_len=48, max_num_batched_tokens=8)


def tokens(model, parts=None):
    llm = LLM(str(model), parts=parts, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("kind", ["qwen2-untied", "qwen3", "llama"])
def test_the_same_tokens(checkpoint, kind):
    norms = []

    def rms_norm(x, weight, eps):
        norms.append((x.dim(), list(weight.shape)))
        return layers.rms_norm(x, weight, eps)

    parts = Parts(rms_norm=rms_norm, rope=plain.rope, attend=plain.attend, flat_batch=batch.flat_batch)
    assert tokens(checkpoint(kind), parts) == tokens(checkpoint(kind))
    assert ((3, [16, 16]) in norms) == (kind == "qwen3") and (2, [112]) in norms
