"""Misuses of the library, each answered by one line: see `docs/reference/misuse.md`."""

import contextlib
import dataclasses
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from fwpkm_jax import memories
from fwpkm_jax.cli import main
from fwpkm_jax.cli.memories_command import MemoriesOptions, carried_out
from fwpkm_jax.config import load_config
from fwpkm_jax.core.cross_entropy import linear_cross_entropy
from fwpkm_jax.core.recurrence.gated_delta import chunk_gated_delta_rule
from fwpkm_jax.core.slots.keys.addressing import product_top_k
from fwpkm_jax.core.slots.values.table import slot_read
from fwpkm_jax.evaluation.readers.devices import check_one_stream
from fwpkm_jax.generation import generate, init_generation
from fwpkm_jax.layers.lora import LoRAConfig
from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.layers.mixers.attention import Attention, AttentionConfig
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.layers.pkm import PKM, PKMConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.rules import FwMLP, FwPKM
from fwpkm_jax.rules.matrix import MATRIX_RULES
from fwpkm_jax.rules.matrix.base import Tokens
from fwpkm_jax.run.conversation import Conversation
from fwpkm_jax.run.setup import check_chunk_size, check_documents
from fwpkm_jax.storage.lock import Lock
from fwpkm_jax.training.state import MemoryConfig
from tests.memories.models import ONE, make_model, make_state

BATCH, LENGTH, MODEL = 2, 8, 6
RULE = FwPKM(num_subkeys=4, key_dim=6, value_dim=5, top_k=2)
CONFIG = FastWeightConfig(rule=RULE, chunk_size=4)
DECODER = ModelConfig(
    vocab_size=17,
    model_dim=MODEL,
    mixers=("swa",),
    mlp_dim=8,
    memory_layers=(0,),
    window=4,
    attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=4, rotary_fraction=0.5),
    fast_weight=CONFIG,
    activation_dtype="float32",
)


class Misuse(NamedTuple):
    """What a user does, in words and in code; the code raises or prints the message."""

    what: str
    call: Callable[[], Any]


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def sequence(rule: Any = RULE, **changes: Any) -> Any:
    signals = {"query": zeros(BATCH, LENGTH, 1, 6), "value": zeros(BATCH, LENGTH, 5)}
    return rule.sequence(**{**signals, "chunk_size": 4, **changes})


def memory(rule: Any = RULE, groups: int | None = None) -> Any:
    one = rule.init(jax.random.key(0))
    return one if groups is None else jax.tree.map(lambda x: jnp.stack([x] * groups), one)


def overlay(rule: Any = RULE, capacity: int = 4) -> Any:
    base = memory(rule, groups=1)
    return rule.overlay(base, base, capacity=capacity)


def layer() -> FastWeight:
    return FastWeight(CONFIG, MODEL, rngs=nnx.Rngs(0))


def call_layer(x: Any, written: Any = None, **options: Any) -> Any:
    return layer()(x, memory(groups=1) if written is None else written, **options)


def stream_layer(x: Any, groups: int = 1, **options: Any) -> Any:
    pending = layer().init_pending(BATCH, 1, max_chunk_size=4, dtype=jnp.float32)
    return layer().stream(x, memory(groups=groups), pending, **options)


def decoder() -> LanguageModel:
    return LanguageModel(DECODER, rngs=nnx.Rngs(0))


def call_decoder(tokens: Any, groups: int = 1, **options: Any) -> Any:
    model = decoder()
    return model(tokens, model.init_memory(jax.random.key(0), groups=groups), **options)


def stream_decoder(tokens: Any, **options: Any) -> Any:
    model = decoder()
    start = model.init_stream(model.init_memory(jax.random.key(0)), batch=BATCH, max_length=8)
    return model.stream(tokens, start, **options)


def attention(x: Any, **options: Any) -> Any:
    config = DECODER.attention
    shared = {"norm_eps": 1e-5, "init_std": 0.02, "rngs": nnx.Rngs(0)}
    return Attention(config, MODEL, **shared)(x, **options)


def pkm(x: Any) -> Any:
    return PKM(PKMConfig(num_subkeys=4, key_dim=4, value_dim=4, top_k=2), MODEL, rngs=nnx.Rngs(0))(
        x
    )


def gated_deltanet(**changes: Any) -> Any:
    tokens = {"query": zeros(2, 8, 1, 4), "key": zeros(2, 8, 1, 4), "value": zeros(2, 8, 1, 3)}
    gates = {"log_decay": zeros(2, 8, 1), "strength": zeros(2, 8, 1)}
    return MATRIX_RULES["gated_deltanet"]().run(Tokens(**{**tokens, **gates, **changes}))


def recall(**changes: Any) -> Any:
    """The shipped recall run with sections replaced."""
    experiment = load_config("recall")
    sections = {
        name: dataclasses.replace(getattr(experiment, name), **change)
        for name, change in changes.items()
    }
    return dataclasses.replace(experiment, **sections)


def a_file() -> Path:
    path = Path(tempfile.mkdtemp()) / "notes"
    path.write_text("mine")
    return path


def lock_twice() -> None:
    directory = Path(tempfile.mkdtemp())
    held = Lock(directory)
    try:
        Lock(directory)
    finally:
        held.release()


def command(*arguments: object) -> None:
    """`fwpkm` with these arguments; raises what it prints when it refuses them."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        assert main([str(argument) for argument in arguments]) == 2
    raise ValueError(errors.getvalue().strip())


TOKENS = jnp.zeros((BATCH, LENGTH), jnp.int32)
X = zeros(BATCH, LENGTH, MODEL)

NAMES = [
    Misuse("`FwPKM(score='l2')`", lambda: FwPKM(score="l2")),
    Misuse("`FwPKM(key_loss='adressing')`", lambda: FwPKM(key_loss="adressing")),
    Misuse("`FwPKM(nonlinearity='gelu')`", lambda: FwPKM(nonlinearity="gelu")),
    Misuse("`FwMLP(target='latter')`", lambda: FwMLP(target="latter")),
    Misuse(
        "`FastWeightConfig(value_norm='standardise')`",
        lambda: FastWeightConfig(value_norm="standardise"),
    ),
    Misuse("`ModelConfig(activation_dtype='bf16')`", lambda: ModelConfig(activation_dtype="bf16")),
    Misuse("`FastWeightConfig(rule='fwpmk')`", lambda: FastWeightConfig(rule="fwpmk")),
    Misuse("`ModelConfig(mixers=('gnd',))`", lambda: ModelConfig(mixers=("gnd",))),
    Misuse(
        "low-rank updates of a map that the model lacks",
        lambda: LanguageModel(
            dataclasses.replace(DECODER, lora=LoRAConfig(maps=("query_proj",))), rngs=nnx.Rngs(0)
        ),
    ),
]
CHUNKS = [
    Misuse(
        "`sequence(chunk_size=4)`, then `run(chunk_size=8)`",
        lambda: RULE.run(memory(), sequence(), chunk_size=8),
    ),
    Misuse(
        "A chunk without room for a pair",
        lambda: dataclasses.replace(CONFIG, chunk_size=1),
    ),
    Misuse(
        "A stream whose queue is shorter than its chunk",
        lambda: stream_layer(X, chunk_size=9),
    ),
]
RULES = [
    Misuse("Queries without their heads", lambda: sequence(query=zeros(2, 8, 6))),
    Misuse("Queries of another width", lambda: sequence(query=zeros(2, 8, 1, 4))),
    Misuse("Integer values", lambda: sequence(value=zeros(2, 8, 5, dtype=jnp.int32))),
    Misuse("A gate shorter than the sequence", lambda: sequence(gate=zeros(2, 7))),
    Misuse("A gate of one sequence", lambda: sequence(gate=zeros(8))),
    Misuse("A mask of another batch", lambda: sequence(mask=zeros(3, 8))),
    Misuse(
        "A sequence without tokens",
        lambda: sequence(query=zeros(2, 0, 1, 6), value=zeros(2, 0, 5)),
    ),
    Misuse(
        "`run` with several groups",
        lambda: RULE.run(memory(groups=2), sequence(), chunk_size=4),
    ),
    Misuse(
        "`run` with the memory of another rule",
        lambda: RULE.run(
            memory(FwMLP(key_dim=6, value_dim=5, hidden_dim=3)), sequence(), chunk_size=4
        ),
    ),
    Misuse("`read` of whole sequences", lambda: RULE.read(memory(), zeros(2, 8, 1, 6))),
    Misuse(
        "A matrix rule's values of another length",
        lambda: gated_deltanet(value=zeros(2, 7, 1, 3)),
    ),
    Misuse("A matrix rule without a gate", lambda: gated_deltanet(strength=None)),
    Misuse(
        "An overlay of a memory that is written everywhere",
        lambda: overlay(FwMLP(key_dim=6, value_dim=5, hidden_dim=3)),
    ),
    Misuse(
        "An overlay of a rule with `weight_decay`",
        lambda: overlay(dataclasses.replace(RULE, weight_decay=0.1)),
    ),
    Misuse("An overlay of more rows than slots", lambda: overlay(capacity=17)),
    Misuse("`step` of an overlay", lambda: RULE.step(overlay(), sequence())),
]
PARTS = AbstractMesh(
    (1, 1, 4, 1), ("data", "fsdp", "sequence", "model"), axis_types=(AxisType.Auto,) * 4
)
ROWS = AbstractMesh((2, 1, 1), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
LAYERS = [
    Misuse("A memory layer on integers", lambda: call_layer(X.astype(jnp.int32))),
    Misuse("A memory layer on one sequence", lambda: call_layer(X[0])),
    Misuse("A memory layer of another width", lambda: call_layer(zeros(2, 8, 5))),
    Misuse("A memory layer on no token", lambda: call_layer(zeros(2, 0, MODEL))),
    Misuse("A memory without the axis of groups", lambda: call_layer(X, memory())),
    Misuse("A batch that groups do not divide", lambda: call_layer(X, memory(groups=3))),
    Misuse("A mask of another length", lambda: call_layer(X, mask=zeros(2, 7))),
    Misuse("A stream with more memories than its queue", lambda: stream_layer(X, groups=2)),
    Misuse(
        "`flush` of a memory without groups",
        lambda: layer().flush(
            memory(), layer().init_pending(BATCH, 1, max_chunk_size=4, dtype=jnp.float32)
        ),
    ),
    Misuse(
        "An overlay over a mesh",
        lambda: call_layer(
            X, overlay(), partition=Partition(jax.make_mesh((1, 1, 1), ("data", "fsdp", "model")))
        ),
    ),
    Misuse(
        "An overlay with `documents='document'`",
        lambda: FastWeight(
            dataclasses.replace(CONFIG, documents="document"), MODEL, rngs=nnx.Rngs(0)
        )(X, overlay(), starts=jnp.zeros((BATCH, LENGTH), bool)),
    ),
    Misuse(
        "Documents in a stream with `documents='document'`, without what they start from",
        lambda: FastWeight(
            dataclasses.replace(CONFIG, documents="document"), MODEL, rngs=nnx.Rngs(0)
        ).stream(
            X,
            memory(groups=BATCH),
            layer().init_pending(BATCH, BATCH, max_chunk_size=4, dtype=jnp.float32),
            numbers=jnp.ones((BATCH, LENGTH), jnp.int32),
            starts=jnp.zeros((BATCH, LENGTH), bool),
        ),
    ),
    Misuse("A mixer on one sequence", lambda: attention(X[0])),
    Misuse("A mixer of another width", lambda: attention(zeros(2, 8, 5))),
    Misuse("A mixer's mask of another length", lambda: attention(X, mask=zeros(2, 7))),
    Misuse(
        "A sequence that does not divide over `mesh.sequence`",
        lambda: attention(zeros(1, 6, MODEL), partition=Partition(PARTS)),
    ),
    Misuse("A product-key memory of another width", lambda: pkm(zeros(2, 8, 5))),
]
MODELS = [
    Misuse("A decoder on floating-point tokens", lambda: call_decoder(TOKENS.astype(float))),
    Misuse("A decoder on one sequence", lambda: call_decoder(TOKENS[0])),
    Misuse("A decoder on no token", lambda: call_decoder(TOKENS[:, :0])),
    Misuse("A decoder's mask of another length", lambda: call_decoder(TOKENS, mask=zeros(2, 7))),
    Misuse("A decoder whose groups do not divide the batch", lambda: call_decoder(TOKENS, 3)),
    Misuse("A decoder without its memory", lambda: decoder()(TOKENS, {})),
    Misuse("A decoder's stream on one sequence", lambda: stream_decoder(TOKENS[0])),
    Misuse(
        "A piece of a stream that does not divide over `mesh.sequence`",
        lambda: stream_decoder(TOKENS[:, :6], partition=Partition(PARTS)),
    ),
]
CORE = [
    Misuse(
        "`slot_read` with a weight too few",
        lambda: slot_read(zeros(16, 5), zeros(8, 2, dtype=jnp.int32), zeros(8, 1)),
    ),
    Misuse(
        "`product_top_k` of more slots than sub-keys",
        lambda: product_top_k(zeros(8, 1, 6), zeros(1, 2, 4, 3), top_k=5),
    ),
    Misuse(
        "`product_top_k` with queries of another width",
        lambda: product_top_k(zeros(8, 1, 5), zeros(1, 2, 4, 3), top_k=2),
    ),
    Misuse(
        "`chunk_gated_delta_rule` with a short `beta`",
        lambda: chunk_gated_delta_rule(
            zeros(2, 8, 1, 4), zeros(2, 8, 1, 4), zeros(2, 8, 1, 3),
            log_decay=zeros(2, 8, 1), beta=zeros(2, 7, 1),
        ),
    ),
    Misuse(
        "`linear_cross_entropy` with float labels",
        lambda: linear_cross_entropy(
            zeros(8, 4), zeros(4, 9), None, zeros(8), zeros(8), block=4
        ),
    ),
]  # fmt: skip

RUNS = [
    Misuse(
        "A chunk as long as the sequences of a memory that lives one batch",
        lambda: check_chunk_size(
            recall(
                model={"fast_weight": FastWeightConfig(chunk_size=256)},
                training={"memory": MemoryConfig(groups=32, lifetime="batch"), "batch_size": 32},
            )
        ),
    ),
    Misuse("A second run in the directory of one that runs", lambda: lock_twice()),
    Misuse("A run directory that is a file", lambda: command("train", "--run_dir", a_file())),
    Misuse(
        "A run directory below a file",
        lambda: command("train", "--run_dir", a_file() / "run"),
    ),
    Misuse("A misspelt config", lambda: command("train", "recal")),
    Misuse(
        "A memory for each document that is carried from batch to batch",
        lambda: check_documents(
            recall(
                model={"fast_weight": FastWeightConfig(documents="document")},
                training={"memory": MemoryConfig(lifetime="carried")},
            )
        ),
    ),
    Misuse(
        "An evaluation of one stream over `mesh.data`",
        lambda: check_one_stream(Partition(ROWS), "ppl"),
    ),
]


def alice() -> str:
    """A folder with a memory `alice` and a fork of it, `bob`."""
    folder, model = tempfile.mkdtemp(), make_model(ONE)
    memories.save(folder, "alice", make_state(model), model=model, origin="runs/a, step 7")
    memories.fork(folder, "alice", "bob")
    return folder


def damaged_memory() -> None:
    folder = alice()
    (Path(folder) / "alice.safetensors").write_text("mine")
    memories.load(folder, "alice", make_model(ONE))


def long_draft() -> None:
    model = make_model(ONE)
    state = init_generation(model, model.init_memory(jax.random.key(0)), batch=1, max_length=16)
    generate(model, [[1]], state, max_new_tokens=7, chunk_size="flush")


MEMORIES = [
    Misuse(
        "A memory of other weights",
        lambda: memories.load(alice(), "alice", make_model(ONE, seed=1)),
    ),
    Misuse(
        "A memory of another model",
        lambda: memories.load(
            alice(), "alice", make_model(dataclasses.replace(ONE, norm_eps=1e-3))
        ),
    ),
    Misuse("A file that is no memory", damaged_memory),
    Misuse("A path as a name", lambda: memories.fork(alice(), "alice", "../carol")),
    Misuse("A fork with the name of another", lambda: memories.fork(alice(), "alice", "bob")),
    Misuse("A memory that others share is deleted", lambda: memories.delete(alice(), "alice")),
    Misuse(
        "The name of a memory that others begin with",
        lambda: Conversation(None, name="start-600", folder="memories"),  # pyright: ignore
    ),
    Misuse("A draft longer than the queue", long_draft),
    Misuse(
        "Two commands to `fwpkm memories` at once",
        lambda: carried_out(MemoriesOptions(run=Path("a"), show="alice", delete="bob")),
    ),
    Misuse(
        "Forks to keep of nothing that is deleted",
        lambda: carried_out(MemoriesOptions(run=Path("a"), keep_forks=True)),
    ),
    Misuse(
        "The memory that others begin with is deleted",
        lambda: carried_out(MemoriesOptions(run=Path("a"), delete="start-600", keep_forks=True)),
    ),
]

SECTIONS = {
    "Names": NAMES,
    "Chunks": CHUNKS,
    "Rules": RULES,
    "Layers": LAYERS,
    "Decoders": MODELS,
    "Functions": CORE,
    "Runs and commands": RUNS,
    "Memories": MEMORIES,
}
