"""LongBench: perplexity of answers to questions about long texts."""
