"""AWQ's format: packing, dequantising, what a configuration may say; folders against the same weights written out."""

import json
from subprocess import CalledProcessError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvlab.model import awq
from kvlab.model.awq_linear import AWQLinear, uses_kernel
from kvlab.model.config import ModelConfig
from kvlab.model.layers import Linear
from kvlab.model.loader import CheckpointError, expected_shapes, load_model, load_weights
from kvlab.sizing import ModelShape, model_shape

QWEN_7B = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
       "modules_to_not_convert": None}  # fmt: skip


# ---- the format


def test_the_order_within_a_word():
    """Known by hand: column 1 lies in nibble 4, column 2 in nibble 1."""
    numbers = torch.arange(8, dtype=torch.uint8)[None]
    assert f"{awq.pack(numbers).item():08x}" == "75316420"
    assert awq.unpack(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [[*range(8)]]
    assert awq.pack(torch.full((1, 8), 15)).item() == -1  # the sign bit is a bit like any other


@settings(max_examples=25)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=6))
def test_unpacking_is_what_the_slow_one_does_and_packing_undoes_it(words):
    words = torch.tensor([words, words[::-1]], dtype=torch.int32)
    numbers = awq.unpack(words)
    assert numbers.tolist() == awq.unpack_reference(words)
    assert torch.equal(awq.pack(numbers), words)


@settings(max_examples=25)
@given(st.sampled_from([16, 32]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99), st.floats(-3, 3))
def test_a_weight_is_read_again_within_half_a_step(group, groups, eights, seed, shift):
    weight = torch.randn(8 * eights, group * groups, generator=torch.Generator().manual_seed(seed)) + shift
    parts = awq.quantise_weight(weight, group)
    again = awq.dequantise_weight(*parts, torch.float32)
    step = parts[2].float().T.repeat_interleave(group, 1)
    # Half a step for the number; at the ends of the range another half, since zero was rounded; and fp16's scale.
    assert ((again - weight).abs() <= 1.02 * step).all()
    assert ((again - weight).abs() <= 0.51 * step).double().mean() > 0.9


def test_dequantising_one_number_after_the_other():
    parts = awq.quantise_weight(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), 32)
    numbers, zeros = awq.unpack_reference(parts[0]), awq.unpack_reference(parts[1])
    again = awq.dequantise_weight(*parts, torch.float64)
    for n in range(16):
        for k in range(64):
            assert again[n, k] == (numbers[k][n] - zeros[k // 32][n]) * parts[2][k // 32, n].double()


def test_weights_of_zero_and_of_one_sign():
    weight = torch.zeros(8, 32)
    weight[1], weight[2] = 0.75, -0.75
    again = awq.dequantise_weight(*awq.quantise_weight(weight, 16), torch.float32)
    assert (again[0] == 0).all() and torch.allclose(again, weight, rtol=1e-3)


@pytest.mark.parametrize("shape, group", [((8, 30), 16), ((12, 32), 16), ((8, 32), 0)])
def test_a_weight_that_does_not_fit_the_format(shape, group):
    with pytest.raises(ValueError, match=f"{shape[0]} x {shape[1]} does not fit groups of {group}"):
        awq.quantise_weight(torch.zeros(shape), group)


# ---- configurations and sizes


def test_the_configuration_of_a_published_checkpoint():
    config = ModelConfig.from_dict(QWEN_7B | {"quantization_config": AWQ})
    assert config.awq_group_size == 128
    assert ModelConfig.from_dict(QWEN_7B).awq_group_size is None
    older = {"quant_method": "awq", "zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM",
             "modules_to_not_convert": ["lm_head"]}  # fmt: skip
    assert ModelConfig.from_dict(QWEN_7B | {"quantization_config": older}) == config


@pytest.mark.parametrize(
    "change, words",
    [
        ({"quant_method": "gptq"}, "'gptq'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "fp8"}, "'fp8'"),
        ({"bits": 8}, "bits 8"),
        ({"version": "gemv"}, "version 'gemv'"),
        ({"version": "gemv_fast"}, "version 'gemv_fast'"),
        ({"zero_point": False}, "zero_point False"),
        ({"modules_to_not_convert": ["lm_head", "o_proj"]}, r"modules_to_not_convert \['o_proj'\]"),
        ({"lm_head": True}, "lm_head True"),
        ({"group_size": -1}, "group_size -1"),
        ({"group_size": None}, "group_size None"),
    ],
)
def test_what_is_not_this_format_is_named_with_what_to_use(change, words):
    with pytest.raises(ValueError, match=f"{words}.*are not supported: use the model's AWQ checkpoint.*bf16 or fp16"):
        ModelConfig.from_dict(QWEN_7B | {"quantization_config": AWQ | change})


def test_sizes_that_do_not_make_whole_groups_or_words():
    with pytest.raises(ValueError, match="group_size 128, which does not divide 3600 inputs"):
        ModelConfig.from_dict(QWEN_7B | {"hidden_size": 3600, "head_dim": 128, "quantization_config": AWQ})
    small = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 4,
             "intermediate_size": 64, "quantization_config": AWQ | {"group_size": 16}}  # fmt: skip
    with pytest.raises(ValueError, match="k_proj has 4 outputs"):
        ModelConfig.from_dict(QWEN_7B | small)


def test_the_bytes_of_a_folder_are_those_that_planning_counts():
    """Qwen2.5-7B-Instruct-AWQ has 5.57 GB of tensors; sizing counts them without torch, the loader tensor by tensor."""
    config = ModelConfig.from_dict(QWEN_7B | {"quantization_config": AWQ})
    size = {"qweight": 4, "qzeros": 4}
    shapes = expected_shapes(config)
    total = sum(torch.Size(shape).numel() * size.get(name.rsplit(".", 1)[-1], 2) for name, shape in shapes.items())
    assert total == model_shape("Qwen2.5-7B").quantised_weight_bytes() == 5_570_747_392
    assert ModelShape.from_config(QWEN_7B).quantised_weight_bytes() == total


def test_every_matrix_of_the_7b_model_fits_chunks_and_tiles():
    """Inputs in chunks of 128, outputs in tiles of 128: qkv, o, gate and up, down."""
    for inputs, outputs in ((3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)):
        assert inputs % 128 == outputs % 128 == 0


# ---- folders


@pytest.fixture(params=["qwen2-tied", "qwen3-bias", "llama-bias"])
def pair(request, checkpoint, tmp_path):
    """(AWQ folder, plain folder of the same weights written out in fp32)."""
    awq.quantise_checkpoint(checkpoint(request.param)[0], tmp_path / "awq", group_size=16)
    awq.dequantise_checkpoint(tmp_path / "awq", tmp_path / "plain")
    return tmp_path / "awq", tmp_path / "plain"


def test_a_quantised_folder_is_the_model_of_its_weights_written_out(pair):
    quantised, plain = (load_model(folder)[0] for folder in pair)
    for layer, other in zip(quantised.layers, plain.layers, strict=True):
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            got, want = getattr(layer, name), getattr(other, name)
            x = torch.randn(3, want.in_features, generator=torch.Generator().manual_seed(0))
            assert isinstance(got, AWQLinear) and isinstance(want, Linear)
            assert torch.equal(got(x), want(x)), name
    assert torch.equal(quantised.embed_tokens, plain.embed_tokens)


def test_parts_arrive_as_they_are_stored(pair):
    config = ModelConfig.from_folder(pair[0])
    stored = load_file(pair[0] / "model.safetensors")
    weights = load_weights(pair[0], config, torch.bfloat16)
    for name, tensor in weights.items():
        is_part = name.endswith(awq.PARTS)
        assert tensor.dtype == (stored[name].dtype if is_part else torch.bfloat16)


def test_every_problem_of_a_quantised_folder_is_named(checkpoint, tmp_path):
    folder = tmp_path / "awq"
    awq.quantise_checkpoint(checkpoint("qwen2-tied")[0], folder, group_size=16)
    tensors = load_file(folder / "model.safetensors")
    p = "model.layers.0.mlp"
    tensors[f"{p}.up_proj.weight"] = torch.zeros(96, 112)
    del tensors[f"{p}.up_proj.qzeros"]
    tensors[f"{p}.down_proj.qweight"] = tensors[f"{p}.down_proj.qweight"].T.contiguous()
    tensors[f"{p}.gate_proj.scales"] = tensors[f"{p}.gate_proj.scales"].float()
    tensors[f"{p}.gate_proj.qweight"] = tensors[f"{p}.gate_proj.qweight"].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    text = str(error.value)
    assert "5 problems" in text
    assert f"extra: {p}.up_proj.weight (96, 112)" in text
    assert f"missing: {p}.up_proj.qzeros (7, 12)" in text
    assert f"wrong shape: {p}.down_proj.qweight expected (96, 14), found (14, 96)" in text
    assert f"wrong type: {p}.gate_proj.scales is F32, expected one of ['F16']" in text
    assert f"wrong type: {p}.gate_proj.qweight is F32, expected one of ['I32']" in text


def test_a_config_that_forgot_the_quantisation(checkpoint, tmp_path):
    folder = tmp_path / "awq"
    awq.quantise_checkpoint(checkpoint("qwen2-tied")[0], folder, group_size=16)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="extra: model.layers.0.mlp.down_proj.qweight"):
        load_model(folder)


@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler"), CalledProcessError(1, ["gcc", "main.c"])])
def test_where_no_kernel_can_be_built_weights_are_written_out(error, monkeypatch):
    """As attention goes on by PyTorch there (backends.py): known before the weights are loaded, or it is too late."""
    launch = pytest.importorskip("kvlab_kernels.launch")

    class Driver:
        fails = False

        @property
        def active(self):
            if self.fails:
                raise error

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch.triton.runtime, "driver", Driver())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert uses_kernel("auto", "cuda")
    Driver.fails = True
    assert not uses_kernel("auto", "cuda")


def test_who_multiplies_in_4_bits():
    assert uses_kernel("triton", "cpu")
    assert not any(uses_kernel(backend, "cpu") for backend in ("auto", "torch", "naive"))
    assert not uses_kernel("torch", "cuda")
