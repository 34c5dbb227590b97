"""One sequence over many devices: what each device sends to the others, inside `jax.shard_map`."""
