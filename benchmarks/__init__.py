"""Programs that measure, each run from the repository's root as `python -m benchmarks.ROOM.NAME`.

speed/ times the library, kernels/ single operations, compiled/ reads compiled code without running
it. bring_up/ runs everything that needs a GPU. They need jax, flax, optax, orbax, chex, numpy
and jaxtyping; only `speed.long_reading` needs all of the library's dependencies. What small models
learn is measured by lab/.
"""
