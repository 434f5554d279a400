"""What each part is: a class or a function, how the engine calls it, and what it may return. Data, and its checks.

The complaints look only at what costs little and is told nowhere else: a forgotten return, too few blocks. Whether a
part is right is for its lab's checks to say.

The four parts of lab 12 are functions on torch tensors, T the tokens of a step:

    rms_norm(x, weight, eps)         x [T, D] and weight [D], or x [T, heads, D] and weight [heads, D] (Qwen3's q and k)
                                     -> like x: x / sqrt(mean(x^2) + eps) * weight, over the last dimension;
                                     the squares are summed in float32 at least
    rope(x, positions, theta)        x [T, heads, D] (q's heads, then k's), positions int64 [T], theta a float
                                     -> like x: elements i and i + D/2 turned by positions * theta^(-2i/D) radians.
                                     Angles in float32, as ours and transformers' are, or tokens may differ
    attend(q, kv, block_table, seq_len)  one sequence's chunk over its pages, causal; once a sequence and layer
        q [n, H, D]                  its n last tokens, at positions seq_len - n to seq_len - 1; a decode has n = 1
        kv [2, num_blocks, block_size, Hkv, D]   K, then V, of q's dtype; the chunk's own are written already
        block_table                  list of ceil(seq_len / block_size) ints; position p lies in block
                                     block_table[p // block_size] at p % block_size. Slots behind the end hold anything
        seq_len                      int: the context, this chunk included
                                     -> like q: softmax(q k^T / sqrt(D)) v; H / Hkv query heads share a KV head
    flat_batch(seqs, block_size)     seqs: (token_ids, start_position, block_ids, wants_logits) each, those of one
                                     token first -> kvlab.model.batch.FlatBatch of CPU tensors, sequences in that order

x, q and kv are the engine's own memory: a part must not change them. The result is a tensor of the same shape, dtype
and device.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.blocks import BlockPoolBase, KVCacheBlock
from kvlab.parts.guard import Complaint

# ---- complaints


def _bool(result, *args) -> str | None:
    return None if isinstance(result, bool | int) else f"returned {result!r}: return True or False"


def _whole_numbers(result, *args) -> str | None:
    fits = isinstance(result, list | tuple) and set(map(type, result)) <= {int, bool}  # once a step, for all who run
    return None if fits else f"returned {result!r}: return a list of Python's whole numbers (int)"


def _swap_or_recompute(result, *args) -> str | None:
    return None if result in ("swap", "recompute") else f'returned {result!r}: return "swap" or "recompute"'


def _num_blocks(result, *args) -> str | None:
    fits = isinstance(result, int) and result >= 2
    return None if fits else f"returned {result!r}: an engine needs a whole number of blocks, at least 2"


def _start(result, *args) -> str | None:
    return None if result is None or isinstance(result, int) else f"returned {result!r}: return a start, or None"


def _like_q(result, q, *args) -> str | None:
    shape = getattr(result, "shape", None)
    return None if shape == q.shape else f"returned {shape or result!r:.60}: return an array of q's shape, {q.shape}"


def _described(tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if hasattr(tensor, "dtype") else f"{tensor!r:.60}"


def _like_first(result, x, *args) -> str | None:
    """A tensor of the shape and dtype of the first argument."""
    if type(result) is type(x) and result.shape == x.shape and result.dtype == x.dtype:
        return None
    return f"returned {_described(result)}: return {_described(x)}, as its first argument is"


_BATCH = {"token_ids": "int64 [T]", "positions": "int64 [T]", "slot_mapping": "int64 [T]",
          "query_start_loc": "int32 [S + 1]", "seq_lens": "int32 [S]", "block_tables": "int32 [S, W]",
          "logits_indices": "int64 [R]"}  # fmt: skip


def _flat_batch(result, seqs, block_size) -> str | None:
    """A FlatBatch whose tensors have the dtypes and shapes that `seqs` asks for."""
    counts = [len(token_ids) for token_ids, *_ in seqs]
    sizes = {"T": sum(counts), "S": len(seqs), "S + 1": len(seqs) + 1, "R": sum(bool(seq[3]) for seq in seqs)}
    for name, asked in _BATCH.items():
        dtype, dims = asked[:-1].split(" [")
        dims = [sizes.get(dim, dim) for dim in dims.split(", ")]
        value = getattr(result, name, None)
        shape = list(getattr(value, "shape", ()))
        fits = len(shape) == len(dims) and all(n == dim or dim == "W" for n, dim in zip(shape, dims, strict=True))
        if not fits or str(getattr(value, "dtype", "")) != f"torch.{dtype}":
            asked = f"torch.{dtype} [{', '.join(map(str, dims))}]"
            return f"returned a batch whose {name} is {_described(value)}: make it {asked}"
    width = max(-(-(start + len(token_ids)) // block_size) for token_ids, start, *_ in seqs)
    if result.block_tables.shape[1] < width:
        return f"returned block_tables of {result.block_tables.shape[1]} columns: the longest sequence needs {width}"
    decodes = next((i for i, n in enumerate(counts) if n != 1), len(counts))
    longest = max(start + len(token_ids) for token_ids, start, *_ in seqs)
    for name, wanted in (("num_decodes", decodes), ("max_query_len", max(counts)), ("max_seq_len", longest)):
        if getattr(result, name, None) != wanted:
            return f"returned a batch whose {name} is {getattr(result, name, None)!r}: it must be {wanted} here"
    return None


def _text(result, *args) -> str | None:
    return None if isinstance(result, str) else f"returned {result!r:.60}: return text (str), \"\" if there is none"


def _text_and_stop(result, *args) -> str | None:
    fits = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str)
    if fits and isinstance(result[1], str | None):
        return None
    return f"returned {result!r:.60}: return (text to show, the stop string that ended it or None)"


def _block(result, *args) -> str | None:
    return None if isinstance(result, KVCacheBlock) else f"returned {result!r}: return a block"


def _blocks(result, *args) -> str | None:
    fits = isinstance(result, list) and all([isinstance(block, KVCacheBlock) for block in result])
    return None if fits else f"returned {result!r}: return a list of blocks"


def _n_blocks(result, owner, n=None) -> str | None:
    """n different blocks. (The engine says n by place; a part that calls itself may name it, and is not asked.)"""
    if complaint := _blocks(result):
        return complaint
    if n is None:
        return None
    if len(result) != n or len(set(map(id, result))) != n:
        return f"returned {len(set(map(id, result)))} different blocks, and {n} were asked for"
    return None


def _new_blocks(result, pool, num_blocks=None) -> str | None:
    """n different blocks that nobody else owns and nobody else finds."""
    if complaint := _n_blocks(result, pool, num_blocks):
        return complaint
    for block in result:
        if block.ref_cnt != 1:
            return f"handed out block {block.block_id} with ref_cnt {block.ref_cnt}: a new block has one owner"
        if block.block_hash is not None:
            return (
                f"handed out block {block.block_id} while the prefix index still finds it: call self.evict(block) "
                f"first, or run with enable_prefix_caching=False"
            )
    return None


def _same_blocks(result, pool, blocks) -> str | None:
    if complaint := _blocks(result):
        return complaint
    if len(result) != len(blocks):
        return f"returned {len(result)} blocks for a parent that holds {len(blocks)}: the child shares every one"
    return None


def _pair(result, pool, table, index) -> str | None:
    """The engine asks only where a copy is needed, so None is not an answer."""
    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(b, KVCacheBlock) for b in result)):
        return f"returned {result!r} for a block that others may read: return (the shared block, its copy)"
    if table[index] is not result[1]:
        return f"left block {table[index].block_id} in the table: put the copy in its place"
    return None


# ---- the table


@dataclass(frozen=True)
class Kind:
    """What a part must be.

    lab: where it is written. called: its arguments, as the engine gives them. methods: of a class, each with its
    complaint; a function has none. attributes: what instances of the class must have. base: what it must extend.
    """

    lab: str
    called: tuple[str, ...]
    methods: Mapping[str, Complaint | None] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    base: type = object
    complaint: Complaint | None = None

    @property
    def is_class(self) -> bool:
        return bool(self.methods)

    def check(self, part: str, value: Any) -> None:
        """ValueError unless `value` is of this kind: says what it lacks."""
        shape = f"{'a class' if self.is_class else 'a function'} called with ({', '.join(self.called)})"
        if isinstance(value, type) != self.is_class or not callable(value):
            given = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
            raise ValueError(f"part `{part}` is {given}: give {shape} (lab {self.lab})")
        name = getattr(value, "__name__", part)
        if not issubclass(value if self.is_class else object, self.base):
            raise ValueError(f"part `{part}`: {name} must extend kvlab.blocks.{self.base.__name__} (lab {self.lab})")
        if lacks := [method for method in self.methods if not callable(getattr(value, method, None))]:
            raise ValueError(f"part `{part}`: {name} has no {', '.join(lacks)} (lab {self.lab})")
        if problem := _cannot_call(value, self.called):
            raise ValueError(f"part `{part}`: {name} must be {shape}: {problem} (lab {self.lab})")


def _cannot_call(function: Callable, called: tuple[str, ...]) -> str | None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # one of C: nothing to be read
    given = {name.partition("=")[0]: name for name in called}
    positional = [name for name, text in given.items() if "=" not in text]
    keywords = {name: None for name, text in given.items() if "=" in text}
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


_SIZES = ("total_bytes", "gpu_memory_utilization", "weight_bytes", "activation_bytes", "cudagraph_bytes", "block_bytes")
_QUEUE = {"popleft": _block, "popleft_n": _n_blocks, "remove": None, "append": None, "append_n": None,
          "get_all_free_blocks": _blocks}  # fmt: skip

KINDS: dict[str, Kind] = {
    "sizing": Kind("01", _SIZES, complaint=_num_blocks),
    "arena": Kind("02", ("capacity", "start=1"), {"allocate": _start, "free": None}),
    "free_queue": Kind("03", ("blocks",), _QUEUE, ("num_free_blocks",)),
    "block_pool": Kind("03", ("num_gpu_blocks", "prefix_index=", "recorder=", "free_queue="),
                       {"get_new_blocks": _new_blocks, "free_blocks": None, "touch": None}, base=BlockPoolBase),
    "fork": Kind("04", ("pool", "blocks"), complaint=_same_blocks),
    "ensure_writable": Kind("04", ("pool", "table", "index"), complaint=_pair),
    "prefix_index": Kind("05", ("block_size",), {"match": _blocks, "insert": None, "remove": None},
                         ("block_size", "cached_block_hash_to_block")),
    "admit": Kind("07", ("num_running", "max_num_seqs", "batch_is_forming"), complaint=_bool),
    "plan_tokens": Kind("08", ("pending", "budget", "limit"), complaint=_whole_numbers),
    "choose_victim": Kind("09", ("running", "needy", "gain")),
    "swap_or_recompute": Kind("09", ("request", "num_blocks", "num_free_cpu_blocks"), complaint=_swap_or_recompute),
    "may_resume": Kind("09", ("request", "room"), complaint=_bool),
    "attention": Kind("10", ("q", "keys", "values", "block_tables", "seq_lens"), complaint=_like_q),
    "rms_norm": Kind("12", ("x", "weight", "eps"), complaint=_like_first),
    "rope": Kind("12", ("x", "positions", "theta"), complaint=_like_first),
    "attend": Kind("12", ("q", "kv", "block_table", "seq_len"), complaint=_like_first),
    "flat_batch": Kind("12", ("seqs", "block_size"), complaint=_flat_batch),
    "detokenizer": Kind("14", ("decode",), {"add": _text}),
    "stop_checker": Kind("14", ("stop", "include_stop"), {"add": _text_and_stop}),
}  # fmt: skip
