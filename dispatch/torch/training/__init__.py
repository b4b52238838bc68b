"""Layers for training."""

from __future__ import annotations

from skuda.torch.training.layers import FakeQuant, FakeQuantLinear, Mixed, MixedLinear, observe

__all__ = ["FakeQuant", "FakeQuantLinear", "Mixed", "MixedLinear", "observe"]
