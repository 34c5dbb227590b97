"""Small models trained on text, and what their memories change."""
