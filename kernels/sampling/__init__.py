"""Log-probabilities and sampling from logits, one module for each op. Modules are imported on first use of a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skuda.kernels.sampling.argmax import ArgmaxDescriptor
    from skuda.kernels.sampling.log_softmax_at import LogProbabilities, LogSoftmaxAtDescriptor
    from skuda.kernels.sampling.sample import SampleDescriptor

__all__ = ["ArgmaxDescriptor", "LogProbabilities", "LogSoftmaxAtDescriptor", "SampleDescriptor"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from skuda.kernels.catalog import exported

        return exported(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
