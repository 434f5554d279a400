"""Checkpoints that are whole load; those that are not say everything that is wrong with them, and what to do."""

import json
import shutil
import socket
import sys
import types

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlab.model.config import ModelConfig
from kvlab.model.loader import CheckpointError, expected_shapes, load_model, load_weights, resolve_model


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of a checkpoint to break."""
    shutil.copytree(checkpoint("qwen2-tied")[0], tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(checkpoint, tmp_path):
    shutil.copytree(checkpoint("llama", max_shard_size="60KB")[0], tmp_path / "model")
    return tmp_path / "model"


def edit(folder, change):
    """Rewrite model.safetensors with `change(tensors)` applied."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder):
    return load_weights(folder, ModelConfig.from_folder(folder), torch.float32)


# ---- whole checkpoints


def test_weights_arrive_in_the_type_asked_for(folder):
    config = ModelConfig.from_folder(folder)
    stored = load_file(folder / "model.safetensors")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        weights = load_weights(folder, config, dtype)
        assert {name: tuple(w.shape) for name, w in weights.items()} == expected_shapes(config)
        assert all(torch.equal(w, stored[name].to(dtype)) for name, w in weights.items())


def test_all_shards_are_read(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert load(sharded).keys() == index["weight_map"].keys()


def test_harmless_extras_are_skipped(folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit(folder, change)
    assert load(folder).keys() == expected_shapes(ModelConfig.from_folder(folder)).keys()


def test_building_a_model_empties_the_dict_and_picks_the_type(folder):
    from kvlab.model.decoder import CausalLM

    config, weights = ModelConfig.from_folder(folder), load(folder)
    CausalLM(config, weights)
    assert weights == {}
    assert load_model(folder)[0].dtype == torch.float32  # auto on a CPU
    assert load_model(folder, dtype="bfloat16")[0].embed_tokens.dtype == torch.bfloat16
    assert load_model(folder, dtype=torch.float64)[0].norm.dtype == torch.float64
    with pytest.raises(ValueError, match="dtype 'int8' is unknown: use 'auto' or one of"):
        load_model(folder, dtype="int8")


def test_a_loaded_model_does_not_depend_on_its_file(folder):
    """safetensors maps files: a tensor that is only a view would change with the file, and keep it in memory."""
    model, _ = load_model(folder)
    before = model.embed_tokens.clone(), model.norm.clone()
    with open(folder / "model.safetensors", "r+b") as file:
        size = (folder / "model.safetensors").stat().st_size
        file.write(bytes(size))
    assert torch.equal(model.embed_tokens, before[0]) and torch.equal(model.norm, before[1])


# ---- tensors that do not fit


def test_every_problem_is_named_at_once(folder):
    def change(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.self_attn.q_proj.bias"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(112, dtype=torch.int8)

    edit(folder, change)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    text = str(error.value)
    assert "5 problems" in text and "same checkpoint" in text
    assert "missing: model.norm.weight (112,)" in text
    assert "missing: model.layers.1.self_attn.q_proj.bias (112,)" in text
    assert "wrong shape: model.layers.0.mlp.up_proj.weight expected (96, 112), found (3, 4)" in text
    assert "extra: model.layers.7.mlp.up_proj.weight (2,)" in text
    assert "wrong type: model.layers.0.input_layernorm.weight is I8, expected one of ['BF16'," in text


def test_an_untied_head_must_be_there_and_be_expected(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"1 problems.*\n  missing: lm_head.weight \(223, 112\)$"):
        load(folder)


def test_biases_that_the_configuration_denies_are_extra(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="6 problems") as error:
        load(folder)
    assert str(error.value).count("extra: model.layers.") == 6


def test_a_tensor_that_the_index_promises_but_no_shard_holds(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shard = sharded / index["weight_map"]["model.norm.weight"]
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    with pytest.raises(CheckpointError, match="missing: model.norm.weight"):
        load(sharded)


# ---- files that are missing or broken


def test_a_missing_shard_is_named(sharded):
    shards = sorted(sharded.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"lacks \['{shards[1].name}'\]: download the whole checkpoint again"):
        load(sharded)


@pytest.mark.parametrize("content", ["{", "[]", '{"metadata": {}}', '{"weight_map": 3}'])
def test_a_broken_index(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="index.json' is broken"):
        load(sharded)


def test_a_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors' is no readable safetensors file.*download it again"):
        load(folder)


def test_a_git_lfs_pointer(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        load(folder)


def test_a_pickle_is_not_opened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds \['pytorch_model.bin'\], not safetensors.*save_pretrained"):
        load(folder)


def test_an_empty_folder_and_none(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks \['model.safetensors'\]"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no config.json"):
        load_model(folder)
    with pytest.raises(CheckpointError, match="there is no folder"):
        load_weights(tmp_path / "gone", None, torch.float32)


# ---- names


def test_names_of_folders(folder, monkeypatch):
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model").resolve() == folder.resolve()
    for name in ("no-such-model", "./a/b", "/a/b/c", "a b/c", "", "../x"):
        with pytest.raises(CheckpointError, match="is no folder here: give 'tiny'"):
            resolve_model(name)


def test_tiny_is_the_shipped_model(monkeypatch, tmp_path):
    tiny = types.ModuleType("kvlab.tiny")
    tiny.MODEL_DIR = tmp_path
    monkeypatch.setitem(sys.modules, "kvlab.tiny", tiny)
    assert resolve_model("tiny") == tmp_path


@pytest.fixture
def hubs(monkeypatch, tmp_path):
    """Both hubs' download functions replaced by ones that record what they are asked for."""
    asked = []
    for module in ("huggingface_hub", "modelscope"):

        def snapshot_download(name, module=module, **options):
            asked.append((module, name, options.get("endpoint")))
            assert "*.safetensors" in options["allow_patterns"] and "*.bin" not in options["allow_patterns"]
            return str(tmp_path)

        stand_in = types.ModuleType(module)
        stand_in.snapshot_download = snapshot_download
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.delenv("KVLAB_HUB", raising=False)
    return asked


def test_one_setting_chooses_the_hub(hubs, monkeypatch, tmp_path):
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    monkeypatch.setenv("KVLAB_HUB", "modelscope")
    resolve_model("Qwen/Qwen3-0.6B")
    monkeypatch.setenv("KVLAB_HUB", "https://mirror.example")
    resolve_model("Qwen/Qwen3-0.6B")
    resolve_model("Qwen/Qwen3-0.6B", source="hf")  # an argument outranks the environment
    assert hubs == [
        ("huggingface_hub", "Qwen/Qwen3-0.6B", None),
        ("modelscope", "Qwen/Qwen3-0.6B", None),
        ("huggingface_hub", "Qwen/Qwen3-0.6B", "https://mirror.example"),
        ("huggingface_hub", "Qwen/Qwen3-0.6B", None),
    ]
    with pytest.raises(CheckpointError, match="KVLAB_HUB is 'mirror.example': use 'hf', 'modelscope', or the https"):
        resolve_model("Qwen/Qwen3-0.6B", source="mirror.example")


def test_modelscope_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)  # as if it were not installed
    with pytest.raises(CheckpointError, match="pip install modelscope"):
        resolve_model("Qwen/Qwen3-0.6B", source="modelscope")


def test_an_unreachable_hub(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: refuses every connection
        mirror = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(CheckpointError, match=f"could not download 'Qwen/Qwen3-0.6B' from '{mirror}'.*KVLAB_HUB"):
            resolve_model("Qwen/Qwen3-0.6B", source=mirror)
