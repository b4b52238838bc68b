"""Refuses derivatives of ops that have none. Without this they would silently be zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import _C, Tensor
from torch.autograd import forward_ad

from skuda.registry.errors import InvalidProblem
from skuda.torch.ops.tensor_op import refuse_gradient

_KEYS = ((_C.DispatchKey.CPU, _C.DispatchKey.AutogradCPU), (_C.DispatchKey.CUDA, _C.DispatchKey.AutogradCUDA))
_ORDINARY = {(_C.DispatchKeySet(device) | _C.DispatchKeySet(autograd)).raw_repr() for device, autograd in _KEYS}
"""The dispatch keys of calls for which torch would only run the kernel of a device next."""


def refusing(name: str, overload: Any, names: Sequence[str], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of an op for torch's autograd keys, where tensors still have gradients and tangents.

    Parameters
    ----------
    name : str
        The op, for errors.
    overload : torch.ops.OpOverload
        Continues below autograd.
    names : sequence of str
        Names of its tensors, in order.
    run : callable
        The op for real tensors. It refuses gradients itself.
    """

    def kernel(keys: Any, *arguments: Any, **fields: Any) -> Any:
        forward_mode = forward_ad._current_level >= 0  # noqa: SLF001  no public name
        if keys.raw_repr() in _ORDINARY and not forward_mode:
            return run(*arguments, **fields)
        for argument, given in zip(names, arguments, strict=False):
            if isinstance(given, Tensor):
                if given.requires_grad:
                    refuse_gradient(name, argument)
                if forward_mode and forward_ad.unpack_dual(given).tangent is not None:
                    refuse_tangent(name, argument)
        with _C._AutoDispatchBelowAutograd():  # type: ignore[attr-defined]  # noqa: SLF001  as torch's own custom ops
            return overload.redispatch(keys & _C._after_autograd_keyset, *arguments, **fields)  # noqa: SLF001

    return kernel


def refuse_tangent(op: str, name: str) -> NoReturn:
    """Raise `InvalidProblem` for a tensor with a tangent."""
    rule = (
        "have none: there are no forward-mode derivatives (jvp, linearize, jacfwd, dual tensors). Use reverse mode "
        "through the layers of skuda.torch, as backward and torch.func.vjp do"
    )
    raise InvalidProblem(op, name, "a tensor with a tangent", rule)
