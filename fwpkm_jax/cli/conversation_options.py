"""Options that `fwpkm generate` and `fwpkm chat` share."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fwpkm_jax import memories
from fwpkm_jax.cli.options import CheckpointOptions, RunArgument
from fwpkm_jax.generation import Sampling
from fwpkm_jax.io.status_line import progress_shown
from fwpkm_jax.literals import check_seed
from fwpkm_jax.run.conversation import Conversation, memory_place
from fwpkm_jax.run.load import load_run
from fwpkm_jax.storage.addresses import address_of, scheme_of


@dataclass(frozen=True, kw_only=True)
class ConversationOptions(CheckpointOptions):
    """Of any conversation with a run's model."""

    run: RunArgument
    """Run directory, as `fwpkm train` wrote it; the run was trained on text."""
    memories: Path | None = None
    """Folder of the memories, also in a bucket; None: RUN/memories."""
    keep: Literal["all", "memory"] = "all"
    """What is saved. all: the conversation goes on. memory: the next one begins with empty caches
    and what the fast weights hold."""
    max_new_tokens: int = 200
    """Most tokens of an answer; it stops at an end of document."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Seed of the random draws."""

    def __post_init__(self) -> None:
        check_seed(self.seed)  # Before the run is loaded.

    @contextlib.contextmanager
    def conversation(self, memory: str | None, *, write: bool = True) -> Iterator[Conversation]:
        """The conversation that these options ask for."""
        place = memory_place(self.run, memory, self.memories)
        with contextlib.ExitStack() as held:
            if place is not None and scheme_of(place[0]) is not None:
                # Before anything is loaded or compiled, as an address may be wrong or in use.
                held.enter_context(memories.hold(*place))
            run = load_run(self.run, self.step, weights=self.weights)
            line = "Compiling; the next start finds these programs again ..."
            held.enter_context(progress_shown(line))
            named = {}
            if place is not None:
                origin = f"{address_of(self.run)}, step {run.step}"
                named = {"folder": place[0], "name": place[1], "origin": origin}
            with Conversation(
                run,
                **named,
                keep=self.keep,
                sampling=self.sampling,
                seed=self.seed,
                write=write,
            ) as talk:
                yield talk


PLACES = ("run", "memories")
"""Options that may be addresses of buckets."""
