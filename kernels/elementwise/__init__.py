"""Elementwise ops, one module each."""

from skuda.kernels.elementwise.fill import FillDescriptor

__all__ = ["FillDescriptor"]
