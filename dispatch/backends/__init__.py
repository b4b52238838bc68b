"""Backends: how kernels are prepared and run, one module each."""
