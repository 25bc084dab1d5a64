"""Plain-torch twins of the kernels: the oracle in tests, and what runs on a CPU."""
