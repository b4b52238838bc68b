"""Exact attention over a paged int8 cache, one module for each op."""

from skuda.kernels.attention.attention import AttentionDescriptor

__all__ = ["AttentionDescriptor"]
