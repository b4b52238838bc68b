"""LoRA of the package peft over int8 layers; see `skuda.torch.hf.peft`."""

from __future__ import annotations

from skuda.torch.hf.peft import LoraInt8Linear

__all__ = ["LoraInt8Linear"]
