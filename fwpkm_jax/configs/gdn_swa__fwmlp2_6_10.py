"""GDN+SWA | FwMLP@2,6,10 (Table 1): FwMLP in layers 2, 6 and 10."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import paper_experiment


def get_config() -> Experiment:
    return paper_experiment("gdn_swa__fwmlp2_6_10")
