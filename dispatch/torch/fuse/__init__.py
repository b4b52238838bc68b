"""Fewer launches: joined products, and norms and gates that write codes; see `skuda.torch.fuse.fuse`."""

from __future__ import annotations

from skuda.torch.fuse.fuse import Fusion, fuse_

__all__ = ["Fusion", "fuse_"]
