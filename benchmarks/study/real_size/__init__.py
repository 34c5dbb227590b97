"""The paper's claims at a real size, in one sitting: `benchmarks.study.real_size.__main__`."""
