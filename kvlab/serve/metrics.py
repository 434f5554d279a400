"""Prometheus metrics under vLLM's names, so that its dashboards work. docs/serving.md says where each comes from.

    Report -> observe()      histograms and counters of what happened (event loop, once a step)
    last stats -> collect()  gauges and counters that the scheduler keeps, read when somebody scrapes

All times are of the engine thread's report: when a token exists, not when the network has carried it.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from kvlab.engine.outputs import RequestOutput
from kvlab.serve.call import Call
from kvlab.serve.engine_thread import Report

LABELS = ("model_name", "engine")
FIRST_TOKEN = (*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
               *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0))  # fmt: skip
BETWEEN_TOKENS = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
                  *(20.0, 40.0, 80.0))  # fmt: skip
REQUEST = (*(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
           *(480.0, 960.0, 1920.0, 7680.0))  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Older names that dashboards still ask for; each is served as a copy of the newer one.
OLDER = {
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries": "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_hits": "vllm:prefix_cache_hits",
}


class Metrics:
    """What has happened to all requests since the start. model: the label model_name."""

    def __init__(self, model: str, max_model_len: int, stats: dict[str, float]):
        self.registry = CollectorRegistry()
        self._labels = (model, "0")
        self._stats, self._num_step_tokens = stats, 0
        self._requests = self._counter("vllm:request_success", "Continuations that ended.", "finished_reason")
        self._rejections = self._counter("vllm:admission_rejections", "Requests answered with 429.", "reason")
        for reason in ("stop", "length", "abort", "error"):
            self._requests.labels(*self._labels, reason)  # zero is a figure, too
        self._rejections.labels(*self._labels, "max_waiting")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that were prefilled.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        count = _one_two_five(max_model_len)
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", count)
        self._generation = self._histogram("vllm:request_generation_tokens", "Tokens generated for a request.", count)
        self._n = self._histogram("vllm:request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self._max = self._histogram("vllm:request_params_max_tokens", "max_tokens of a request.", count)
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Arrival to the first token.", FIRST_TOKEN)
        self._all_between = Histogram("vllm:inter_token_latency_seconds", "Token to token.", LABELS,
                                      buckets=BETWEEN_TOKENS, registry=self.registry)  # fmt: skip
        self._between = self._all_between.labels(*self._labels)
        self._mean = self._histogram("vllm:request_time_per_output_token_seconds", "Mean time from token to token "
                                     "of a request.", BETWEEN_TOKENS)  # fmt: skip
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to the last token.", REQUEST)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Queued to scheduled.", REQUEST)
        self._inference = self._histogram("vllm:request_inference_time_seconds", "Scheduled to last token.", REQUEST)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Scheduled to the first token.", REQUEST)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First to the last token.", REQUEST)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _counter(self, name: str, text: str, *more: str) -> Counter:
        metric = Counter(name, text, (*LABELS, *more), registry=self.registry)
        return metric if more else metric.labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry).labels(*self._labels)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    # ---- what happened

    def reject(self, reason: str) -> None:
        self._rejections.labels(*self._labels, reason).inc()

    def observe(self, report: Report) -> None:
        """Take in what a report tells."""
        if report.stats:
            num_tokens = report.stats["num_scheduled_tokens"] - self._stats["num_scheduled_tokens"]
            if num_tokens:
                self._step_tokens.observe(num_tokens)
            self._stats = report.stats
        for call, queued in report.started:
            call.queued = queued
        for call, i, scheduled in report.scheduled:
            call.times[i].scheduled = scheduled
        self._observe_deltas(report)
        for call, i, output in report.outputs:
            self._observe_output(call, i, output, report.time)
        for call, i in report.aborted:
            self._count_end("abort", call.jobs[i].params.num_sequences - call.times[i].num_ended)

    def _observe_deltas(self, report: Report) -> None:
        now, num_generated = report.time, 0
        for call, i, delta in report.deltas:
            times = call.times[i]
            if delta.finish_reason is not None:
                times.num_ended += 1
                self._count_end(delta.finish_reason)
            if not delta.token_ids:
                continue
            num_generated += len(delta.token_ids)
            if times.first_token is None:
                times.first_token = now
                self._first.observe(now - call.arrival)
                self._prompt_tokens.inc(len(call.jobs[i].prompt))
            if delta.index in times.last:
                self._between.observe(now - times.last[delta.index])
            times.last[delta.index] = now
        if num_generated:
            self._generation_tokens.inc(num_generated)

    def _count_end(self, reason: str, how_many: int = 1) -> None:
        self._requests.labels(*self._labels, reason).inc(how_many)

    def _observe_output(self, call: Call, i: int, output: RequestOutput, now: float) -> None:
        times, params = call.times[i], call.jobs[i].params
        self._whole.observe(now - call.arrival)
        self._prompt.observe(output.usage.prompt_tokens)
        self._generation.observe(output.usage.completion_tokens)
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max.observe(params.max_tokens)
        if times.scheduled is None:
            return
        self._queue.observe(times.scheduled - call.queued)
        self._inference.observe(now - times.scheduled)
        if times.first_token is None:
            return
        self._prefill.observe(times.first_token - times.scheduled)
        self._decode.observe(now - times.first_token)
        num_gaps = output.usage.completion_tokens / len(times.last) - 1  # of a continuation, on average
        if num_gaps > 0:
            self._mean.observe((now - times.first_token) / num_gaps)

    # ---- what the scheduler knows, when scraped

    def collect(self) -> Iterator[Metric]:
        """Gauges, the scheduler's counters, and copies under older names. (Called by the registry.)"""
        stats = self._stats
        preemptions = stats["num_preemptions_recompute"] + stats["num_preemptions_swap"]
        for kind, name, text, value in (
            (GaugeMetricFamily, "vllm:num_requests_running", "Sequences in the batch.", stats["num_running"]),
            (GaugeMetricFamily, "vllm:num_requests_waiting", "Sequences that wait.", stats["num_waiting"]),
            (GaugeMetricFamily, "vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", stats["usage"]),
            (CounterMetricFamily, "vllm:num_preemptions", "Preemptions.", preemptions),
            (CounterMetricFamily, "vllm:prefix_cache_queries", "Prompt tokens looked up.",
             stats["num_prefix_queried_tokens"]),
            (CounterMetricFamily, "vllm:prefix_cache_hits", "Prompt tokens found.", stats["num_prefix_hit_tokens"]),
        ):  # fmt: skip
            for each in (name, *(older for older, newer in OLDER.items() if newer == name)):
                family = kind(each, text, labels=LABELS)
                family.add_metric(self._labels, value)
                yield family
        (newer,) = self._all_between.collect()
        older = Metric("vllm:time_per_output_token_seconds", newer.documentation, newer.type)
        older.samples = [each._replace(name=each.name.replace(newer.name, older.name)) for each in newer.samples]
        yield older

    def describe(self) -> list[Metric]:
        """None beforehand: it makes the registry call collect() only when scraped."""
        return []


def _one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    return [m * 10**e for e in range(len(str(most))) for m in (1, 2, 5) if m * 10**e <= most]
