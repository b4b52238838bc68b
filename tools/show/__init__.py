"""Registered kernels and the state of this machine: `skuda list`, `show`, `explain`, `doctor`."""
