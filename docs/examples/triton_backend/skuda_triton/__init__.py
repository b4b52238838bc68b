"""Triton as a backend of skuda: `kernels`, the `records` that offer them, and two backends that run them."""
