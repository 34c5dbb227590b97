"""Fast-weight memories on the residual stream."""
