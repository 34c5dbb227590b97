"""What reproduces the paper and nothing else uses; imported by name, when it is asked for."""
