"""Faults in `fwpkm_jax.evaluation`."""

from lab.seeded_faults.fault import Fault

_READERS = ("tests/evaluation/readers", "tests/evaluation/test_perplexity.py")
_NEEDLE = ("tests/evaluation/test_needle.py", "tests/evaluation/test_needle_samples.py")

FAULTS = (
    Fault(
        "intervals: clusters of unequal sizes weigh alike",
        "residuals = sums - mean * sizes",
        "residuals = sums - sums.mean()",
        ("tests/evaluation/test_intervals.py",),
    ),
    Fault(
        "intervals: the variance of a sum of clusters without its correction",
        "variance = clusters / (clusters - 1) *",
        "variance = 1.0 *",
        ("tests/evaluation/test_intervals.py",),
    ),
    Fault(
        "token losses: documents of one segment merge",
        "cluster = np.cumsum(new_document | new_segment) - 1",
        "cluster = np.cumsum(new_segment) - 1",
        _READERS,
    ),
    Fault(
        "token losses: the last run of a curve divides by a full run",
        "sizes = np.diff(np.append(starts, length))",
        "sizes = np.full(len(starts), tokens)",
        _READERS,
    ),
    Fault(
        "segments: the last token is read and has no label",
        "last = min(segment_length * (k + 1), num_tokens - 1)",
        "last = min(segment_length * (k + 1), num_tokens - 2)",
        _READERS,
    ),
    Fault(
        "documents: the rest of the queue is never written",
        "    if not released:\n        reader.write()\n",
        "    if not released:\n",
        _READERS,
    ),
    Fault(
        "needle: a depth of 100 % has no bin",
        "return min(int(depth / 100 * DEPTH_BINS), DEPTH_BINS - 1)",
        "return int(depth / 100 * DEPTH_BINS)",
        _NEEDLE,
    ),
    Fault(
        "stream reader: a new haystack keeps the old memory",
        "self._stream = self._start(jax.tree.map(jnp.copy, self._initial_memory))",
        'self._stream = self._start(jax.tree.map(jnp.copy, getattr(self, "_stream", self)'
        '.memory if hasattr(self, "_stream") else self._initial_memory))',
        _NEEDLE,
    ),
    Fault(
        "addressing: windows overlap",
        "        self._waiting = []\n\n    def means",
        "        self._waiting = self._waiting[1:]\n\n    def means",
        ("tests/evaluation/test_addressing.py",),
    ),
    Fault(
        "recall: frozen reads start from the written memory",
        "answer(first, tokens, write=write)",
        "answer(first if write else written, tokens, write=write)",
        ("tests/evaluation/test_recall.py",),
    ),
    Fault(
        "recall: a distance at a bound counts twice",
        "(found := score((distance > low) & (distance <= high)))",
        "(found := score((distance >= low) & (distance <= high)))",
        ("tests/evaluation/test_recall.py",),
    ),
    Fault(
        "LongBench: the first answer token is not scored",
        "first = num_context + len(sample.question) - 1",
        "first = num_context + len(sample.question)",
        ("tests/paper/evaluation/test_longbench.py",),
    ),
    Fault(
        "gates: a mean over histograms",
        "sums[name][layer] += float(gate.sum(dtype=np.float64))",
        "sums[name][layer] = float(gate.sum(dtype=np.float64))",
        ("tests/paper/evaluation/test_gates.py",),
    ),
)
