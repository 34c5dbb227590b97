"""RULER: retrieval, tracing, counting and questions in texts of chosen lengths.

References: Hsieh et al. 2024, arXiv:2404.06654.
"""
