"""Lab 10: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    return source


_LOCATE = '''
def locate(position, kv_head, block_table, block_size, num_kv_heads, head_dim):
    block = block_table[position // block_size]
    offset = position % block_size
    stride_slot = num_kv_heads * head_dim
    return block, offset, block * block_size * stride_slot + offset * stride_slot + kv_head * head_dim
'''
_PLAIN = '''
def attend_gathered(q, keys, values, block_table, seq_len):
    size, num_kv_heads, dim = keys.shape[1:]
    num_heads = q.shape[0]
    if seq_len == 0:
        return np.zeros((num_heads, dim))
    pages = (seq_len + size - 1) // size
    k = np.concatenate([keys[b] for b in block_table[:pages]])[:seq_len].astype(np.float64)
    v = np.concatenate([values[b] for b in block_table[:pages]])[:seq_len].astype(np.float64)
    shared = np.arange(num_heads) // (num_heads // num_kv_heads)
    scores = np.einsum("hd,lhd->hl", q.astype(np.float64), k[:, shared]) / np.sqrt(dim)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hl,lhd->hd", weights / weights.sum(axis=1, keepdims=True), v[:, shared])
'''
# Right as long as nobody's slots hold NaN; wrong with what a last owner left.
_BY_NAN = '''
def attend_gathered(q, keys, values, block_table, seq_len):
    size, num_kv_heads, dim = keys.shape[1:]
    if seq_len == 0:
        return np.zeros(q.shape)
    pages = -(-seq_len // size)
    k = keys[block_table[:pages]].reshape(-1, num_kv_heads, dim).astype(np.float64)
    v = values[block_table[:pages]].reshape(-1, num_kv_heads, dim).astype(np.float64)
    out = np.zeros(q.shape)
    for h in range(len(q)):
        kv_head = h * num_kv_heads // len(q)
        scores = k[:, kv_head] @ q[h].astype(np.float64) / np.sqrt(dim)
        weights = np.nan_to_num(np.exp(scores - np.nanmax(scores)))
        out[h] = weights @ np.nan_to_num(v[:, kv_head]) / weights.sum()
    return out
'''
_HEAD = '''
@triton.jit
def {name}(out, q, keys, values, block_tables, seq_lens, scale_log2e, stride_table, stride_block, stride_slot, stride_head,
           GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    h = tl.program_id(0)
    s = tl.program_id(1)
    n = tl.load(seq_lens + s)
    j = tl.arange(0, HEAD_DIM)
    i = tl.arange(0, BLOCK_SIZE)
    start = s * tl.num_programs(0) * HEAD_DIM + h * HEAD_DIM
    x = tl.load(q + start + j).to(tl.float32)
    row = block_tables + s * stride_table
    head_at = h // GROUP * stride_head
'''
_NAIVE = _HEAD.format(name="naive_kernel") + '''
    top = -float("inf")
    for page in range(tl.cdiv(n, BLOCK_SIZE)):
        b = tl.load(row + page).to(tl.int64) * stride_block
        live = i < n - page * BLOCK_SIZE
        k = tl.load(keys + b + head_at + (i * stride_slot)[:, None] + j[None, :], mask=live[:, None], other=0.0)
        score = tl.sum(k.to(tl.float32) * x[None, :], axis=1) * scale_log2e
        top = tl.maximum(top, tl.max(tl.where(live, score, -float("inf")), axis=0))
    total = 0.0
    mean = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for page in range(tl.cdiv(n, BLOCK_SIZE)):
        b = tl.load(row + page).to(tl.int64) * stride_block
        live = i < n - page * BLOCK_SIZE
        k = tl.load(keys + b + head_at + (i * stride_slot)[:, None] + j[None, :], mask=live[:, None], other=0.0)
        score = tl.sum(k.to(tl.float32) * x[None, :], axis=1) * scale_log2e
        w = tl.where(live, tl.exp2(score - top), 0.0)
        v = tl.load(values + b + head_at + (i * stride_slot)[:, None] + j[None, :], mask=live[:, None], other=0.0)
        total += tl.sum(w, axis=0)
        mean += tl.sum(w[:, None] * v.to(tl.float32), axis=0)
    if n > 0:
        mean = mean / total
    tl.store(out + start + j, mean)
'''
# Token after token, and exp in place of exp2.
_NAIVE_BY_TOKEN = _HEAD.format(name="naive_kernel") + '''
    x = x * scale_log2e * 0.6931471805599453
    top = -float("inf")
    for p in range(n):
        b = tl.load(row + p // BLOCK_SIZE).to(tl.int64)
        at = b * stride_block + p % BLOCK_SIZE * stride_slot + head_at
        top = tl.maximum(top, tl.sum(x * tl.load(keys + at + j).to(tl.float32), axis=0))
    total = 0.0
    mean = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for p in range(n):
        b = tl.load(row + p // BLOCK_SIZE).to(tl.int64)
        at = b * stride_block + p % BLOCK_SIZE * stride_slot + head_at
        w = tl.exp(tl.sum(x * tl.load(keys + at + j).to(tl.float32), axis=0) - top)
        total += w
        mean += w * tl.load(values + at + j).to(tl.float32)
    tl.store(out + start + j, mean / tl.maximum(total, 1e-30))
'''
_ONLINE = _HEAD.format(name="online_softmax_kernel") + '''
    top = -float("inf")
    total = 0.0
    mean = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for page in range(tl.cdiv(n, BLOCK_SIZE)):
        b = tl.load(row + page).to(tl.int64) * stride_block
        live = i < n - page * BLOCK_SIZE
        k = tl.load(keys + b + head_at + (i * stride_slot)[:, None] + j[None, :], mask=live[:, None], other=0.0)
        v = tl.load(values + b + head_at + (i * stride_slot)[:, None] + j[None, :], mask=live[:, None], other=0.0)
        score = tl.sum(k.to(tl.float32) * x[None, :], axis=1) * scale_log2e
        score = tl.where(live, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0))
        shrink = tl.exp2(top - new_top)
        w = tl.exp2(score - new_top)
        total = total * shrink
        total += tl.sum(w, axis=0)
        mean = mean * shrink
        mean += tl.sum(w[:, None] * v.to(tl.float32), axis=0)
        top = new_top
    mean = mean / tl.where(n > 0, total, 1.0)
    tl.store(out + start + j, mean)
'''
# Keeps the mean itself right after every page, as some derivations have it.
_ONLINE_MEAN = _HEAD.format(name="online_softmax_kernel") + '''
    top = -float("inf")
    total = 0.0
    mean = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for page in range(tl.cdiv(n, BLOCK_SIZE)):
        b = tl.load(row + page).to(tl.int64) * stride_block
        live = i < n - page * BLOCK_SIZE
        at = b + head_at + (i * stride_slot)[:, None] + j[None, :]
        k = tl.load(keys + at, mask=live[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=live[:, None], other=0.0).to(tl.float32)
        score = tl.where(live, tl.sum(k * x[None, :], axis=1) * scale_log2e, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0))
        old = total * tl.exp2(top - new_top)
        w = tl.exp2(score - new_top)
        total = old + tl.sum(w, axis=0)
        mean = (mean * old + tl.sum(w[:, None] * v, axis=0)) / total
        top = new_top
    tl.store(out + start + j, mean)
'''
_PACKED = '''
@triton.jit
def gqa_packed_kernel(out, q, keys, values, block_tables, seq_lens, scale_log2e, stride_table, stride_block, stride_slot,
                      stride_head, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
                      BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    g = tl.program_id(0)
    s = tl.program_id(1)
    n = tl.load(seq_lens + s)
    r = tl.arange(0, ROWS)
    j = tl.arange(0, HEAD_DIM)
    t = tl.arange(0, TILE)
    ours = (r < GROUP)[:, None]
    spot = (s * tl.num_programs(0) * GROUP + g * GROUP + r)[:, None] * HEAD_DIM + j[None, :]
    x = tl.load(q + spot, mask=ours, other=0.0)
    row = block_tables + s * stride_table
    top = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mean = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    for tile in range(tl.cdiv(n, TILE)):
        p = tile * TILE + t
        live = p < n
        b = tl.load(row + p // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        at = (b * stride_block + p % BLOCK_SIZE * stride_slot + g * stride_head)[:, None] + j[None, :]
        k = tl.load(keys + at, mask=live[:, None], other=0.0)
        v = tl.load(values + at, mask=live[:, None], other=0.0)
        score = tl.dot(x, tl.trans(k), input_precision="ieee") * scale_log2e
        score = tl.where(live[None, :], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        shrink = tl.exp2(top - new_top)
        w = tl.exp2(score - new_top[:, None])
        total = total * shrink + tl.sum(w, axis=1)
        mean = mean * shrink[:, None]
        mean = mean + tl.dot(w.to(v.dtype), v, input_precision="ieee")
        top = new_top
    mean = mean / tl.where(n > 0, total, 1.0)[:, None]
    tl.store(out + spot, mean, mask=ours)
'''
_LAUNCH = '''
def paged_attention(q, keys, values, block_tables, seq_lens):
    num_seqs, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, _ = keys.shape
    out = np.empty_like(q)
    rows = 16
    while rows < num_heads // num_kv_heads:
        rows *= 2
    strides = [stride // keys.itemsize for stride in keys.strides]
    packed[(num_kv_heads, num_seqs)](
        out, q, keys, values, block_tables, seq_lens, 1.4426950408889634 * head_dim ** -0.5,
        block_tables.strides[0] // 4, strides[0], strides[1], strides[2],
        GROUP=num_heads // num_kv_heads, ROWS=rows, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=32)
    return out
'''
_BYTES = '''
def bytes_moved(rung, seq_lens, num_heads, num_kv_heads, head_dim, dtype_bytes=2):
    kv = 2 * num_kv_heads * head_dim * dtype_bytes * sum(seq_lens)
    group = num_heads // num_kv_heads
    if rung == "naive":
        return kv * group * 3 // 2
    return kv * {"gather": 3, "online": group, "packed": 1}[rung]
'''
_CASES = '''
def case_for(fault):
    return {
        "short": {"seq_lens": [6]},
        "late": {"seq_lens": [6], "nan": False, "values": "random"},
        "lost": {"seq_lens": [16], "values": "random", "block_size": 2},
        "zero": {"seq_lens": [5], "scores": "cold"},
        "group": {"seq_lens": [5], "group": 3, "kv_heads": 2, "values": "random"},
        "narrow": {"seq_lens": [12, 12], "spread": True},
        "value": {"seq_lens": [3]},
    }.get(fault)
'''

CORRECT = {
    "locate": {"strides": _LOCATE},
    "attend_gathered": {"whole pages, cut": _PLAIN},
    "naive_kernel": {
        "a mask on the weights": _NAIVE, "token after token, with exp": _NAIVE_BY_TOKEN,
        "an early return": _changed(_NAIVE, ('    top = -float("inf")\n', """    if n == 0:
        tl.store(out + start + j, tl.zeros([HEAD_DIM], dtype=tl.float32))
        return
    top = -float("inf")
""")),
        "while": _changed(_NAIVE, ("    for page in range(tl.cdiv(n, BLOCK_SIZE)):\n", """    page = -1
    while (page + 1) * BLOCK_SIZE < n:
        page += 1
""")),
        "a low number for -inf": _changed(_NAIVE, ('-float("inf")', "-1.0e30")),
    },
    "online_softmax_kernel": {"scaled scores": _ONLINE, "the mean itself is kept": _ONLINE_MEAN,
                              "rescaled only when it must be": _changed(_ONLINE, ("shrink = tl.exp2(top - new_top)", """shrink = 1.0
        if new_top > top:
            shrink = tl.exp2(top - new_top)"""))},
    "gqa_packed_kernel": {
        "K transposed after the load": _PACKED,
        "tl.dot adds up": _changed(_PACKED, ("mean = mean + tl.dot(w.to(v.dtype), v, ", "mean = tl.dot(w.to(v.dtype), v, mean, ")),
        "q is scaled, in its own type": _changed(_PACKED, ("tl.dot(x, tl", "tl.dot((x * scale_log2e).to(k.dtype), tl"),
                                                 (' * scale_log2e\n        score = tl.where', '\n        score = tl.where')),
    },
    "paged_attention": {"strides of the arrays": _LAUNCH,
                        "rows for all heads": _changed(_LAUNCH, ("rows < num_heads // num_kv_heads", "rows < num_heads"))},
    "bytes_moved": {"times the least": _BYTES},
    "case_for": {"a table": _CASES, "nearly one for all": """
def case_for(fault):
    if fault == "key":
        return None
    return {"seq_lens": (9, 6), "kv_heads": 2, "group": 2, "block_size": 2, "spread": True, "values": "random",
            "scores": "cold" if fault == "zero" else "random"}
"""},
}

# Faults that the two kernels with one program a head can have in the same words.
_SHARED = {
    "K of the query head, not of its KV head": ("h // GROUP * stride_head", "h * stride_head"),
    "heads dealt out in turn": ("h // GROUP * stride_head", "h % (tl.num_programs(0) // GROUP) * stride_head"),
    "always the first KV head": ("h // GROUP * stride_head", "0"),
    "offsets in 32 bits": (".to(tl.int64)", ""),
    "64 bits too late": ("tl.load(row + page).to(tl.int64) * stride_block", "(tl.load(row + page) * stride_block).to(tl.int64)"),
    "everybody's table is the first": ("block_tables + s * stride_table", "block_tables"),
    "the table is not asked": ("tl.load(row + page)", "(page + tl.zeros([1], dtype=tl.int32))"),
    "the table in a row of pages of tokens": ("row + page", "row + page * BLOCK_SIZE"),
    "full pages only": ("tl.cdiv(n, BLOCK_SIZE)", "n // BLOCK_SIZE"),
    "one page too many": ("tl.cdiv(n, BLOCK_SIZE)", "n // BLOCK_SIZE + 1"),
    "one token too many": ("i < n - page", "i <= n - page"),
    "one token too few": ("i < n - page", "i < n - 1 - page"),
    "all pages are full": ("i < n - page * BLOCK_SIZE", "i < BLOCK_SIZE"),
    "the length of a page": ("i < n - page * BLOCK_SIZE", "i < n"),
    "no scale": (" * scale_log2e", ""),
    "the scale twice": ("x = tl.load(q + start + j).to(tl.float32)", "x = tl.load(q + start + j).to(tl.float32) * scale_log2e"),
    "the scale without log2(e)": (" * scale_log2e", " * (scale_log2e * 0.6931471805599453)"),
    "exp for exp2": ("tl.exp2(", "tl.exp("),
    "the maximum starts at 0": ('top = -float("inf")', "top = 0.0"),
    "masked scores are 0": ('-float("inf"))', "0.0)"),
    "q of the first sequence": ("s * tl.num_programs(0) * HEAD_DIM + h", "h"),
    "sequences a head apart": ("s * tl.num_programs(0) * HEAD_DIM", "s * HEAD_DIM"),
    "slots a KV head apart": ("i * stride_slot", "i * HEAD_DIM"),
    "K and V add up in fp16": (".to(tl.float32)", ""),
    "stride_head taken for granted": ("h // GROUP * stride_head", "h // GROUP * HEAD_DIM"),
    "stride_slot taken for granted": ("i * stride_slot", "i * (tl.num_programs(0) // GROUP * HEAD_DIM)"),
    "stride_block taken for granted": ("* stride_block", "* (BLOCK_SIZE * stride_slot)"),
    "a sum that starts as a whole number": ("total = 0.0", "total = 0"),
    "a result that starts as one number": ("mean = tl.zeros([HEAD_DIM], dtype=tl.float32)", "mean = 0.0"),
    "weights in fp16": ("w[:, None] * v.to(tl.float32)", "w[:, None].to(tl.float16) * v.to(tl.float16)"),
    "NumPy's exp2": ("tl.exp2(", "np.exp2("),
    "not divided": ("mean / ", "mean * 1.0 + 0.0 * "),
}


def _mutants(source: str, pairs: dict) -> dict[str, str]:
    return {title: _changed(source, pair) for title, pair in pairs.items() if pair[0] in source}


def _without(pairs, *titles):
    return {title: pair for title, pair in pairs.items() if title not in titles}


WRONG = {
    "locate": {
        "logical, not physical": _changed(_LOCATE, ("block_table[position // block_size]", "position // block_size")),
        "the next page": _changed(_LOCATE, ("position // block_size", "(position + 1) // block_size")),
        "from 1": _changed(_LOCATE, ("position % block_size", "position % block_size + 1")),
        "heads before tokens": _changed(_LOCATE, ("offset * stride_slot + kv_head * head_dim",
                                                  "(kv_head * block_size + offset) * head_dim")),
        "float": _changed(_LOCATE, ("return block, offset, block * block_size * stride_slot",
                                    "return block, offset, block * block_size * stride_slot / 1")),
        "slots, not numbers": _changed(_LOCATE, ("stride_slot = num_kv_heads * head_dim", "stride_slot = num_kv_heads")),
        "without the KV head": _changed(_LOCATE, (" + kv_head * head_dim", "")),
        "KV heads of one number": _changed(_LOCATE, ("kv_head * head_dim", "kv_head")),
        "no KV heads in a token": _changed(_LOCATE, ("stride_slot = num_kv_heads * head_dim", "stride_slot = head_dim")),
        "a block of one token": _changed(_LOCATE, ("block * block_size * stride_slot", "block * stride_slot")),
        "only the element": _changed(_LOCATE, ("return block, offset, ", "return ")),
        "changes the table": _changed(_LOCATE, ("    offset =", "    block_table.append(0)\n    offset =")),
        "bytes": _changed(_LOCATE, ("return block, offset, block * block_size * stride_slot + offset * stride_slot + "
                                    "kv_head * head_dim", "return block, offset, 2 * (block * block_size * stride_slot + "
                                    "offset * stride_slot + kv_head * head_dim)")),
    },
    "attend_gathered": {
        "whole pages": _changed(_PLAIN, ("[:seq_len].astype", ".astype")),
        "the table's tail too": _changed(_PLAIN, ("block_table[:pages]", "block_table")).replace("[:seq_len]", ""),
        "full pages only": _changed(_PLAIN, ("(seq_len + size - 1) // size", "max(seq_len // size, 1)")),
        "no maximum": _changed(_PLAIN, (" - scores.max(axis=1, keepdims=True)", "")),
        "one maximum for all heads": _changed(_PLAIN, ("scores.max(axis=1, keepdims=True)", "scores.max()")),
        "one maximum, of absolute values": _changed(_PLAIN, ("scores.max(axis=1, keepdims=True)", "np.abs(scores).max()")),
        "no scale": _changed(_PLAIN, (" / np.sqrt(dim)", "")),
        "divided by the dim": _changed(_PLAIN, ("np.sqrt(dim)", "dim")),
        "scale by num_heads": _changed(_PLAIN, ("np.sqrt(dim)", "np.sqrt(num_heads)")),
        "base 2": _changed(_PLAIN, ("np.exp(", "np.exp2(")),
        "heads dealt out in turn": _changed(_PLAIN, ("np.arange(num_heads) // (num_heads // num_kv_heads)",
                                                     "np.arange(num_heads) % num_kv_heads")),
        "the first KV head": _changed(_PLAIN, ("np.arange(num_heads) // (num_heads // num_kv_heads)",
                                               "np.arange(num_heads) * 0")),
        "in order, without the table": _changed(_PLAIN, ("for b in block_table[:pages]", "for b in range(pages)")),
        "V without the table": _changed(_PLAIN, ("[values[b] for b in block_table", "[values[b] for b in np.arange(9)")),
        "K for V": _changed(_PLAIN, ("[values[b]", "[keys[b]")),
        "not divided": _changed(_PLAIN, (" / weights.sum(axis=1, keepdims=True)", "")),
        "divided over all heads": _changed(_PLAIN, ("weights.sum(axis=1, keepdims=True)", "weights.sum()")),
        "an empty sequence gives NaN": _changed(_PLAIN, ("np.zeros((num_heads, dim))", "np.full((num_heads, dim), np.nan)")),
        "an empty sequence gives None": _changed(_PLAIN, ("np.zeros((num_heads, dim))", "None")),
        "cleans the pages": _changed(_PLAIN, ("    num_heads = ", "    np.nan_to_num(values, copy=False)\n    num_heads = ")),
        "a list": _changed(_PLAIN, ('return np.einsum("hl,lhd->hd", weights', 'return list(np.einsum("hl,lhd->hd", weights'),
                           ("v[:, shared])", "v[:, shared]))")),
        "what is not NaN, in place of seq_len": _BY_NAN,
        "pages up to -1, and what is not NaN": _changed(_BY_NAN, ("block_table[:pages]", "block_table[block_table >= 0]")),
        "in the type of K": _changed(_PLAIN, (".astype(np.float64)", "")),
        "a result like q": _changed(_PLAIN, ("v[:, shared])", "v[:, shared]).astype(q.dtype)")),
        "a sum of fp16 products": _changed(_PLAIN, ("values[b] for b in block_table[:pages]])[:seq_len].astype(np.float64)",
                                                    "values[b] for b in block_table[:pages]])[:seq_len]"),
                                           ("weights / weights.sum(axis=1, keepdims=True)",
                                            "(weights / weights.sum(axis=1, keepdims=True)).astype(v.dtype)"),
                                           ("v[:, shared])", "v[:, shared]).astype(np.float64)")),
        "the last token is left out": _changed(_PLAIN, ("[:seq_len]", "[: max(seq_len - 1, 1)]")),
    },
    "naive_kernel": {
        **_mutants(_NAIVE, _without(_SHARED, "masked scores are 0")),
        "nothing masks V": _changed(_NAIVE, ("v = tl.load(values + b + head_at + (i * stride_slot)[:, None] + j[None, :], "
                                             "mask=live[:, None], other=0.0)",
                                             "v = tl.load(values + b + head_at + (i * stride_slot)[:, None] + j[None, :])")),
        "no other for V": _changed(_NAIVE, ("v = tl.load(values + b + head_at + (i * stride_slot)[:, None] + j[None, :], "
                                            "mask=live[:, None], other=0.0)",
                                            "v = tl.load(values + b + head_at + (i * stride_slot)[:, None] + j[None, :], "
                                            "mask=live[:, None])")),
        "no maximum subtracted": _changed(_NAIVE, ("tl.exp2(score - top)", "tl.exp2(score)")),
        "the maximum of the last page": _changed(_NAIVE, ("top = tl.maximum(top, tl.max(", "top = tl.maximum(-1e30, tl.max(")),
        "weights of dead slots count": _changed(_NAIVE, ("tl.where(live, tl.exp2(score - top), 0.0)", "tl.exp2(score - top)")),
        "an empty sequence divides by 0": _changed(_NAIVE, ("    if n > 0:\n        mean", "    mean")),
        "K for V": _changed(_NAIVE, ("tl.load(values", "tl.load(keys")),
        "stores what is not there": _changed(_NAIVE, ("    tl.store(out + start + j, mean)",
                                                      "    if n > 0:\n        tl.store(out + start + j, mean)")),
        "writes into q": _changed(_NAIVE, ("    tl.store(out", "    tl.store(q + start + j, mean)\n    tl.store(out")),
        "everybody writes to the first row": _changed(_NAIVE, ("tl.store(out + start + j", "tl.store(out + j")),
        "total of pages": _changed(_NAIVE, ("total += tl.sum(w, axis=0)", "total += 1.0")),
        "the sum along the wrong axis": _changed(_NAIVE, ("tl.sum(k.to(tl.float32) * x[None, :], axis=1)",
                                                          "tl.sum(k.to(tl.float32) * x[None, :], axis=0)")),
        "ours": "from kvlab.standin.decode import naive_kernel\n",
        "three passes over K": _changed(_NAIVE, ("    total = 0.0\n", '''    for page in range(tl.cdiv(n, BLOCK_SIZE)):
        b = tl.load(row + page).to(tl.int64) * stride_block
        live = i < n - page * BLOCK_SIZE
        tl.load(keys + b + head_at + (i * stride_slot)[:, None] + j[None, :], mask=live[:, None], other=0.0)
    total = 0.0
''')),
        "V is read twice": _changed(_NAIVE, ("        total += ", "        v = tl.load(values + b + head_at + (i * stride_slot)[:, "
                                             "None] + j[None, :], mask=live[:, None], other=0.0)\n        total += ")),
        "what is not NaN, in place of the length": _changed(
            _NAIVE, ("mask=live[:, None], other=0.0", "mask=None"), ("tl.where(live, score,", "tl.where(score == score, score,"),
            ("tl.where(live, tl.exp2(score - top), 0.0)", "tl.where(score == score, tl.exp2(score - top), 0.0)"),
            ("        total += ", "        v = tl.where(v == v, v, 0.0)\n        total += ")),
        "break": _changed(_NAIVE, ("        live = i", "        if page * BLOCK_SIZE >= n:\n            break\n        live = i")),
        "a little is added to the sum": _changed(_NAIVE, ("mean = mean / total", "mean = mean / (total + 1e-3)")),
        "the sum as Python's float": _changed(_NAIVE, ("mean = mean / total", "mean = mean / float(total)")),
        "the table's width for its stride": _changed(_NAIVE, ("s * stride_table", "s * tl.cdiv(n, BLOCK_SIZE)")),
    },
    "online_softmax_kernel": {
        **_mutants(_ONLINE, _SHARED),
        "the total is not rescaled": _changed(_ONLINE, ("        total = total * shrink\n", "")),
        "the result is not rescaled": _changed(_ONLINE, ("        mean = mean * shrink\n", "")),
        "nothing is rescaled": _changed(_ONLINE, ("        total = total * shrink\n", ""), ("        mean = mean * shrink\n", "")),
        "rescaled the wrong way": _changed(_ONLINE, ("tl.exp2(top - new_top)", "tl.exp2(new_top - top)")),
        "rescaled after the sum": _changed(_ONLINE, ("        mean = mean * shrink\n", "")).replace(
            "v.to(tl.float32), axis=0)\n", "v.to(tl.float32), axis=0)\n        mean = mean * shrink\n"),
        "weights relative to the old maximum": _changed(_ONLINE, ("w = tl.exp2(score - new_top)", "w = tl.exp2(score - top)")),
        "the maximum of the page alone": _changed(_ONLINE, ("tl.maximum(top, tl.max(score, axis=0))", "tl.max(score, axis=0)")),
        "the maximum is forgotten": _changed(_ONLINE, ("        top = new_top\n", "")),
        "the maximum is not subtracted": _changed(_ONLINE, ("tl.exp2(score - new_top)", "tl.exp2(score)"),
                                                  ("tl.exp2(top - new_top)", "1.0")),
        "alpha of scores without log2(e)": _changed(_ONLINE, ("shrink = tl.exp2(", "shrink = tl.exp(")),
        "V is not masked": _changed(_ONLINE, ("v = tl.load(values + b + head_at + (i * stride_slot)[:, None] + j[None, :], "
                                              "mask=live[:, None], other=0.0)",
                                              "v = tl.load(values + b + head_at + (i * stride_slot)[:, None] + j[None, :])")),
        "an empty sequence divides by 0": _changed(_ONLINE, ("tl.where(n > 0, total, 1.0)", "total")),
        "two passes": _NAIVE.replace("naive_kernel", "online_softmax_kernel"),
        "ours": "from kvlab.standin.decode import online_softmax_kernel\n",
        "ours, without a fault": '''
class Late:
    def __getitem__(self, grid):
        from kvlab.standin.faults import faulty
        return faulty("none")[grid]

online_softmax_kernel = Late()
''',
        "continue": _changed(_ONLINE, ("        live = i", "        if page * BLOCK_SIZE >= n:\n            continue\n"
                                       "        live = i")),
        "the maximum of the first page": _changed(_ONLINE, ("new_top = tl.maximum(top, tl.max(score, axis=0))",
                                                            "new_top = tl.max(score, axis=0) if page == 0 else top")),
        "what is not NaN, in place of the length": _changed(
            _ONLINE, ("mask=live[:, None], other=0.0", "mask=None"), ("tl.where(live, score,", "tl.where(score == score, score,"),
            ("        total = total * shrink", "        v = tl.where(v == v, v, 0.0)\n        total = total * shrink")),
        "V is read twice": _changed(_ONLINE, ("        score = tl.sum", "        v = tl.load(values + b + head_at + (i * "
                                              "stride_slot)[:, None] + j[None, :], mask=live[:, None], other=0.0)\n"
                                              "        score = tl.sum")),
        "divided in every page": _changed(_ONLINE, ("        top = new_top\n", "        top = new_top\n        mean = mean / total\n")),
    },
    "gqa_packed_kernel": {
        "the group's rows are stored whole": _changed(_PACKED, ("tl.store(out + spot, mean, mask=ours)",
                                                                "tl.store(out + spot, mean)")),
        "the next group's q is loaded": _changed(_PACKED, ("tl.load(q + spot, mask=ours, other=0.0)", "tl.load(q + spot)")),
        "heads dealt out in turn": _changed(_PACKED, ("g * GROUP + r)", "r * tl.num_programs(0) + g)")),
        "sequences one KV head apart": _changed(_PACKED, ("s * tl.num_programs(0) * GROUP", "s * tl.num_programs(0)")),
        "all from KV head 0": _changed(_PACKED, (" + g * stride_head", "")),
        "the tile is the page": _changed(_PACKED, ("row + p // BLOCK_SIZE", "row + tile + p * 0")),
        "one block id for the tile": _changed(_PACKED, ("row + p // BLOCK_SIZE", "row + tile * TILE // BLOCK_SIZE + p * 0")),
        "the table is loaded without a mask": _changed(_PACKED, ("tl.load(row + p // BLOCK_SIZE, mask=live, other=0)",
                                                                 "tl.load(row + p // BLOCK_SIZE)")),
        "offset in the tile, not in the page": _changed(_PACKED, ("p % BLOCK_SIZE * stride_slot", "t % BLOCK_SIZE * stride_slot"))
        .replace("tl.arange(0, TILE)", "tl.arange(0, TILE) + 1 - 1").replace("t % BLOCK", "(t + TILE - 1) % BLOCK"),
        "offsets in 32 bits": _changed(_PACKED, (".to(tl.int64)", "")),
        "no mask on the scores": _changed(_PACKED, ('        score = tl.where(live[None, :], score, -float("inf"))\n', "")),
        "masked scores are 0": _changed(_PACKED, ('score, -float("inf"))', "score, 0.0)")),
        "V is not masked": _changed(_PACKED, ("v = tl.load(values + at, mask=live[:, None], other=0.0)",
                                              "v = tl.load(values + at)")),
        "V without other": _changed(_PACKED, ("v = tl.load(values + at, mask=live[:, None], other=0.0)",
                                              "v = tl.load(values + at, mask=live[:, None])")),
        "one maximum for all rows": _changed(_PACKED, ("tl.max(score, axis=1)", "tl.max(tl.max(score, axis=1), axis=0)"))
        .replace("tl.full([ROWS], -float", "tl.full([ROWS], -1.0 * float"),
        "total is not rescaled": _changed(_PACKED, ("total * shrink + tl.sum", "total + tl.sum")),
        "result is not rescaled": _changed(_PACKED, ("        mean = mean * shrink[:, None]\n", "")),
        "alpha along the wrong side": _changed(_PACKED, ("mean * shrink[:, None]", "mean * tl.max(shrink, axis=0)")),
        "the maximum starts at 0": _changed(_PACKED, ('tl.full([ROWS], -float("inf"), dtype=tl.float32)',
                                                      "tl.zeros([ROWS], dtype=tl.float32)")),
        "the maximum is forgotten": _changed(_PACKED, ("        top = new_top\n", "")),
        "exp for exp2": _changed(_PACKED, ("tl.exp2(", "tl.exp(")),
        "no scale": _changed(_PACKED, (" * scale_log2e", "")),
        "weights stay fp32": _changed(_PACKED, ("w.to(v.dtype)", "w")),
        "full tiles only": _changed(_PACKED, ("tl.cdiv(n, TILE)", "n // TILE")),
        "one tile": _changed(_PACKED, ("range(tl.cdiv(n, TILE))", "range(1)")),
        "pages, not tiles": _changed(_PACKED, ("tl.cdiv(n, TILE)", "tl.cdiv(n, BLOCK_SIZE)"), ("live = p < n", "live = p < n + 0 * n"))
        .replace("tile * TILE + t", "tile * BLOCK_SIZE + t"),
        "an empty sequence divides by 0": _changed(_PACKED, ("tl.where(n > 0, total, 1.0)", "total")),
        "K is not transposed": _changed(_PACKED, ("tl.trans(k)", "k")),
        "ours": "from kvlab.standin import decode\ngqa_packed_kernel = decode.gqa_packed_kernel\n",
        "once for each head": _changed(_PACKED, ("        score = tl.dot", "        for again in range(GROUP - 1):\n            "
                                                 "k = tl.load(keys + at, mask=live[:, None], other=0.0)\n        score = tl.dot")),
        "the table's row is not the sequence's": _changed(_PACKED, ("block_tables + s * stride_table", "block_tables")),
        "one token too many": _changed(_PACKED, ("live = p < n", "live = p <= n")),
        "16 rows always": _changed(_PACKED, ("[ROWS]", "[16]"), ("[ROWS, HEAD_DIM]", "[16, HEAD_DIM]"),
                                   ("tl.arange(0, ROWS)", "tl.arange(0, 16)")),
        "stride_head taken for granted": _changed(_PACKED, ("g * stride_head", "g * HEAD_DIM")),
        "stride_slot taken for granted": _changed(_PACKED, ("* stride_slot", "* (tl.num_programs(0) * HEAD_DIM)")),
        "stride_block taken for granted": _changed(_PACKED, ("b * stride_block", "b * (BLOCK_SIZE * stride_slot)")),
        "tiles of 16 always": _changed(_PACKED, ("t = tl.arange(0, TILE)", "t = tl.arange(0, 16)"), ("tile * TILE", "tile * 16"),
                                       ("tl.cdiv(n, TILE)", "tl.cdiv(n, 16)")),
        "a return in the loop": _changed(_PACKED, ("        top = new_top\n", "        top = new_top\n        if p is None:\n"
                                                   "            return\n")),
        "the maximum of the first tile": _changed(_PACKED, ("new_top = tl.maximum(top, tl.max(score, axis=1))",
                                                            "new_top = tl.max(score, axis=1) if tile == 0 else top")),
        "a maximum that starts as one number": _changed(_PACKED, ('tl.full([ROWS], -float("inf"), dtype=tl.float32)',
                                                                  '-float("inf")')),
        "a sum that starts as one number": _changed(_PACKED, ("tl.zeros([ROWS], dtype=tl.float32)", "0.0")),
        "weights in fp16": _changed(_PACKED, ("w.to(v.dtype), v,", "w.to(tl.float16), v.to(tl.float16),")),
        "V is read twice": _changed(_PACKED, ("        score = tl.dot", "        v = tl.load(values + at, mask=live[:, None], "
                                              "other=0.0)\n        score = tl.dot")),
    },
    "paged_attention": {
        "scale without log2(e)": _changed(_LAUNCH, ("1.4426950408889634 * ", "")),
        "no square root": _changed(_LAUNCH, ("** -0.5", "** -1.0")),
        "grid turned round": _changed(_LAUNCH, ("packed[(num_kv_heads, num_seqs)]", "packed[(num_seqs, num_kv_heads)]")),
        "a program for each query head": _changed(_LAUNCH, ("packed[(num_kv_heads,", "packed[(num_heads,")),
        "16 rows always": _changed(_LAUNCH, ("rows < num_heads // num_kv_heads", "rows < 0")),
        "32 rows always": _changed(_LAUNCH, ("rows = 16", "rows = 32"), ("rows < num_heads // num_kv_heads", "rows < 0")),
        "64 rows always": _changed(_LAUNCH, ("rows = 16", "rows = 64"), ("rows < num_heads // num_kv_heads", "rows < 0")),
        "the same array again": _changed(_LAUNCH, ("    out = np.empty_like(q)", """    global buffer
    if "buffer" not in globals() or buffer.shape != q.shape or buffer.dtype != q.dtype:
        buffer = np.empty_like(q)
    out = buffer""")),
        "a loop in NumPy": """
def paged_attention(q, keys, values, block_tables, seq_lens):
    rows = [attend_gathered(q[s], keys, values, block_tables[s], int(n)) for s, n in enumerate(seq_lens)]
    return np.array(rows).reshape(q.shape).astype(q.dtype)
""",
        "rows not a power of two": _changed(_LAUNCH, ("rows *= 2", "rows += 1")),
        "strides in bytes": _changed(_LAUNCH, ("stride // keys.itemsize", "stride")),
        "strides swapped": _changed(_LAUNCH, ("strides[1], strides[2]", "strides[2], strides[1]")),
        "a block's stride is its size": _changed(_LAUNCH, ("strides[0], strides[1]", "block_size, strides[1]")),
        "the table's stride is 1": _changed(_LAUNCH, ("block_tables.strides[0] // 4", "1")),
        "KV heads for the group": _changed(_LAUNCH, ("GROUP=num_heads // num_kv_heads", "GROUP=num_kv_heads")),
        "out is q": _changed(_LAUNCH, ("out = np.empty_like(q)", "out = q")),
        "out of another type": _changed(_LAUNCH, ("np.empty_like(q)", "np.empty(q.shape)")),
        "returns nothing": _changed(_LAUNCH, ("    return out", "    return None")),
        "K for V": _changed(_LAUNCH, ("keys, values, block_tables, seq_lens, 1", "keys, keys, block_tables, seq_lens, 1")),
        "the block size is the tile": _changed(_LAUNCH, ("BLOCK_SIZE=block_size, TILE=32", "BLOCK_SIZE=16, TILE=32")),
    },
    "bytes_moved": {
        "gather twice": _changed(_BYTES, ('"gather": 3', '"gather": 2')),
        "gather for each query head": _changed(_BYTES, ('"gather": 3', '"gather": 3 * group')),
        "naive once": _changed(_BYTES, ("kv * group * 3 // 2", "kv * group")),
        "naive twice": _changed(_BYTES, ("kv * group * 3 // 2", "kv * group * 2")),
        "naive as a float": _changed(_BYTES, ("kv * group * 3 // 2", "kv * group * 1.5")),
        "online for each KV head": _changed(_BYTES, ('"online": group', '"online": 1')),
        "packed for each query head": _changed(_BYTES, ('"packed": 1', '"packed": group')),
        "K alone": _changed(_BYTES, ("kv = 2 *", "kv = 1 *")),
        "without the bytes of a number": _changed(_BYTES, (" * dtype_bytes", " * 2")),
        "the longest for all": _changed(_BYTES, ("sum(seq_lens)", "max(seq_lens, default=0) * len(seq_lens)")),
        "empties the list": _changed(_BYTES, ("sum(seq_lens)", "sum(seq_lens.pop() for _ in range(len(seq_lens)))")),
        "whole pages of 16": _changed(_BYTES, ("sum(seq_lens)", "sum(-(-n // 16) * 16 for n in seq_lens)")),
        "the mean": _changed(_BYTES, ("sum(seq_lens)", "(sum(seq_lens) // max(len(seq_lens), 1))")),
    },
    "case_for": {
        "nothing is caught": "\ndef case_for(fault):\n    return None\n",
        "one case for all": '\ndef case_for(fault):\n    return {"seq_lens": [15]}\n',
        "a full page": _changed(_CASES, ('"value": {"seq_lens": [3]}', '"value": {"seq_lens": [4]}')),
        "full pages": _changed(_CASES, ('"short": {"seq_lens": [6]}', '"short": {"seq_lens": [8]}')),
        "a group of one": _changed(_CASES, ('"group": 3', '"group": 1')),
        "near": _changed(_CASES, ('"spread": True', '"spread": False')),
        "warm": _changed(_CASES, ('"scores": "cold"', '"scores": "hot"')),
        "one page": _changed(_CASES, ('{"seq_lens": [16], "values": "random", "block_size": 2}', '{"seq_lens": [4]}')),
        "no length": _changed(_CASES, ('{"seq_lens": [6]}', '{"seq_lens": []}')),
        "a word that is none": _changed(_CASES, ('"cold"', '"warm"')),
        "a length, not a list": _changed(_CASES, ('"value": {"seq_lens": [3]}', '"value": {"seq_lens": 3}')),
        "an option that is none": _changed(_CASES, ('"block_size": 2', '"size": 2')),
        "a negative length": _changed(_CASES, ('"value": {"seq_lens": [3]}', '"value": {"seq_lens": [-3]}')),
        "tries to catch K": _changed(_CASES, ("    }.get(fault)", '        "key": {"seq_lens": [3]},\n    }.get(fault)')),
    },
}
