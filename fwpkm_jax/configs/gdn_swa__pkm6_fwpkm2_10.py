"""GDN+SWA | PKM@6 + FwPKM@2,10 (Table 1), the paper's headline hybrid.

    fwpkm train gdn_swa__pkm6_fwpkm2_10 \
        --data.train_paths longcrawl64.bin fineweb_edu.bin --data.valid_paths valid.bin

516.31M parameters, fast weights included; 113.73M active per token. Needs accelerators: not trained
here yet. Sizes and training are those of `fwpkm_jax/paper.py`, as for every model of the paper.
"""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import paper_experiment


def get_config() -> Experiment:
    return paper_experiment("gdn_swa__pkm6_fwpkm2_10")
