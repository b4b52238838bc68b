"""Architectures that a kernel is written for, and which processors run them."""

from __future__ import annotations

import re
from enum import StrEnum

_SM = re.compile(r"sm_(\d+)(\d)([af]?)")


class ArchSku(StrEnum):
    """What a kernel's source needs.

    A plain ``sm_80`` entry is compiled at run time for the card at hand, so it serves 8.0 and everything later. A
    suffix ``a`` names instructions of one chip only: ``sm_90a`` runs on 9.0 and nowhere else. A suffix ``f`` names
    those of a family: the same major number and the same or a later minor number.
    """

    __hash__ = str.__hash__  # an enumeration's own is a slower Python function

    CPU = "cpu"
    SM_75 = "sm_75"
    SM_80 = "sm_80"
    SM_86 = "sm_86"
    SM_87 = "sm_87"
    SM_89 = "sm_89"
    SM_90 = "sm_90"
    SM_90A = "sm_90a"
    SM_100 = "sm_100"
    SM_100A = "sm_100a"
    SM_100F = "sm_100f"
    SM_103 = "sm_103"
    SM_103A = "sm_103a"
    SM_103F = "sm_103f"
    SM_110 = "sm_110"
    SM_110A = "sm_110a"
    SM_110F = "sm_110f"
    SM_120 = "sm_120"
    SM_120A = "sm_120a"
    SM_120F = "sm_120f"
    SM_121 = "sm_121"
    SM_121A = "sm_121a"
    SM_121F = "sm_121f"

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability that the name carries, as (major, minor); None for a CPU."""
        found = _SM.fullmatch(self.value)
        return (int(found[1]), int(found[2])) if found else None

    @property
    def is_specific(self) -> bool:
        """Whether the entry needs one chip or family. If not, it needs a least compute capability."""
        return self is not ArchSku.CPU and self.value[-1] in "af"

    def runs_on(self, capability: tuple[int, int] | None) -> bool:
        """Whether a processor of this compute capability (major, minor; None: a CPU) can run the entry."""
        own = self.capability
        if own is None or capability is None:
            return own is capability is None
        if self.value.endswith("a"):
            return capability == own
        if self.value.endswith("f"):
            return capability[0] == own[0] and capability >= own
        return capability >= own

    def describe(self) -> str:
        """Return what the entry needs, in words."""
        own = self.capability
        if own is None:
            return "a CPU"
        version = f"{own[0]}.{own[1]}"
        if self.value.endswith("a"):
            return f"compute capability {version} exactly"
        if self.value.endswith("f"):
            return f"compute capability {version} or a later {own[0]}.x"
        return f"compute capability {version} or later"
