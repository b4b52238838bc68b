"""Every op of the registry as an op of torch; see `skuda.torch.ops.registered`."""

from __future__ import annotations

from skuda.torch.ops.registered import linear_codes, linear_dynamic, linear_scaled, linear_static, register

__all__ = ["linear_codes", "linear_dynamic", "linear_scaled", "linear_static", "register"]
