"""Matrix memories: the chunked engine, decays and delta rules."""
