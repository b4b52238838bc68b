"""Patterns of aten graphs: gated activations and RMS norms, whole or decomposed."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

_aten, _prims = torch.ops.aten, torch.ops.prims
_CASTS = (_prims.convert_element_type.default, _aten._to_copy.default)  # noqa: SLF001  the op's name
_ADD, _MUL = (_aten.add.Tensor, _aten.add.Scalar), (_aten.mul.Tensor, _aten.mul.Scalar)
_SQRT_HALF, _SQRT_2_OVER_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)


class Left(Exception):
    """A group of layers that does not change. The message says why."""


def curve(node: Any) -> tuple[str, Mapping[str, str], fx.Node] | None:
    """Return an activation: the first word of its op, the op's further fields, and its input."""
    node = _uncast(node)
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    args = node.args
    if node.target is _aten.silu.default:
        return "silu", {}, args[0]  # type: ignore[return-value]
    if node.target is _aten.gelu.default:
        form = {"none": "erf", "tanh": "tanh"}[node.kwargs.get("approximate", "none")]  # type: ignore[index]
        return "gelu", {"approximation": form}, args[0]  # type: ignore[return-value]
    if node.target is _aten.div.Tensor:
        x = _uncast(args[0])
        return ("silu", {}, x) if _is(args[1], _ADD, (_exp_of_negative, x), 1) else None
    for one, other in (args[:2], args[1::-1]) if node.target in _MUL and len(args) > 1 else ():
        x = _uncast(one)
        if _is(other, (_aten.sigmoid.default,), x):
            return "silu", {}, x
        half = _half_of(one)
        if half is not None and _is(other, _ADD, (_erf, half), 1):
            return "gelu", {"approximation": "erf"}, half
        if half is not None and _is(other, _ADD, (_tanh, half), 1):
            return "gelu", {"approximation": "tanh"}, half
    return None


def _half_of(node: Any) -> fx.Node | None:
    """Return x of 0.5 * x."""
    node = _uncast(node)
    if isinstance(node, fx.Node) and node.target in _MUL and node.args[1] == 0.5:
        found: fx.Node = _uncast(node.args[0])
        return found
    return None


def _exp_of_negative(node: Any, x: fx.Node) -> bool:
    """Whether this is exp(-x)."""
    node = _uncast(node)
    return _is(node, (_aten.exp.default,), (lambda inner, x: _is(inner, (_aten.neg.default,), x), x))


def _erf(node: Any, x: fx.Node) -> bool:
    """Whether this is erf(x * sqrt(1 / 2))."""
    return _is(node, (_aten.erf.default,), (lambda inner, x: _is(inner, _MUL, x, _SQRT_HALF), x))


def _tanh(node: Any, x: fx.Node) -> bool:
    """Whether this is tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))."""

    def cube(inner: Any, x: fx.Node) -> bool:
        return _is(inner, _MUL, (square, x), x) or _is(inner, (_aten.pow.Tensor_Scalar,), x, 3)

    def square(inner: Any, x: fx.Node) -> bool:
        return _is(inner, _MUL, x, x)

    def polynomial(inner: Any, x: fx.Node) -> bool:
        return _is(inner, _ADD, x, (lambda term, x: _is(term, _MUL, (cube, x), 0.044715), x))

    return _is(node, (_aten.tanh.default,), (lambda inner, x: _is(inner, _MUL, (polynomial, x), _SQRT_2_OVER_PI), x))


def _is(node: Any, targets: tuple[Any, ...], *wanted: Any) -> bool:
    """Whether a node, apart from casts, calls one of the targets with these arguments.

    A wanted argument is a node, a number, or a pair of a pattern and the node that it is about.
    """
    node = _uncast(node)
    if not isinstance(node, fx.Node) or node.target not in targets or len(node.args) != len(wanted) or node.kwargs:
        return False
    for given, want in zip(node.args, wanted, strict=True):
        if isinstance(want, tuple):
            pattern, about = want
            fits = bool(pattern(given, about))
        elif isinstance(want, fx.Node):
            fits = _uncast(given) is want
        else:
            fits = isinstance(given, int | float) and math.isclose(given, want, rel_tol=1e-12)
        if not fits:
            return False
    return True


def rms_norm(node: fx.Node) -> tuple[fx.Node, fx.Node | None, Any] | None:
    """Return input, weight and epsilon of an RMS norm over the last axis, or None for another node."""
    inner = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    if isinstance(inner, fx.Node) and inner.target in (_aten.rms_norm.default, _aten._fused_rms_norm.default):  # noqa: SLF001
        x, shape, weight, eps = (*inner.args, None, None)[:4]
        return (x, weight, eps) if len(shape) == 1 else None  # type: ignore[arg-type, return-value]
    node = _uncast(node)
    if not isinstance(node, fx.Node) or node.target is not _aten.mul.Tensor:
        return None
    bare = _scaled_by_rsqrt(node)
    if bare is not None:
        return bare[0], None, bare[1]
    for one, weight in (node.args[:2], node.args[1::-1]):
        found = _scaled_by_rsqrt(_uncast(one))
        if found is not None and isinstance(weight, fx.Node):
            return found[0], _uncast(weight), found[1]
    return None


def _scaled_by_rsqrt(node: Any) -> tuple[fx.Node, Any] | None:
    """Return x and eps of x * rsqrt(mean(x^2) + eps)."""
    if not isinstance(node, fx.Node) or node.target is not _aten.mul.Tensor:
        return None
    for one, other in (node.args[:2], node.args[1::-1]):
        x, root = _uncast(one), _uncast(other)
        if not isinstance(x, fx.Node) or not isinstance(root, fx.Node) or root.target is not _aten.rsqrt.default:
            continue
        total = root.args[0]
        if not isinstance(total, fx.Node) or total.target not in _ADD or total.kwargs:
            continue
        mean, eps = total.args
        if not isinstance(mean, fx.Node) or mean.target is not _aten.mean.dim or len(mean.args) < 3:
            continue
        square, axes, keeps = mean.args[:3]
        squared = _is(square, (_aten.pow.Tensor_Scalar,), x, 2) or _is(square, _MUL, x, x)
        wide = fake_of(square).dtype is torch.float32  # type: ignore[arg-type]
        if squared and wide and keeps and axes in ([-1], [fake_of(x).dim() - 1]):
            return x, eps
    return None


def _uncast(node: Any) -> Any:
    """Return a node without casts between floating types, which ops that round once leave out."""
    while isinstance(node, fx.Node) and node.target in _CASTS:
        given = node.args[0]
        if not isinstance(given, fx.Node) or not fake_of(given).is_floating_point():
            return node
        if not fake_of(node).is_floating_point() or fake_of(node).device != fake_of(given).device:
            return node
        node = given
    return node


def whole(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """Return the tensor whose first half is the gate and whose second half is the up, or None."""
    parts = (gate, up)
    if all(part.target is operator.getitem for part in parts) and gate.args[0] is up.args[0]:
        split: Any = gate.args[0]
        whole, size, *axis = split.args
        fits = (gate.args[1], up.args[1]) == (0, 1) and split.target in (
            _aten.split.Tensor,
            _aten.split_with_sizes.default,
        )
        fits = fits and size in (fake_of(gate).shape[-1], [fake_of(gate).shape[-1]] * 2)
    elif all(part.target is _aten.slice.Tensor for part in parts) and gate.args[0] is up.args[0]:
        whole, *axis = gate.args[:2]
        width = fake_of(gate).shape[-1]
        fits = gate.args[1:4] in ((axis[0], 0, width), (axis[0], None, width)) and up.args[1:3] == (axis[0], width)
    else:
        return None
    last = fake_of(whole).dim() - 1
    return (
        whole if fits and axis in ([-1], [last]) and fake_of(whole).shape[-1] == 2 * fake_of(gate).shape[-1] else None
    )


def fake_of(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of a node.

    Raises
    ------
    Left
        If it has none.
    """
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor):
        raise Left(f"{node.name} has no fake tensor in its meta")
    return found
