"""Exact attention over a paged int8 cache, one module for each op. Modules are imported on first use of a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skuda.kernels.attention.attention import Attended, AttentionDescriptor
    from skuda.kernels.attention.rope_quantize_append import RopeQuantizeAppendDescriptor, RopeQuantizedQueries

__all__ = ["Attended", "AttentionDescriptor", "RopeQuantizeAppendDescriptor", "RopeQuantizedQueries"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from skuda.kernels.catalog import exported

        return exported(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
