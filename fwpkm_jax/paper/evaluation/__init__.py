"""The paper's evaluations that nothing else uses."""
