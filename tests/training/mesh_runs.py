"""Trains tiny models over simulated devices, in a process of its own.

    python -m tests.training.mesh_runs OUT.json NAME [NAME ...]
    python -m tests.training.mesh_runs OUT.json loop
    python -m tests.training.mesh_runs OUT.json [NAME ...] restore restore_all padding

The number of devices is fixed before JAX starts. Writes each run's losses, the sum of every array
of its last state, and what its compiled step sends.
"""

import os
import sys

from tests.training import mesh_flags

os.environ.update(mesh_flags.environment(8))

import dataclasses
import functools
import io
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.compiled.collectives import collectives
from fwpkm_jax.core.slots.options.retention import Retention
from fwpkm_jax.layers.experts import ExpertsConfig
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.layers.lora import LoRAConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig
from fwpkm_jax.layers.mixers.titans import TitansConfig
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.remat import Remat
from fwpkm_jax.rules import SDM, FwPKM
from fwpkm_jax.rules.fwpkm import FwPKMInfo
from fwpkm_jax.run.train import train as run_loop
from fwpkm_jax.training.optimizer import OptimizerConfig, make_optimizer
from fwpkm_jax.training.sharding import (
    make_partition,
    put_batch,
    state_shardings,
)
from fwpkm_jax.training.state import (
    MemoryConfig,
    init_state,
    model_graph,
    named_leaves,
)
from fwpkm_jax.training.step import make_train_step
from tests.training import mesh_restores
from tests.training.tiny_config import get_config

FwPKMInfo.logged = FwPKMInfo._fields  # Also the norm of the write, a sum over devices.

SUBKEYS, STEPS, BATCH, LENGTH = 12, 2, 8, 16


def small_model() -> ModelConfig:
    """One layer: attention, and a memory of 144 slots."""
    model = get_config().model
    rule = dataclasses.replace(model.fast_weight.rule, num_subkeys=SUBKEYS)
    return dataclasses.replace(
        model,
        mixers=("swa",),
        attention=dataclasses.replace(model.attention, num_heads=4, num_kv_heads=2),
        memory_layers=(0,),
        fast_weight=dataclasses.replace(model.fast_weight, rule=rule),
        tie_embeddings=True,
    )


def updated_model() -> ModelConfig:
    """The same with low-rank updates of maps that are split along either axis."""
    return dataclasses.replace(small_model(), lora=LoRAConfig(maps=(".*/[qo]_proj",), rank=2))


def whole_model() -> ModelConfig:
    """A layer of each kind."""
    return dataclasses.replace(
        small_model(),
        mixers=("gdn", "attention", "lact"),
        gdn=GatedDeltaNetConfig(
            num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=4, chunk_size=8
        ),
        lact=dataclasses.replace(
            get_config().model.lact, num_heads=2, num_fast_heads=2, hidden_dim=4, low_rank=2,
            window=8, chunk_size=8,
        ),
        memory_layers=(0, 1),
        pkm_layers=(1,),
        pkm=PKMConfig(num_subkeys=SUBKEYS, key_dim=8, value_dim=8, num_heads=2, top_k=2),
        tie_embeddings=False,
        head_bias=True,
    )  # fmt: skip


def family_model() -> ModelConfig:
    """The rest of the family: matrix memories, Titans' variants, a Fast Weight Layer, retention."""
    small = small_model()
    retention = Retention(hardening=0.5, relocation=1.0)
    rule = dataclasses.replace(small.fast_weight.rule, retention=retention)
    return dataclasses.replace(
        small,
        mixers=("gated_deltanet", "titans_mac", "titans_mag"),
        matrix=MatrixMemoryConfig(
            num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=4
        ),
        titans=TitansConfig(
            num_heads=1, head_dim=small.model_dim, depth=1, chunk_size=8, num_persistent=2
        ),
        fast_weight=dataclasses.replace(small.fast_weight, rule=rule),
        pkm_layers=(1,),
        pkm=PKMConfig(
            num_subkeys=SUBKEYS, key_dim=8, value_dim=8, num_heads=2, top_k=2,
            query_norm=False, query_batch_norm=True,
        ),
        fast_weight_layer=FastWeightLayerConfig(hidden_dim=8, chunk_size=8),
    )  # fmt: skip


def documents_model() -> ModelConfig:
    """Each kind of layer that splits its heads, a batch norm, and a Fast Weight Layer."""
    return dataclasses.replace(
        family_model(), mixers=("attention", "gdn", "mlstm"), gdn=whole_model().gdn
    )


def imported_model() -> ModelConfig:
    """What models of other programs need: experts, biases, other norms and scales, no gates."""
    whole = whole_model()
    attention = dataclasses.replace(
        whole.attention, gated=False, qk_norm="all", norm_offset=False, bias=True,
        output_bias=False, score_dim=5,
    )  # fmt: skip
    return dataclasses.replace(
        whole,
        mixers=("gdn", "attention", "swa"),
        attention=attention,
        pkm_layers=(),
        expert_layers=(0, 2),
        experts=ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8, shared_dim=8),
        post_norm_layers=(1,),
        sandwich_norm_layers=(2,),
        embedding_scale=3.0,
        mlp_bias=True,
        norm_offset=False,
    )


def parts_model() -> ModelConfig:
    """Layers that take parts of sequences: attention, a window, matrix memories, PKM, experts."""
    return dataclasses.replace(
        documents_model(),
        mixers=("attention", "swa", "gdn", "mlstm"),
        window=5,
        memory_layers=(),
        fast_weight_layer=None,
        pkm=whole_model().pkm,
        expert_layers=(2,),
        experts=ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8, shared_dim=8),
    )


def turns_model() -> ModelConfig:
    """Layers whose memory goes from device to device, and a table that devices share."""
    family = family_model()
    return dataclasses.replace(
        family,
        mixers=("titans_mal", "lact", "swa"),
        lact=whole_model().lact,
        titans=dataclasses.replace(family.titans, num_persistent=0),
        memory_layers=(1,),
        fast_weight=small_model().fast_weight,
    )


def delta_model() -> ModelConfig:
    """A memory that the delta rule writes token by token, with a learned start."""
    small = small_model()
    rule = SDM(num_subkeys=SUBKEYS, value_dim=8, num_writes=4, num_reads=4, first_table="learned")
    return dataclasses.replace(small, fast_weight=dataclasses.replace(small.fast_weight, rule=rule))


def many_slots() -> ModelConfig:
    """16.8 million narrow slots."""
    rule = FwPKM(num_subkeys=4096, key_dim=8, value_dim=4, top_k=4)
    model = small_model()
    return dataclasses.replace(
        model, fast_weight=dataclasses.replace(model.fast_weight, rule=rule, chunk_size=8)
    )


class Run(NamedTuple):
    """A model on a mesh."""

    mesh: MeshConfig
    groups: int
    model: Any = small_model
    micro_batches: int = 1
    lifetime: Any = "carried"
    remat: Remat | None = None
    documents: bool = False
    optimizer: OptimizerConfig | None = None


def _mesh(
    data: int, fsdp: int, model: int, memory: Any = "independent", sequence: int = 1
) -> MeshConfig:
    return MeshConfig(data=data, fsdp=fsdp, model=model, memory=memory, sequence=sequence)


_EMA = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, ema=0.9)
_FREE = OptimizerConfig(
    learning_rate=1e-2, warmup_steps=0, schedule="constant", name="schedule_free"
)

RUNS = {
    "one": Run(_mesh(1, 1, 1), 4, updated_model),
    "independent": Run(_mesh(2, 2, 1), 4, updated_model),
    "columns": Run(_mesh(2, 2, 2, "columns"), 4, updated_model),
    "slots": Run(_mesh(1, 2, 1, "slots"), 4, updated_model),
    "whole": Run(_mesh(1, 1, 1), 8, whole_model),
    "whole_data": Run(_mesh(8, 1, 1), 8, whole_model),
    "whole_fsdp": Run(_mesh(1, 8, 1), 8, whole_model),
    "whole_tensor": Run(_mesh(2, 2, 2), 8, whole_model, remat="block"),
    "split": Run(_mesh(1, 1, 1), 4, whole_model),
    "split_columns": Run(_mesh(2, 2, 2, "columns"), 4, whole_model),
    "split_slots": Run(_mesh(2, 2, 2, "slots"), 4, whole_model),
    "shared": Run(_mesh(1, 1, 1), 1, whole_model),
    "shared_columns": Run(_mesh(1, 4, 2, "columns"), 1, whole_model),
    "shared_slots": Run(_mesh(1, 4, 2, "slots"), 1, whole_model),
    "batch": Run(_mesh(1, 1, 1), 4, micro_batches=2, lifetime="batch"),
    "batch_columns": Run(_mesh(2, 2, 1, "columns"), 4, micro_batches=2, lifetime="batch"),
    "batch_independent": Run(_mesh(2, 1, 2), 4, micro_batches=2, lifetime="batch"),
    "family": Run(_mesh(1, 1, 1), 8, family_model),
    "family_data": Run(_mesh(8, 1, 1), 8, family_model),
    "family_tensor": Run(_mesh(2, 2, 2), 8, family_model),
    "documents": Run(_mesh(1, 1, 1), 8, documents_model, documents=True),
    "documents_tensor": Run(_mesh(2, 2, 2), 8, documents_model, documents=True, remat="block"),
    "imported": Run(_mesh(1, 1, 1), 8, imported_model),
    "imported_fsdp": Run(_mesh(1, 8, 1), 8, imported_model),
    "imported_tensor": Run(_mesh(2, 2, 2), 8, imported_model),
    "parts": Run(_mesh(1, 1, 1), 8, parts_model, documents=True),
    "parts_eight": Run(_mesh(1, 1, 1, sequence=8), 8, parts_model, documents=True),
    "parts_data": Run(_mesh(2, 1, 1, sequence=4), 8, parts_model, documents=True),
    "parts_tensor": Run(_mesh(1, 2, 2, sequence=2), 8, parts_model, documents=True, remat="block"),
    "one_columns": Run(_mesh(1, 2, 2, "columns", sequence=2), 4, updated_model),
    "turns": Run(_mesh(1, 1, 1), 8, turns_model, documents=True),
    "turns_two": Run(_mesh(2, 2, 1, sequence=2), 8, turns_model, documents=True, remat="block"),
    "delta": Run(_mesh(1, 1, 1), 8, delta_model, lifetime="batch"),
    "delta_columns": Run(_mesh(2, 1, 2, "columns"), 8, delta_model, lifetime="batch"),
    "ema": Run(_mesh(1, 1, 1), 2, optimizer=_EMA),
    "ema_two": Run(_mesh(1, 2, 1), 2, optimizer=_EMA),
    "free": Run(_mesh(1, 1, 1), 2, optimizer=_FREE),
    "free_two": Run(_mesh(1, 2, 1), 2, optimizer=_FREE),
    "many": Run(_mesh(1, 1, 1), 1, many_slots),
    "many_slots": Run(_mesh(1, 8, 1, "slots"), 1, many_slots),
}


def train(run: Run) -> dict[str, Any]:
    """Trains a few steps of a run."""
    model = run.model()
    partition = make_partition(run.mesh, jax.devices()[: run.mesh.num_devices])
    memory = MemoryConfig(groups=run.groups, lifetime=run.lifetime)
    of_run = run.optimizer or OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    optimizer = make_optimizer(of_run, steps=10)

    def init():
        return init_state(model, memory=memory, optimizer=optimizer, seed=0)

    layout = None
    if partition is not None:
        shapes, graphdef = jax.eval_shape(init), model_graph(model)
        layout = state_shardings(partition, shapes, graphdef=graphdef)
    state = jax.jit(init, out_shardings=layout)()
    step = make_train_step(
        model_graph(model),
        optimizer,
        schedule=lambda count: 0.0,
        micro_batches=run.micro_batches,
        memory=memory,
        loss_block=16,
        remat=run.remat,
        partition=partition,
    )
    random = np.random.default_rng(0)
    compiled, losses = None, []
    for _ in range(STEPS):
        arrays = {
            "tokens": random.integers(0, 12, (BATCH, LENGTH + 1), dtype=np.int32),
            "loss_weight": random.uniform(0, 1, (BATCH, LENGTH)).astype(np.float32),
        }
        if run.documents:  # The ends of rows are padding.
            starts = random.uniform(size=(BATCH, LENGTH)) < 0.2
            ids = np.where(np.arange(LENGTH) < LENGTH - 3, 1 + np.cumsum(starts, axis=1), 0)
            arrays["segment_ids"] = ids.astype(np.int32)
            arrays["loss_weight"] *= ids != 0
        batch = put_batch(partition, arrays)
        if compiled is None:
            compiled = step.lower(state, batch).compile()
        state, metrics = compiled(state, batch)
        losses.append({name: float(x) for name, x in metrics.items()})
    assert compiled is not None
    arrays = {"params": state.params, "memory": state.memory}
    if run.optimizer is not None:
        arrays["optimizer"] = state.opt_state
    parts = {
        name: [list(shard.data.shape) for shard in leaf.addressable_shards]
        for name, leaf in named_leaves(arrays).items()
    }
    return {
        "losses": losses,
        "sizes": {name: _norm(leaf) for name, leaf in named_leaves(arrays).items()},
        "parts": {name: shapes[0] for name, shapes in parts.items()},
        "sent": [
            [one.kind, one.times, [shape.dims for shape in one.results]]
            for one in collectives(compiled.as_text())
        ],
    }


def through_the_loop(out: Path) -> dict[str, Any]:
    """`metrics.jsonl` of runs of 4 steps: stopped after 2 and resumed, unbroken, on one device."""
    tiny = get_config()
    records = {}
    for name, mesh, stops in (
        ("resumed", _mesh(2, 4, 1, "columns"), (2, 4)),
        ("unbroken", _mesh(2, 4, 1, "columns"), (4,)),
        ("one", MeshConfig(), (4,)),
    ):
        directory = out.parent / name
        for steps in stops:
            experiment = dataclasses.replace(
                tiny,
                mesh=mesh,
                run_dir=str(directory),
                optimizer=dataclasses.replace(tiny.optimizer, decay_steps=4),
                training=dataclasses.replace(tiny.training, steps=steps, batch_size=8),
            )
            run_loop(experiment, stream=io.StringIO())
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        records[name] = [json.loads(line) for line in lines]
    return records


def padding() -> dict[str, float]:
    """How far padding and memories of single documents move outputs over devices from those of one.

    In `norms` of the outputs, of the memories and of the gradients. Both `parts` have padding in
    sequences of which each device holds a part.
    """
    small = small_model()
    model = dataclasses.replace(
        small,
        mixers=("swa", "gdn"),
        gdn=whole_model().gdn,
        fast_weight=dataclasses.replace(small.fast_weight, documents="document"),
        fast_weight_layer=FastWeightLayerConfig(hidden_dim=8, chunk_size=8),
    )
    carried = dataclasses.replace(model.fast_weight, documents="carry")
    carrying = nnx.split(
        LanguageModel(dataclasses.replace(model, fast_weight=carried), rngs=nnx.Rngs(0))
    )[0]
    graphdef, params = nnx.split(LanguageModel(model, rngs=nnx.Rngs(0)))
    memory = nnx.merge(graphdef, params).init_memory(jax.random.key(0), groups=BATCH)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 12, (BATCH, LENGTH), dtype=np.int32)
    mask = (random.uniform(size=tokens.shape) < 0.8).astype(np.float32)
    ids = 1 + np.cumsum(random.uniform(size=tokens.shape) < 0.2, axis=1, dtype=np.int32)

    def run(graphdef, partition, params, memory, segment_ids):
        def loss(params):
            model = nnx.merge(graphdef, params)
            out = model.hidden(
                tokens, memory, mask=mask, segment_ids=segment_ids, partition=partition
            )
            x = out.x.astype(jnp.float32) * mask[..., None]
            return jnp.sum(jnp.sin(x)), (x, out.memory)

        gradient, out = jax.grad(loss, has_aux=True)(params)
        return gradient, *out

    by_rows = make_partition(_mesh(2, 2, 1), jax.devices()[:4])
    by_parts = make_partition(_mesh(2, 1, 1, sequence=2), jax.devices()[:4])
    moved = {}
    for name, segment_ids, graph, partition in (
        ("mask", None, graphdef, by_rows),
        ("documents", ids, graphdef, by_rows),
        ("parts", ids, carrying, by_parts),
        ("own_parts", ids, graphdef, by_parts),
    ):
        runs = (jax.jit(functools.partial(run, graph, p)) for p in (None, partition))
        found = [f(params, memory, segment_ids) for f in runs]
        for part, ours, theirs in zip(("gradients", "x", "memory"), *found, strict=True):
            size = math.sqrt(sum(_norm(x) ** 2 for x in jax.tree.leaves(theirs)))
            apart = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), ours, theirs)
            apart = math.sqrt(sum(_norm(x) ** 2 for x in jax.tree.leaves(apart)))
            moved[f"{name}/{part}"] = apart / size
    return moved


def result_of(name: str, directory: Path) -> Any:
    """A run's result, or that of saving and restoring over other meshes."""
    if name == "padding":
        return padding()
    if name == "restore":
        return mesh_restores.restores(small_model(), directory, mesh_restores.SOME)
    if name == "restore_all":
        return mesh_restores.restores(whole_model(), directory, mesh_restores.ALL)
    return train(RUNS[name])


def _norm(x: jax.Array) -> float:
    return float(math.sqrt(np.sum(np.square(np.asarray(x), dtype=np.float64))))


if __name__ == "__main__":
    out, *names = sys.argv[1:]
    if names == ["loop"]:
        results = through_the_loop(Path(out))
    else:
        results = {name: result_of(name, Path(out).parent) for name in names}
    Path(out).write_text(json.dumps(results))
