"""GDN+FA | PKM@6 + FwPKM@2,10 (Table 1): PKM in layer 6, FwPKM in layers 2 and 10."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import paper_experiment


def get_config() -> Experiment:
    return paper_experiment("gdn_fa__pkm6_fwpkm2_10")
