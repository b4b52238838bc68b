"""Models that are exact; see `skuda.torch.exact.exact`."""

from __future__ import annotations

from skuda.torch.exact.exact import exact_, is_exact

__all__ = ["exact_", "is_exact"]
