"""The paper's claims at a real size: 24 million slow weights on bytes, in one sitting at a GPU.

`lab.study.real_size` trains and evaluates these models (docs/measurements/real_size.md).
"""
