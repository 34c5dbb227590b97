"""The paper's claims at a real size: 24M slow weights on bytes, in one sitting at a GPU.

    fwpkm train lab/study/real_size/configs.py:gdn

Six layers of Gated DeltaNet, alone or with the memories of `lab.study.real_size.models`. Reads the
package's own sample of text unless `--data.train_paths` and `--data.valid_paths` name more.
`lab.study.real_size` trains the same models on 75 MB of books with needles in many wordings
(docs/measurements/real_size.md): about a minute each on one H100.
"""

from collections.abc import Callable, Mapping
from functools import partial

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData, sample
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.state import MemoryConfig
from fwpkm_jax.training.training_config import TrainingConfig
from lab.study.real_size.models import MEMORIES, real_size_model

BATCH_SIZE = 8


def variant(name: str) -> Experiment:
    """The experiment of a model of `lab.study.real_size.models`; they differ in nothing else."""
    return Experiment(
        model=real_size_model(name),
        data=TextData(train_paths=(sample.TRAIN,), valid_paths=(sample.VALID,), length=4096),
        optimizer=OptimizerConfig(learning_rate=1.5e-3, warmup_steps=100),
        training=TrainingConfig(
            steps=2000,
            batch_size=BATCH_SIZE,
            # One memory for each place in the batch, carried from step to step.
            memory=MemoryConfig(groups=BATCH_SIZE, lifetime="carried"),
            log_every=20,
        ),
        run_dir=f"runs/real_size/{name}",
    )


CONFIGS: Mapping[str, Callable[[], Experiment]] = {
    name: partial(variant, name) for name in MEMORIES
}
"""The runs of this file by name."""
