"""Dynamic evaluation: gradient steps of all slow weights on what was read."""
