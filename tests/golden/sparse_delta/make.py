"""Writes this folder's arrays: `python -m tests.golden.sparse_delta.make`, from the root.

Each file holds inputs in the names of `fwpkm_jax.functions.sparse_delta` (weights, values and gates
float32) and, in float64, what NumPy makes of them with a loop over tokens and slots: outputs, the
last table, and the gradients of their sum weighted by `co` and `ct`, by complex steps.
"""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
ROWS, SLOTS, VALUE = 2, 6, 3
CASES = {
    "slot": {"length": 11, "writes": 3, "reads": 4},
    "weighted": {"length": 11, "writes": 4, "reads": 2},
    "padded": {"length": 9, "writes": 2, "reads": 2},
}
"""By file: its sizes; `decay` is "weighted" in the file of that name."""
IDS = ("write_ids", "read_ids")


def inputs_of(name: str) -> dict[str, np.ndarray]:
    """Slots repeat within tokens and chunks; "padded" has tokens of no decay and no strength."""
    sizes, rng = CASES[name], np.random.default_rng(sorted(CASES).index(name))
    length = sizes["length"]

    def weights(places):
        scores = np.exp(rng.normal(size=(ROWS, length, places)))
        return scores / scores.sum(-1, keepdims=True)

    real = np.ones((ROWS, length))
    if name == "padded":
        real[0, 3:5] = real[1, 6:] = 0
    floats = {
        "table": rng.normal(size=(ROWS, SLOTS, VALUE)),
        "write_weights": weights(sizes["writes"]),
        "read_weights": weights(sizes["reads"]),
        "v": rng.normal(size=(ROWS, length, VALUE)),
        "g": -real * rng.exponential(size=(ROWS, length)) ** 2,
        "beta": real * rng.uniform(size=(ROWS, length)),
        "co": rng.normal(size=(ROWS, length, VALUE)),
        "ct": rng.normal(size=(ROWS, SLOTS, VALUE)),
    }
    ids = {
        name: rng.integers(0, SLOTS, (ROWS, length, sizes[f"{name[:-4]}s"])).astype(np.int32)
        for name in IDS
    }
    return {name: x.astype(np.float32) for name, x in floats.items()} | ids


def run(given: dict[str, np.ndarray], *, weighted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and the last tables, in float64, or complex where an input is."""
    table = given["table"].copy()
    output = np.zeros(given["v"].shape, np.result_type(*(given[n] for n in given if n not in IDS)))
    table = table.astype(output.dtype)
    for row, token in np.ndindex(given["g"].shape):
        at = {name: x[row, token] for name, x in given.items() if name not in ("table", "co", "ct")}
        memory, places = table[row], {}
        for slot, weight in zip(at["write_ids"], at["write_weights"], strict=True):
            places[slot] = places.get(slot, 0) + weight
        for slot, weight in places.items():
            memory[slot] = np.exp(at["g"] * (weight if weighted else 1)) * memory[slot]
        error = at["v"] - sum(weight * memory[slot] for slot, weight in places.items())
        for slot, weight in places.items():
            memory[slot] = memory[slot] + weight * at["beta"] * error
        reads = zip(at["read_ids"], at["read_weights"], strict=True)
        output[row, token] = sum(weight * memory[slot] for slot, weight in reads)
    return output, table


def results(name: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a file holds besides its inputs."""
    weighted = name == "weighted"
    exact = {n: x if n in IDS else x.astype(np.float64) for n, x in given.items()}
    output, table = run(exact, weighted=weighted)
    found = {"output": output, "last_table": table}
    for name, x in exact.items():
        if name in (*IDS, "co", "ct"):
            continue
        gradient = np.zeros(x.shape)
        for place in np.ndindex(x.shape):
            moved = x.astype(np.complex128)
            moved[place] += 1e-30j
            ours = run({**exact, name: moved}, weighted=weighted)
            gradient[place] = sum(
                np.sum(c * y.imag) for c, y in zip((exact["co"], exact["ct"]), ours, strict=True)
            )
        found[f"g:{name}"] = gradient / 1e-30
    return found


def main() -> None:
    for name in CASES:
        given = inputs_of(name)
        np.savez_compressed(FOLDER / f"{name}.npz", **given, **results(name, given))


if __name__ == "__main__":
    main()
