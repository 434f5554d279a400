"""Known configurations against published counts; random folders through loader, engine and transformers."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from kvlab import LLM, SamplingParams
from kvlab.model.awq import dequantise_checkpoint
from kvlab.model.config import ModelConfig
from kvlab.model.known import KNOWN, known_config
from kvlab.model.random_weights import AWQ_CONFIG, write_random_model
from kvlab.sizing import MODELS, ModelShape

PUBLISHED = {  # parameters, as the model cards' safetensors headers count them
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_configurations_have_the_published_size_and_run_here(name):
    config = known_config(name)
    shape = ModelShape.from_config(config)
    assert shape.num_parameters == PUBLISHED[name]
    assert MODELS.get(name, shape) == shape
    read = ModelConfig.from_dict(config)  # refuses what would be computed wrongly
    assert (read.head_dim, read.tie_word_embeddings) == (shape.head_dim, shape.tie_word_embeddings)


def test_names_come_with_their_owner_or_without_and_unknown_ones_are_told():
    assert known_config("Qwen/Qwen2.5-7B") == known_config("Qwen2.5-7B")
    known_config("Qwen2.5-7B")["hidden_size"] = 1
    assert known_config("Qwen2.5-7B")["hidden_size"] == 3584
    with pytest.raises(ValueError, match="'GPT-5' is known by name: known are Qwen2.5-0.5B"):
        known_config("GPT-5")


def small(name: str, **changes):
    """The shape of `name`, scaled down: its groups of query heads, its vocabulary's kind, its flags."""
    config = known_config(name)
    config |= {"hidden_size": 112, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 2304}
    return config | {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 8} | changes


def greedy(folder, prompt: list[int], num_tokens: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-0.6B", "Llama-3.2-1B"])
def test_a_scaled_folder_in_bf16_shards_says_what_transformers_says(tmp_path, name):
    folder = write_random_model(tmp_path / "m", small(name), shard_bytes=200_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=32, max_model_len=256)
    prompt = llm.tokenizer.encode("What is a KV cache?")
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24))
    assert output.outputs[0].token_ids == greedy(folder, prompt, 24)
    assert len(set(output.outputs[0].token_ids)) > 4  # it wanders


def test_the_same_seed_makes_the_same_weights_whatever_the_shards_and_layers(tmp_path):
    def weights(folder: str, seed: int = 0, layers: int = 2, **options):
        write_random_model(tmp_path / folder, small("Qwen2.5-7B", num_hidden_layers=layers), seed=seed, **options)
        return {k: v for file in (tmp_path / folder).glob("*.safetensors") for k, v in load_file(file).items()}

    one, cut, short, other = weights("a"), weights("b", shard_bytes=100_000), weights("c", layers=1), weights("d", 1)
    assert all(torch.equal(one[name], cut[name]) for name in one)
    assert len(short) < len(one) and all(torch.equal(one[name], short[name]) for name in short)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_a_folder_in_4_bits_says_what_its_weights_written_out_say(tmp_path):
    sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=8, head_dim=16)
    config = small("Qwen2.5-7B", **sizes) | {"quantization_config": AWQ_CONFIG}
    folder = write_random_model(tmp_path / "q", config, shard_bytes=1 << 30)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (folder / index["model.norm.weight"]).rename(folder / "model.safetensors")  # one file, as awq's tools want it
    (folder / "model.safetensors.index.json").unlink()
    dequantise_checkpoint(folder, tmp_path / "plain")
    prompt, params = list(range(3, 40)), SamplingParams(temperature=0, max_tokens=16)
    one, other = (
        LLM(str(f), dtype="float32", num_gpu_blocks_override=32, max_model_len=256, quantization=q)
        for f, q in ((folder, "awq"), (tmp_path / "plain", None))
    )
    tokens = one.generate([prompt], params)[0].outputs[0].token_ids
    assert tokens == other.generate([prompt], params)[0].outputs[0].token_ids
    assert len(set(tokens)) > 4


def test_what_cannot_be_written_is_said_before_anything_is(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty: name a new folder"):
        write_random_model(tmp_path / "full", small("Qwen2.5-7B"))
    with pytest.raises(ValueError, match="dtype is 'int4': use one of bfloat16"):
        write_random_model(tmp_path / "new", small("Qwen2.5-7B"), dtype="int4")
    with pytest.raises(ValueError, match="model_type 'gpt2' is not supported"):
        write_random_model(tmp_path / "new", small("Qwen2.5-7B") | {"model_type": "gpt2"})
    assert not (tmp_path / "new").exists()


def test_a_small_vocabulary_gets_no_tokenizer(tmp_path):
    folder = write_random_model(tmp_path / "m", small("Qwen2.5-7B", vocab_size=512, eos_token_id=0))
    assert not (folder / "tokenizer.json").exists()
    llm = LLM(str(folder), num_gpu_blocks_override=16, max_model_len=64)
    assert len(llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids) == 4


@pytest.mark.slow
def test_one_layer_of_the_exact_7b_says_what_transformers_says(tmp_path):
    """2.7 GB of bf16 on disk, 5.3 GB in fp32 on top for each of the two that run it, one after the other."""
    config = known_config("Qwen2.5-7B") | {"num_hidden_layers": 1}
    folder = write_random_model(tmp_path / "m", config)
    prompt, params = [9707, 11, 151_000, 77_777, 3, 152_063], SamplingParams(temperature=0, max_tokens=12)
    expected = greedy(folder, prompt, 12)
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64, max_model_len=512)
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == expected
