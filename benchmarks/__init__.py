"""Programs that measure, each run from the repository's root as `python -m benchmarks.ROOM.NAME`.

speed/ times the library, kernels/ single operations, compiled/ reads compiled code without running
it; comparison/ and study/ train small models and measure what they learn. first_light/ runs
everything that needs a GPU. They need jax, flax, optax, orbax, chex, numpy and jaxtyping; only
comparison/, study/ and `speed.long_reading` need all of the library's dependencies.
"""
