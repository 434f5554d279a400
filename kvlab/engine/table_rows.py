"""Block tables as rows of one array, which a step's inputs are cut from: NumPy's copy of what the manager keeps."""

import numpy as np

from kvlab.schedule import SchedulerOutput


class TableRows:
    """Copies of the block tables of running sequences, one row each, brought up to date by what is new.

    Only a cache: a row is known by the table's version, so a request that comes back, or whose block was
    replaced by a copy, is read again as a whole, and rows of sequences that have left may be dropped at any time.
    """

    def __init__(self, max_num_seqs: int, max_num_blocks: int):
        self.ids = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_num_seqs))
        self._version = [0] * max_num_seqs
        self._filled = [0] * max_num_seqs

    def sync(self, output: SchedulerOutput) -> dict[str, int]:
        """Bring the rows of all scheduled sequences up to date; row by request id."""
        row_of, versions, num_filled = self._row_of, self._version, self._filled
        if len(self._free) < len(output.scheduled):
            scheduled = {request.request_id for request, _ in output.scheduled}
            for gone in [request_id for request_id in self._row_of if request_id not in scheduled]:
                self._free.append(self._row_of.pop(gone))
        for (request, _), table in zip(output.scheduled, output.block_tables, strict=True):
            row = row_of.get(request.request_id)
            if row is None:
                row = row_of[request.request_id] = self._free.pop()
            filled = num_filled[row] if versions[row] == table.version else 0
            if len(table) != filled:
                self.ids[row, filled : len(table)] = [block.block_id for block in table[filled:]]
                versions[row], num_filled[row] = table.version, len(table)
        return row_of
