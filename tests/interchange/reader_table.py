"""How far exported models in PyTorch are from this package, for docs/howto/open_models.md.

    python -m tests.interchange.reader_table

Needs torch and transformers. The models are those of `test_pytorch`: a batch of two sequences of
300 tokens, one with padding in front, each with a memory of its own, read at once. Differences are
shares of the largest number; texts are 8 greedy tokens of each sequence.
"""

import tempfile
from pathlib import Path

from tests.interchange.exported_models import export, loading_in_pytorch, streamed
from tests.interchange.test_pytorch import (
    CASES,
    NEW,
    PROMPT,
    a_batch,
    a_batch_with_text,
    difference,
    fast_weights,
    greedy,
    in_float64,
    model_of,
    read_in_pieces,
)


def differences(lm, model, weights, tokens, mask, *, wide):
    """Of logits and of rows, and the logits that this package computes."""
    logits, _ = read_in_pieces(lm, tokens, mask, [])
    expected, stream = streamed(model, weights, tokens, mask, groups=2, wide=wide)
    rows = max(difference(*pair) for _, *pair in fast_weights(lm.memory_state(), stream))
    return (difference(logits[mask > 0], expected[mask > 0]), rows), expected


def line(name, folder, load):
    """A model's row of the table."""
    model = model_of(name)
    weights = export(model, folder)
    lm = load(folder / "out")
    tokens, mask = a_batch_with_text(name, lm)
    narrow, expected = differences(lm, model, weights, tokens, mask, wide=False)
    same = int((tokens[:, PROMPT : PROMPT + NEW] == greedy(expected)).sum())
    eager = {"experts_implementation": "eager"} if name.endswith("moe") else {}
    with in_float64(load(folder / "out", **eager)) as lm:
        wide, _ = differences(lm, model, weights, *a_batch(), wide=True)
    cells = [f"{x:.0e}" for x in (*narrow, *wide)]
    return f"| {' | '.join([f'`{name}`', *cells, f'{same} of {2 * NEW}'])} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as place, loading_in_pytorch(Path(place) / "m") as load:
        for name in CASES:
            print(line(name, Path(place) / name, load), flush=True)


if __name__ == "__main__":
    main()
