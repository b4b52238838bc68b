"""Every op as a function of its arrays: the descriptor follows from their shapes and dtypes.

>>> import numpy, skuda
>>> skuda.ops.fake_quantize(input=numpy.float32([0.26, 99]), scale=0.5, zero_point=0, q_min=-128, q_max=127)
array([ 0.5, 63.5], dtype=float32)

Every argument is a keyword: the op's arguments, then the fields of its descriptor, of which those that are left out
follow from the arguments or have a default. Three more say how to run: `dispatcher` (one for the whole process where
it is left out), `preference` and `stream`. An output that is left out is made in the framework of the inputs.

A function is made when it is first used. ``make ops`` writes the types of all of them to ``ops.pyi``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skuda import functional


def __getattr__(name: str) -> Callable[..., Any] | list[str]:
    if name == "__all__":
        return list(functional.built_in())
    if not name.startswith("_"):
        op = functional.built_in().get(name)
        if op is not None:
            made: Callable[..., Any] = globals().setdefault(name, functional.function(op, __name__))
            return made
        op = functional.default_dispatcher().registry.ops.get(name)
        if op is not None:  # not kept: plug-ins may differ between dispatchers
            return functional.function(op, __name__, strict=False)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return functional.op_names()
