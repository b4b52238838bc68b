"""The reason why a kernel was refused, as data: a code, the field at fault, the wanted value and the given one."""

from __future__ import annotations

from typing import Literal

from skuda.registry.value import Value

ReasonCode = Literal[
    "element",
    "aux_element",
    "layout",
    "epilogue",
    "arch",
    "constraint",
    "guarantee",
    "workspace",
    "preference",
    "backend",
]


class Reason(Value):
    """One reason for which a kernel was refused.

    Attributes
    ----------
    code : str
        Kind of reason, from a closed list, for programs that branch on it.
    field : str
        Field of the descriptor, ``device``, ``backend`` or ``preference.*`` that would have to change.
    wanted : str
        What the kernel needs, or what the caller requires.
    had : str
        What was given instead.
    """

    code: ReasonCode
    field: str
    wanted: str
    had: str

    def __str__(self) -> str:
        return f"{self.field}: wanted {self.wanted}, had {self.had}"

    @property
    def change(self) -> str:
        """The change that would remove this reason, in words."""
        match self.code:
            case "guarantee":
                return f"relax {self.field} = {self.wanted}: this kernel promises {self.had}"
            case "preference":
                return f"drop {self.field} = {self.wanted}"
            case "arch":
                return f"run on {self.wanted}"
            case "backend":
                return self.wanted
            case _:
                return f"set {self.field} to {self.wanted}"
