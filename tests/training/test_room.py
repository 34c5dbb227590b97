"""What a run needs of its devices' memory is told, and refused where it cannot be there."""

import dataclasses

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fwpkm_jax.run import room
from fwpkm_jax.run import setup as parts
from fwpkm_jax.training.checkpoints.checkpoint import item_bytes
from tests.training.tiny_config import get_config


def needed(setup):
    """Bytes of state and gradients on one device that has all of them."""
    sizes = item_bytes(setup.shapes)
    return sum(sizes.values()) + sizes["params"]


def give(monkeypatch, size, devices=1):
    monkeypatch.setattr(room, "device_bytes", lambda found: size * devices)


@pytest.mark.thorough
def test_state_and_gradients_must_fit_a_device_and_activations_are_told(monkeypatch):
    experiment = get_config()
    setup = parts.make_setup(experiment)
    give(monkeypatch, needed(setup))
    parts.make_setup(experiment)
    layout = parts.state_layout(setup)
    said = room.describe_memory(experiment, setup.shapes, layout, jax.devices()[:1])
    assert "It may not fit: " in said
    give(monkeypatch, 10 * needed(setup))
    said = room.describe_memory(experiment, setup.shapes, layout, jax.devices()[:1])
    assert "fit" not in said
    give(monkeypatch, needed(setup) - 1)
    with pytest.raises(ValueError, match=r"takes .* gradients .* of each device, which has"):
        parts.make_setup(experiment)
    # Each gradient may be used and dropped before the next one is there.
    one_by_one = dataclasses.replace(experiment.optimizer, clip_norm=None)
    parts.make_setup(dataclasses.replace(experiment, optimizer=one_by_one))


def test_a_device_must_hold_its_copy_or_its_part(monkeypatch):
    experiment = get_config()
    setup = parts.make_setup(experiment)
    mesh = AbstractMesh((2,), ("parts",))
    copies = jax.tree.map(lambda _: NamedSharding(mesh, P()), setup.shapes)

    def half(x):
        return NamedSharding(mesh, P("parts") if x.shape and x.shape[0] % 2 == 0 else P())

    shares = jax.tree.map(half, setup.shapes)
    give(monkeypatch, needed(setup) * 3 // 4, devices=2)
    room.check_memory(experiment, setup.shapes, shares, jax.devices()[:1] * 2)
    with pytest.raises(ValueError, match=r"of each device, which has"):
        room.check_memory(experiment, setup.shapes, copies, jax.devices()[:1] * 2)
