"""In which order the numbers of a block lie in memory (L33 2.2; lab 03).

    H  KV head     N  token, 0 to block_size - 1     D  dim of the head, 0 to head_dim - 1     X  D in pieces of x

    NHD   [blocks, N, H, D]          a token in one piece: kvlab, FlashAttention
    HND   [blocks, H, N, D]          a head in one piece
    HDNX  [blocks, H, D/x, N, x]     the textbook's K: 16-byte pieces of neighbouring tokens side by side
    HDN   [blocks, H, D, N]          the textbook's V: the same dim of neighbouring tokens side by side
"""

LAYOUTS = ("NHD", "HND", "HDNX", "HDN")


def byte_offset(layout: str, block: int, token: int, head: int, dim: int, block_size: int, num_kv_heads: int,
                head_dim: int, itemsize: int = 2, x: int = 8) -> int:  # fmt: skip
    """How many bytes after the pool's first byte the number (block, token, head, dim) of K or V begins.

    token: the offset in the block. itemsize: bytes of a number. x: numbers in a piece, of HDNX only.
    ValueError for an unknown layout; IndexError for a token, head or dim that a block does not have.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown: use one of {', '.join(LAYOUTS)}")
    for name, index, size in (("token", token, block_size), ("head", head, num_kv_heads), ("dim", dim, head_dim)):
        if not 0 <= index < size:
            raise IndexError(f"{name} {index} is outside the block: it has {size}")
    n, h, d = block_size, num_kv_heads, head_dim
    strides = {  # of block, token, head, dim // x and dim % x, in numbers
        "NHD": (n * h * d, h * d, d, x, 1),
        "HND": (n * h * d, d, n * d, x, 1),
        "HDNX": (n * h * d, x, n * d, n * x, 1),
        "HDN": (n * h * d, 1, n * d, n * x, n),
    }[layout]
    index = (block, token, head, dim // x, dim % x)
    return itemsize * sum(i * stride for i, stride in zip(index, strides, strict=True))
