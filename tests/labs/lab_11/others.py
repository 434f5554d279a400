"""Lab 11: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    return source


def _wrong(source: str, faults: dict) -> dict[str, str]:
    """faults: title -> (old, new), or a list of such pairs."""
    return {title: _changed(source, *(pairs if isinstance(pairs, list) else [pairs])) for title, pairs in faults.items()}


_CHOOSE = '''
def choose_num_splits(num_seqs, num_kv_heads, max_seq_len, sms):
    wanted = -(-2 * sms // (num_seqs * num_kv_heads))
    room = max_seq_len // 256
    power = 1
    while power < wanted:
        power *= 2
    while power > max(room, 1) or power > 64:
        power //= 2
    return power
'''
_MERGE = '''
def merge(partial, lse):
    top = max(lse)
    if top == -np.inf:
        return np.zeros(partial.shape[1]), -np.inf
    total, result = 0.0, np.zeros(partial.shape[1])
    for part, one in zip(partial, lse):
        if one > -np.inf:
            weight = 2.0 ** float(one - top)
            total += weight
            result += weight * part
    return result / total, float(top) + math.log2(total)
'''
# As online softmax: pair by pair.
_MERGE_ONLINE = '''
def merge(partial, lse):
    result, so_far = np.zeros(partial.shape[1]), -np.inf
    for part, one in zip(partial, lse):
        if one == -np.inf:
            continue
        joined = np.logaddexp2(so_far, one)
        result = result * np.exp2(so_far - joined) + part * np.exp2(one - joined)
        so_far = joined
    return result, so_far
'''
_MERGE_HALVES = '''
def merge(partial, lse):
    if len(lse) == 1:
        return (np.zeros(partial.shape[1]) if lse[0] == -np.inf else partial[0].copy()), lse[0]
    (a, x), (b, y) = merge(partial[:1], lse[:1]), merge(partial[1:], lse[1:])
    both = np.logaddexp2(x, y)
    return (a, x) if both == -np.inf else (a * np.exp2(x - both) + b * np.exp2(y - both), both)
'''
_SPLIT = '''
@triton.jit
def split_kernel(partial, lse, q, keys, values, block_tables, seq_lens, scale_log2e, split_tokens, stride_table, stride_block,
                 stride_slot, stride_head, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    g = tl.program_id(0)
    s = tl.program_id(1)
    i = tl.program_id(2)
    n = tl.load(seq_lens + s)
    first = i * split_tokens
    last = first + split_tokens
    if last > n:
        last = n
    r = tl.arange(0, ROWS)
    j = tl.arange(0, HEAD_DIM)
    h = s * tl.num_programs(0) * GROUP + g * GROUP + r
    mine = r < GROUP
    here = h * tl.num_programs(2) + i
    if first >= n:
        tl.store(lse + here, tl.full([ROWS], -float("inf"), dtype=tl.float32), mask=mine)
    else:
        x = tl.load(q + (h * HEAD_DIM)[:, None] + j[None, :], mask=mine[:, None], other=0.0)
        top, total, mean = sweep(x, tl.full([ROWS], 1, dtype=tl.int32) * n, first, last, block_tables + s * stride_table,
                                 keys + g * stride_head, values + g * stride_head, scale_log2e, stride_block, stride_slot,
                                 ROWS, HEAD_DIM, BLOCK_SIZE, TILE)
        tl.store(lse + here, top + tl.log2(total), mask=mine)
        tl.store(partial + (here * HEAD_DIM)[:, None] + j[None, :], mean / total[:, None], mask=mine[:, None])
'''
# A walk of its own, and what is masked is the weights.
_SPLIT_WALK = '''
@triton.jit
def split_kernel(partial, lse, q, keys, values, block_tables, seq_lens, scale_log2e, split_tokens, stride_table, stride_block,
                 stride_slot, stride_head, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    g, s, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = i * split_tokens
    end = tl.minimum(tl.load(seq_lens + s), begin + split_tokens)
    r, j, t = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM), tl.arange(0, TILE)
    h = (s * tl.num_programs(0) + g) * GROUP + r
    mine = r < GROUP
    x = tl.load(q + h[:, None] * HEAD_DIM + j[None, :], mask=mine[:, None], other=0.0)
    top = tl.full([ROWS], -1e30, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mean = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    for p0 in range(begin, end, TILE):
        p = p0 + t
        live = p < end
        b = tl.load(block_tables + s * stride_table + p // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        at = (b * stride_block + p % BLOCK_SIZE * stride_slot + g * stride_head)[:, None] + j[None, :]
        k = tl.load(keys + at, mask=live[:, None], other=0.0)
        v = tl.load(values + at, mask=live[:, None], other=0.0)
        score = tl.where(live[None, :], tl.dot(x, tl.trans(k), input_precision="ieee") * scale_log2e, -1e30)
        new = tl.maximum(top, tl.max(score, axis=1))
        w = tl.where(live[None, :], tl.exp2(score - new[:, None]), 0.0)
        total = total * tl.exp2(top - new) + tl.sum(w, axis=1)
        mean = mean * tl.exp2(top - new)[:, None] + tl.dot(w, v, input_precision="ieee")
        top = new
    here = h * tl.num_programs(2) + i
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    tl.store(lse + here, tl.where(empty, -float("inf"), top + tl.log2(safe)), mask=mine)
    tl.store(partial + here[:, None] * HEAD_DIM + j[None, :], mean / safe[:, None], mask=mine[:, None])
'''
_FIND = '''
@triton.jit
def find_sequence(query_start_loc, num_seqs, block, BLOCK_Q: tl.constexpr):
    left = 0
    right = num_seqs - 1
    while left < right:
        middle = (left + right + 1) // 2
        begins = tl.load(query_start_loc + middle) // BLOCK_Q + middle
        if begins > block:
            right = middle - 1
        else:
            left = middle
    return left
'''
_FIND_STEPS = '''
@triton.jit
def find_sequence(query_start_loc, num_seqs, block, BLOCK_Q: tl.constexpr):
    found, step = 0, 1
    while step < num_seqs:
        step *= 2
    while step > 0:
        if found + step < num_seqs:
            if tl.load(query_start_loc + found + step) // BLOCK_Q + found + step <= block:
                found += step
        step //= 2
    return found
'''
_VARLEN = '''
@triton.jit
def varlen_kernel(out, q, keys, values, block_tables, seq_lens, query_start_loc, num_seqs, scale_log2e, stride_table,
                  stride_block, stride_slot, stride_head, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr,
                  HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    b = tl.program_id(0)
    g = tl.program_id(1)
    s = whose(query_start_loc, num_seqs, b, BLOCK_Q)
    begin = tl.load(query_start_loc + s)
    behind = tl.load(query_start_loc + s + 1)
    r = tl.arange(0, ROWS)
    j = tl.arange(0, HEAD_DIM)
    mine = begin + (b - begin // BLOCK_Q - s) * BLOCK_Q
    if mine < behind:
        n = tl.load(seq_lens + s)
        token = mine + r // GROUP
        real = (r < BLOCK_Q * GROUP) & (token < behind)
        at = (token * tl.num_programs(1) + g) * GROUP + r % GROUP
        x = tl.load(q + at[:, None] * HEAD_DIM + j[None, :], mask=real[:, None], other=0.0)
        sees = n - (behind - 1 - token)
        top, total, mean = sweep(x, sees, 0, tl.minimum(n - behind + mine + BLOCK_Q, n), block_tables + s * stride_table,
                                 keys + g * stride_head, values + g * stride_head, scale_log2e, stride_block, stride_slot,
                                 ROWS, HEAD_DIM, BLOCK_SIZE, TILE)
        tl.store(out + at[:, None] * HEAD_DIM + j[None, :], mean / total[:, None], mask=real[:, None])
'''
_QUANTIZE = '''
def quantize(x):
    y = x.astype(np.float32).copy()
    high = np.maximum(y.max(axis=-1), -y.min(axis=-1))
    scales = (high / 127).astype(np.float32)
    numbers = np.zeros(y.shape, np.int8)
    for at in np.ndindex(*scales.shape):
        if scales[at] > 0:
            numbers[at] = np.floor(y[at] / scales[at] + 0.5).clip(-127, 127).astype(np.int8)
    return numbers, np.asarray(scales)
'''
_INT8 = '''
@triton.jit
def sweep_int8(query, limit, start, end, table, keys, values, key_scales, value_scales, scale_log2e, stride_block, stride_slot,
               stride_scale, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    j = tl.arange(0, HEAD_DIM)
    top = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mean = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    for first in range(start, end, TILE):
        p = first + tl.arange(0, TILE)
        live = p < end
        b = tl.load(table + p // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        at = (b * stride_block + p % BLOCK_SIZE * stride_slot)[:, None] + j[None, :]
        n = (b * BLOCK_SIZE + p % BLOCK_SIZE) * stride_scale
        ks = tl.load(key_scales + n, mask=live, other=0.0)
        vs = tl.load(value_scales + n, mask=live, other=0.0)
        k = tl.load(keys + at, mask=live[:, None], other=0).to(tl.float32) * ks[:, None]
        v = tl.load(values + at, mask=live[:, None], other=0).to(tl.float32) * vs[:, None]
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale_log2e
        score = tl.where(live[None, :] & (p[None, :] < limit[:, None]), score, -float("inf"))
        new = tl.maximum(top, tl.max(score, axis=1))
        shrink = tl.exp2(top - new)
        w = tl.exp2(score - new[:, None])
        total = total * shrink + tl.sum(w, axis=1)
        mean = mean * shrink[:, None] + tl.dot(w, v, input_precision="ieee")
        top = new
    return top, total, mean
'''
# The scales wait: the mutants are of this one.
_INT8_LATE = _changed(
    _INT8,
    (".to(tl.float32) * ks[:, None]", ".to(query.dtype)"), (".to(tl.float32) * vs[:, None]", ".to(query.dtype)"),
    ("* scale_log2e", "* (ks * scale_log2e)[None, :]"), ("tl.dot(w, v", "tl.dot(w * vs[None, :], v"),
)  # fmt: skip
_DECODE = '''
def decode_attention(q, keys, values, block_tables, seq_lens):
    out = np.zeros(q.shape, q.dtype)
    for s in range(len(q)):
        n = int(seq_lens[s])
        splits = (n + SPLIT_TOKENS - 1) // SPLIT_TOKENS
        if splits:
            partial, lse = launch_split(split, splits, SPLIT_TOKENS, q[s : s + 1], keys, values, block_tables[s : s + 1],
                                        seq_lens[s : s + 1])
            for h in range(q.shape[1]):
                out[s, h] = merged(partial[0, h], lse[0, h])[0]
    return out
'''
# One launch; the merge walks all splits, one after the other, so that empty ones add nothing at all.
_DECODE_ONE = '''
def decode_attention(q, keys, values, block_tables, seq_lens):
    out = np.zeros_like(q)
    most = 1 + max((int(n) for n in seq_lens), default=0) // SPLIT_TOKENS
    partial, lse = launch_split(split, most, SPLIT_TOKENS, q, keys, values, block_tables, seq_lens)
    for s in range(len(q)):
        for h in range(q.shape[1]):
            total, mean, top = 0.0, 0.0, lse[s, h].max()
            for i in range(most):
                if lse[s, h, i] > -np.inf:
                    w = 2.0 ** float(lse[s, h, i] - top)
                    total, mean = total + w, mean + w * partial[s, h, i]
            if total:
                out[s, h] = mean / total
    return out
'''
_DECODE_BATCH = '''
def decode_attention(q, keys, values, block_tables, seq_lens):
    out = np.zeros_like(q)
    longest = max([1, *map(int, seq_lens)])
    tokens = SPLIT_TOKENS
    splits = -(-longest // tokens)
    partial, lse = launch_split(split, splits, tokens, q, keys, values, block_tables, seq_lens)
    for s in range(len(q)):
        for h in range(q.shape[1]):
            out[s, h] = merged(partial[s, h], lse[s, h])[0]
    return out
'''

CORRECT = {
    "choose_num_splits": {"from what is wanted": _CHOOSE},
    "merge": {"one after the other": _MERGE, "pair by pair": _MERGE_ONLINE, "halves": _MERGE_HALVES},
    "split_kernel": {"two branches": _SPLIT, "a walk of its own": _SPLIT_WALK},
    "find_sequence": {"both ends inside": _FIND, "steps of powers of two": _FIND_STEPS},
    "varlen_kernel": {"rows of the whole batch": _VARLEN, "heads before positions": _changed(
        _VARLEN, ("mine + r // GROUP", "mine + r % BLOCK_Q"), ("+ r % GROUP", "+ r // BLOCK_Q"))},
    "quantize": {"row by row": _QUANTIZE},
    "sweep_int8": {"numbers are widened first": _INT8, "scales wait": _INT8_LATE},
    "decode_attention": {"a launch for each sequence": _DECODE, "a merge of its own": _DECODE_ONE, "all are merged": _DECODE_BATCH},
}

WRONG = {
    "choose_num_splits": _wrong(_CHOOSE, {
        "one program for each": ("-(-2 * sms", "-(-sms"),
        "KV heads are forgotten": ("(num_seqs * num_kv_heads)", "num_seqs"),
        "sequences are forgotten": ("(num_seqs * num_kv_heads)", "num_kv_heads"),
        "rounded down": ("-(-2 * sms // (num_seqs * num_kv_heads))", "2 * sms // (num_seqs * num_kv_heads)"),
        "128 tokens are enough": ("// 256", "// 128"),
        "more than 256 tokens": ("max_seq_len // 256", "(max_seq_len - 1) // 256"),
        "one short split is let through": ("max_seq_len // 256", "-(-max_seq_len // 256)"),
        "up to 128": ("power > 64", "power > 128"),
        "up to 32": ("power > 64", "power > 32"),
        "no power of two": ("power *= 2", "power += 1"),
        "twice too many": ("while power < wanted", "while power <= wanted"),
        "no floor": ("max(room, 1)", "max(room, 2)"),
        "a float": ("return power", "return float(power)"),
        "no limit by length": ("power > max(room, 1) or ", ""),
    }) | {"always 16": "\ndef choose_num_splits(num_seqs, num_kv_heads, max_seq_len, sms):\n    return 16\n"},
    "merge": _wrong(_MERGE, {
        "base e": ("2.0 ** float(one - top)", "math.exp(one - top)"),
        "lse in base e": ("math.log2(total)", "math.log(total)"),
        "no maximum": [("2.0 ** float(one - top)", "np.exp2(np.float64(one))"), ("float(top) + ", "")],
        "garbage is weighted with 0": ("if one > -np.inf", "if True"),
        "not divided": ("result / total", "result"),
        "divided by the number of splits": ("result / total", "result / len(lse)"),
        "weights are lse": ("2.0 ** float(one - top)", "float(one)"),
        "all alike": ("2.0 ** float(one - top)", "1.0"),
        "the lse is the largest": ("float(top) + math.log2(total)", "float(top)"),
        "the lse is added up": ("float(top) + math.log2(total)", "float(sum(lse))"),
        "the lse without the largest": ("float(top) + ", ""),
        "no case for nothing": ("top == -np.inf", "False"),
        "nothing gives an lse of 0": ("np.zeros(partial.shape[1]), -np.inf", "np.zeros(partial.shape[1]), 0.0"),
        "only the result": ("return result / total, float(top) + math.log2(total)", "return result / total"),
        "the first empty one ends it": ("        if one > -np.inf:", "        if one == -np.inf:\n            break\n        if True:"),
        "cleans the workspace": ("    top = max(lse)", "    np.nan_to_num(partial, copy=False)\n    top = max(lse)"),
        "the wrong sign": ("float(one - top)", "float(top - one)"),
        "the first is the base": ("top = max(lse)", "top = lse[0]"),
        "the last is left out": ("zip(partial, lse)", "zip(partial[: max(len(lse) - 1, 1)], lse)"),
        "empty where NaN": [("if one > -np.inf", "if not np.isnan(part).any()"),
                            ("top == -np.inf", "np.isnan(partial).any(axis=1).all()")],
        "garbage made finite where all is empty": ("np.zeros(partial.shape[1]), -np.inf", "np.nan_to_num(partial).sum(axis=0), -np.inf"),
        "a view where there is one": ("    total, result = ", "    if len(lse) == 1:\n        return partial[0], lse[0]\n    total, result = "),
        "a view where one is live": ("    total, result = ", "    if np.isfinite(lse).sum() == 1:\n        return partial[np.isfinite(lse).argmax()], "
                                     "top\n    total, result = "),
        "the mean is the base": ("float(one - top)", "(float(one) - np.mean([x for x in lse if x > -np.inf]))"),
        "a light split does not count": ("if one > -np.inf", "if one > top - 10"),
        "an lse in an array": ("return result / total, float(top) + math.log2(total)",
                               "return result / total, np.array([float(top) + math.log2(total)])"),
        "in fp16": ("return result / total,", "return (result / total).astype(np.float16),"),
        "sorts lse": ("    top = max(lse)", "    lse.sort()\n    top = max(lse)"),
    }) | {"NaN made 0, weights for all": """
def merge(partial, lse):
    top = lse.max()
    if top == -np.inf:
        return np.zeros(partial.shape[1]), top
    weights = np.exp2(lse - top)
    return weights @ np.where(np.isnan(partial), 0, partial) / weights.sum(), top + np.log2(weights.sum())
"""},
    "split_kernel": _wrong(_SPLIT, {
        "the end is forgotten": ("    if last > n:\n        last = n\n", ""),
        "every split walks all": ("n, first, last, block_tables", "n, 0, n, block_tables"),
        "from the start": ("n, first, last, block_tables", "n, 0, last, block_tables"),
        "to the end": ("n, first, last, block_tables", "n, first, n, block_tables"),
        "one token too many": ("last = first + split_tokens", "last = first + split_tokens + 1"),
        "nothing for an empty split": ('        tl.store(lse + here, tl.full([ROWS], -float("inf"), dtype=tl.float32), mask=mine)',
                                       "        return"),
        "zero for an empty split": ('-float("inf"), dtype', "0.0, dtype"),
        "an empty split stores one head": ('tl.store(lse + here, tl.full([ROWS], -float("inf"), dtype=tl.float32), mask=mine)',
                                           'tl.store(lse + here, tl.full([ROWS], -float("inf"), dtype=tl.float32), mask=r < 1)'),
        "result not divided": ("mean / total[:, None]", "mean"),
        "lse in base e": ("tl.log2(total)", "tl.log(total)"),
        "lse is the largest": ("top + tl.log2(total)", "top"),
        "lse without the largest": ("top + tl.log2(total)", "tl.log2(total)"),
        "the total for the lse": ("top + tl.log2(total)", "total"),
        "splits before heads": ("here = h * tl.num_programs(2) + i", "here = i * tl.num_programs(0) * GROUP + h"),
        "split forgotten": ("here = h * tl.num_programs(2) + i", "here = h * tl.num_programs(2)"),
        "padding is stored": ("mean / total[:, None], mask=mine[:, None])",
                              "mean / total[:, None])"),
        "the lse of padding is stored": ("top + tl.log2(total), mask=mine)", "top + tl.log2(total))"),
        "heads dealt out in turn": ("g * GROUP + r", "r * tl.num_programs(0) + g"),
        "always the first KV head": ("keys + g * stride_head", "keys"),
        "V of the first KV head": ("values + g * stride_head", "values"),
        "everybody's table is the first": ("block_tables + s * stride_table", "block_tables"),
        "sequences one KV head apart": ("s * tl.num_programs(0) * GROUP", "s * tl.num_programs(0)"),
        "K for V": ("values + g", "keys + g"),
        "no scale": ("scale_log2e, stride_block, stride_slot,\n                                 ROWS", "1.0, stride_block, "
                     "stride_slot,\n                                 ROWS"),
        "length of the first": ("tl.load(seq_lens + s)", "tl.load(seq_lens)"),
        "writes to q": ("        tl.store(partial", "        tl.store(q + h, total, mask=mine)\n        tl.store(partial"),
        "equal parts": ("first = i * split_tokens", "first = i * tl.cdiv(n, tl.num_programs(2))"),
        "a limit of the split's length": ("* n, first", "* split_tokens, first"),
    }) | {"empty ones are NaN": _changed(_SPLIT_WALK, ("tl.where(empty, -float(\"inf\"), top + tl.log2(safe))",
                                                        "top + tl.log2(safe)")),
          "offsets in 32 bits": _changed(_SPLIT_WALK, (".to(tl.int64)", "")),
          "read for nothing": _changed(_SPLIT_WALK, ("        score = tl.where", "        k = tl.load(keys + at, mask=live[:, None], "
                                                     "other=0.0)\n        score = tl.where"))},
    "find_sequence": _wrong(_FIND, {
        "without the number": (" // BLOCK_Q + middle", " // BLOCK_Q"),
        "rows for blocks": (" // BLOCK_Q + middle", " + middle"),
        "rounded up": ("tl.load(query_start_loc + middle) // BLOCK_Q", "tl.cdiv(tl.load(query_start_loc + middle), BLOCK_Q)"),
        "one behind": ("begins > block", "begins >= block"),
        "num_seqs is one of them": ("right = num_seqs - 1", "right = num_seqs"),
        "the first": ("return left", "return left * 0"),
        "one too few": ("return left", "return tl.maximum(left - 1, 0)"),
        "one too many": ("return left", "return left + 1"),
        "one look": ("while left < right:", "if left < right:"),
        "six looks": ("while left < right:", "for _ in range(6):"),
        "eight looks": ("while left < right:", "for _ in range(8):"),
        "float middle": ("(left + right + 1) // 2", "(left + right + 1) / 2"),
        "rows and numbers together": ("tl.load(query_start_loc + middle) // BLOCK_Q + middle",
                                      "(tl.load(query_start_loc + middle) + middle) // BLOCK_Q"),
    }) | {
        "one by one": '''
@triton.jit
def find_sequence(query_start_loc, num_seqs, block, BLOCK_Q: tl.constexpr):
    found = 0
    for i in range(num_seqs):
        if tl.load(query_start_loc + i) // BLOCK_Q + i <= block:
            found = i
    return found
''',
        "counts blocks as they are": '''
@triton.jit
def find_sequence(query_start_loc, num_seqs, block, BLOCK_Q: tl.constexpr):
    left = 0
    while tl.load(query_start_loc + left + 1) <= block * BLOCK_Q:
        left += 1
    return left
''',
    },
    "varlen_kernel": _wrong(_VARLEN, {
        "all see all": ("sees = n - (behind - 1 - token)", "sees = n + token * 0"),
        "one less": ("n - (behind - 1 - token)", "n - (behind - token)"),
        "one more": ("n - (behind - 1 - token)", "n - (behind - 2 - token)"),
        "no context": ("sees = n - (behind - 1 - token)", "sees = token - begin + 1"),
        "one more in a long chunk": ("n - (behind - 1 - token)", "n - (behind - 1 - token) + (token - begin > 15)"),
        "the row of the batch": ("sees = n - (behind - 1 - token)", "sees = token + 1"),
        "the walk to the end": ("tl.minimum(n - behind + mine + BLOCK_Q, n)", "n"),
        "the walk ends with the context": ("tl.minimum(n - behind + mine + BLOCK_Q, n)", "tl.maximum(n - behind + mine, 1)"),
        "the walk goes behind the end": ("tl.minimum(n - behind + mine + BLOCK_Q, n)", "n - behind + mine + BLOCK_Q"),
        "one row too few": ("n - behind + mine + BLOCK_Q, n)", "n - behind + mine + BLOCK_Q - 1, n)"),
        "heads before positions, half": ("mine + r // GROUP", "mine + r % BLOCK_Q"),
        "heads and positions mixed": ("+ r % GROUP", "+ r // GROUP"),
        "rows of the next sequence": (" & (token < behind)", ""),
        "padding rows": ("(r < BLOCK_Q * GROUP) & ", ""),
        "no mask on the store": ("mean / total[:, None], mask=real[:, None])", "mean / total[:, None])"),
        "blocks of nobody work": ("    if mine < behind:", "    if mine <= behind:"),
        "not divided": ("mean / total[:, None]", "mean"),
        "blocks counted from row 0": ("b - begin // BLOCK_Q - s", "b - begin // BLOCK_Q"),
        "blocks counted without rows": ("(b - begin // BLOCK_Q - s)", "(b - s)"),
        "the first KV head": ("keys + g * stride_head", "keys"),
        "heads dealt out in turn": ("(token * tl.num_programs(1) + g) * GROUP + r % GROUP",
                                    "(token * GROUP + r % GROUP) * tl.num_programs(1) + g"),
        "everybody's table is the first": ("block_tables + s * stride_table", "block_tables"),
        "length of the first": ("tl.load(seq_lens + s)", "tl.load(seq_lens)"),
        "the grid turned round": [("b = tl.program_id(0)", "b = tl.program_id(1)"), ("g = tl.program_id(1)", "g = tl.program_id(0)")],
        "no scale": ("scale_log2e, stride_block, stride_slot,\n                                 ROWS", "1.0, stride_block, "
                     "stride_slot,\n                                 ROWS"),
        "K for V": ("values + g", "keys + g"),
    }) | {"one row after the other": _changed(_VARLEN, ("        top, total, mean = sweep(", '''        for again in range(BLOCK_Q - 1):
            sweep(x, sees, 0, n, block_tables + s * stride_table, keys + g * stride_head, values + g * stride_head, scale_log2e,
                  stride_block, stride_slot, ROWS, HEAD_DIM, BLOCK_SIZE, TILE)
        top, total, mean = sweep('''))},
    "quantize": _wrong(_QUANTIZE, {
        "cut off": ("np.floor(y[at] / scales[at] + 0.5)", "np.trunc(y[at] / scales[at])"),
        "rounded down": (" + 0.5)", ")"),
        "128": ("high / 127", "high / 128"),
        "255": ("high / 127", "high / 255"),
        "without magnitudes": ("np.maximum(y.max(axis=-1), -y.min(axis=-1))", "y.max(axis=-1)"),
        "the range": ("np.maximum(y.max(axis=-1), -y.min(axis=-1))", "(y.max(axis=-1) - y.min(axis=-1)) / 2"),
        "one scale for all": ("np.maximum(y.max(axis=-1), -y.min(axis=-1))", "np.abs(y).max() + 0 * y[..., 0]"),
        "one scale for each token": ("np.maximum(y.max(axis=-1), -y.min(axis=-1))",
                                     "np.abs(y).max(axis=tuple(range(min(1, y.ndim - 1), y.ndim))).reshape((-1,) + (1,) * (y.ndim - 2)) "
                                     "+ 0 * y[..., 0]"),
        "zeros are divided": ("if scales[at] > 0", "if True"),
        "scales in fp64": (".astype(np.float32)\n    numbers", ".astype(np.float64)\n    numbers"),
        "scales in x's type": [("y = x.astype(np.float32).copy()", "y = x.copy()"),
                               ("(high / 127).astype(np.float32)", "(high / 127).astype(x.dtype).astype(np.float32)")],
        "unsigned": (".clip(-127, 127).astype(np.int8)", ".clip(0, 127).astype(np.int8)"),
        "int16": ("np.zeros(y.shape, np.int8)", "np.zeros(y.shape, np.int16)"),
        "a scale with a side too many": ("return numbers, np.asarray(scales)", "return numbers, np.asarray(scales)[..., None]"),
        "the other way round": ("return numbers, np.asarray(scales)", "return np.asarray(scales), numbers"),
        "a scale of 1 for zeros": ("    numbers = ", "    scales = np.where(scales > 0, scales, 1).astype(np.float32)\n    numbers = "),
        "scales inverted": ("return numbers, np.asarray(scales)", "return numbers, (1 / np.maximum(scales, 1e-30)).astype(np.float32)"),
        "divides x itself": ("y = x.astype(np.float32).copy()", "x /= 1.5; y = x.astype(np.float32) * 1.5"),
        "a little is added": ("y[at] / scales[at]", "y[at] / (scales[at] + np.float32(1e-12))"),
        "mean magnitude": ("np.maximum(y.max(axis=-1), -y.min(axis=-1))", "2 * np.abs(y).mean(axis=-1)"),
    }),
    "sweep_int8": _wrong(_INT8_LATE, {
        "no scale of K": ("(ks * scale_log2e)[None, :]", "scale_log2e"),
        "no scale of V": ("w * vs[None, :]", "w"),
        "V's scale in the sum": [("        total = total", "        w = w * vs[None, :]\n        total = total"),
                                 ("tl.dot(w * vs[None, :]", "tl.dot(w")],
        "K's scale for V": ("w * vs", "w * ks"),
        "V's scale for K": ("(ks * scale", "(vs * scale"),
        "the scale twice": ("(ks * scale", "(ks * ks * scale"),
        "scale of the position": ("n = (b * BLOCK_SIZE + p % BLOCK_SIZE)", "n = p"),
        "scale of the block": ("n = (b * BLOCK_SIZE + p % BLOCK_SIZE)", "n = b * BLOCK_SIZE"),
        "without stride_scale": ("p % BLOCK_SIZE) * stride_scale", "p % BLOCK_SIZE)"),
        "dead scales of V are read": ("vs = tl.load(value_scales + n, mask=live, other=0.0)", "vs = tl.load(value_scales + n)"),
        "no other for V's scale": ("vs = tl.load(value_scales + n, mask=live, other=0.0)",
                                   "vs = tl.load(value_scales + n, mask=live)"),
        "no end": ("live[None, :] & (p[None, :] < limit[:, None])", "p[None, :] < limit[:, None]"),
        "offsets in 32 bits": (".to(tl.int64)", ""),
        "no limit": (" & (p[None, :] < limit[:, None])", " | (p[None, :] < 0)"),
        "total is not rescaled": ("total * shrink", "total"),
        "result is not rescaled": ("mean * shrink[:, None]", "mean"),
        "int8 into the product": (".to(query.dtype)\n        v", "\n        v"),
        "one scale for the tile": ("(ks * scale_log2e)[None, :]", "scale_log2e * tl.max(ks, axis=0)"),
        "the first tile's scales": ("n = (b * BLOCK_SIZE + p % BLOCK_SIZE)", "n = (b * 0 + p % BLOCK_SIZE)"),
        "dead numbers are read": ("k = tl.load(keys + at, mask=live[:, None], other=0)", "k = tl.load(keys + at)"),
        "dead numbers of V are read": ("v = tl.load(values + at, mask=live[:, None], other=0)", "v = tl.load(values + at)"),
        "weights of V's type": [("tl.load(values + at, mask=live[:, None], other=0).to(query.dtype)",
                                 "tl.load(values + at, mask=live[:, None], other=0)"),
                                ("tl.dot(w * vs[None, :], v", "tl.dot((w * vs[None, :]).to(v.dtype), v")],
        "always from token 0": ("range(start, end, TILE)", "range(0, end, TILE)"),
        "scales in the middle of the row": ("stride_scale\n", "stride_scale + 1\n"),
    }) | {"fp32 K and V": _changed(_INT8_LATE, ("tl.load(value_scales + n, mask=live, other=0.0)",
                                               "tl.load(value_scales + n, mask=live, other=0.0) * 1.02"))},
    "decode_attention": _wrong(_DECODE_BATCH, {
        "equal parts of the longest": [("tokens = SPLIT_TOKENS", "tokens = max(-(-longest // 4), 1)"),
                                       ("splits = -(-longest // tokens)", "splits = 4")],
        "cuts as in the rule of the batch": ("tokens = SPLIT_TOKENS", "tokens = SPLIT_TOKENS if len(q) == 1 else 2 * SPLIT_TOKENS"),
        "16 where there are many": ("tokens = SPLIT_TOKENS", "tokens = 32 if longest < 300 else 16"),
        "every 16 tokens": ("tokens = SPLIT_TOKENS", "tokens = 16"),
        "plain where it is short": ("tokens = SPLIT_TOKENS", "tokens = longest if longest <= 48 else SPLIT_TOKENS"),
        "in order of length": ("partial, lse = launch_split(split, splits, tokens, q, keys, values, block_tables, seq_lens)",
                               "partial, lse = (x[np.argsort(seq_lens)] for x in launch_split(split, splits, tokens, q, keys, values, "
                               "block_tables, seq_lens))"),
        "one split": [("tokens = SPLIT_TOKENS", "tokens = longest"), ("splits = -(-longest // tokens)", "splits = 1")],
        "the last split is left out": ("-(-longest // tokens)", "max(longest // tokens, 1)"),
        "not merged": ("merged(partial[s, h], lse[s, h])[0]", "np.nan_to_num(partial[s, h, 0])"),
        "the mean of the splits": ("merged(partial[s, h], lse[s, h])[0]", "np.nan_to_num(partial[s, h]).mean(axis=0)"),
        "merged with the first head's lse": ("lse[s, h])[0]", "lse[s, 0])[0]"),
        "merged with the first sequence's lse": ("lse[s, h])[0]", "lse[0, h])[0]"),
        "only the first sequence": ("for s in range(len(q))", "for s in range(min(len(q), 1))"),
        "in q": ("out = np.zeros_like(q)", "out = q"),
        "float64": ("np.zeros_like(q)", "np.zeros(q.shape)"),
        "a merge that adds in another order": ("merged(partial[s, h], lse[s, h])[0]",
                                               "(lambda w: (w[:, None] * np.nan_to_num(partial[s, h])).sum(axis=0) / max(w.sum(), "
                                               "np.float32(1e-30)))(np.exp2(lse[s, h] - max(lse[s, h].max(), np.float32(-1e30))))"),
        "noise": ("    return out", "    return out + np.float32(1e-6) * len(q) * (out != 0)"),
        "fails on nobody": ("longest = max([1, *map(int, seq_lens)])", "longest = max(1, max(map(int, seq_lens)))"),
    }) | {"nothing is launched": """
def decode_attention(q, keys, values, block_tables, seq_lens):
    out, size, group = np.zeros_like(q), keys.shape[1], q.shape[1] // keys.shape[2]
    for s, n in enumerate(map(int, seq_lens)):
        at = block_tables[s, np.arange(n) // size], np.arange(n) % size
        for h in range(q.shape[1] if n else 0):
            scores = keys[at][:, h // group] @ q[s, h] / math.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[s, h] = weights @ values[at][:, h // group] / weights.sum()
    return out
"""},
}
