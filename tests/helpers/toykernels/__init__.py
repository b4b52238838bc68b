"""Kernels of a made-up package: what the CUDA backends need of one, and nothing else."""
