"""Hashes of the sources that evidence depends on: those of the kernel, and of its reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from skuda.kernels.code import code_hash
from skuda.kernels.sources import source_hash
from skuda.registry.op import Case, Op

__all__ = ["reference_hash", "source_hash"]


def reference_hash(op: Op) -> str:
    """Return the hash of an op's meaning and of its cases.

    It covers the op's reference, descriptor and input drawing, with the definitions that they reach. Comments,
    docstrings and the declarations of kernels do not count.

    Raises
    ------
    LookupError
        If one of the modules does not exist.
    """
    code = [_part_hash(op, part) for part in (op.reference, op.descriptor, op.draw) if part is not None]
    return hashlib.sha256(repr((code, _cases_hash(op.cases))).encode()).hexdigest()


@lru_cache(maxsize=256)
def _cases_hash(cases: tuple[Case, ...]) -> str:
    contents = [(case.problem.model_dump_json(), case.values) for case in cases]
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def _part_hash(op: Op, part: Callable[..., Any]) -> str:
    name = getattr(part, "__qualname__", "<locals>")
    if "<locals>" in name:
        # A closure or a partial function may depend on anything in the op's module.
        return code_hash(op.descriptor.__module__)
    return code_hash(part.__module__, name.partition(".")[0])
