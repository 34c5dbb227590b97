"""Statistics of slot accesses over windows of segments (section D.3, Table 4 of the paper)."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from fwpkm_jax.core.slots.measures import AccessMeasures, access_measures


class AddressingWindows:
    """Collects slot reads segment by segment and measures every full window of segments."""

    def __init__(self, num_slots: int, *, segments: int):
        """Creates a collector without reads.

        Args:
          num_slots: number of slots of each memory layer.
          segments: segments per window; a window may span several documents.
        """
        self._num_slots = num_slots
        self._segments = segments
        self._waiting: list[Mapping[str, np.ndarray]] = []
        self._measured: dict[str, list[AccessMeasures]] = {}

    def add(self, slot_ids: Mapping[str, np.ndarray]) -> None:
        """Adds one segment's reads `[length, places]` of every memory layer."""
        self._waiting.append(slot_ids)
        if len(self._waiting) < self._segments:
            return
        for layer in slot_ids:
            window = np.concatenate([segment[layer].reshape(-1) for segment in self._waiting])
            measures = access_measures(jnp.asarray(window), self._num_slots)
            self._measured.setdefault(layer, []).append(measures)
        self._waiting = []

    def means(self) -> dict[str, dict[str, float]]:
        """Means over the full windows, by layer; the entry "mean" averages over layers.

        An incomplete last window is dropped. Without a full window the result is empty.
        """
        table = {
            layer: {
                name: float(np.mean([getattr(window, name) for window in windows]))
                for name in AccessMeasures._fields
            }
            | {"windows": len(windows)}
            for layer, windows in self._measured.items()
        }
        if table:
            table["mean"] = {
                name: float(np.mean([row[name] for row in table.values()]))
                for name in AccessMeasures._fields
            }
        return table
