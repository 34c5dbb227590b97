"""FA | PKM@6 + FwPKM@2,10, pSWA (section 4.2): in 90 % of steps attention sees a window."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import paper_experiment


def get_config() -> Experiment:
    return paper_experiment("fa__pkm6_fwpkm2_10__pswa")
