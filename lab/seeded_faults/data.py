"""Faults in `fwpkm_jax.data`."""

from lab.seeded_faults.fault import Fault

_TEXT = ("tests/data/test_text.py", "tests/data/test_documents.py")

FAULTS = (
    Fault(
        "recall: the label after the answer counts",
        "loss_weight[questions] = 1",
        "loss_weight[questions - 1] = 1",
        ("tests/data/test_recall.py",),
    ),
    Fault(
        "recall: distances to other facts",
        "questions - stated[asked]",
        "questions - stated[: len(asked)]",
        ("tests/data/test_recall.py",),
    ),
    Fault(
        "recall: training and validation share documents",
        "np.random.SeedSequence(self._seed, spawn_key=(self._stream, index))",
        "np.random.SeedSequence(self._seed, spawn_key=(0, index))",
        ("tests/data/test_recall.py",),
        under="fwpkm_jax/data/recall.py",
    ),
    Fault(
        "packing: a short last row is kept",
        "return self.num_tokens // self._row",
        "return -(-self.num_tokens // self._row)",
        ("tests/data/test_packing.py",),
    ),
    Fault(
        "packing: the rest of a document is dropped",
        "self._pending = tokens[whole:]",
        "self._pending = tokens[:0]",
        ("tests/data/prepare/test_job.py",),
    ),
    Fault(
        "batches: a resumed run starts again",
        'self._started().set_state({n: x for n, x in state.items() if n != "source"})',
        "self._started()",
        ("tests/data/test_batches.py",),
    ),
    Fault(
        "batches: a process takes the first rows",
        "batch * self._batch_size + self._rows[place]",
        "batch * self._batch_size + place",
        ("tests/data/test_batches.py",),
    ),
    Fault(
        "text: documents without their end",
        "tokens = np.concatenate([tokens, eos])",
        "tokens = np.concatenate([tokens])",
        (*_TEXT, "tests/data/test_streams.py"),
    ),
    Fault(
        "text: every row hides the same needles",
        "spawn_key=(_NEEDLES, index)",
        "spawn_key=(_NEEDLES, 0)",
        (*_TEXT, "tests/data/test_needles.py"),
    ),
    Fault(
        "text: the weights given are ignored",
        "weights = config.train_weights or tuple(float(len(rows)) for rows in sources)",
        "weights = tuple(float(len(rows)) for rows in sources)",
        _TEXT,
    ),
    Fault(
        "documents: errors name the wrong line",
        "\n        number, byte = number + 1, byte + len(line)",
        "\n            number, byte = number + 1, byte + len(line)",
        _TEXT,
    ),
    Fault(
        "needles: the answer's weight one byte early",
        "weight[start : start + self.value_digits] = self.answer_weight",
        "weight[start - 1 : start - 1 + self.value_digits] = self.answer_weight",
        ("tests/data/test_needles.py",),
    ),
)
