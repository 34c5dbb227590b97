"""Saved memories whose files are damaged, whose processes are killed, whose disk is full."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from fwpkm_jax import memories
from fwpkm_jax.memories.file import FORMAT, checksum
from tests.memories.models import ONE, make_model, make_state
from tests.memories.test_memories import assert_same

ROOT = Path(__file__).parents[2]
WRITER = """
import sys
import jax
from fwpkm_jax import memories
from tests.memories.models import ONE, make_model, make_state
from tests.memories.test_memories import change
folder, name, first, times = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = make_model(ONE)
state = make_state(model)
print("ready", flush=True)
for number in range(first, first + times):
    try:
        memories.save(folder, name, change(state, *range(144), value=number), model=model)
    except (ValueError, OSError) as error:
        print("refused", error, flush=True)
        continue
    if number % 3 == 0:
        memories.fork(folder, name, f"{name}@{number}")
        memories.delete(folder, f"{name}@{number}")
    print("saved", number, flush=True)
"""


@pytest.fixture
def writer():
    """Starts a process that saves a memory with growing numbers; what runs at the end is killed."""
    running = []

    def start(folder, name="alice", first=1, times=10**6, command=()):
        arguments = (sys.executable, "-c", WRITER, folder, name, first, times)
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def number_in(folder, model, name="alice"):
    """The number of a writer's memory; all rows hold the same one."""
    values = memories.load(folder, name, model).stream.memory["layer_0"].values
    (number,) = np.unique(values)
    return int(number)


def write_with_right_checksum(path, values):
    """Fills arrays of a memory's file, as anybody can who knows the format."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = json.loads(content[8 : 8 + length])["__metadata__"]["facts"]
    arrays = load(content)
    for name, value in values.items():
        arrays[name] = np.full_like(arrays[name], value)
    metadata = {"format": FORMAT, "checksum": checksum(arrays, text), "facts": text}
    path.unlink()  # It may have a second name.
    path.write_bytes(save(arrays, metadata))


def test_a_damaged_memory_or_base_is_refused_by_name(fault, tmp_path):
    model = make_model(ONE)
    state = make_state(model)
    memories.save(tmp_path, "alice", state, model=model)
    memories.fork(tmp_path, "alice", "bob")
    path, (base,) = tmp_path / "alice.safetensors", (tmp_path / "bases").glob("*.safetensors")
    assert path.samefile(base)
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    damaged = [whole[:at] for at in (0, 7, 40, header + 8, len(whole) - 1)]
    # The header's own words and shapes, the metadata, and the arrays.
    for at in [*rng.integers(0, 8 + header, 60), *rng.integers(8 + header, len(whole), 20)]:
        flipped = bytes([whole[at] ^ (1 << int(rng.integers(8)))])
        damaged.append(whole[:at] + flipped + whole[at + 1 :])
    named = r"[0-9a-z]+\.safetensors.*; delete it, or put back a copy\.$"
    with fault("a cut or flipped file of a memory, also as a fork's base", 2 * len(damaged)):
        for content in damaged:
            path.write_bytes(content)  # Through the base's name, too: it is the same file.
            for name in ("alice", "bob"):
                with pytest.raises(ValueError, match=named):
                    memories.load(tmp_path, name, model)
        path.write_bytes(whole)
        assert_same(memories.load(tmp_path, "bob", model), state)
    with fault("a fork's base that is replaced or removed", 2):
        memories.save(tmp_path, "carol", make_state(model, seed=7), model=model)
        base.unlink()
        base.write_bytes((tmp_path / "carol.safetensors").read_bytes())
        with pytest.raises(ValueError, match=r"[0-9a-z]+\.safetensors is another memory than"):
            memories.load(tmp_path, "bob", model)
        base.unlink()
        lost = r"bob.safetensors needs its base, a former 'alice', which is missing"
        with pytest.raises(ValueError, match=lost):
            memories.load(tmp_path, "bob", model)
        memories.save(tmp_path, "bob", state, model=model)  # Whole, without its base.
        assert_same(memories.load(tmp_path, "bob", model), state)


@pytest.mark.parametrize(
    ("array", "value"),
    [
        ("stream/layers/layer_0/pending/num_waiting", 2**31 - 1),  # Would write for ever.
        ("stream/layers/layer_0/pending/num_waiting", -1),
        ("num_read", -1),
        ("num_read", 2**31 - 1),
    ],
)
def test_a_count_out_of_range_is_refused_though_the_checksum_is_right(
    fault, tmp_path, array, value
):
    model = make_model(ONE)
    memories.save(tmp_path, "alice", make_state(model), model=model)
    path = tmp_path / "alice.safetensors"
    with fault("a count of a saved memory that lies"):
        write_with_right_checksum(path, {array: value})
        with pytest.raises(ValueError, match=rf"alice\.safetensors, {array} is out of range"):
            memories.load(tmp_path, "alice", model)
        write_with_right_checksum(path, {array: 0})
        memories.load(tmp_path, "alice", model)


@pytest.mark.slow
def test_a_memory_whose_process_is_killed_is_the_last_one_saved(fault, writer, tmp_path):
    model, rng, times = make_model(ONE), random.Random(0), 20
    first = 1
    with fault("`kill -9` while a memory is saved or forked", times):
        for _ in range(times):
            process = writer(tmp_path, first=first)
            assert process.stdout.readline() == "ready\n"
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            said, errors = process.communicate()
            assert not errors
            last = [int(line.split()[1]) for line in said.splitlines() if line.startswith("saved")]
            last = last[-1] if last else first
            assert number_in(tmp_path, model) in (last, last + 1)
            first = last + 2
        points = set(memories.names(tmp_path)) - {"alice"}
        assert all(number_in(tmp_path, model, name) for name in points)


@pytest.mark.slow
def test_of_two_processes_that_save_one_name_none_is_mixed(fault, writer, tmp_path):
    model, times = make_model(ONE), 100
    with fault("two processes that save one memory", 2 * times):
        pair = [writer(tmp_path, first=first, times=times) for first in (1, 1000)]
        saved = set()
        for process in pair:
            said, errors = process.communicate()
            assert (process.returncode, errors) == (0, "")
            lines = said.splitlines()[1:]
            assert len(lines) == times
            saved |= {int(line.split()[1]) for line in lines if line.startswith("saved")}
            refused = [line for line in lines if line.startswith("refused")]
            assert all("The memory 'alice" in line for line in refused)
            assert all("is in use by" in line for line in refused)
        assert number_in(tmp_path, model) in saved


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [4, 20, 40])
def test_a_full_disk_leaves_the_memory_that_was_saved(fault, tmp_path, kilobytes):
    """From a disk on which nothing fits to one that holds some saves and no more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    write = '"$PYTHON" -c "$WRITER" $DISK/m alice'
    script = (
        f"mount -t tmpfs -o size={kilobytes}k none $DISK; {write} 1 3;"
        "dd if=/dev/zero of=$DISK/filler 2>/dev/null || true;"
        f"{write} 4 3; echo with room; mount -o remount,size=100m $DISK; {write} 7 3;"
        "cp -a $DISK/m $OUT/m"
    )
    try:
        subprocess.run(["unshare", "-Urm", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"This system lets no one mount in a namespace of their own: {error}")
    with fault("a full disk while a memory is saved, then room again"):
        done = subprocess.run(
            ["unshare", "-Urm", "bash", "-euc", script],
            cwd=ROOT,
            env={
                **os.environ,
                "DISK": str(disk),
                "OUT": str(tmp_path),
                "PYTHON": sys.executable,
                "WRITER": WRITER,
                "PYTHONPATH": str(ROOT),
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        full, _, room = done.stdout.partition("with room")
        refused = [line for line in full.splitlines() if line.startswith("refused")]
        assert refused
        assert all("No space left on device" in line for line in refused), refused
        assert "saved 9" in room
        assert number_in(tmp_path / "m", make_model(ONE)) == 9
