"""A kernel registry with a SKU-based dispatcher: int8 quantization for inference and training.

`skuda.dispatch` chooses and runs kernels. `skuda.ops` has a function for every op. `skuda.registry` and `skuda.kernels`
describe the ops and kernels. `skuda.torch` is the layer for PyTorch. Importing this package imports none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skuda import dispatch, kernels, ops, registry, tools

    __version__: str

__all__ = ["__version__", "dispatch", "kernels", "ops", "registry", "tools"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("skuda")
    if name in __all__ or name == "torch":  # not in __all__, because it needs an optional package
        return importlib.import_module(f"skuda.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
