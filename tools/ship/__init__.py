"""Kernels and selections as files: `skuda compile`, `bundle`, `cache`, `lock`, `diff`."""
