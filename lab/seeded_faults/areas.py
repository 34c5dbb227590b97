"""All faults by area."""

from lab.seeded_faults import (
    core,
    data,
    evaluation,
    folders,
    interchange,
    kernels,
    layers,
    memories,
    metadata,
    outside,
    precision,
    rules,
    training,
)

AREAS = {
    module.__name__.rpartition(".")[2]: module.FAULTS
    for module in (
        *(core, rules, kernels, layers, training, data, evaluation, interchange, memories, outside),
        *(folders, metadata, precision),
    )
}
"""The faults of each area, named after the part of the library that they lie in."""
