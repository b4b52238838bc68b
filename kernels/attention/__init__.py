"""Exact attention over a paged int8 cache, one module for each op."""
