"""Dynamic evaluation: all slow weights take gradient steps on the text that was read."""
