"""FlatBatch: all tokens of one step in a row, whatever they are for.

Chunks of prompts and single decode tokens lie end to end, without padding; a decode is a chunk of length 1
(L33 4.3). Two prompts' chunks and one decode, block size 4:

    token_ids        [ a5 a6 a7 | b0 b1 | c9 ]
    positions        [  5  6  7 |  0  1 |  9 ]       where each token stands in its own sequence
    slot_mapping     [ 13 14 15 | 32 33 | 21 ]       where its K and V go: block_id * block_size + offset
    query_start_loc  [ 0          3       5    6 ]   sequence i owns rows [i] to [i + 1]
    seq_lens         [ 8, 2, 10 ]                    tokens to attend over, this step's included
    block_tables     [[7, 3], [8], [2, 6, 5]]        padded to one width
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class FlatBatch:
    """T tokens of S sequences; R of the rows need logits. All tensors on the model's device.

    Block table entries behind ceil(seq_len / block_size) may hold anything. The first `num_decodes` sequences
    have exactly one token each, so that backends can attend for them together.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    query_start_loc: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S], context length INCLUDING this step's tokens
    block_tables: Tensor  # int32 [S, W]
    logits_indices: Tensor  # int64 [R], rows of the hidden state
    num_decodes: int
    max_query_len: int
    max_seq_len: int


def flat_batch(seqs, block_size: int, device: torch.device | str = "cpu") -> FlatBatch:
    """Lay out sequences as one FlatBatch, in the order given (L33 2.2 for the slot arithmetic).

    `seqs`: one (token_ids, start_position, block_ids, wants_logits) each: the tokens to compute now, the
    position of the first, the sequence's whole block table so far, and whether its last token's logits are
    needed.

    Raises ValueError for an empty chunk, a negative start, or a table too short for the last token.
    """
    token_ids, positions, slots, starts, seq_lens, logits_rows = [], [], [], [0], [], []
    for i, (tokens, start, block_ids, wants_logits) in enumerate(seqs):
        end = start + len(tokens)
        if not tokens or start < 0:
            raise ValueError(
                f"sequence {i} has {len(tokens)} tokens from position {start}: give at least one, from 0 up"
            )
        if end > len(block_ids) * block_size:
            raise ValueError(
                f"sequence {i} reaches position {end - 1}, but its {len(block_ids)} blocks hold {block_size} "
                f"tokens each: allocate {-(-end // block_size)} blocks first"
            )
        token_ids += tokens
        for position in range(start, end):
            positions.append(position)
            slots.append(block_ids[position // block_size] * block_size + position % block_size)
        starts.append(len(token_ids))
        seq_lens.append(end)
        if wants_logits:
            logits_rows.append(len(token_ids) - 1)

    query_lens = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    width = max((len(block_ids) for _, _, block_ids, _ in seqs), default=0)
    tables = [list(block_ids) + [0] * (width - len(block_ids)) for _, _, block_ids, _ in seqs]

    def tensor(values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    return FlatBatch(
        token_ids=tensor(token_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        slot_mapping=tensor(slots, torch.int64),
        query_start_loc=tensor(starts, torch.int32),
        seq_lens=tensor(seq_lens, torch.int32),
        block_tables=tensor(tables, torch.int32).view(len(tables), width),
        logits_indices=tensor(logits_rows, torch.int64),
        num_decodes=num_decodes,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
    )
