"""A process that compiles for a GPU which is not there: an engine's warm-up, then two days of random requests.

Prints as JSON, for each of the three, the kernels that it compiled and the compiled kernels that it launched, by hash.
The engine is the real one, scheduler and forward included, but kernels do not run, so what it generates means nothing.
"""

import json
import random
import sys

from kvlab import LLM, SamplingParams
from kvlab_kernels.aot import compiling_for
from kvlab_kernels.warmup import count_compilations


def day(llm: LLM, seed: int) -> None:
    """Requests of all lengths, one alone or many together, more than memory holds at once."""
    rng = random.Random(seed)
    for number in range(12):
        prompts = [
            [rng.randrange(3, 2000) for _ in range(rng.choice((1, 2, 7, 40, 63, 64, 65, 200, 700)))]
            for _ in range(rng.choice((1, 1, 2, 5, 17)))
        ]
        if number == 5:
            prompts = [prompts[0][:1] * 700]  # alone, and long
        params = [SamplingParams(temperature=0, max_tokens=rng.randint(1, 30), ignore_eos=True) for _ in prompts]
        for output in llm.generate(prompts, params):
            assert output.error is None, output.error
    llm.generate([[5] * 20], SamplingParams(n=3, temperature=1.0, seed=seed, max_tokens=5))  # copies on write


def make_engine(split_tokens: int, warm: bool, kv_cache_dtype: str) -> LLM:
    llm = LLM("tiny", attention_backend="triton", dtype="bfloat16", num_gpu_blocks_override=70, max_model_len=1024,
              max_num_batched_tokens=200, kv_cache_dtype=kv_cache_dtype,
              deterministic_split_tokens=split_tokens)  # fmt: skip
    forward = llm.model.forward  # attention leaves what the memory held, which may be NaN
    llm.model.forward = lambda batch, kv_cache: forward(batch, kv_cache).nan_to_num(0.0, 0.0, 0.0)
    if warm:  # as LLM does on a GPU
        llm.engine.runner.warm_up(llm.config.max_num_batched_tokens)
    return llm


def main(split_tokens: int, warm: bool, kv_cache_dtype: str) -> None:
    found = {}
    with compiling_for(90) as launched:
        for name in ("warm-up", "day 1", "day 2"):
            launched.clear()
            with count_compilations() as compiled:
                if name == "warm-up":
                    llm = make_engine(split_tokens, warm, kv_cache_dtype)
                else:
                    day(llm, seed=int(name[-1]))
            found[name] = {"compiled": compiled, "launched": sorted({kernel.hash for _, kernel in launched})}
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "warm", sys.argv[3])
