"""The Triton kernels, and under ``twins`` the same functions in plain torch."""
