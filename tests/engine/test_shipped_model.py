"""The main job on real input: the shipped model answers its glossary through the engine, all at once."""

import pytest

from kvlab.engine import LLM
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Policies
from kvlab.tiny import MODEL_DIR, load_glossary

ENTRIES = load_glossary()
CONVERSATIONS = [[{"role": "user", "content": entry["question"]}] for entry in ENTRIES]
GREEDY = SamplingParams(temperature=0, max_tokens=96)


@pytest.fixture(scope="module")
def answers():
    """What a roomy engine says, every request alone in it: no batching, no sharing."""
    llm = LLM("tiny", max_num_seqs=1, enable_prefix_caching=False)
    return [output.outputs[0].token_ids for output in llm.chat(CONVERSATIONS, GREEDY)]


def test_it_answers_word_for_word_with_everybody_at_once():
    llm = LLM("tiny")
    outputs = llm.chat(CONVERSATIONS, GREEDY)
    right = sum(o.outputs[0].text == entry["answer"] for o, entry in zip(outputs, ENTRIES, strict=True))
    assert right >= 0.98 * len(ENTRIES)
    assert all(o.outputs[0].finish_reason == "stop" for o in outputs)
    stats = llm.stats()
    assert stats["peak_running"] > 50
    # All share the system prompt's full blocks; the first to compute them shares them with all the others.
    assert stats["num_prefix_hit_tokens"] >= 64 * (len(ENTRIES) - 1)


@pytest.mark.parametrize("options", [
    dict(num_gpu_blocks_override=40, max_num_seqs=12, max_num_batched_tokens=50),
    dict(num_gpu_blocks_override=40, max_num_seqs=12, num_cpu_blocks_override=60, enable_prefix_caching=False),
    dict(num_gpu_blocks_override=600, block_size=1, max_num_seqs=8),
], ids=["recompute", "swap", "block size 1"])  # fmt: skip
def test_the_words_do_not_depend_on_memory_or_company(answers, options):
    llm = LLM("tiny", policies=Policies(may_resume=lambda *_: True), **options)
    outputs = llm.chat(CONVERSATIONS[::3], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == answers[::3]
    stats = llm.stats()
    if options["num_gpu_blocks_override"] == 40:
        assert stats["num_preemptions_recompute"] + stats["num_preemptions_swap"] > 0


def test_transformers_generates_the_same(answers):
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    for conversation, answer in list(zip(CONVERSATIONS, answers, strict=True))[::14]:
        prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_tensors="pt")
        ids = prompt["input_ids"] if not isinstance(prompt, torch.Tensor) else prompt
        with torch.inference_mode():
            output = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=False)
        assert output[0, ids.shape[1] :].tolist() == answer
