"""`Handed`: what one hook of a framework hands to another, past code that must not compute with it."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils._pytree import tree_leaves

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "bool", "int", "float", "index", "complex"),
    *("len", "iter", "contains", "getitem", "setitem", "delitem", "array"),
)


class Handed:
    """A value that is no tensor, and that raises an error for all that could be done to a tensor in its place.

    A hook of a framework cannot know that its partner runs, too: other code may compute with what it returns, or take
    None for nothing to do. This value can be passed on, and nothing else; the partner reads its attributes.
    """

    __hash__ = object.__hash__

    def refuse(self) -> NoReturn:
        """Raise the error.

        Raises
        ------
        InvalidProblem
            Always.
        """
        raise NotImplementedError

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse any function of torch."""
        next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).refuse()


def _refused(self: Handed, *_: Any) -> NoReturn:
    self.refuse()


for _name in _OPERATORS:
    setattr(Handed, f"__{_name}__", _refused)
    setattr(Handed, f"__r{_name}__", _refused)
