"""The compiled programs of a variant: training step, reading, reading a frozen memory, answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.training.optimizer import decay_mask
from fwpkm_jax.training.state import MemoryConfig, TrainState, init_state, model_graph
from fwpkm_jax.training.step import make_train_step
from lab.study.real_size.sizes import Size

QUESTIONS = 5
"""Needles of a haystack that is asked."""
DIGITS = slice(ord("0"), ord("9") + 1)
_WARMUP = 100


class Reading(NamedTuple):
    """What a model says of a piece of text.

    Attributes:
      nats: loss of every label, `[batch, length]`.
      best: the likeliest byte, uint8.
      best_digit: the likeliest of the ten digits, 0 to 9.
      gates: of each memory layer, `[layers, batch, length]`.
    """

    nats: jax.Array
    best: jax.Array
    best_digit: jax.Array
    gates: jax.Array


class Programs(NamedTuple):
    """Of one variant. Each field is a compiled program, or the future of one.

    Attributes:
      init: the state before the first step, of a seed.
      step: `(state, batch) -> (state, metrics)`; donates the state.
      read: `(params, memory, tokens) -> (Reading, memory)`, which writes the memory.
      read_frozen: `(params, memory, tokens) -> Reading`; None without a memory.
      ask: like `read_frozen`, of `asked` rows.
      stream: from parameters to the start of a stream; None with a memory, like the next two.
      carry: like `read`, with a stream in place of the memory: the mixers' state goes on.
      ask_carried: `(params, stream, asked) -> Reading`, from where the stream stands.
    """

    init: Any
    step: Any
    read: Any
    read_frozen: Any
    ask: Any
    stream: Any
    carry: Any
    ask_carried: Any


class PlannedRate(NamedTuple):
    """State of the learning rate's schedule, whose length is known only after compilation."""

    taken: jax.Array
    steps: jax.Array


def planned_rate(peak: float) -> optax.GradientTransformation:
    """Scales updates by minus the rate: linear warm-up, then a cosine to a tenth of the peak."""

    def rate(state: PlannedRate) -> jax.Array:
        count, steps = state.taken.astype(jnp.float32), state.steps.astype(jnp.float32)
        warmup = jnp.minimum(_WARMUP, steps / 10)
        done = jnp.clip((count - warmup) / jnp.maximum(steps - warmup, 1), 0, 1)
        cosine = 0.1 + 0.9 * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return peak * jnp.minimum((count + 1) / (warmup + 1), cosine)

    def init(params: Any) -> PlannedRate:
        del params
        return PlannedRate(jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, PlannedRate]:
        del params
        scaled = jax.tree.map(lambda x: -rate(state) * x, updates)
        return scaled, PlannedRate(state.taken + 1, state.steps)

    return optax.GradientTransformation(init, update)


def plan(state: TrainState, steps: int) -> TrainState:
    """The state with a schedule of `steps` steps."""
    opt_state: Any = state.opt_state
    *others, schedule = opt_state
    schedule = schedule._replace(steps=jnp.asarray(steps, jnp.int32))
    return state._replace(opt_state=(*others, schedule))


def make_optimizer(size: Size) -> optax.GradientTransformation:
    """AdamW with clipping, as `fwpkm_jax.training.optimizer`, and the planned schedule."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(0.1, mask=decay_mask),
        planned_rate(size.learning_rate),
    )


def frozen(model: ModelConfig) -> ModelConfig:
    """The model with writes of size zero: it reads by the same kernels, and nothing changes."""
    if not model.memory_layers:
        return model
    rule = replace(model.fast_weight.rule, learning_rate=0.0)
    return replace(model, fast_weight=replace(model.fast_weight, rule=rule))


def compile_programs(
    models: Mapping[str, ModelConfig],
    size: Size,
    *,
    made: Mapping[tuple[str, str], Any] | None = None,
    compile_for: Callable[[Any], Any] = lambda tree: tree,
    options: Mapping[str, Any] | None = None,
    threads: int = 16,
) -> dict[str, Programs]:
    """Starts to compile every program; the fields are futures.

    Programs are traced one after another here and compiled side by side, the training steps first.

    Args:
      models: the variants by name.
      size: of rows and batch.
      made: programs by variant and name that are not compiled anew.
      compile_for: changes the shapes of arguments, to compile for a device that is not here.
      options: of the compiler; None: those of the process.
      threads: programs that are compiled at once.
    """
    pool, made = ThreadPoolExecutor(threads), made or {}
    found: dict[str, dict[str, Any]] = {name: {} for name in models}

    def start(variant: str, program: str, function: jax.stages.Wrapped, *arguments: Any) -> None:
        def compiled(lowered: jax.stages.Lowered) -> Any:
            return lowered.compile(compiler_options=dict(options or {}))

        if (variant, program) in made:
            one: Future[Any] = Future()
            one.set_result(made[variant, program])
        else:
            one = pool.submit(compiled, function.lower(*arguments))
        found[variant][program] = one

    shapes = {
        name: compile_for(jax.eval_shape(first_state(model, size), 0))
        for name, model in models.items()
    }
    batch = {
        "tokens": jax.ShapeDtypeStruct((size.batch, size.length + 1), jnp.int32),
        "loss_weight": jax.ShapeDtypeStruct((size.batch, size.length), jnp.float32),
    }

    def tokens(rows: int, length: int) -> Any:
        return compile_for(jax.ShapeDtypeStruct((rows, length + 1), jnp.int32))

    # A step with a memory takes longest to compile.
    for name, model in sorted(models.items(), key=lambda one: not one[1].memory_layers):
        start(name, "step", training_step(model, size), shapes[name], compile_for(batch))
    for name, model in models.items():
        seed = compile_for(jax.ShapeDtypeStruct((), jnp.int32))
        start(name, "init", jax.jit(first_state(model, size)), seed)
    for name, model in models.items():
        state, still = shapes[name], frozen(model)
        text = state.params, state.memory, tokens(size.batch, size.length)
        asked = (*text[:2], tokens(size.batch * QUESTIONS, size.ask_length))
        start(name, "read", jax.jit(reader(model)), *text)
        read_only = jax.jit(without_state(reader(still)))
        start(name, "ask", read_only, *asked)
        if model.memory_layers:
            start(name, "read_frozen", read_only, *text)
        else:
            begin, carry = stream_reader(model, size)
            stream = compile_for(jax.eval_shape(begin, state.params))
            start(name, "stream", jax.jit(begin), state.params)
            start(name, "carry", jax.jit(carry), state.params, stream, text[2])
            ask_carried = jax.jit(without_state(carry))
            start(name, "ask_carried", ask_carried, state.params, stream, asked[2])
    pool.shutdown(wait=False)
    return {
        variant: Programs(**{name: programs.get(name) for name in Programs._fields})
        for variant, programs in found.items()
    }


def memory_config(size: Size) -> MemoryConfig:
    """A memory for each place in the batch, carried from step to step."""
    return MemoryConfig(groups=size.batch, lifetime="carried")


def first_state(model: ModelConfig, size: Size) -> Callable[[Any], TrainState]:
    """What makes the state before the first step from a seed."""
    options: Any = {"memory": memory_config(size), "optimizer": make_optimizer(size)}
    return lambda seed: init_state(model, seed=seed, **options)


def training_step(model: ModelConfig, size: Size) -> jax.stages.Wrapped:
    """`(state, batch) -> (state, metrics)`; donates the state."""
    return make_train_step(
        model_graph(model),
        make_optimizer(size),
        schedule=lambda count: jnp.zeros(()),  # Only for a metric that is not used.
        micro_batches=1,
        memory=memory_config(size),
    )


def without_state(read: Callable[..., tuple[Reading, Any]]) -> Callable[..., Reading]:
    """A reader without the memory or stream that it would return."""
    return lambda *arguments: read(*arguments)[0]


def reader(model: ModelConfig) -> Callable[..., tuple[Reading, Any]]:
    """What reads tokens `[batch, length + 1]` with parameters and memory."""
    graph = model_graph(model)

    def read(params: Any, memory: Any, tokens: jax.Array) -> tuple[Reading, Any]:
        lm: LanguageModel = nnx.merge(graph, params)
        out = lm(tokens[:, :-1], memory)
        return _reading(out.logits, tokens[:, 1:], out.info), out.memory

    return read


def stream_reader(model: ModelConfig, size: Size) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What begins a stream of a model without a memory, and what reads its next piece.

    A piece may have several rows for each of the stream, neighbours first; all go on from there.
    """
    graph = model_graph(model)

    def begin(params: Any) -> Any:
        lm: LanguageModel = nnx.merge(graph, params)
        return lm.init_stream({}, batch=size.batch, max_length=size.length)

    def carry(params: Any, stream: Any, tokens: jax.Array) -> tuple[Reading, Any]:
        lm: LanguageModel = nnx.merge(graph, params)
        times = len(tokens) // size.batch
        stream = jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), stream)
        out = lm.stream(tokens[:, :-1], stream)
        return _reading(out.logits, tokens[:, 1:], out.info), out.stream

    return begin, carry


def _reading(logits: jax.Array, labels: jax.Array, info: Mapping[str, Any]) -> Reading:
    # `jax.nn.logsumexp` and one gather, in place of a second array as large as the logits.
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    gates = [facts.gate for facts in info.values()]
    return Reading(
        nats=jax.nn.logsumexp(logits, axis=-1) - chosen,
        best=jnp.argmax(logits, axis=-1).astype(jnp.uint8),
        best_digit=jnp.argmax(logits[..., DIGITS], axis=-1).astype(jnp.uint8),
        gates=jnp.stack(gates) if gates else jnp.zeros((0, *labels.shape)),
    )


def futures_of(programs: Programs) -> list[Future[Any]]:
    """The futures among a variant's programs."""
    return [x for x in programs if isinstance(x, Future)]


def wait(programs: Programs) -> Programs:
    """The compiled programs of their futures."""
    return Programs(*(x.result() if isinstance(x, Future) else x for x in programs))
