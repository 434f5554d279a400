"""Configurations: old and new files read alike, and what would be computed wrongly is refused by name."""

import json

import pytest
import transformers
from random_checkpoints import LLAMA3

from kvlab.model.config import ModelConfig

QWEN2 = dict(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    max_position_embeddings=32768,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    sliding_window=32768,
    use_sliding_window=False,
    max_window_layers=21,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    eos_token_id=151645,
)


def test_a_qwen2_file_of_transformers_4():
    assert ModelConfig.from_dict(QWEN2) == ModelConfig(
        "qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, 1e-6, 1e6, None, True,
        attention_bias=True, eos_token_ids=(151645,), dtype="bfloat16",
    )  # fmt: skip


@pytest.mark.parametrize(
    "family, options",
    [
        ("Qwen2", {}),
        ("Qwen3", dict(attention_bias=True, head_dim=64)),
        ("Llama", dict(attention_bias=True, mlp_bias=True)),
        ("Llama", dict(rope_parameters=LLAMA3)),
        ("Llama", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=5000.0))),
    ],
)
def test_files_of_transformers_5_and_older_mean_the_same(tmp_path, family, options):
    hf = getattr(transformers, f"{family}Config")(
        num_attention_heads=8, num_key_value_heads=4, hidden_size=512, **options
    )
    hf.save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    parameters = dict(new["rope_parameters"])
    old["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"type": kind, **parameters}
    config = ModelConfig.from_dict(new)
    assert config == ModelConfig.from_dict(old)
    assert config.rope_theta == hf.rope_parameters["rope_theta"]
    assert (config.rope_scaling or {"rope_type": "default"})["rope_type"] == kind
    assert config.head_dim == getattr(hf, "head_dim", 64)


def test_flags_by_family():
    llama = {**QWEN2, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    qwen3 = {**QWEN2, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}

    def flags(d):
        c = ModelConfig.from_dict(d)
        return c.attention_bias, c.o_bias, c.mlp_bias, c.qk_norm

    assert flags(QWEN2) == (True, False, False, False)
    assert flags({**llama, "attention_bias": True}) == (True, True, False, False)
    assert flags({**llama, "mlp_bias": True}) == (False, False, True, False)
    assert flags(qwen3) == (False, False, False, True)
    assert ModelConfig.from_dict({**qwen3, "head_dim": 100}).head_dim == 100
    no_groups = {key: value for key, value in llama.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_dict(no_groups).num_key_value_heads == 14


def test_generation_config_names_the_ends_first(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN2, "eos_token_id": 1}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (1,)
    assert ModelConfig.from_dict({**QWEN2, "eos_token_id": None}).eos_token_ids == ()
    assert ModelConfig.from_dict({**QWEN2, "eos_token_id": 0}).eos_token_ids == (0,)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mistral"}, r"model_type 'mistral' is not supported: use \['llama', 'qwen2', 'qwen3'\]"),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "only Qwen2ForCausalLM is"),
        ({"hidden_size": None, "vocab_size": None}, r"lacks \['hidden_size', 'vocab_size'\]"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'.*bf16"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window 4096 is in use"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}, "sliding_window 128"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"layer_types \['linear_attention'\]"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported: use one of"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope type 'linear' lacks \['factor'\]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 4}, "num_attention_heads 14 is not a multiple of num_key_value_heads 4"),
        ({"head_dim": 63}, "head_dim is 63"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": "896"}, "hidden_size is '896'"),
        ({"num_attention_heads": 1000}, "head_dim is 0"),
    ],
)
def test_what_cannot_be_run_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**QWEN2, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "sliding_window": 32768},  # a window as long as the context never bites
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 24},  # no layer slides
        {"layer_types": ["full_attention"] * 24, "use_sliding_window": True, "sliding_window": 4096},
        {"rope_scaling": {"rope_type": "default"}},
    ],
)
def test_windows_that_never_bite_are_accepted(change):
    assert ModelConfig.from_dict({**QWEN2, **change}) == ModelConfig.from_dict(QWEN2)


def test_broken_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json in"):
        ModelConfig.from_folder(tmp_path)
    for content in ("{", "[1, 2]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="config.json.*fetch the file again"):
            ModelConfig.from_folder(tmp_path)
