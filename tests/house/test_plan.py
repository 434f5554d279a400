"""kvlab plan: the engine's arithmetic before there is an engine; what it says, to people and to programs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvlab import cli, plan
from kvlab.config import EngineConfig
from kvlab.plan import CARDS, Settings, activation_bytes, alternatives, find_card, make_plan, settings_of
from kvlab.sizing import GB, GIB, MODELS, model_shape

ROOT = Path(__file__).parents[2]
SEVEN = model_shape("Qwen2.5-7B")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def facts(*arguments: str):
    return json.loads(run(*arguments, "--json"))


# ---- the arithmetic


def test_the_7b_on_24_gib_by_hand():
    """PAV 3.1: 0.92 of 24 GiB = 23,708,219,473 bytes. Less 15,231,233,024 of weights, 512 MiB, and the estimates."""
    made = make_plan(SEVEN, 24 * GIB, Settings(max_model_len=4096, gpu_memory_utilization=0.92))
    assert made.weight_bytes == 15_231_233_024 and made.kv_bytes_per_token == 57_344
    left = 23_708_219_473 - 15_231_233_024 - GIB // 2 - made.activation_bytes - made.cudagraph_bytes
    assert made.num_gpu_blocks == left // (57_344 * 16)
    assert made.num_tokens == (made.num_gpu_blocks - 1) * 16
    assert made.concurrency(4096) == (made.num_gpu_blocks - 1) / 256
    logits = 256 * 152_064  # fp32 twice, and the weights of 2^22 of them; 2048 tokens x 96,768 x 2 are 396 MB
    assert made.activation_bytes == logits * 8 + 2**22 * 64
    few = activation_bytes(SEVEN, 2, 1, 1)  # one row alone has fewer numbers than the sampler works on together
    assert few == 152_064 * (8 + 64)
    assert activation_bytes(SEVEN, 2, 2048, 1, True) - activation_bytes(SEVEN, 2, 2048, 1) == 2 * 2 * 18_944 * 3584
    assert activation_bytes(SEVEN, 2, 2048, 1) == 2048 * 2 * (2 * 3584 + 4 * 18_944 + 3 * (28 + 2 * 4) * 128)


def test_what_the_textbook_says_of_quantisation_holds():
    """PAV 6 and 9: 4-bit weights free blocks, 8-bit K/V nearly doubles the tokens, utilisation adds its share."""
    base = Settings(max_model_len=4096)
    tokens = {
        name: make_plan(SEVEN, 24 * GIB, replace(base, **change)).num_tokens
        for name, change in {
            "bf16": {},
            "awq": {"quantization": "awq"},
            "int8 K/V": {"kv_cache_dtype": "int8"},
            "0.94": {"gpu_memory_utilization": 0.94},
        }.items()
    }
    assert (tokens["awq"] - tokens["bf16"]) * 57_344 == pytest.approx(15_231_233_024 - 5_570_747_392, rel=0.03)
    assert tokens["int8 K/V"] / tokens["bf16"] == pytest.approx(57_344 / 29_568, rel=0.001)
    assert (tokens["0.94"] - tokens["bf16"]) * 57_344 == pytest.approx(0.04 * 24 * GIB, rel=0.001)


def test_the_13b_of_the_opening_case():
    """L33 0.1, claims C01 to C03: 26 GB of weights, 800 KiB a token, and so about 30 requests of 2048 on 80 GB."""
    made = make_plan(model_shape("Llama-2-13B"), 80 * GB, Settings(max_model_len=2048, gpu_memory_utilization=1.0))
    assert round(made.weight_bytes / GB) == 26 and made.kv_bytes_per_token == 800 * 1024
    assert 30 <= made.concurrency(2048) < 32  # 32 with nothing but weights and K/V


def test_16_gb_are_enough_for_the_7b_in_awq_and_not_in_bf16():
    """PAV 8 asks for about 16 GB for the INT4 model."""
    base = Settings(max_model_len=8192)
    assert not make_plan(SEVEN, CARDS["RTX 4080"].total_bytes, base).fits
    awq = make_plan(SEVEN, CARDS["RTX 4080"].total_bytes, replace(base, quantization="awq"))
    assert awq.fits and round(awq.weight_bytes / GB, 2) == 5.57  # what the published AWQ checkpoint has


@given(
    model=st.sampled_from(sorted(MODELS)), total=st.integers(GIB, 200 * GIB), seats=st.integers(1, 512),
    length=st.sampled_from([16, 1000, 32_768]), kv=st.sampled_from(["auto", "int8"]),
    quantization=st.sampled_from([None, "awq"]), share=st.floats(0.1, 1),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_plan_spends_no_more_than_the_budget_and_says_what_is_missing(
    model, total, seats, length, kv, quantization, share
):
    asked = Settings(length, share, max_num_seqs=seats, kv_cache_dtype=kv, quantization=quantization)
    made = make_plan(model_shape(model), total, asked)
    fixed = made.weight_bytes + made.context_bytes + made.activation_bytes + made.cudagraph_bytes
    block, budget = made.kv_bytes_per_token * 16, int(total * share)
    if made.missing_bytes:
        assert made.num_gpu_blocks == 0 and fixed + block - made.missing_bytes == budget
        enough = make_plan(model_shape(model), int((budget + made.missing_bytes) / share) + 2, asked)
        assert enough.num_gpu_blocks >= 1
    else:
        most = seats * -(-length // 16) + 1  # the engine makes no more
        assert made.num_gpu_blocks == min(most, (budget - fixed) // block)
    for _, other in alternatives(made):
        assert other.fits


def test_its_defaults_are_the_engines():
    engine, own = EngineConfig(), Settings(max_model_len=1)
    for name in ("gpu_memory_utilization", "block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype"):
        assert getattr(engine, name) == getattr(own, name)


# ---- names


@pytest.mark.parametrize("name", ["4090", "RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "RTX 4090 24GB"])
def test_a_gpu_by_its_names(name):
    assert find_card(name) == "RTX 4090"


def test_other_gpus():
    assert find_card("a100-40gb") == "A100 40GB" and find_card("A100") == find_card("A100 80GB") == "A100"
    with pytest.raises(ValueError, match="no GPU '9999' in the table: known are .*H200; or give --memory"):
        find_card("9999")


def write_config(folder: Path, **changes) -> str:
    config = json.loads((ROOT / "kvlab/tiny/model/config.json").read_text()) | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_folder_with_4_bit_weights_is_planned_as_such(tmp_path):
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
    sizes = dict(vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, head_dim=128,
                 num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False)  # fmt: skip
    found = facts(write_config(tmp_path / "m", quantization_config=awq, **sizes), "--gpu", "4090")
    assert found["weight_bytes"] == SEVEN.quantised_weight_bytes(4, 64) and found["model"] == "m"
    with pytest.raises(ValueError, match=r"quantised weights \('gptq'\) are not supported: use the model's AWQ"):
        run(write_config(tmp_path / "m", quantization_config={"quant_method": "gptq", "bits": 4}))
    with pytest.raises(ValueError, match="give --max-model-len"):
        settings_of({"max_position_embeddings": None})


def test_a_hub_id_brings_its_config_json_and_nothing_else(monkeypatch, tmp_path):
    write_config(tmp_path)
    asked = []
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub := type(sys)("huggingface_hub"))
    hub.snapshot_download = lambda name, **options: asked.append((name, options)) or str(tmp_path)
    monkeypatch.setenv("KVLAB_HUB", "https://mirror.example")
    assert facts("Qwen/Qwen2.5-7B-Instruct", "--gpu", "L4")["settings"]["max_model_len"] == 2048
    files = {"allow_patterns": ["config.json"], "endpoint": "https://mirror.example"}
    assert asked == [("Qwen/Qwen2.5-7B-Instruct", files)]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["GPT-5"], "'GPT-5' is no folder here.*Qwen2.5-7B"),
        (["Qwen2.5-7B", "--gpu", "4090", "--memory", "24 GiB"], "--gpu and --memory are both given"),
        (["Qwen2.5-7B", "--memory", "24"], "give a number, a space and one of"),
        (["Qwen2.5-7B", "--gpu", "4090", "--dtype", "int4"], "dtype is 'int4': use one of bfloat16"),
        (["Qwen2.5-7B", "--gpu", "4090", "--kv-cache-dtype", "fp8"], "kv_cache_dtype is 'fp8': use one of auto"),
        (["Qwen2.5-7B", "--gpu", "4090", "--gpu-memory-utilization", "92"], "gpu_memory_utilization is 92.0"),
        (["Qwen2.5-7B", "--gpu", "4090", "--max-num-seqs", "0"], "max_num_seqs is 0: use a whole number >= 1"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments, said):
    with pytest.raises(ValueError, match=said):
        run(*arguments)


# ---- what it says


def test_a_fit_for_people_and_for_programs():
    text = run("Qwen2.5-7B", "--gpu", "4090", "--max-model-len", "8192")
    found = facts("Qwen2.5-7B", "--gpu", "4090", "--max-model-len", "8192")
    assert found["fits"] and found["alternatives"] == [] and found["verdict"] in text and "What would" not in text
    assert f"num_gpu_blocks  {found['num_gpu_blocks']:,} of 16 tokens" in text
    assert "K/V of a token  56 KiB = 2 x 28 layers x 4 KV heads x (128 x 2) bytes" in text
    for word in ("CUDA context", "largest step", "CUDA graphs"):
        assert any(line.strip().startswith(word) and "estimate:" in line for line in text.splitlines())
    assert set(found["estimates"]) == {"activation_bytes", "cudagraph_bytes", "context_bytes", "total_bytes"}
    assert "total_bytes" not in facts("Qwen2.5-7B", "--memory", "24GiB")["estimates"]  # that one was given


def test_no_fit_says_what_would():
    text = run("Qwen2.5-7B", "--gpu", "t4", "--max-model-len", "8192")
    assert "does not fit the T4" in text and "are missing for the first K/V block" in text and "Note on the T4" in text
    rest = text.partition("What would fit:")[2]
    assert "AWQ checkpoint" in rest and "a larger GPU: L4" in rest


def test_a_long_context_that_does_not_fit_names_the_longest_that_does():
    found = facts("Qwen2.5-7B", "--gpu", "4090")  # 131,072 positions
    assert not found["fits"] and not found["missing_bytes"] and "for sequences of up to" in found["verdict"]
    change = found["alternatives"][0]["change"]
    length = int(change.removeprefix("--max-model-len "))
    assert length <= found["num_tokens"] < length + 2 * 256
    assert facts("Qwen2.5-7B", "--gpu", "4090", "--max-model-len", str(length))["fits"]


def test_without_a_gpu_all_of_them():
    text = run("Llama-3-8B")
    assert all(f"\n{card} " in text for card in CARDS)
    assert [entry["gpu"] for entry in facts("Llama-3-8B")] == list(CARDS)


def test_it_starts_without_torch():
    code = "import sys; from kvlab import cli; sys.argv = ['kvlab', 'plan', 'Qwen3-8B', '--gpu', '4090']\n"
    code += "try: cli.main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False" and "Qwen3-8B on RTX 4090" in done.stdout, done.stderr


def test_every_card_of_the_cost_model_can_be_planned_for():
    from kvlab.primer import GPUS

    assert set(GPUS) <= set(CARDS)
    assert all(0.9 < plan.CARDS[name].total_bytes / GPUS[name].memory < 1.08 for name in GPUS)
