"""Requirements on a record, and whether it meets them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rich.text import Text

from skuda.tools.study.view import Parts, Table

_VERDICTS = {
    True: Text("met", style="green"),
    False: Text("missed", style="red"),
    None: Text("not judged", style="dim"),
}


class Requirement(NamedTuple):
    """One requirement: the quantity, its bound, and its value in this record, or why there is none.

    `met` says whether the value is within the bound; None if the record does not decide that.
    """

    what: str
    required: str
    measured: str
    met: bool | None

    @classmethod
    def ratio(cls, what: str, value: float | None, bound: float, *, at_most: bool = False) -> Requirement:
        """Return the requirement that a ratio is at least, or at most, a bound; None is a ratio without a value."""
        required = f"{'at most' if at_most else 'at least'} {bound:g}x"
        if value is None:
            return cls(what, required, "not measured", None)
        return cls(what, required, f"{value:.3f}x", value <= bound if at_most else value >= bound)

    @classmethod
    def equal(cls, what: str, wrong: str, compared: int) -> Requirement:
        """Return the requirement that bits are equal; `wrong` names where they are not, `compared` counts inputs."""
        if wrong:
            return cls(what, "equal", f"different or failed: {wrong}", met=False)
        return cls(what, "equal", f"equal on {compared} inputs" if compared else "not compared", compared > 0 or None)


def requirements(bits: Requirement, figures: Iterable[Requirement], unlike: Iterable[tuple[bool, str]]) -> Parts:
    """Return the table of a requirement on bits, which is judged everywhere, and of figures.

    Figures are for one kind of run. `unlike` has pairs: whether the run is like that, and how it differs if it is not;
    if it differs, the figures are not judged.
    """
    different = ", ".join(text for like, text in unlike if not like)
    found = [bits, *(one._replace(met=None) if different else one for one in figures)]
    table = Table(
        ("requirement", "required", "measured", "verdict"), [(*one[:3], _VERDICTS[one.met]) for one in found], words=4
    )
    return (table, Text(f"Figures are not judged: {different}.", style="yellow")) if different else (table,)
