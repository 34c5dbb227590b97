"""What makes lookup general: trainings in several wordings, tests in others, and rivals."""
