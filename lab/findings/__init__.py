"""What pages say of stored lines: a module for each finding, which also draws its picture."""

FINDINGS = (
    *("recall", "generalise", "text", "forgetting", "comparison", "states", "performance"),
    *("readme", "objections", "lookup", "account", "sdm", "real_model"),
)
"""Modules that a page's comment can name."""
PARTS = (
    *("answer", "table", "layer", "notes", "results", "gains", "costs", "aims", "chats", "tasks"),
    "half_way",
    "seeds",
)
"""Functions of a finding that give a part of a page, each as far as the finding has it."""
