"""HOW kernels run: one module per backend."""
