"""`fuse_graph`: fewer launches in any graph of aten ops that has int8 layers, whatever the model's source looks like.

The graph may come from `torch.export`, from AOTAutograd, or from Inductor's passes after it: activations and norms are
found whole or decomposed. `graph_pass` and `fused_backend` bring the pass into `torch.compile`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import fx

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch import patterns
from skuda.torch.autograd import Q_MAX
from skuda.torch.dtypes import element_of
from skuda.torch.fuse import Fusion
from skuda.torch.patterns import Left, fake_of

Bits = Literal["eager", "fused"]
_CODES = {"q_min": -Q_MAX, "q_max": Q_MAX, "output_element": "s8"}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_aten, _skuda = torch.ops.aten, torch.ops.skuda
_LINEAR = _skuda.quantized_linear.default


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
        except Left as reason:
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
        given, fake = _given(layer), fake_of(input)
        if (given.get("q_min"), given.get("q_max")) not in ((None, None), (-Q_MAX, Q_MAX)):
            raise Left(f"{layer.name} has another range of codes than -{Q_MAX}..{Q_MAX}")
        if fake.dtype not in _DTYPES or given.get("output_element") == "f64":
            raise Left(f"{layer.name} computes in f64")
    why = "only with bits='fused' may a norm or gated activation write its codes"
    if bits == "fused":
        try:
            coded = _norm(input, layers) or _gated(input, layers)
            why = f"its input, {input.name}, is no known form of a norm or gated activation"
        except Left as reason:
            coded, why = None, str(reason)
        if coded is not None:
            return _rewired(layers, coded)
    if len(layers) == 1:
        raise Left(f"no other layer has its input, and {why}")
    at = min(layers, key=list(input.graph.nodes).index)
    coded = _called(at, _skuda.dynamic_range.default, (input,), _CODES, "one quantization of the input for all")
    return _rewired(layers, coded) + (f" ({why})" if bits == "fused" else "")


def _rewired(layers: list[fx.Node], coded: _Coded) -> str:
    """Replace layers by products of codes."""
    for layer in layers:
        given = _given(layer)
        element = given.get("output_element") or str(element_of(fake_of(given["activation"]).dtype))
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
    Left
        If it is such a norm, but no op computes the same.
    """
    found = patterns.rms_norm(input)
    if found is None:
        return None
    x, weight, eps = found
    if not isinstance(eps, float):
        raise Left("the norm's eps is an input of the graph: dynamic=True makes one of every number; leave it out")
    _only_used_by(input, layers)
    value = fake_of(x)
    if value.dtype is not fake_of(input).dtype:
        raise Left(f"the norm {input.name} changes the dtype")
    width = value.shape[-1]
    if weight is not None and (fake_of(weight).dtype is not value.dtype or tuple(fake_of(weight).shape) != (width,)):
        raise Left(f"the weight of the norm {input.name} has another dtype or shape than its columns")
    fields = {"eps": eps, **_CODES}
    terms = x.args[:2] if x.target is _aten.add.Tensor and not x.kwargs else ()
    order = {node: at for at, node in enumerate(x.graph.nodes)}
    residual = len(terms) == len(x.args) == 2 and all(
        isinstance(term, fx.Node) and fake_of(term).shape == value.shape and fake_of(term).dtype is value.dtype
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
        found = patterns.curve(act)
        if found is not None and isinstance(up, fx.Node):
            break
    else:
        return None
    name, fields, gate = found
    _only_used_by(input, layers)
    values = [fake_of(each) for each in (input, gate, up)]
    if len({value.dtype for value in values}) > 1 or any(value.shape != values[0].shape for value in values):
        raise Left(f"gate and up of {input.name} differ in dtype or shape")
    whole = patterns.whole(gate, up)
    tensors = (gate, up, None) if whole is None else (None, None, whole)
    op = getattr(_skuda, f"{name}_mul_quantize").default
    order = {node: at for at, node in enumerate(input.graph.nodes)}
    at = min(layers, key=lambda layer: order[layer])
    return _called(at, op, tensors, {**fields, **_CODES}, "the gated activation writes codes")


def _only_used_by(input: fx.Node, layers: list[fx.Node]) -> None:
    others = [user.name for user in input.users if user not in layers]
    if others:
        raise Left(f"{input.name} is also used by {', '.join(others)}")


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
            return bytes(get_hash_for_files((__file__,), bits))

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
