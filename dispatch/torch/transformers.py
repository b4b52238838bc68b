"""Int8 models of the package transformers; see `skuda.torch.hf.transformers`."""

from __future__ import annotations

from skuda.torch.hf.transformers import SkudaConfig, SkudaQuantizer, convert_

__all__ = ["SkudaConfig", "SkudaQuantizer", "convert_"]
