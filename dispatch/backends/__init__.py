"""Backends, one module each: they prepare and run kernels."""
