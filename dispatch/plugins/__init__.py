"""Kernels and backends of other packages."""
