"""Parts that slot-echo has no place for, called by themselves: a few numbers, beside loops that say what is meant.

    attention     NumPy; labs 10 and 11                     softmax, one head after the other
    rms_norm, rope, attend, flat_batch     torch; lab 12    the same in loops, and nothing that is handed in may change
    detokenizer, stop_checker     lab 14                    bytes, and characters, one after the other

Each check raises, with what is wrong, or returns. What they need is imported when they run: other parts do without.
"""

import math
from collections.abc import Callable
from itertools import product


def _attention(attention: Callable) -> None:
    import numpy as np

    lens = 1, 4, 5
    numbers = np.random.default_rng(0)
    keys, values = numbers.normal(size=(2, 8, 2, 2, 16)).astype(np.float32)
    q = numbers.normal(size=(3, 4, 16)).astype(np.float32)
    tables = np.array([[6, -1, -1], [2, 7, -1], [1, 5, 3]], np.int32)
    out = attention(q, keys, values, tables, np.array(lens, np.int32))
    for seq, head in np.ndindex(3, 4):
        at = [(tables[seq, p // 2], p % 2, head // 2) for p in range(lens[seq])]
        weights = np.exp([keys[i] @ q[seq, head] / 4 for i in at])
        want = sum(w * values[i] for w, i in zip(weights, at, strict=True)) / weights.sum()
        assert np.allclose(out[seq, head], want, atol=1e-3), f"sequence {seq}, head {head} is wrong"


def _randn(*shape):
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _close(got, want) -> bool:
    import torch

    got, want = (torch.as_tensor(x, dtype=torch.float64) for x in (got, want))
    return torch.allclose(got, want, rtol=0, atol=1e-3)


def _call(function: Callable, *args):
    """function(*args), and AssertionError if it has changed one of the tensors."""
    before = [arg.clone() if hasattr(arg, "clone") else arg for arg in args]
    result = function(*args)
    for was, now in zip(before, args, strict=True):
        if hasattr(now, "clone"):
            same = was.nan_to_num(7.0).equal(now.nan_to_num(7.0))
            assert same, f"a tensor of shape {list(now.shape)} that was handed in has changed: work on a new one"
    return result


def _rms_norm(rms_norm: Callable) -> None:
    for x, weight in ((_randn(3, 8), _randn(8)), (_randn(2, 3, 8), _randn(3, 8)), (1e-3 * _randn(2, 4), _randn(4))):
        got = _call(rms_norm, x, weight, 1e-6)
        for row in product(*map(range, x.shape[:-1])):
            numbers = x[row].tolist()
            scale = math.sqrt(sum(n * n for n in numbers) / len(numbers) + 1e-6)
            factors = weight[row[1:]].tolist()
            want = [n / scale * factor for n, factor in zip(numbers, factors, strict=True)]
            assert _close(got[row], want), f"row {list(row)} of x {list(x.shape)} is wrong"
    large = _randn(1, 8).sign().half() * 1000
    got = _call(rms_norm, large, large.abs() / 1000, 1e-6)
    assert _close(got, large / 1000), "a square of 1000 is no number of fp16: sum in float32"


def _rope(rope: Callable) -> None:
    import torch

    x, positions, theta = _randn(3, 2, 8), [0, 5, 900], 100.0
    got = _call(rope, x, torch.tensor(positions), theta)
    for token, head, i in product(range(3), range(2), range(4)):
        a, b = x[token, head, i].item(), x[token, head, i + 4].item()
        angle = positions[token] * theta ** (-2 * i / 8)
        want = [a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)]
        pair = [got[token, head, i].item(), got[token, head, i + 4].item()]
        assert _close(pair, want), (
            f"at position {positions[token]} the pair of elements {i} and {i + 4} is {pair} and must be {want}"
        )


def _attend(attend: Callable) -> None:
    import torch

    kv = torch.full((2, 9, 2, 2, 16), torch.nan)  # nothing that was not written may matter
    for table, seq_len, n in (([6], 1, 1), ([2, 7], 4, 4), ([1, 5, 3], 5, 3), ([8, 4], 3, 1)):
        slots = [(table[p // 2], p % 2) for p in range(seq_len)]
        for block, offset in slots:
            kv[:, block, offset] = _randn(2, 2, 16 + block)[..., :16]
        q = _randn(n, 4, 16)
        got = _call(attend, q, kv, list(table), seq_len)
        for row, head in product(range(n), range(4)):
            seen = [kv[:, block, offset, head // 2].double() for block, offset in slots[: seq_len - n + row + 1]]
            weights = [math.exp(key @ q[row, head].double() / 4) for key, _ in seen]
            want = sum(w * value for w, (_, value) in zip(weights, seen, strict=True)) / sum(weights)
            why = "not a number: it has read slots behind the end" if got[row, head].isnan().any() else "wrong"
            where = f"token {row} of {n}, at position {seq_len - n + row}"
            assert _close(got[row, head], want), f"head {head} of {where}, is {why}"


def _flat_batch(flat_batch: Callable) -> None:
    from kvlab.model import batch

    steps = (
        [([9], 0, [3], True)],
        [([9], 4, [2, 6, 5], True), ([4], 0, [1], False), ([5, 6, 7], 2, [7, 3, 8], True), ([1, 2], 0, [4], False)],
    )
    for seqs in steps:
        want, got = batch.flat_batch(seqs, 2), flat_batch([(list(t), s, list(b), w) for t, s, b, w in seqs], 2)
        for name in ("token_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "logits_indices"):
            expected, value = (getattr(x, name).tolist() for x in (want, got))
            assert value == expected, f"{name} is {value} and must be {expected}"
        for i, (_, _, block_ids, _) in enumerate(seqs):
            row = got.block_tables[i].tolist()
            assert row[: len(block_ids)] == block_ids, f"row {i} of block_tables is {row} for the blocks {block_ids}"


def _detokenizer(detokenizer: Callable) -> None:
    """A token is a byte: every character of more than one byte comes in parts, and the last one never ends."""
    whole = "a\u5757\U0001f642b".encode()
    made, shown = detokenizer(lambda token_ids: bytes(token_ids).decode(errors="replace")), ""
    for end, byte in enumerate(whole, 1):
        shown += made.add([byte])
        want = whole[:end].decode(errors="ignore")
        assert shown == want, f"after {end} bytes of {whole.decode()!r} it has shown {shown!r} and not {want!r}"
    shown += made.add([0xE5]) + made.add([], final=True)
    assert shown == whole.decode() + "\ufffd", f"at the end, with half a character left, it has shown {shown!r}"


def _stop_checker(stop_checker: Callable) -> None:
    """Two stop strings, one the beginning of the other; text in pieces of one character."""
    for include, want in ((False, "xSTx"), (True, "xSTxSTOP")):
        made, shown, found = stop_checker(("STOP!", "STOP"), include), "", None
        for piece in "xSTxSTOP!":
            text, found = made.add(piece, may_stop=True)
            shown += text
            if found is not None:
                break
        assert (shown, found) == (want, "STOP"), f"it has shown {shown!r} and found {found!r}, not {want!r} and 'STOP'"
    made = stop_checker(("ab",), False)
    shown = made.add("ab", may_stop=False)[0] + made.add("a", final=True)[0]
    assert shown == "aba", f"nothing could stop, and at the end it has shown {shown!r} of 'aba'"


ALONE: dict[str, tuple[str, Callable[[Callable], None]]] = {  # part -> what it is tried on, and its check
    "attention": ("three sequences in pages of two tokens", _attention),
    "rms_norm": ("rows, heads with a weight each, and 16 bits", _rms_norm),
    "rope": ("three tokens of two heads", _rope),
    "attend": ("chunks and decodes in pages of two tokens", _attend),
    "flat_batch": ("a decode, and four sequences at once", _flat_batch),
    "detokenizer": ("a token a byte", _detokenizer),
    "stop_checker": ("two stop strings, a character at a time", _stop_checker),
}
