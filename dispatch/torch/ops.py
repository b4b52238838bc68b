"""Every op of the registry that takes a tensor, as an op of torch: ``torch.ops.skuda.<name>``.

The schemas are generated from the registry. An op's inputs come first, as tensors; then, by keyword, the fields of its
descriptor, of which those that are left out follow from the tensors or have a default, as in `skuda.ops`. Nothing is
mutated: outputs are new tensors. An op whose number of outputs depends on the problem returns a list, in the order of
its result.

Where an argument has one row per token, it may have any number of leading axes instead; outputs get the same ones. A
tensor whose rows are not dense is copied first, as torch does. Where an op takes one scale or zero point for
everything, it takes a tensor of one element, or with the overload ``number`` plain numbers, which do not have to be
read from the device.

CUDA tensors are served by what the dispatcher selects, CPU tensors by the ``numpy`` backend, with the same bits. There
is no gradient here: see `skuda.torch.autograd`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from skuda.dispatch.select.fields import Fields
from skuda.functional import default_dispatcher
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Descriptor, Role, storage_shape
from skuda.registry.elements import FLOATS, ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op

NAMESPACE = "skuda"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
"""What the ops are registered in; it lives as long as the process."""

_MOST_REMEMBERED = 4096
_SCALARS = {Role.SCALE: "float", Role.ZERO_POINT: "int", Role.VALUE: "float"}


class _Call(NamedTuple):
    """What follows from the shapes and dtypes of a call.

    Attributes
    ----------
    problem : Descriptor
        The problem.
    led : dict of str to int
        Arguments and outputs whose leading axes are rows, with the number of their other axes; empty for matrices.
    leading : tuple of int
        Those leading axes.
    """

    problem: Descriptor
    led: dict[str, int]
    leading: tuple[int, ...]


class TensorOp:
    """One op of the registry as an op of torch.

    Parameters
    ----------
    op : Op
        The op; its first input is a tensor.

    Attributes
    ----------
    name : str
        Its name in ``torch.ops.skuda``.
    inputs : tuple of Argument
        What is passed as a tensor, in the order of the schema.
    outputs : tuple of Argument
        What is returned, in this order, as far as a problem has it.
    """

    def __init__(self, op: Op) -> None:
        self.name = op.name
        self._fields = Fields(op)
        given = tuple(a for a in self._fields.arguments if a.role not in (Role.OUTPUT, Role.SCRATCH))
        always = frozenset.intersection(*(frozenset(a.name for a in case.problem.arguments()) for case in op.cases))
        self._always = always
        self.inputs = tuple(sorted(given, key=lambda argument: (argument.name not in always, argument.is_scalar)))
        self.outputs = tuple(a for a in self._fields.arguments if a.role is Role.OUTPUT)
        self._several = op.descriptor.result is not None
        self._varies = not {a.name for a in self.outputs} <= always
        shown = {f"has_{argument.name}" for argument in self.inputs}
        self._infos = {name: info for name, info in op.descriptor.model_fields.items() if name not in {"op", *shown}}
        first = self.inputs[0]
        matrix = {first.name: first} if len(first.shape) == 2 else {}
        # The field that counts rows: the first size of a matrix.
        self._rows = next((name for name in self._infos if matrix.keys() & self._fields.led(name, matrix)), "")
        self._calls: dict[Any, _Call] = {}

    @property
    def schemas(self) -> dict[str, str]:
        """The schemas by qualified name: with tensors only and, where there is a scalar, with plain numbers for it."""
        fields = ", ".join(f"{self._type(name)}? {name}=None" for name in self._infos)
        result = "Tensor"
        if self._several:
            result = "Tensor[]" if self._varies else f"({', '.join('Tensor' for _ in self.outputs)})"

        def schema(overload: str, scalars: Mapping[Role, str]) -> str:
            arguments = []
            for argument in self.inputs:
                kind = scalars.get(argument.role, "Tensor")
                needed = argument.name in self._always
                arguments.append(f"{kind} {argument.name}" if needed else f"{kind}? {argument.name}=None")
            return f"{self.name}{overload}({', '.join(arguments)}, *, {fields}) -> {result}"

        overloads: dict[str, Mapping[Role, str]] = {"": {}}
        if any(argument.is_scalar for argument in self.inputs):
            overloads[".number"] = _SCALARS
        return {f"{self.name}{overload}": schema(overload, kinds) for overload, kinds in overloads.items()}

    def _type(self, field: str) -> str:
        """Return torch's type of a field."""
        annotation = str(self._infos[field].annotation)
        if "tuple[" in annotation:
            return "SymInt[]"
        if self._infos[field].annotation in (bool, float):
            return str(self._infos[field].annotation.__name__)  # type: ignore[union-attr]
        if "int" in annotation.lower():
            return "SymInt" if self._fields.sources(field) else "int"
        return "float" if "float" in annotation.lower() else "str"

    def run(self, *arguments: Any, **named: Any) -> Any:
        """Run the op on real tensors.

        Raises
        ------
        InvalidProblem
            For a bad argument, and for a tensor that requires grad where gradients are recorded.
        Unsupported
            If no kernel can serve it.
        """
        given = self._given(arguments, named)
        key = tuple((name, value.shape, value.dtype) if _is_tensor(value) else (name, value) for name, value in given)
        # 1, 1.0 and True are equal, but not the same field.
        call = self._calls.get((key, *(type(value) for _, value in given)))
        if call is None:
            if len(self._calls) >= _MOST_REMEMBERED:
                self._calls.clear()
            call = self._calls[key, *(type(value) for _, value in given)] = self._described(dict(given))
        arrays = {
            name: self._array(value, call.led.get(name)) if _is_tensor(value) else value
            for name, value in given
            if name not in self._infos
        }
        found = default_dispatcher().run(call.problem, **arrays)
        results = [value for value in found if value is not None] if self._several else [found]
        if call.led:
            names = [argument.name for argument in call.problem.arguments() if argument.role is Role.OUTPUT]
            results = [
                value.reshape((*call.leading, *value.shape[1:])) if name in call.led else value
                for name, value in zip(names, results, strict=True)
            ]
        return self._returned(results)

    def problem(self, **named: Any) -> Descriptor:
        """Return the problem of a call; only shapes and dtypes of its tensors are read.

        Raises
        ------
        InvalidProblem
            For a bad argument.
        """
        return self._described({name: value for name, value in named.items() if value is not None}).problem

    def fake(self, *arguments: Any, **named: Any) -> Any:
        """Return empty tensors of the result's shapes and dtypes; sizes may be symbolic.

        Raises
        ------
        InvalidProblem
            For a tensor that requires grad where gradients are recorded: a compiled graph would give none for it.
        """
        given = dict(self._given(arguments, named))
        for name, value in given.items():
            if torch.is_grad_enabled() and _is_tensor(value) and value.requires_grad:
                raise InvalidProblem(self.name, name, "a tensor that requires grad", "be detached: pass x.detach()")
        device = next(value.device for value in given.values() if _is_tensor(value))
        led, leading = self._leading(given)
        flat = {name: _rows(value, led.get(name)) for name, value in given.items()}
        problem = self._fields.sketch(flat)
        results = []
        for argument in problem.arguments():
            if argument.role is not Role.OUTPUT:
                continue
            shape: Sequence[Any] = storage_shape(argument.shape, argument.elements[0])
            if argument.flat and not argument.elements[0].is_packed:
                shape = self._flat_shape(given, math.prod(argument.shape))
            elif argument.name in led:
                shape = (*leading, *shape[1:])
            results.append(torch.empty(shape, dtype=torch_dtype(argument.elements[0]), device=device))
        return self._returned(results)

    def _flat_shape(self, given: Mapping[str, Any], numel: Any) -> Sequence[Any]:
        """Return the shape of a result that has as many elements as an input, if one has."""
        for argument in self.inputs:
            value = given.get(argument.name)
            if argument.flat and value is not None and value.numel() == numel:
                return tuple(value.shape)
        return (numel,)

    def _returned(self, results: list[Any]) -> Any:
        if not self._several:
            return results[0]
        return results if self._varies else tuple(results)

    def _given(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return what a call gives, by name."""
        positional = zip((argument.name for argument in self.inputs), arguments, strict=False)
        return [(name, value) for name, value in (*positional, *named.items()) if value is not None]

    def _described(self, given: dict[str, Any]) -> _Call:
        led, leading = self._leading(given)
        flat = {name: _rows(value, led.get(name)) for name, value in given.items()}
        problem, _ = self._fields.split(flat)
        return _Call(problem, led, leading)

    def _leading(self, given: Mapping[str, Any]) -> tuple[dict[str, int], tuple[Any, ...]]:
        """Return the arguments whose leading axes are rows, and these axes; nothing where all are matrices."""
        first = next(value for value in given.values() if _is_tensor(value))
        if not self._rows or first.dim() in (0, 2):
            return {}, ()
        return self._fields.led(self._rows, given), tuple(first.shape[:-1])

    @staticmethod
    def _array(tensor: torch.Tensor, axes: int | None) -> torch.Tensor:
        """Return a tensor as kernels take it: without a gradient, flattened to rows, each of which is dense."""
        if tensor.requires_grad and not torch.is_grad_enabled():
            tensor = tensor.detach()
        tensor = _rows(tensor, axes)
        if tensor.is_contiguous() or (
            tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.size(1)
        ):
            return tensor
        return tensor.contiguous()


def torch_dtype(element: ElementKind) -> torch.dtype:
    """Return torch's dtype for what stores an element; packed ones are stored in bytes."""
    found: torch.dtype = getattr(torch, str(storage_dtype(element)))
    return found


def element_of(dtype: torch.dtype) -> ElementKind:
    """Return the element that a dtype of torch stores.

    Raises
    ------
    InvalidProblem
        If there is none.
    """
    found = _ELEMENTS.get(dtype)
    if found is None:
        raise InvalidProblem("skuda.torch", "dtype", str(dtype), f"be one of {', '.join(map(str, _ELEMENTS))}")
    return found


_ELEMENTS = {torch_dtype(element): element for element in (*FLOATS, ElementKind.S8, ElementKind.U8, ElementKind.S32)}


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _rows(value: Any, axes: int | None) -> Any:
    """Flatten all but the last `axes` axes of a tensor into one; None leaves it as it is."""
    if axes is None or value.dim() == axes + 1:
        return value
    own = tuple(value.shape[value.dim() - axes :])
    return value.reshape(math.prod(value.shape[: value.dim() - axes]), *own)


def _register(op: TensorOp) -> None:
    """Make an op known to torch."""
    for name, schema in op.schemas.items():
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, op.run, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", op.fake, lib=LIBRARY)


OPS = {
    name: TensorOp(op)
    for name, op in built_in_registry().ops.items()
    if any(argument.role is Role.INPUT for argument in op.cases[0].problem.arguments())
}
"""The ops by name."""
for _op in OPS.values():
    _register(_op)


def _smooth(input: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return input.to(torch.promote_types(input.dtype, torch.float32)) / factors


# An op, because compilers of torch may replace a division by something that is not correctly rounded.
LIBRARY.define("smooth(Tensor input, Tensor factors) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    LIBRARY.impl("smooth", _smooth, _key)
torch.library.register_fake(f"{NAMESPACE}::smooth", _smooth, lib=LIBRARY)


def linear_dynamic(
    input: torch.Tensor,
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    epilogue: str | None = None,
    output_element: str | None = None,
) -> torch.Tensor:
    """Return a linear layer of real activations: each row is quantized with its own scale, then multiplied in int8.

    Parameters
    ----------
    input : tensor of shape (..., K), f16, bf16, f32 or f64
    weight_q : tensor of shape (N, K), s8 or u8
    weight_scale : tensor of shape (N,), f32 or narrower
    bias : tensor of shape (N,), f32 or narrower, optional
    epilogue : str, optional
        ``relu``, ``gelu`` or ``silu`` on what a given bias was added to; by default nothing more.
    output_element : str, optional
        Element of the result; by default the input's.

    Returns
    -------
    tensor of shape (..., N)

    Raises
    ------
    InvalidProblem
        For a bad argument.
    Unsupported
        If no kernel can serve it.
    """
    op = torch.ops.skuda.quantized_linear.default
    found: torch.Tensor = op(input, weight_q, weight_scale, bias=bias, epilogue=epilogue, output_element=output_element)
    return found


def linear_scaled(
    input: torch.Tensor,
    input_scale: torch.Tensor,
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    epilogue: str | None = None,
    output_element: str = "bf16",
) -> torch.Tensor:
    """Return a linear layer of given codes with a scale per row, such as `dynamic_range` or a fused norm returns.

    Parameters
    ----------
    input : tensor of shape (..., K), s8 or u8
        Codes.
    input_scale : tensor of shape (...), f32 or narrower
        Their scale, one per row.
    weight_q, weight_scale, bias, epilogue
        As in `linear_dynamic`.
    output_element : str
        Element of the result.

    Returns, Raises
    ---------------
    As in `linear_dynamic`.
    """
    op = torch.ops.skuda.scaled_linear.default
    found: torch.Tensor = op(
        input,
        weight_q,
        act_scale=input_scale,
        weight_scale=weight_scale,
        bias=bias,
        epilogue=epilogue,
        output_element=output_element,
    )
    return found


def linear_static(
    input: torch.Tensor,
    input_scale: torch.Tensor,
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    epilogue: str | None = None,
    output_element: str = "bf16",
) -> torch.Tensor:
    """Return a linear layer of given codes with one scale for all.

    Parameters
    ----------
    input : tensor of shape (..., K), s8 or u8
        Codes.
    input_scale : tensor of shape (1,), f32 or narrower
        Their scale.
    weight_q, weight_scale, bias, epilogue
        As in `linear_dynamic`.
    output_element : str
        Element of the result.

    Returns, Raises
    ---------------
    As in `linear_dynamic`.
    """
    op = torch.ops.skuda.scaled_linear.default
    found: torch.Tensor = op(
        input,
        weight_q,
        act_scale=input_scale,
        weight_scale=weight_scale,
        bias=bias,
        epilogue=epilogue,
        output_element=output_element,
        act_scale_scope="tensor",
    )
    return found


def linear_codes(
    input: torch.Tensor,
    input_scale: torch.Tensor,
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    output_scale: torch.Tensor,
    output_zero_point: torch.Tensor,
    *,
    epilogue: str | None = None,
    output_element: str = "s8",
) -> torch.Tensor:
    """Return the codes of `linear_static`, which the next layer takes as they are.

    Parameters
    ----------
    input, input_scale, weight_q, weight_scale, bias, epilogue
        As in `linear_static`.
    output_scale : tensor of one element, f32
        Real units per code of the result.
    output_zero_point : tensor of one element, s32
        Code of 0.
    output_element : str
        ``s8`` or ``u8``.

    Returns, Raises
    ---------------
    As in `linear_dynamic`.
    """
    op = torch.ops.skuda.scaled_linear.default
    found: torch.Tensor = op(
        input,
        weight_q,
        act_scale=input_scale,
        weight_scale=weight_scale,
        bias=bias,
        output_scale=output_scale,
        output_zero_point=output_zero_point,
        epilogue=epilogue,
        output_element=output_element,
        act_scale_scope="tensor",
    )
    return found
