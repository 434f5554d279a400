"""The sections of benchmarks/gpu_engine.py. Each yields rows, which `work` prints as JSON, one a line, as they come."""

import gc
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from gpu.roofline import decode_bytes, head_and_layer_bytes, prefill_flops
from kvlab import LLM, SamplingParams
from kvlab.model.batch import flat_batch
from kvlab.model.config import ModelConfig
from kvlab.model.known import known_config
from kvlab.model.kv_cache import kv_bytes_per_token
from kvlab.model.random_weights import AWQ_CONFIG, write_random_model
from kvlab.sizing import ModelShape

Row = dict[str, object]
TOY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
       "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048, "eos_token_id": 0, "bos_token_id": 0}  # fmt: skip
# Logits of these weights spread by about 1.4. A token of ours may be another than the reference's likeliest only where
# the reference gives it so little less: neighbouring bf16 numbers between 4 and 8 are 0.03 apart.
NEAR_TIE = {torch.bfloat16: 0.25, torch.float32: 1e-3}


def make_folders(model: str, folder: Path, awq_folder: Path, toy: bool, with_awq: bool) -> None:
    """Write the random weights that are not there yet. No tokenizer: the time of text is not what is measured."""
    config = known_config(model) | (TOY if toy else {})
    if not folder.exists():
        write_random_model(folder, config, dtype="float32" if toy else "bfloat16", tokenizer=False)
    if with_awq and not awq_folder.exists():
        config |= {"quantization_config": AWQ_CONFIG}
        write_random_model(awq_folder, config, dtype="float16", tokenizer=False)


def work(section: str, folder: Path, awq_folder: Path, toy: bool) -> None:
    """The child: print the rows of one section."""
    bench = Bench(folder, awq_folder, toy)
    for row in getattr(bench, section)():
        print(json.dumps(row), flush=True)


class Bench:
    """Sizes, engines and clocks of a run; a method for each section."""

    def __init__(self, folder: Path, awq_folder: Path, toy: bool):
        self.folder, self.awq_folder, self.toy = str(folder), str(awq_folder), toy
        self.cuda = torch.cuda.is_available() and not toy
        self.device = "cuda" if self.cuda else "cpu"
        self.dtype = torch.float32 if toy else torch.bfloat16
        self.config = ModelConfig.from_folder(folder)
        self.random = random.Random(0)

    # ---- tools

    def engine(self, folder: str | None = None, **options) -> LLM:
        options = {"device": self.device, "enable_prefix_caching": False, "max_num_batched_tokens": 8192,
                   "max_num_seqs": 256, "max_model_len": 2560} | options  # fmt: skip
        if self.toy:
            options |= {"max_model_len": 160, "num_gpu_blocks_override": 128, "max_num_seqs": 16}
        return LLM(folder or self.folder, **options)

    def free(self) -> None:
        """Call it when nobody holds the last engine any more."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(3, self.config.vocab_size) for _ in range(length)]

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def ceiling(self, name: str) -> float | None:
        """Bytes a second of a large copy, or operations a second of a large matrix product, on this GPU."""
        if not self.cuda:
            return None
        from kvlab_kernels.bench import machine

        return getattr(machine, name)(machine.Machine(toy=False))

    # ---- sections

    def right(self) -> Iterator[Row]:
        """Logits beside those of a wider transformers; greedy tokens, with CUDA graphs and without."""
        prompts = [self.prompt(n) for n in ((40, 17, 5, 1) if self.toy else (700, 64, 33, 1))]
        sizes = {"num_gpu_blocks_override": 2048, "cudagraph_capture_sizes": [1, 4]}
        llm = self.engine(dtype=str(self.dtype).removeprefix("torch."), **sizes)
        blocks, seqs = iter(range(1, 2048)), []
        for p in prompts:
            seqs.append((p, 0, [next(blocks) for _ in range(-(-len(p) // 16))], True))
        batch = flat_batch(seqs, 16, self.device)
        batch = replace(batch, logits_indices=torch.arange(len(batch.token_ids), device=self.device))
        ours = llm.model.forward(batch, llm.engine_core.runner.kv_cache).float().cpu()
        num_tokens = 16 if self.toy else 64
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        tokens = {"graphs": [output.outputs[0].token_ids for output in llm.generate(prompts, params)]}
        del llm
        self.free()
        llm = self.engine(enforce_eager=True, **sizes)
        tokens["eager"] = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        del llm
        self.free()

        reference = self.load_reference(self.dtype)
        theirs = torch.cat([self.logits(reference, p) for p in prompts])
        for how, answers in tokens.items():
            gaps = []
            for p, answer in zip(prompts, answers, strict=True):
                rows = self.logits(reference, p + answer)[len(p) - 1 : -1]
                gaps += (rows.max(-1).values - rows[range(len(answer)), answer]).tolist()
            yield {"what": f"greedy tokens, {how}", "count": len(gaps), "others": sum(gap > 0 for gap in gaps),
                   "largest": max(gaps), "right": max(gaps) <= NEAR_TIE[self.dtype]}  # fmt: skip
        del reference
        self.free()
        wide = torch.float64 if self.toy else torch.float32
        if self.cuda and torch.cuda.get_device_properties(0).total_memory < 4.5 * self.config_bytes(4):
            return  # no room for the wide one
        model = self.load_reference(wide)
        exact = torch.cat([self.logits(model, p) for p in prompts])
        theirs_off, ours_off = ((x - exact).abs().max().item() for x in (theirs, ours))
        yield {"what": "logits, transformers", "count": exact.numel(), "largest": theirs_off}
        yield {"what": "logits, ours", "count": exact.numel(), "largest": ours_off,
               "right": ours_off <= 1.5 * theirs_off}  # fmt: skip

    def decode(self) -> Iterator[Row]:
        """Tokens a second when all sequences decode, 1,024 tokens into their contexts."""
        bandwidth = self.ceiling("copy_bandwidth")
        batches = (1, 3) if self.toy else (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for graphs, some in ((True, batches), (False, batches[::3])):
            llm = self.engine(enforce_eager=not graphs, cudagraph_capture_sizes=list(some))
            for batch in some:
                row = self.time_decode(llm, batch, 24 if self.toy else 1024, bandwidth)
                yield {"batch": batch, "graphs": graphs} | row
            del llm
            self.free()

    def prefill(self) -> Iterator[Row]:
        """One prompt, from empty to its first token."""
        flops = self.ceiling("gemm_flops")
        llm = self.engine(max_model_len=8224)
        params = SamplingParams(temperature=0, max_tokens=1)
        for length in (32, 100) if self.toy else (512, 2048, 8192):
            seconds = []
            for _ in range(6):
                start = self.now()
                llm.generate([self.prompt(length)], params)
                seconds.append(self.now() - start)
            median = statistics.median(seconds[1:])
            rate = prefill_flops(self.shape(), length) / median
            yield {"prompt": length, "ms": median * 1e3, "tokens_per_s": length / median, "TFLOP/s": rate / 1e12,
                   "of_gemm": flops and rate / flops}  # fmt: skip

    def workload(self) -> Iterator[Row]:
        """nano-vllm's: everything at once, forced lengths."""
        llm, requests = self.engine(), self.requests()
        total = sum(n for _, n in requests)
        for name, options in (("greedy", {"temperature": 0}), ("temperature 0.6", {"temperature": 0.6, "seed": 0})):
            params = [SamplingParams(max_tokens=n, ignore_eos=True, **options) for _, n in requests]
            start, before = self.now(), llm.stats()["num_preemptions_recompute"]
            llm.generate([p for p, _ in requests], params)
            seconds, preempted = self.now() - start, llm.stats()["num_preemptions_recompute"] - before
            yield {"how": name, "requests": len(requests), "tokens": total, "seconds": seconds,
                   "tokens_per_s": total / seconds, "preemptions": preempted}  # fmt: skip

    def transformers(self) -> Iterator[Row]:
        """Its continuous batching, as quick as it can be made here."""
        cases = [("paged|sdpa", False)] if not self.cuda else [("paged|sdpa", True), ("paged|sdpa", False),
                                                              ("paged|flash_attention_2", True)]  # fmt: skip
        for attention, graphs in cases:
            row = {"attention": attention, "graphs": graphs}
            try:
                yield row | self.continuous_batching(attention, graphs, 28.0)
            except Exception as error:  # whatever it lacks here: the row says so, the others go on
                yield row | {"error": f"{type(error).__name__}: {str(error)[:120]}"}
            self.free()

    def variants(self) -> Iterator[Row]:
        """Other settings: how quick, and how many of the first greedy tokens are those of the usual ones."""
        bandwidth, long = self.ceiling("copy_bandwidth"), 24 if self.toy else 2048
        batches = (1, 3) if self.toy else (1, 16, 64)
        cases = [("usual", {}, self.folder), ("K/V in INT8", {"kv_cache_dtype": "int8"}, self.folder),
                 ("fixed splits", {"deterministic_split_tokens": 512}, self.folder),
                 ("weights in 4 bits", {"quantization": "awq"}, self.awq_folder),
                 ("attention by PyTorch", {"attention_backend": "torch"}, self.folder)]  # fmt: skip
        prompts = [self.prompt(n) for n in (20, 33, 7, 61)]
        params, usual = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), None
        for name, options, folder in cases:
            if "deterministic_split_tokens" in options and not self.cuda:
                continue  # of the kernels, which a CPU would interpret
            llm = self.engine(folder, cudagraph_capture_sizes=list(batches), **options)
            tokens = [token for output in llm.generate(prompts, params) for token in output.outputs[0].token_ids]
            usual = usual or tokens
            same = None if folder != self.folder else sum(a == b for a, b in zip(tokens, usual, strict=True))
            for batch in batches:
                row = self.time_decode(llm, batch, long, bandwidth)
                yield {"how": name, "batch": batch} | row | {"same_tokens": same, "of": len(usual)}
            del llm
            self.free()

    # ---- pieces

    def time_decode(self, llm: LLM, batch: int, context: int, bandwidth: float | None) -> Row:
        """Mean step of `batch` decodes, through LLMEngine.step, after all prompts are computed and some steps more."""
        pool = llm.stats()["num_gpu_blocks"] * llm.config.block_size
        steps = 4 if self.toy else 48
        if batch * (context + 4 * steps) > pool:
            return {"step_ms": None, "note": f"the pool holds {pool} tokens"}
        params = SamplingParams(temperature=0, max_tokens=llm.config.max_model_len - context, ignore_eos=True)
        requests = [llm.add_request(self.prompt(context), params) for _ in range(batch)]
        while any(request.num_output_tokens < 4 for request in requests):
            llm.step()
        tokens = sum(request.num_tokens for request in requests)
        start = self.now()
        for _ in range(steps):
            llm.step()
        seconds = (self.now() - start) / steps
        for request in requests:
            llm.abort_request(request.request_id)
        row = {"context": context, "step_ms": seconds * 1e3, "tokens_per_s": batch / seconds}
        if bandwidth:
            dtype = llm.engine_core.runner.kv_cache.dtype
            weights = head_and_layer_bytes(self.shape(), self.weight_bytes(llm), self.dtype.itemsize)
            mean = tokens / batch + steps / 2
            moved = decode_bytes(weights, kv_bytes_per_token(self.config, dtype), batch, mean)
            row |= {"GB": moved / 1e9, "of_roofline": moved / bandwidth / seconds}
        return row

    def weight_bytes(self, llm: LLM) -> int:
        shape = self.shape()
        return shape.quantised_weight_bytes() if llm.config.quantization else shape.num_parameters * self.dtype.itemsize

    def shape(self) -> ModelShape:
        return ModelShape.from_config(json.loads((Path(self.folder) / "config.json").read_text()))

    def config_bytes(self, dtype_bytes: int) -> int:
        return self.shape().num_parameters * dtype_bytes

    def requests(self) -> list[tuple[list[int], int]]:
        """(prompt, output tokens), the same at every call."""
        draw = random.Random(0)
        count, low, high = (6, 10, 40) if self.toy else (256, 100, 1024)
        top = min(10_000, self.config.vocab_size - 1)
        return [([draw.randint(3, top) for _ in range(draw.randint(low, high))], draw.randint(low, high))
                for _ in range(count)]  # fmt: skip

    def continuous_batching(self, attention: str, graphs: bool, limit: float) -> Row:
        """Its continuous batching on the same requests. After `limit` seconds only what has finished counts."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        model, requests = self.load_reference(self.dtype, attention), self.requests()
        sizes = {"num_blocks": 256, "max_batch_tokens": 128} if self.toy else {"max_batch_tokens": 8192}
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1024),
            continuous_batching_config=ContinuousBatchingConfig(
                max_requests_per_batch=len(requests), allow_block_sharing=False, use_cuda_graph=graphs,
                auto_switch_to_flash=False, **sizes),
        )  # fmt: skip
        manager.start()
        try:
            start = self.now()
            ids = [manager.add_request(p, max_new_tokens=n, eos_token_id=-1) for p, n in requests]
            done = {}
            while len(done) < len(ids) and time.perf_counter() - start < limit:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("transformers' generation thread has died")
                if result is not None and result.is_finished():
                    done[result.request_id] = len(result.generated_tokens)
            seconds = self.now() - start
        finally:
            manager.stop(block=True, timeout=10)
        total = sum(done.values())
        return {"finished": len(done), "tokens": total, "seconds": seconds, "tokens_per_s": total / seconds}

    def load_reference(self, dtype: torch.dtype, attention: str = "sdpa"):
        import transformers

        transformers.logging.set_verbosity_error()
        options = {"dtype": dtype, "attn_implementation": attention}
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, **options)
        return model.eval().to(self.device)

    @torch.inference_mode()
    def logits(self, model, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocab] on the host."""
        out = model(torch.tensor([tokens], device=self.device)).logits[0]
        return out.to(torch.float64 if out.dtype == torch.float64 else torch.float32).cpu()
