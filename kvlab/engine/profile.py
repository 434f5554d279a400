"""How much memory the largest steps take: run them, and read the peak (PAV 3.1).

    weights are loaded -> meter.start -> the largest steps, on two blocks of K/V -> meter.peak -> activation bytes

    mixed     max_num_batched_tokens tokens in max_num_seqs sequences: few long chunks, the rest decodes
    decodes   one token for each of max_num_seqs sequences

Every sequence ends at max_model_len, and each samples with top-p, which sorts: nothing that is served later needs more,
except log-probabilities of prompts. All tables name the same block, over and over, so that the K/V of these steps takes
next to no memory; what they compute is of no use.
"""

import gc
from dataclasses import dataclass
from typing import Protocol

import torch

from kvlab.blocks import BlockTable, KVCacheBlock, cdiv
from kvlab.config import EngineConfig
from kvlab.engine.runner import ModelRunner
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, SchedulerOutput

# Draws from nearly the whole vocabulary in order of rank: of all ways to sample, the one that takes most memory.
WIDEST = SamplingParams(temperature=1.0, top_p=1 - 2**-40, seed=0)


class Meter(Protocol):
    """Reads a device's memory, in bytes."""

    total_bytes: int

    def used_bytes(self) -> int:
        """In use right now, by anybody."""

    def start(self) -> None:
        """Begin to watch."""

    def peak_bytes(self) -> int:
        """The most that has come on top since `start`. Ends the watch."""


class CudaMeter:
    """A CUDA GPU: the driver says what is in use, PyTorch's allocator what its tensors took at most."""

    def __init__(self, device: str):
        self.device = torch.device(device)
        self.total_bytes = torch.cuda.mem_get_info(self.device)[1]

    def used_bytes(self) -> int:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # else what PyTorch keeps for later tensors counts as used
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def start(self) -> None:
        self._outside = self.used_bytes() - torch.cuda.memory_reserved(self.device)
        self._tensors = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        tensors = torch.cuda.max_memory_allocated(self.device) - self._tensors
        # Compiled kernels, and what libraries take by themselves. They stay, so their peak is what is there now.
        outside = self.used_bytes() - torch.cuda.memory_reserved(self.device) - self._outside
        return tensors + max(0, outside)


def meter_for(device: str) -> Meter | None:
    """The meter of a CUDA device. None for a CPU, whose pool has a size of its own."""
    return None if torch.device(device).type == "cpu" else CudaMeter(device)


@dataclass(frozen=True)
class MemoryUse:
    """Of a device, in bytes. used: right now, by anybody: weights, other processes. activations: what the largest step
    takes on top. cudagraphs: what captured graphs will take, an estimate."""

    total: int
    used: int
    activations: int
    cudagraphs: int = 0


def profile(runner: ModelRunner, config: EngineConfig, meter: Meter, cudagraphs: int = 0) -> MemoryUse:
    """Run the largest steps that `config` allows, and say what they took.

    runner: on a KVCache of at least two blocks, whose contents are lost. config: max_model_len must be set. cudagraphs:
    bytes that graphs will take, which are captured when there is a pool.
    """
    used = meter.used_bytes()
    meter.start()
    try:
        runner.warm_up(config.max_num_batched_tokens)
        for lengths in largest_steps(config):
            runner.execute(step_of(lengths, config))
    finally:
        peak = meter.peak_bytes()
    return MemoryUse(meter.total_bytes, used, peak, cudagraphs)


def largest_steps(config: EngineConfig) -> list[list[int]]:
    """Tokens of each sequence in the mixed step and in the step of decodes."""
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    left, mixed = config.max_num_batched_tokens, []
    for others in reversed(range(num_seqs)):
        mixed.append(min(config.max_model_len - 1, left - others))  # one position is left for the output
        left -= mixed[-1]
    return [mixed, [1] * num_seqs]


def step_of(lengths: list[int], config: EngineConfig) -> SchedulerOutput:
    """A step that computes the last `lengths` tokens of sequences of max_model_len, and samples for each."""
    tokens = [0] * (config.max_model_len - 1)
    table = BlockTable([KVCacheBlock(1)] * cdiv(config.max_model_len, config.block_size))
    output = SchedulerOutput(0, block_ops_done=True)
    for i, length in enumerate(lengths):
        request = Request(f"profile-{i}", tokens[:1], WIDEST)
        request.all_token_ids = tokens  # one list for all: a long context in every seat would fill the host's memory
        request.num_prompt_tokens = len(tokens)
        request.num_computed_tokens = len(tokens) - length
        output.scheduled.append((request, length))
        output.block_tables.append(table)
    return output
