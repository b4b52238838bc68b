"""`fuse_graph`: fewer launches in any graph of aten ops that has int8 layers, whatever the model's source looks like.

The graph may come from `torch.export`, from AOTAutograd, or from Inductor's passes after it: activations and norms are
found whole or decomposed. `graph_pass` and `fused_backend` bring the pass into `torch.compile`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import fx

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.autograd import Q_MAX
from skuda.torch.dtypes import element_of
from skuda.torch.fuse import Fusion

Bits = Literal["eager", "fused"]
_CODES = {"q_min": -Q_MAX, "q_max": Q_MAX, "output_element": "s8"}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_aten, _prims, _skuda = torch.ops.aten, torch.ops.prims, torch.ops.skuda
_LINEAR = _skuda.quantized_linear.default
_CASTS = (_prims.convert_element_type.default, _aten._to_copy.default)  # noqa: SLF001  the op's name
_ADD, _MUL = (_aten.add.Tensor, _aten.add.Scalar), (_aten.mul.Tensor, _aten.mul.Scalar)
_SQRT_HALF, _SQRT_2_OVER_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)


class _Left(Exception):
    """A group of layers that does not change. The message says why."""


class _Coded(NamedTuple):
    """Codes and scales of the input of some layers, as nodes, and how they were made."""

    codes: fx.Node
    scale: fx.Node
    how: str


def fuse_graph(graph_module: fx.GraphModule, *, bits: Bits = "eager") -> Fusion:
    """Fuse what surrounds the int8 layers of a graph, in place: calls of ``torch.ops.skuda.quantized_linear``.

    - Layers with the same input share one quantization. The bits stay.
    - With ``bits="fused"``, an RMS norm whose result only such layers use writes codes (`rms_norm_quantize`), and adds
      the residual before. So does a gated activation, ``silu(a) * b`` or ``gelu(a) * b``, of two tensors or of the
      halves of one (`silu_mul_quantize`, `gelu_mul_quantize`). These ops round once where torch rounds several times.

    Gates and ups of separate layers stay two products: weights are inputs of a graph, so joining them would copy them
    in every call. `fuse_` joins them once.

    Parameters
    ----------
    graph_module : GraphModule
        A functional graph of aten ops, whose nodes have fake tensors in ``meta["val"]``. Sizes may be symbolic.
    bits : str
        ``eager`` keeps the bits of the graph. ``fused`` gives those of the fused ops.

    Returns
    -------
    Fusion
        What changed and what did not, by the names of the nodes of the layers.

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type.
    """
    if not isinstance(graph_module, fx.GraphModule):
        raise InvalidProblem("fuse_graph", "graph_module", shown(graph_module), "be a torch.fx.GraphModule")
    _check_bits("fuse_graph", bits)
    graph = graph_module.graph
    fused: dict[str, str] = {}
    left: dict[str, str] = {}
    for layers in _groups(graph):
        names = ", ".join(layer.name for layer in layers)
        try:
            fused[names] = _fuse(_given(layers[0])["activation"], layers, bits)
        except _Left as reason:
            left[names] = str(reason)
    if fused:
        graph.eliminate_dead_code()
        graph.lint()
        graph_module.recompile()
    return Fusion(fused, left)


def _groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the int8 layers that share an input, in the order of the graph."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is _LINEAR:
            found.setdefault(_given(node)["activation"], []).append(node)
    return list(found.values())


def _fuse(input: fx.Node, layers: list[fx.Node], bits: Bits) -> str:
    """Let layers with the same input take codes. Return how."""
    for layer in layers:
        given, value = _given(layer), _value(input)
        if (given.get("q_min"), given.get("q_max")) not in ((None, None), (-Q_MAX, Q_MAX)):
            raise _Left(f"{layer.name} has another range of codes than -{Q_MAX}..{Q_MAX}")
        if value.dtype not in _DTYPES or given.get("output_element") == "f64":
            raise _Left(f"{layer.name} computes in f64")
    why = "only with bits='fused' may a norm or gated activation write its codes"
    if bits == "fused":
        try:
            coded = _norm(input, layers) or _gated(input, layers)
            why = f"its input, {input.name}, is no known form of a norm or gated activation"
        except _Left as reason:
            coded, why = None, str(reason)
        if coded is not None:
            return _rewired(layers, coded)
    if len(layers) == 1:
        raise _Left(f"no other layer has its input, and {why}")
    at = min(layers, key=list(input.graph.nodes).index)
    coded = _called(at, _skuda.dynamic_range.default, (input,), _CODES, "one quantization of the input for all")
    return _rewired(layers, coded) + (f" ({why})" if bits == "fused" else "")


def _rewired(layers: list[fx.Node], coded: _Coded) -> str:
    """Replace layers by products of codes."""
    for layer in layers:
        given = _given(layer)
        element = given.get("output_element") or str(element_of(_value(given["activation"]).dtype))
        names = ("weight_scale", "weight_zero_point", "bias", "output_scale", "output_zero_point")
        tensors = coded.codes, given["weight_q"], coded.scale, None, *(given.get(name) for name in names)
        fields = {"output_element": element, "act_scale_scope": "token"}
        if given.get("epilogue") is not None:
            fields["epilogue"] = given["epilogue"]
        with layer.graph.inserting_before(layer):
            made = layer.graph.call_function(_skuda.scaled_linear.default, tensors, fields)
        made.meta.update({key: value for key, value in layer.meta.items() if key != "eager_input_vals"})
        layer.replace_all_uses_with(made)
        layer.graph.erase_node(layer)
    return coded.how


def _norm(input: fx.Node, layers: list[fx.Node]) -> _Coded | None:
    """Let an RMS norm write codes, or return None for another input.

    Raises
    ------
    _Left
        If it is such a norm, but no op computes the same.
    """
    found = _rms_norm(input)
    if found is None:
        return None
    x, weight, eps = found
    if not isinstance(eps, float):
        raise _Left("the norm's eps is an input of the graph: dynamic=True makes one of every number; leave it out")
    _only_used_by(input, layers)
    value = _value(x)
    if value.dtype is not _value(input).dtype:
        raise _Left(f"the norm {input.name} changes the dtype")
    width = value.shape[-1]
    if weight is not None and (_value(weight).dtype is not value.dtype or tuple(_value(weight).shape) != (width,)):
        raise _Left(f"the weight of the norm {input.name} has another dtype or shape than its columns")
    fields = {"eps": eps, **_CODES}
    terms = x.args[:2] if x.target is _aten.add.Tensor and not x.kwargs else ()
    order = {node: at for at, node in enumerate(x.graph.nodes)}
    residual = len(terms) == len(x.args) == 2 and all(  # noqa: PLR2004
        isinstance(term, fx.Node) and _value(term).shape == value.shape and _value(term).dtype is value.dtype
        for term in terms
    )
    if not residual or (weight is not None and order[weight] > order[x]):
        at = min(layers, key=lambda layer: order[layer])
        return _called(at, _skuda.rms_norm_quantize.default, (x, None, weight), fields, "the norm writes codes")
    op, at = _skuda.rms_norm_quantize.default, x.next
    coded = _called(at, op, (*terms, weight), fields, "the norm adds the residual and writes codes")
    total = _item(coded.scale.args[0], 2, at)
    x.replace_all_uses_with(total)
    return coded


def _gated(input: fx.Node, layers: list[fx.Node]) -> _Coded | None:
    """Let a gated activation write codes, or return None for another input; errors as `_norm`."""
    if input.target is not _aten.mul.Tensor:
        return None
    for act, up in (input.args[:2], input.args[1::-1]):
        found = _curve(act)
        if found is not None and isinstance(up, fx.Node):
            break
    else:
        return None
    name, fields, gate = found
    _only_used_by(input, layers)
    values = [_value(each) for each in (input, gate, up)]
    if len({value.dtype for value in values}) > 1 or any(value.shape != values[0].shape for value in values):
        raise _Left(f"gate and up of {input.name} differ in dtype or shape")
    whole = _whole(gate, up)
    tensors = (gate, up, None) if whole is None else (None, None, whole)
    op = getattr(_skuda, f"{name}_mul_quantize").default
    order = {node: at for at, node in enumerate(input.graph.nodes)}
    at = min(layers, key=lambda layer: order[layer])
    return _called(at, op, tensors, {**fields, **_CODES}, "the gated activation writes codes")


def _curve(node: Any) -> tuple[str, Mapping[str, str], fx.Node] | None:
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
        return ("silu", {}, x) if _is(args[1], _ADD, (_ONE_EXP, x), 1) else None
    for one, other in (args[:2], args[1::-1]) if node.target in _MUL and len(args) > 1 else ():
        x = _uncast(one)
        if _is(other, (_aten.sigmoid.default,), x):
            return "silu", {}, x
        half = _half_of(one)
        if half is not None and _is(other, _ADD, (_ERF, half), 1):
            return "gelu", {"approximation": "erf"}, half
        if half is not None and _is(other, _ADD, (_TANH, half), 1):
            return "gelu", {"approximation": "tanh"}, half
    return None


def _half_of(node: Any) -> fx.Node | None:
    """Return x of 0.5 * x."""
    node = _uncast(node)
    if isinstance(node, fx.Node) and node.target in _MUL and node.args[1] == 0.5:  # noqa: PLR2004
        found: fx.Node = _uncast(node.args[0])
        return found
    return None


def _ONE_EXP(node: Any, x: fx.Node) -> bool:  # noqa: N802  a pattern
    """Whether this is exp(-x)."""
    node = _uncast(node)
    return _is(node, (_aten.exp.default,), (lambda inner, x: _is(inner, (_aten.neg.default,), x), x))


def _ERF(node: Any, x: fx.Node) -> bool:  # noqa: N802
    """Whether this is erf(x * sqrt(1 / 2))."""
    return _is(node, (_aten.erf.default,), (lambda inner, x: _is(inner, _MUL, x, _SQRT_HALF), x))


def _TANH(node: Any, x: fx.Node) -> bool:  # noqa: N802
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


def _rms_norm(node: fx.Node) -> tuple[fx.Node, fx.Node | None, Any] | None:
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
        if not isinstance(mean, fx.Node) or mean.target is not _aten.mean.dim or len(mean.args) < 3:  # noqa: PLR2004
            continue
        square, axes, keeps = mean.args[:3]
        squared = _is(square, (_aten.pow.Tensor_Scalar,), x, 2) or _is(square, _MUL, x, x)
        wide = _value(square).dtype is torch.float32  # type: ignore[arg-type]
        if squared and wide and keeps and axes in ([-1], [_value(x).dim() - 1]):
            return x, eps
    return None


def _uncast(node: Any) -> Any:
    """Return a node without casts between floating types, which ops that round once leave out."""
    while isinstance(node, fx.Node) and node.target in _CASTS:
        given = node.args[0]
        if not isinstance(given, fx.Node) or not _value(given).is_floating_point():
            return node
        if not _value(node).is_floating_point() or _value(node).device != _value(given).device:
            return node
        node = given
    return node


def _whole(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """Return the tensor whose first half is the gate and whose second half is the up, or None."""
    parts = (gate, up)
    if all(part.target is operator.getitem for part in parts) and gate.args[0] is up.args[0]:
        split: Any = gate.args[0]
        whole, size, *axis = split.args
        fits = (gate.args[1], up.args[1]) == (0, 1) and split.target in (
            _aten.split.Tensor,
            _aten.split_with_sizes.default,
        )
        fits = fits and size in (_value(gate).shape[-1], [_value(gate).shape[-1]] * 2)
    elif all(part.target is _aten.slice.Tensor for part in parts) and gate.args[0] is up.args[0]:
        whole, *axis = gate.args[:2]
        width = _value(gate).shape[-1]
        fits = gate.args[1:4] in ((axis[0], 0, width), (axis[0], None, width)) and up.args[1:3] == (axis[0], width)
    else:
        return None
    last = _value(whole).dim() - 1
    return whole if fits and axis in ([-1], [last]) and _value(whole).shape[-1] == 2 * _value(gate).shape[-1] else None


def _only_used_by(input: fx.Node, layers: list[fx.Node]) -> None:
    others = [user.name for user in input.users if user not in layers]
    if others:
        raise _Left(f"{input.name} is also used by {', '.join(others)}")


def _called(at: fx.Node, op: Any, tensors: tuple[Any, ...], fields: Mapping[str, Any], how: str) -> _Coded:
    """Insert a call of an op that writes codes and scales."""
    with at.graph.inserting_before(at):
        made = at.graph.call_function(op, tensors, dict(fields))
    values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in tensors]
    fake: Any = next(value for value in values if value is not None)
    with fake.fake_mode:
        made.meta["val"] = op(*values, **fields)
    return _Coded(_item(made, 0, at), _item(made, 1, at), how)


def _item(node: Any, number: int, at: fx.Node) -> fx.Node:
    with node.graph.inserting_before(at):
        made: fx.Node = node.graph.call_function(operator.getitem, (node, number))
    made.meta["val"] = node.meta["val"][number]
    return made


def _given(layer: fx.Node) -> dict[str, Any]:
    """Return the arguments of an int8 layer by name."""
    names = (argument.name for argument in _LINEAR._schema.arguments)  # noqa: SLF001
    return dict(zip(names, layer.args, strict=False)) | dict(layer.kwargs)


def _value(node: fx.Node) -> torch.Tensor:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise _Left(f"{node.name} has no fake tensor in its meta")
    return value


def _check_bits(subject: str, bits: object) -> None:
    if bits not in get_args(Bits):
        raise InvalidProblem(subject, "bits", shown(bits), f"be one of {', '.join(get_args(Bits))}")


def graph_pass(*, bits: Bits = "eager") -> Any:
    """Return `fuse_graph` as a pass of Inductor. Its ``reports`` has one `Fusion` for each graph that is not cached.

    ``torch.compile(model, options={"post_grad_custom_pre_pass": graph_pass()})`` fuses what it compiles.

    Parameters
    ----------
    bits : str
        As in `fuse_graph`. ``eager`` keeps the bits that Inductor gives without the pass.

    Raises
    ------
    InvalidProblem
        For another value of `bits`.
    """
    _check_bits("graph_pass", bits)
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # importing it takes long

    class Pass(CustomGraphPass):
        def __init__(self) -> None:
            self.reports: list[Fusion] = []

        def __call__(self, graph: fx.Graph) -> None:
            assert graph.owning_module is not None
            self.reports.append(fuse_graph(graph.owning_module, bits=bits))

        def uuid(self) -> bytes:  # part of the key of Inductor's cache
            return get_hash_for_files((__file__,), bits)

    return Pass()


class FusedBackend:
    """A backend of `torch.compile` that runs a fused graph as it is, without Inductor.

    Graphs that record gradients run unchanged.

    Parameters
    ----------
    bits : str
        As in `fuse_graph`.

    Attributes
    ----------
    reports : list of Fusion
        One for each graph that was compiled.
    """

    def __init__(self, bits: Bits) -> None:
        self.bits = bits
        self.reports: list[Fusion] = []

    def __call__(self, graph_module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """Compile a graph of Dynamo."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def unchanged(made: fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(made.forward)

        def fused(made: fx.GraphModule, _: Any) -> Any:
            self.reports.append(fuse_graph(made, bits=self.bits))
            return make_boxed_func(made.forward)

        backend = aot_autograd(fw_compiler=unchanged, bw_compiler=unchanged, inference_compiler=fused)
        found: Callable[..., Any] = backend(graph_module, example_inputs)
        return found


def fused_backend(*, bits: Bits = "eager") -> FusedBackend:
    """Return a backend for ``torch.compile(model, backend=fused_backend())``: aten ops as in eager mode, fused.

    Parameters
    ----------
    bits : str
        As in `fuse_graph`. ``eager`` gives the bits of the uncompiled model.

    Raises
    ------
    InvalidProblem
        For another value of `bits`.
    """
    _check_bits("fused_backend", bits)
    return FusedBackend(bits)
