"""A checked call as a Python function: straight code that recognizes the next call like it and gives what it passes on.

Walking over checks costs more than the checks themselves; as `dataclasses` does, the code is written out once for every
form of call. Whatever differs between calls of one form is handed in as a value, so that forms are few.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from skuda.dispatch.gpu_facts import Guard, Together
from skuda.dispatch.tensor_maps import UNIT

Recognizer = Callable[[Mapping[str, Any]], Any]
"""Takes the arguments given; returns what was asked for where they are like those checked, else None."""


class Clash(NamedTuple):
    """Two arrays that must be apart, one of them written.

    Attributes
    ----------
    written, other : int
        Where their addresses stand among the values.
    low, high : int
        They reach into each other where the one address less the other lies between these.
    equal : bool
        Whether they may be exactly the same array.
    """

    written: int
    other: int
    low: int
    high: int
    equal: bool


class Given(NamedTuple):
    """One argument that was given.

    Attributes
    ----------
    name : str
        The argument.
    guard : Guard
        Gives its value, or None where it is not like the one checked.
    plainly : str
        An expression of the argument ``{0}``; where it holds, the argument is its own value and no guard is asked.
    """

    name: str
    guard: Guard
    plainly: str = ""


class Group(NamedTuple):
    """Arrays of one library that are recognized together.

    Attributes
    ----------
    members : tuple of int
        Which arguments.
    how : Together
        Recognizes them.
    """

    members: tuple[int, ...]
    how: Together


class Form(NamedTuple):
    """A checked call, as far as the next one is compared with it.

    Attributes
    ----------
    given : tuple of Given
        Every argument.
    groups : tuple of Group
        Those that need not be asked one by one.
    clashes : tuple of Clash
        What must be apart.
    aligned : tuple of int
        Whose addresses must be multiples of 16.
    """

    given: tuple[Given, ...]
    groups: tuple[Group, ...]
    clashes: tuple[Clash, ...]
    aligned: tuple[int, ...] = ()

    def values(self) -> Recognizer:
        """Return what gives a new list of one value per argument."""
        return self._written("[" + ", ".join(f"v{at}" for at in range(len(self.given))) + "]")

    def parameters(self, indices: Sequence[int], constants: Sequence[Any]) -> Recognizer:
        """Return what gives a kernel's parameters as a tuple.

        Parameters
        ----------
        indices : sequence of int
            Where each parameter stands among values and, behind them, constants.
        constants : sequence
            The constants.
        """
        count = len(self.given)
        used = {f"k{at - count}": constants[at - count] for at in indices if at >= count}
        names = (f"v{at}" if at < count else f"k{at - count}" for at in indices)
        return self._written("(" + "".join(f"{name}, " for name in names) + ")", used)

    def _written(self, result: str, used: Mapping[str, Any] | None = None) -> Recognizer:
        known: dict[str, Any] = dict(used or {})
        lines = [f"if len(arrays) != {len(self.given)}:", "    return None", "try:", "    pass"]
        lines += [f"    a{at} = arrays[{one.name!r}]" for at, one in enumerate(self.given)]
        lines += ["except KeyError:", "    return None"]
        grouped: dict[int, str] = {}
        for number, (members, how) in enumerate(self.groups):
            known[f"same{number}"] = how.same
            refused = [f"not same{number}({', '.join(f'a{at}' for at in members)})"]
            refused += [how.unless.format(f"a{at}") for at in members]
            lines += [f"if {' or '.join(refused)}:", "    return None"]
            grouped |= dict.fromkeys(members, how.address)
        for at, one in enumerate(self.given):
            if at in grouped:
                lines.append(f"v{at} = {grouped[at].format(f'a{at}')}")
                continue
            known[f"guard{at}"] = one.guard
            asked = [f"v{at} = guard{at}(a{at})", f"if v{at} is None:", "    return None"]
            if one.plainly:
                lines += [f"v{at} = a{at}", f"if not ({one.plainly.format(f'a{at}')}):"]
                asked = [f"    {line}" for line in asked]
            lines += asked
        for number, clash in enumerate(self.clashes):
            known |= {f"low{number}": clash.low, f"high{number}": clash.high}
            left, right = f"v{clash.written}", f"v{clash.other}"
            # Arrays that only reach into each other's gaps are for the full check to tell apart.
            apart = f" and {left} != {right}" if clash.equal else ""
            lines += [f"if low{number} < {left} - {right} < high{number}{apart}:", "    return None"]
        lines += [line for at in self.aligned for line in (f"if v{at} % {UNIT}:", "    return None")]
        lines.append(f"return {result}")
        made: Recognizer = _maker(tuple(known), "\n".join(lines))(*known.values())
        return made


@lru_cache(maxsize=256)
def _maker(known: tuple[str, ...], body: str) -> Callable[..., Recognizer]:
    """Return what makes a function of this body, given the values of the names that it knows."""
    inner = "\n".join(f"        {line}" for line in body.splitlines())
    text = f"def maker({', '.join(known)}):\n    def recognize(arrays):\n{inner}\n    return recognize\n"
    space: dict[str, Any] = {}
    # Names of arguments, which are identifiers, and words of this module are all that is written into the text.
    exec(compile(text, "<skuda: a checked call>", "exec"), space)  # noqa: S102
    found: Callable[..., Recognizer] = space["maker"]
    return found
