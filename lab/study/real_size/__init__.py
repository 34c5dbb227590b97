"""The paper's claims at a real size, in one sitting."""
