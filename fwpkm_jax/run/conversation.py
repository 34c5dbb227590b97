"""A conversation with a run's model in text, whose memory may last under a name."""

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax import memories
from fwpkm_jax.data.chat_turns import START, Turn, closing_tokens, has_template, message_tokens
from fwpkm_jax.evaluation.readers.stream_reader import flush
from fwpkm_jax.generation import GenerationState, Sampling, generate, grow, init_generation
from fwpkm_jax.io.atomic import own_folder
from fwpkm_jax.io.status_line import watched
from fwpkm_jax.io.untrusted import OutsideFileError, shown
from fwpkm_jax.literals import check_seed, some
from fwpkm_jax.memories.saved import Keep
from fwpkm_jax.models.config import mixer_memory
from fwpkm_jax.models.outputs import layer_name
from fwpkm_jax.run.load import Run, text_tokenizer
from fwpkm_jax.storage.addresses import address_of, check_store, scheme_of
from fwpkm_jax.storage.lock import patiently
from fwpkm_jax.storage.stores import Store

_logger = logging.getLogger(__name__)

_START = "start-"
"""With a step: the memory that all others of a checkpoint are forks of, before any text."""
_SHOWN = 1024  # Tokens between two lines of progress; a multiple of those that are read at once.
_LEAST_ROOM = 1024  # Tokens that full attention keeps from the first text on.


class Conversation:
    """Reads texts and answers; a context manager, which holds the memory while it lasts.

    What waits for its chunk to be complete is written before a question is read, so that the
    question finds all that was told before it.

    Args:
      run: from `load_run`; it was trained on text.
      name: of the memory, which is begun if it is not there; None: nothing is kept.
      folder: of the memories, also in a bucket; needed with a name.
      origin: what errors call the run and its step.
      keep: what `save` saves: all, or fast weights and waiting tokens without caches.
      sampling: how tokens are chosen; None takes the most likely one.
      seed: seed of the draws, 0 to 2**31 - 1.
      write: whether what is read and answered is written into the memory.

    Raises:
      ValueError: the run was not trained on text, another process holds the memory, it belongs to
        other weights, or the seed has more bits than that.
    """

    def __init__(
        self,
        run: Run,
        *,
        name: str | None = None,
        folder: str | Path | None = None,
        origin: str = "",
        keep: Keep = "all",
        sampling: Sampling | None = None,
        seed: int = 0,
        write: bool = True,
    ) -> None:
        if (name is None) != (folder is None):
            raise ValueError(f"name={name!r} and folder={folder!r} go together; give both or none.")
        if name is not None and is_start(name):
            raise ValueError(
                f"name={name!r} is the memory that others begin with; choose another name."
            )
        check_seed(seed)
        self.tokenizer = text_tokenizer(run)
        self.name, self._folder = name, Path() if folder is None else Path(folder)
        self._model, self._origin, self._start = run.model, origin, f"{_START}{run.step}"
        config = self._model.config
        self.has_memory = (
            bool(config.memory_layers)
            or config.fast_weight_layer is not None
            or mixer_memory(config) is not None
        )
        """Whether the model has fast weights, which keep what is read."""
        if name is not None and not self.has_memory:
            _logger.warning(
                "This model has no fast-weight memory, so that only the caches of %r can last; "
                "docs/tutorials/open_model.md puts a memory into a model.",
                name,
            )
        self._keep: Keep = keep
        ids = config.vocab_size
        sampling = sampling or Sampling()
        # The embedding may have more rows than the tokenizer has ids, or fewer.
        vocab_size = sampling.vocab_size or min(self.tokenizer.vocab_size, ids)
        ends = [token for token in self.tokenizer.stop_ids if token < ids]
        self._sampling = dataclasses.replace(
            sampling, vocab_size=vocab_size, stop_ids=[*sampling.stop_ids, *ends]
        )
        self._rng, self._write = jax.random.key(seed), write
        memory = jax.tree.map(lambda x: x[:1], run.memory)  # The first group, for one sequence.
        self.state: GenerationState = init_generation(self._model, memory, batch=1, max_length=1)
        self.turn = START
        """How far the conversation by a chat template is; messages without one do not count."""
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "Conversation":
        if self.name is None:
            return self
        with contextlib.ExitStack() as held:
            held.enter_context(memories.hold(self._folder, self.name))
            if self.name not in memories.names(self._folder):
                self._save_start()
            self._load(self.name if self.name in memories.names(self._folder) else self._start)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def tokens_read(self) -> int:
        """Tokens that the state has read, prompts and answers."""
        return int(self.state.num_read[0])

    @property
    def points(self) -> tuple[str, ...]:
        """Names of the saved points of this memory."""
        known = f"{self.name}@"
        found = (name for name in memories.names(self._folder) if name.startswith(known))
        return tuple(name.removeprefix(known) for name in found)

    def read(self, tokens: np.ndarray) -> None:
        """Reads tokens, answers nothing, and writes all of them."""
        for _ in self.answer(tokens, max_new_tokens=0):
            pass
        self.state = self._written()

    def answer(
        self, tokens: np.ndarray, *, max_new_tokens: int, at_once: int | None = None
    ) -> Iterator[np.ndarray]:
        """Reads tokens, outside any chat template, and yields the tokens of the answer.

        Args:
          tokens: what to read first; without any the text goes on.
          max_new_tokens: most tokens of the answer; it ends at an end of document.
          at_once: tokens per yield; `state` is up to date after each. None: all.
        """
        closing = closing_tokens(self.tokenizer, self.turn)
        if self.turn.at == "answer":
            self.turn = Turn("closed")
        yield from self._go_on(np.concatenate([closing, tokens]), max_new_tokens, at_once)

    def answer_aside(self, tokens: np.ndarray, *, max_new_tokens: int) -> np.ndarray:
        """The tokens of the answer to these tokens; the conversation and its memory do not change.

        Args:
          tokens: what to read first, at least one.
          max_new_tokens: most tokens of the answer; it ends at an end of document.
        """
        self._make_room(len(tokens) + max_new_tokens)
        return self._generate([tokens], max_new_tokens, aside=True)

    def reply(
        self,
        message: str,
        *,
        max_new_tokens: int,
        at_once: int | None = None,
        template: bool | None = None,
    ) -> Iterator[np.ndarray]:
        """Reads a message of the user and yields the tokens of the answer.

        By a chat template, all that is read in a conversation is what the template makes of the
        whole of it. What it puts behind an answer is read before anything else that comes.

        Args:
          message: of the user.
          max_new_tokens: see `answer`.
          at_once: see `answer`.
          template: whether the tokenizer's chat template is used; None: if there is one. Without
            it the message and a line break are read as text.

        Raises:
          ValueError: see `message_tokens`.
        """
        if template is None:
            template = has_template(self.tokenizer)
        if not template:
            line = self.tokenizer.encode(f"{message}\n")
            yield from self.answer(line, max_new_tokens=max_new_tokens, at_once=at_once)
            return
        tokens = message_tokens(self.tokenizer, message, self.turn)
        self.turn = Turn("answer")
        for new in self._go_on(tokens, max_new_tokens, at_once):
            if bool(self.state.finished[0]):
                self.turn = Turn("answer", int(new[-1]))
            yield new

    def _go_on(
        self, tokens: np.ndarray, max_new_tokens: int, at_once: int | None
    ) -> Iterator[np.ndarray]:
        self._make_room(len(tokens) + max_new_tokens)
        if max_new_tokens:
            self.state = self._written()
        # In the pieces in which one call would read it.
        cuts = range(len(tokens) % _SHOWN or _SHOWN, len(tokens), _SHOWN)
        *parts, last = np.split(tokens, cuts)
        for part in watched(parts, f"parts of {_SHOWN:,} tokens read"):
            self._generate([part], 0)
        prompts, left = [last], max_new_tokens
        while True:
            count = min(left, at_once or left)
            new = self._generate(prompts, count)
            prompts, left = None, left - count
            if count:
                yield new
            if not left or bool(self.state.finished[0]):
                return

    def _generate(
        self, prompts: list[np.ndarray] | None, count: int, *, aside: bool = False
    ) -> np.ndarray:
        """At most `count` tokens after the prompts; `aside` changes neither state nor memory."""
        out = generate(
            self._model,
            prompts,
            self._written(keep_state=True) if aside else self.state,
            max_new_tokens=count,
            sampling=self._sampling,
            rng=self._rng,
            write=self._write and not aside,
            keep_state=aside,
        )
        if not aside:
            self.state = out.state
        if bool(out.failed[0]):
            raise ValueError(
                f"The log probabilities of token {int(out.state.num_read[0])} are not finite: the "
                "run's weights or this memory hold NaN or infinity, or grew too large; go back to "
                "an earlier checkpoint (--step) or memory."
            )
        return np.asarray(out.tokens)[0, : int(out.lengths[0])]

    def _waiting(self) -> dict[str, int]:
        """For each memory layer, how many tokens wait whose targets have been read."""
        found = {}
        for index in self._model.config.memory_layers:
            pending = self.state.stream.layers[layer_name(index)].pending
            assert pending is not None, "a memory layer has a queue"
            lookahead = self._model.blocks[index].memory.config.rule.lookahead
            found[layer_name(index)] = max(0, int(pending.num_waiting[0]) - lookahead)
        return found

    def _written(self, *, keep_state: bool = False) -> GenerationState:
        """The state after what waits was written, where this conversation writes.

        `keep_state` leaves `state` as it is; otherwise its buffers are reused.
        """
        if not self._write or not any(self._waiting().values()):
            return self.state
        stream = self.state.stream
        if keep_state:
            stream = jax.tree.map(jnp.copy, stream)
        graphdef, params = nnx.split(self._model)
        return self.state._replace(stream=flush(graphdef, params, stream))

    def save(self, point: str | None = None) -> None:
        """Saves the memory, and with `point` also a fork of it to go back to.

        Raises:
          ValueError: the point is there already, or cannot have this name.
          OSError: nothing can be written.
        """
        if self.name is None:
            return
        if point in self.points:
            raise ValueError(f"The point {point!r} is saved already; choose another name.")
        if point is not None and not memories.is_name(f"{self.name}@{point}"):
            raise ValueError(
                f"The point {point!r} cannot have this name: use 1 to {99 - len(self.name)} ASCII "
                "letters, digits and . _ @ + -, without blanks."
            )
        if self.name not in memories.names(self._folder):
            memories.fork(self._folder, self._start, self.name)
        memories.save(
            *(self._folder, self.name, self.state),
            model=self._model,
            keep=self._keep,
            origin=self._origin,
            # Without caches the next conversation begins anew.
            note={"turn": self.turn} if self._keep == "all" else None,
        )
        if point is not None:
            memories.fork(self._folder, self.name, f"{self.name}@{point}")

    def forget(self, point: str | None = None) -> None:
        """Goes back to a saved point, or to the memory as it was last saved."""
        assert self.name is not None, "only a memory with a name is saved"
        if point is not None:
            if point not in self.points:
                there = some(self.points, like=point) or "none"
                raise ValueError(f"There is no point {point!r}; saved are {there}.")
            memories.restore(self._folder, self.name, f"{self.name}@{point}")
        self._load(self.name if self.name in memories.names(self._folder) else self._start)

    def written_rows(self) -> dict[str, tuple[int, int]]:
        """For each table of the memory, how many rows differ from the start, and how many it has.

        Only of a memory with a name.
        """
        return memories.written_rows(self._folder, self._start, self.state)

    def usage(self) -> list[str]:
        """Lines about what of the memory is in use."""
        lines = [f"{self.tokens_read:,} tokens read."]
        if self.name is None:
            return lines
        is_saved = self.name in memories.names(self._folder)
        since = memories.written_rows(
            self._folder, self.name if is_saved else self._start, self.state
        )
        for key, (rows, total) in self.written_rows().items():
            lines.append(
                f"{key}: {rows:,} of {total:,} rows written ({rows / total:.2%}), "
                f"{since[key][0]:,} since it was last saved."
            )
        size = self._model.config.fast_weight.chunk_size
        lines += [
            f"{name}: written after every {size} tokens and before a question; {waiting} wait."
            for name, waiting in self._waiting().items()
        ]
        if is_saved:
            about = memories.describe(self._folder, self.name, forks=False)
            lines.append(f"Saved {about.saved}, {about.num_bytes:,} bytes.")
        if self.points:
            lines.append(f"Points to go back to: {some(self.points)}.")
        return lines

    def _load(self, name: str) -> None:
        self.state = memories.load(self._folder, name, self._model, max_length=1)
        note = memories.describe(self._folder, name, forks=False).note
        self.turn = _turn_of(note, f"{address_of(self._folder)}/{name}", self.tokenizer.vocab_size)

    def _save_start(self) -> None:
        """Saves the checkpoint's memory, which all others share on disk."""

        def save() -> None:
            if self._start not in memories.names(self._folder):
                memories.save(
                    *(self._folder, self._start, self.state),
                    model=self._model,
                    keep="memory",
                    origin=self._origin,
                )

        patiently(save)  # Another process may be saving it.

    def _make_room(self, new: int) -> None:
        """Makes room for more tokens in full attention."""
        # Powers of two, so that few programs are compiled.
        length = max(_LEAST_ROOM, 1 << (self.tokens_read + new - 1).bit_length())
        self.state = grow(self._model, self.state, max_length=length)


def _turn_of(note: Any, memory: str, vocab_size: int) -> Turn:
    """How far a saved conversation is, as its note says, which may be a stranger's."""
    match note:
        case None:
            return START
        case {"turn": [("start" | "answer" | "closed") as at, stop]} if len(note) == 1:
            if stop is None or (type(stop) is int and 0 <= stop < vocab_size):
                return Turn(at, stop)
    raise OutsideFileError(
        memory,
        f"was not saved by a chat: its note is {shown(note, 60)}",
        otherwise="use another name",
    )


def is_start(name: str) -> bool:
    """Whether a memory of this name is the one that all others of a checkpoint begin with."""
    return re.fullmatch(rf"{_START}\d+", name) is not None


def memory_folder(run_dir: Path, folder: Path | None) -> Path:
    """Where the memories of a run lie, which may be in a bucket, as a run may.

    Raises:
      ValueError: in place of the run's own folder is a link; or of an address nothing can be read:
        it is of no bucket, names no folder in it, or its package is missing.
    """
    own = run_dir / "memories"
    place = own if folder is None else folder
    if scheme_of(place) is not None:
        Store(str(place))  # Raises what is wrong with it.
        return place
    return own_folder(own) if folder is None and own.is_symlink() else place


def memory_place(run_dir: Path, name: str | None, folder: Path | None) -> tuple[Path, str] | None:
    """Folder and name of a memory of a run; None without a name.

    Args:
      name: of the memory; or its address, `s3://BUCKET/FOLDER/NAME`, which names the folder too.
      folder: of the memories; None: `RUN/memories`.

    Raises:
      ValueError: see `memory_folder`; or the folder is given without a name, or twice.
    """
    if name is None:
        if folder is not None:
            raise ValueError(
                f"memories={address_of(folder)!r} has no effect without --memory NAME."
            )
        return None
    if scheme_of(name) is not None:
        if folder is not None:
            raise ValueError(
                f"memory={name!r} names a folder, and so does memories={address_of(folder)!r}; "
                "give one of them, or a name without a folder."
            )
        check_store(name, "memory")
        place, _, own = name.partition("://")[2].rpartition("/")
        if not place:
            raise ValueError(f"memory={name!r} names no folder; write {name}/NAME.")
        folder, name = Path(name.removesuffix(f"/{own}")), own
    return memory_folder(run_dir, folder), name
