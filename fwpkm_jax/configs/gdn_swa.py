"""GDN+SWA (Table 1): Gated DeltaNet with a 512-token window in every fourth layer."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import paper_experiment


def get_config() -> Experiment:
    return paper_experiment("gdn_swa")
