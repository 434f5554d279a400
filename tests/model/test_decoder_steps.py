"""Lab 12's functions do what the engine's own do, on the shipped model's shapes; its books balance with lab 00's."""

import pytest
import torch

from kvlab.model import decoder_steps as steps
from kvlab.model.attention import naive_paged_attention
from kvlab.model.batch import flat_batch
from kvlab.model.config import ModelConfig
from kvlab.model.layers import RotaryEmbedding, rope
from kvlab.primer import step_bytes
from kvlab.sizing import model_shape
from kvlab.tiny import MODEL_DIR


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_folder(MODEL_DIR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rope_is_the_engines(config, dtype):
    x = torch.randn(5, 3, config.head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.tensor([9, 0, 1500, 3, 4])
    loose = {"atol": 0.02, "rtol": 0} if dtype == torch.bfloat16 else {}  # the order of rounding is another
    rotary = RotaryEmbedding(config, dtype)
    torch.testing.assert_close(steps.rope(x, positions, config.rope_theta), rope(x, *rotary(positions)), **loose)
    a, b = steps.turn_pair(float(x[0, 0, 2]), float(x[0, 0, 2 + config.head_dim // 2]), 9, 2, config.head_dim, 10_000.0)
    got = steps.rope(x.double(), positions, 10_000.0)[0, 0]
    assert got[2] == pytest.approx(a, abs=1e-5) and got[2 + config.head_dim // 2] == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 9), (4, 4), (3, 10)])
def test_attend_is_the_oracle_of_the_backends(rows, length):
    generator = torch.Generator().manual_seed(1)
    kv, q = torch.randn(2, 9, 4, 2, 8, generator=generator), torch.randn(rows, 6, 8, generator=generator)
    table = [5, 2, 7][: -(-length // 4)]
    batch = flat_batch([([0] * rows, length - rows, table, True)], 4)
    torch.testing.assert_close(steps.attend(q, kv, table, length), naive_paged_attention(q, kv, batch))


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen2.5-0.5B"])
def test_the_ledger_balances_with_the_bytes_of_lab_00(name):
    shape, step = model_shape(name), [(1, 4000, True), (512, 1024, False), (3, 0, True)]
    bill = steps.step_ledger(step, shape)
    embedding = 516 * shape.hidden_size * 2  # a row a token, which the ledger leaves out
    assert bill["weights"] + bill["kv_read"] + embedding == step_bytes(shape, [(new, old) for new, old, _ in step])
    assert bill["kv_written"] == 516 * shape.kv_bytes_per_token() and bill["logits"] == 2 * 4 * shape.vocab_size


def test_where_two_runs_part():
    a, b = torch.zeros(3, 2), torch.zeros(2, 1)
    late, broken = b.clone(), a.clone()
    late[1, 0], broken[2, 1] = 0.2, torch.nan
    good = [("a", a), ("b", b)]
    assert steps.first_wrong(good, good, 0) is None
    assert steps.first_wrong([("a", a), ("b", late)], good, 0.1) == ("b", 1)
    assert steps.first_wrong([("a", broken), ("b", late)], good, 0.1) == ("a", 2)
