"""A decoder language model, built from a `ModelConfig`: embedding, blocks, head, memories."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.checks import check_arrays, check_key, check_rngs
from fwpkm_jax.core.chunks import Memory
from fwpkm_jax.core.documents import Documents
from fwpkm_jax.core.streams.pending import ChunkSize
from fwpkm_jax.core.targets import Pairing, write_weights
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayer, FastWeightStream
from fwpkm_jax.layers.lora import add_low_rank
from fwpkm_jax.layers.norms import RMSNorm
from fwpkm_jax.layers.parameters import LogicalAxes, parameter
from fwpkm_jax.layers.partition import (
    BATCH,
    HEADS,
    SEQUENCE,
    Partition,
)
from fwpkm_jax.models.block import BlockOutput, ForwardContext, Remat
from fwpkm_jax.models.building import build_blocks, scale_branches, store_matrices
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.embedding_and_head import embed_over_devices, read_head
from fwpkm_jax.models.outputs import (
    Hidden,
    LMOutput,
    Stream,
    StreamDocument,
    StreamOutput,
    layer_name,
)
from fwpkm_jax.models.sharding import beside, gathered_array
from fwpkm_jax.models.stream_size import checked_start
from pallas_kernels.embed import embed

_HEAD_AXES: LogicalAxes = ("embed", "vocab")


class LanguageModel(nnx.Module):
    """A decoder. Fast weights are passed in and returned; they are never an attribute.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from fwpkm_jax import FastWeightConfig, FwPKM, LanguageModel, ModelConfig
      >>> from fwpkm_jax.layers import AttentionConfig
      >>> rule = FwPKM(num_subkeys=4, key_dim=8, value_dim=8, top_k=2)
      >>> config = ModelConfig(
      ...     vocab_size=32, model_dim=16, mlp_dim=16, mixers=("swa",), window=4,
      ...     attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
      ...     memory_layers=(0,), fast_weight=FastWeightConfig(rule=rule, chunk_size=4),
      ... )
      >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
      >>> memory = model.init_memory(nnx.Rngs(1).params(), groups=1)
      >>> out = nnx.jit(model)(jnp.zeros((1, 8), jnp.int32), memory)
      >>> out.logits.shape, sorted(out.memory)
      ((1, 8, 32), ['layer_0'])
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = "config"):
        """Initialises the slow weights.

        Args:
          config: the layout.
          rngs: random streams; only `params` is used.
          dtype: dtype of activations. "config": `config.activation_dtype`. None: that of the
            parameters.
        """
        check_rngs(rngs)
        self.config = config
        dtype = jnp.dtype(config.activation_dtype) if dtype == "config" else dtype
        self.dtype = dtype
        dim, init = config.model_dim, nnx.initializers.normal
        table = init(config.init_std)(rngs.params(), (config.vocab_size, dim), jnp.float32)
        self.embedding = parameter(table, "embedding", ("vocab", "embed"))
        blocks = build_blocks(config, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(blocks)
        self.layer_names = tuple(layer_name(index) for index in range(len(blocks)))
        if config.branch_init_scale != 1.0:
            for block in blocks:
                scale_branches(block, config.branch_init_scale)
        self.final_norm = RMSNorm(dim, eps=config.norm_eps, offset=config.norm_offset)
        std = config.init_std if config.head_init_std is None else config.head_init_std
        head_shape = (dim, config.vocab_size)
        self.head = (
            None
            if config.tie_embeddings
            else parameter(init(std)(rngs.params(), head_shape, jnp.float32), "head", _HEAD_AXES)
        )
        head_bias = parameter(jnp.zeros((config.vocab_size,)), "bias")
        self.head_bias = head_bias if config.head_bias else None
        fwl = config.fast_weight_layer
        self.fast_weight_layer = (
            None if fwl is None else FastWeightLayer(fwl, dim, init_std=config.init_std, rngs=rngs)
        )
        if config.parameter_dtype != "float32":
            store_matrices(self, jnp.dtype(config.parameter_dtype))
        # Last, so that the update's factors are not cast with the matrices.
        if config.lora is not None:
            add_low_rank(self, config.lora, rngs=rngs)

    def init_memory(self, rng: jax.Array, *, groups: int = 1) -> dict[str, Memory]:
        """Fast weights before the first token, by layer name, leaves `[groups, ...]`.

        All groups of a layer start with equal values; each layer has its own random draw.
        """
        check_key(rng)
        return {
            self.layer_names[index]: self.blocks[index].memory.init_memory(
                jax.random.fold_in(rng, index), groups=groups
            )
            for index in self.config.memory_layers
        }

    def restart(self, memory: dict[str, Memory]) -> dict[str, Memory]:
        """Memories from `init_memory` with what layers have learned of their starts by now.

        Call it, or `init_memory`, inside the function whose gradient trains such a start.
        """
        return {
            name: self.blocks[self.layer_names.index(name)].memory.restart(of_layer)
            for name, of_layer in memory.items()
        }

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        memory: dict[str, Memory],
        *,
        mask: TokenMask | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        write: bool = True,
        pairing: Pairing = write_weights,
        partition: Partition | None = None,
    ) -> LMOutput:
        """Reads whole sequences from position 0, writing the memories chunk by chunk.

        Args:
          tokens: ids below the vocabulary's size.
          memory: fast weights by layer name, leaves `[groups, ...]`; groups must divide the batch.
            They are constants in the caller's gradient, unless the caller differentiates with
            respect to them.
          mask: 1 for real tokens, 0 for padding.
          segment_ids: document of each token, 0 for padding; None: a row is one document. Each run
            of equal ids gives the same result as in a separate row, except for the fast-weight
            memories, which continue from document to document (`layers.memories.fast_weight`).
            Logits at padding are undefined.
          write: False reads the memories without writing to them.
          pairing: makes each token's write weights, see `core.targets.write_weights`.
          partition: of the work over devices, see `hidden`.

        Raises:
          ValueError: the memory does not fit this model, or arguments contradict each other.
        """
        hidden = self.hidden(
            tokens,
            memory,
            mask=mask,
            segment_ids=segment_ids,
            write=write,
            pairing=pairing,
            partition=partition,
        )
        logits = self.logits(hidden.x, hidden.token_bias, partition)
        return LMOutput(logits, hidden.memory, hidden.info, hidden.pkm_slot_ids)

    def hidden(
        self,
        tokens: Int[Array, "batch length"],
        memory: dict[str, Memory],
        *,
        mask: TokenMask | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        write: bool = True,
        pairing: Pairing = write_weights,
        remat: Remat | None = None,
        partition: Partition | None = None,
        batch_statistics: bool = False,
    ) -> Hidden:
        """`__call__` without the logits, for a loss that computes them block by block.

        Args:
          tokens: as in `__call__`, like the next five arguments.
          memory: fast weights.
          mask: 1 for real tokens.
          segment_ids: document of each token.
          write: False only reads.
          pairing: makes the write weights.
          remat: which activations the backward pass recomputes, see `models.remat.Remat`; changes
            time and memory, and results only by rounding.
          partition: of the work over devices, by sequences and heads; None: one device. With it,
            pass sequences in the order of `Partition.interleave`. Padding at the
            end of rows costs less as `segment_ids` of 0 than in `mask`.
          batch_statistics: True: batch norms use the statistics of this batch, as in training, and
            return them. False: they use the running statistics.

        Raises:
          ValueError: the memory does not fit this model, or arguments contradict each other.
        """
        self._check(tokens, memory, mask, segment_ids)
        starts, real = None, mask
        if segment_ids is not None:
            documents = Documents.of(segment_ids)
            starts, real = documents.starts, documents.mask(mask)
        context = ForwardContext(
            mask=mask,
            real=real,
            starts=starts,
            write=write,
            pairing=pairing,
            partition=partition,
            remat=remat,
            batch_statistics=batch_statistics,
        )
        x, outputs = self._embed(tokens, partition), {}
        for name, block in zip(self.layer_names, self.blocks, strict=True):
            with jax.named_scope(name):  # Profiles and compiled programs name the layer.
                outputs[name] = block(x, memory.get(name), context)
            x = outputs[name].x

        # By field, then by layer, of those layers that have it.
        found: dict[str, dict[str, Any]] = {
            field: {
                name: y for name, out in outputs.items() if (y := getattr(out, field)) is not None
            }
            for field in BlockOutput._fields
        }
        x, bias, _ = self._before_head(x, tokens, None, context)
        return Hidden(
            x,
            memory=memory | found["memory"],
            info=found["info"],
            pkm_slot_ids=found["pkm_slot_ids"],
            token_bias=bias,
            pkm_statistics=found["pkm_statistics"],
            router_loads=found["router_load"],
        )

    def _before_head(
        self,
        x: Float[Array, "batch length model"],
        tokens: Int[Array, "batch length"],
        state: FastWeightStream | None,
        context: ForwardContext,
    ) -> tuple[jax.Array, jax.Array | None, FastWeightStream | None]:
        """What the head reads, its bias per token, and the Fast Weight Layer's new state."""
        x = self.final_norm(x)
        if self.fast_weight_layer is None:
            return x, None, state
        options = {"mask": context.mask, "starts": context.starts, "write": context.write}
        (y, bias), state = read_head(
            *(self.fast_weight_layer, x, tokens, self.readout(), state),
            partition=context.partition,
            **options,
        )
        return y.astype(x.dtype), bias, state

    def readout(self) -> tuple[Float[Array, "model vocab"], Float[Array, " vocab"] | None]:
        """The linear map from the final norm to logits, and its bias if it has one."""
        head = self.embedding[...].T if self.head is None else self.head[...]
        return head, None if self.head_bias is None else self.head_bias[...]

    def logits(
        self,
        x: Float[Array, "batch length model"],
        token_bias: Float[Array, "batch length vocab"] | None = None,
        partition: Partition | None = None,
    ) -> Float[Array, "batch length vocab"]:
        """Logits of `Hidden.x` and `Hidden.token_bias`, in float32 or a wider dtype."""
        head, bias = self.readout()
        if partition is not None:
            head = gathered_array(partition, head, _HEAD_AXES, name="head")
        logits = jnp.matmul(
            x,
            head.astype(x.dtype),
            preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
        )
        logits = logits if bias is None else logits + bias[None, None]
        return logits if token_bias is None else logits + token_bias.astype(logits.dtype)

    def init_stream(
        self,
        memory: dict[str, Memory],
        *,
        batch: int,
        max_length: int,
        max_chunk_size: int | None = None,
    ) -> Stream:
        """The start of a stream of `batch` sequences side by side.

        Args:
          memory: fast weights, leaves `[groups, ...]`.
          batch: sequences, divisible by groups.
          max_length: tokens that full-attention layers keep; they drop older tokens.
          max_chunk_size: the largest `chunk_size` of any later call; None: the config's.

        Raises:
          ValueError: the memory does not fit this model, or caches would not fit the device.
        """
        self._check(None, memory)
        chunk_size = self.config.fast_weight.chunk_size
        max_chunk_size = chunk_size if max_chunk_size is None else max_chunk_size
        groups = jax.tree.leaves(memory)[0].shape[0] if memory else 1
        dtype = self.embedding[...].dtype if self.dtype is None else self.dtype

        def start() -> dict[str, Any]:
            return {
                name: block.init_stream(
                    batch, groups, max_length=max_length, max_chunk_size=max_chunk_size, dtype=dtype
                )
                for name, block in zip(self.layer_names, self.blocks, strict=True)
            }

        windows = {
            "window": self.config.window,
            "lact.window": self.config.lact.window,
            "max_length": max_length,
        }
        what = ", ".join(f"{name}={tokens}" for name, tokens in windows.items())
        layers = checked_start(start, tokens=max(windows.values()), what=f"one of {what}")
        head = None
        if self.fast_weight_layer is not None:
            vocab = self.config.vocab_size
            head = self.fast_weight_layer.init_stream(batch, vocab=vocab, dtype=dtype)
        return beside(self.embedding, Stream(memory, layers, head))

    def stream(
        self,
        tokens: Int[Array, "batch length"],
        stream: Stream,
        *,
        mask: TokenMask | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        initial: dict[str, Memory] | None = None,
        chunk_size: ChunkSize | None = None,
        write: bool = True,
        logits_to_keep: int | None = None,
        partition: Partition | None = None,
    ) -> StreamOutput:
        """Processes a piece of a stream; the sizes of the pieces do not change logits or memories.

        Unlike `__call__`, it also writes pairs whose tokens lie in different chunks.

        Args:
          tokens: the piece, at least one token.
          stream: from `init_stream` or the last call.
          mask: 1 for real tokens, 0 for padding.
          segment_ids: document of each token, 0 for padding, as in `__call__`; a document may go on
            in the next piece. None: the last one goes on.
          initial: fast weights that each document starts from, which `segment_ids` need with
            `fast_weight.documents="document"`: those that the stream started with. A donated stream
            must not hold them.
          chunk_size: tokens per write for this call; None: the config's. "flush": tokens wait in
            the queue, at most `max_chunk_size` in total, until `flush` writes them.
          write: False leaves memories and queues unchanged, except where `initial` takes effect.
          logits_to_keep: of so many last tokens logits are computed, at least 1; None: of all.
            The others cost no product with the vocabulary's matrix.
          partition: of the piece over devices, of which each reads a part (`mesh.sequence`); None:
            one device. The stream lies on all of them. A piece whose length does not divide into
            the parts takes padding in `mask`.

        Raises:
          ValueError: the stream's memory does not fit this model, `chunk_size` its queues, the
            piece the mesh, `initial` is missing, or `logits_to_keep` is below 1 or given with a
            `partition`.
        """
        self._check(tokens, stream.memory, mask, segment_ids)
        if partition is not None:
            _check_piece(tokens, partition)
        if logits_to_keep is not None and (logits_to_keep < 1 or partition is not None):
            raise ValueError(
                f"logits_to_keep={logits_to_keep} must be at least 1, and None with a partition."
            )
        starts, numbers, document = None, None, stream.document
        if segment_ids is not None:
            mask, starts, numbers, document = StreamDocument.of_piece(segment_ids, mask, document)
        elif document is not None:
            numbers = jnp.broadcast_to(document.number[:, None], tokens.shape)
        context = ForwardContext(
            mask=mask,
            real=mask,
            starts=starts,
            numbers=numbers,
            write=write,
            chunk_size=chunk_size,
            partition=partition,
        )
        x = self._embed(tokens, partition)
        memory, layers, info = dict(stream.memory), {}, {}
        for name, block in zip(self.layer_names, self.blocks, strict=True):
            first = None if initial is None else initial.get(name)
            x, after, layers[name], facts = block.stream(
                x, memory.get(name), stream.layers[name], context, initial=first
            )
            if facts is not None:
                memory[name], info[name] = after, facts
        has_state = self.fast_weight_layer is None or stream.head is not None
        assert has_state, "a stream of this model carries its Fast Weight Layer's state"
        x, bias, head = self._before_head(x, tokens, stream.head, context)
        if logits_to_keep is not None:
            x, bias = jax.tree.map(lambda each: each[:, -logits_to_keep:], (x, bias))
        stream = Stream(memory, layers, head, document)
        return StreamOutput(self.logits(x, bias, partition), stream, info)

    def flush(self, stream: Stream, *, partition: Partition | None = None) -> Stream:
        """Writes all complete pairs in the queues to their memories, and returns the new stream.

        Args:
          stream: from `stream`.
          partition: as in `stream`.
        """
        memory, layers = dict(stream.memory), dict(stream.layers)
        for index in self.config.memory_layers:
            name = self.layer_names[index]
            memory[name], pending = self.blocks[index].memory.flush(
                memory[name], layers[name].pending, partition=partition
            )
            layers[name] = layers[name]._replace(pending=pending)
        return stream._replace(memory=memory, layers=layers)

    def reset_caches(self, stream: Stream, *, pending: bool) -> Stream:
        """A stream that starts again from position 0 with the memories as they are.

        A Fast Weight Layer keeps its updated weights; its last token gets no label.

        Args:
          pending: True also drops the tokens that are not written yet.
        """
        layers = {
            name: block.reset_cache(stream.layers[name], pending=pending)
            for name, block in zip(self.layer_names, self.blocks, strict=True)
        }
        head = stream.head
        if head is not None:
            head = head._replace(waits=jnp.zeros_like(head.waits))
        return stream._replace(layers=layers, head=head)

    def _embed(
        self, tokens: Int[Array, "batch length"], partition: Partition | None
    ) -> Float[Array, "batch length model"]:
        """The embedding's rows of the tokens, scaled, in the dtype of the activations."""
        scale = self.config.embedding_scale
        if partition is None:
            # An id outside the vocabulary gives NaN, which training reports, not another row.
            rows = embed(self.embedding[...], tokens)
            rows = rows if self.dtype is None else rows.astype(self.dtype)
        else:
            rows = embed_over_devices(self.embedding[...], tokens, self.dtype, partition)
        return rows if scale == 1 else rows * scale

    def _check(
        self, tokens: Any, memory: dict[str, Memory], mask: Any = None, segment_ids: Any = None
    ) -> None:
        """Raises a ValueError that names the argument which does not fit the model."""
        check_arrays(
            tokens=(tokens, "int batch length"),
            mask=(mask, "mask batch length"),
            segment_ids=(segment_ids, "int batch length"),
        )
        expected = [self.layer_names[index] for index in self.config.memory_layers]
        if set(memory) != set(expected):
            raise ValueError(
                f"The memory holds {sorted(memory)}, the model's memory layers are "
                f"{sorted(expected)}; make one with init_memory."
            )


def _check_piece(tokens: jax.Array, partition: Partition) -> None:
    """Raises ValueError unless devices can read parts of a piece of a stream."""
    if partition.sequence is None:
        raise ValueError(
            "partition without an axis sequence: several devices read parts of a stream; set "
            "mesh.sequence to 2 or more, or pass partition=None."
        )
    partition.check_divides("Sequences of a stream", tokens.shape[0], *BATCH)
    partition.check_divides("The length of a piece", tokens.shape[1], SEQUENCE, HEADS)
