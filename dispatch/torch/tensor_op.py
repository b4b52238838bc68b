"""`TensorOp`: an op of the registry as an op of torch, with schemas, for real tensors and for tensors without data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from pydantic.fields import FieldInfo
from torch import _C, Tensor

from skuda.dispatch.host import rules
from skuda.dispatch.select.fields import Fields
from skuda.functional import default_dispatcher
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op
from skuda.torch.dtypes import torch_dtype

_MOST_REMEMBERED = 4096
_SCALARS = {Role.SCALE: "float", Role.ZERO_POINT: "int", Role.VALUE: "float"}
_LIST = "SymInt[]"

# Looked up once, because every call pays for it. Torch's public functions take longer than all of these together.
_compiles = torch.compiler.is_compiling
_casts = _C._is_any_autocast_enabled  # noqa: SLF001
_dispatch_modes = _C._len_torch_dispatch_stack  # noqa: SLF001
_function_modes = _C._len_torch_function_stack  # noqa: SLF001
_transforms = _C._functorch.maybe_current_level  # noqa: SLF001
_traces = _C._get_tracing_state  # noqa: SLF001
_profiles = torch.autograd._profiler_enabled  # noqa: SLF001

Shape = tuple[int, ...]


class _TensorType(NamedTuple):
    """The shape, which may be symbolic, and the dtype of a tensor."""

    shape: Shape
    dtype: torch.dtype


class _Flattened(NamedTuple):
    """The problem of a call, with leading axes flattened into rows.

    Attributes
    ----------
    problem : Descriptor
        The flattened problem.
    inputs : dict of str to _TensorType
        The given tensors by name, flattened.
    flat : tuple of int or None
        The shape, in elements, of the arguments that accept any shape.
    results : tuple of Argument
        Outputs in the order of the result.
    shapes : tuple of tuples of int
        The stored shapes that the caller gets for these.
    """

    problem: Descriptor
    inputs: dict[str, _TensorType]
    flat: Shape | None
    results: tuple[Argument, ...]
    shapes: tuple[Shape, ...]


class _Call(NamedTuple):
    """The facts about a call that follow from shapes, dtypes and fields, but not from the device.

    Attributes
    ----------
    problem : Descriptor
        The problem.
    names : tuple of str
        The given arguments.
    given : tuple of bool
        For every argument, whether it is given.
    irregular : bool
        Whether a tensor requires grad or is not contiguous, so that every call must check it.
    rows : dict of str to tuple of int
        Flattened shapes of the tensors with leading axes.
    shapes : tuple of tuples of int
        Shapes to give to the results. Empty if the results have them already.
    """

    problem: Descriptor
    names: tuple[str, ...]
    given: tuple[bool, ...]
    irregular: bool
    rows: dict[str, Shape]
    shapes: tuple[Shape, ...]


class TensorOp:
    """One op of the registry as an op of torch.

    Parameters
    ----------
    op : Op
        The op. It must have cases, and its first input must be a tensor.

    Attributes
    ----------
    name : str
        Its name in ``torch.ops.skuda``.
    inputs : tuple of Argument
        The inputs that are tensors, in the order of the schema.
    outputs : tuple of Argument
        The results. A problem may have only some of them.
    """

    def __init__(self, op: Op) -> None:
        self.name = op.name
        self._fields = Fields(op)
        given = tuple(a for a in self._fields.arguments if a.role not in (Role.OUTPUT, Role.SCRATCH))
        always = frozenset.intersection(*(frozenset(a.name for a in case.problem.arguments()) for case in op.cases))
        self._always = always
        self.inputs = tuple(sorted(given, key=lambda argument: (argument.name not in always, argument.is_scalar)))
        self._names = tuple(argument.name for argument in self.inputs)
        self.outputs = tuple(a for a in self._fields.arguments if a.role is Role.OUTPUT)
        self._several = op.descriptor.result is not None
        self._varies = not {a.name for a in self.outputs} <= always
        packed = {a.name for case in op.cases for a in case.problem.arguments() if a.elements[0].is_packed}
        # Fields that follow from a tensor that every call has and that is not packed.
        shows = always.intersection(self._names) - packed
        left_out = {"op", *(f"has_{name}" for name in self._names)}
        self._types = {
            name: self._type(name, info)
            for name, info in op.descriptor.model_fields.items()
            if name not in left_out and not shows.intersection(self._fields.sources(name))
        }
        self._listed = _LIST in self._types.values()
        first = self.inputs[0]
        matrix = {first.name: first} if len(first.shape) == 2 else {}
        # The field that counts rows: the first size of a matrix.
        self._rows = next(
            (name for name in op.descriptor.model_fields if matrix.keys() & self._fields.led(name, matrix)), ""
        )
        self._calls: dict[Any, _Call] = {}

    @property
    def schemas(self) -> dict[str, str]:
        """The schemas by qualified name: one with tensors only and, if there is a scalar, one with plain numbers."""
        fields = [f"{kind}? {name}=None" for name, kind in self._types.items()]
        keywords = ["*", *fields] if fields else []
        result = "Tensor"
        if self._several:
            result = "Tensor[]" if self._varies else f"({', '.join('Tensor' for _ in self.outputs)})"

        def schema(overload: str, scalars: Mapping[Role, str]) -> str:
            arguments = []
            for argument in self.inputs:
                kind = scalars.get(argument.role, "Tensor")
                needed = argument.name in self._always
                arguments.append(f"{kind} {argument.name}" if needed else f"{kind}? {argument.name}=None")
            return f"{self.name}{overload}({', '.join(arguments + keywords)}) -> {result}"

        overloads: dict[str, Mapping[Role, str]] = {"": {}}
        if any(argument.is_scalar for argument in self.inputs):
            overloads[".number"] = _SCALARS
        return {f"{self.name}{overload}": schema(overload, kinds) for overload, kinds in overloads.items()}

    def _type(self, field: str, info: FieldInfo) -> str:
        """Return torch's type of a field."""
        annotation = str(info.annotation)
        if "tuple[" in annotation:
            return _LIST
        if info.annotation in (bool, float):
            return str(info.annotation.__name__)
        if "int" in annotation.lower():
            return "SymInt" if self._fields.sources(field) else "int"
        return "float" if "float" in annotation.lower() else "str"

    def run(self, *arguments: Any, **fields: Any) -> Any:
        """Run the op on real tensors.

        Parameters
        ----------
        *arguments
            The inputs in order. None means left out.
        **fields
            Fields of the descriptor. Torch has converted each to its type in the schema.

        Raises
        ------
        InvalidProblem
            For a bad argument, and for a tensor that requires grad while gradients are recorded.
        Unsupported
            If no kernel can serve the problem.
        """
        key: tuple[Any, ...] = ()
        if fields:
            # A list has no hash, and 0.0 equals -0.0.
            key = (repr(fields),) if self._listed or 0 in fields.values() else tuple(fields.items())
        for each in arguments:
            if isinstance(each, Tensor):
                key += (each.shape, each.dtype, each.is_contiguous(), each.requires_grad)
            else:
                key += (type(each),)
        call = self._calls.get(key) or self._remembered(key, arguments, fields)
        arrays = dict(zip(call.names, compress(arguments, call.given)))  # noqa: B905  strict costs as much as the rest
        for name, shape in call.rows.items():
            arrays[name] = _shaped(arrays[name], shape)
        if call.irregular:
            arrays = {name: self._dense(name, value) for name, value in arrays.items()}
        found = default_dispatcher().run(call.problem, **arrays)
        if not self._several:
            return _shaped(found, call.shapes[0]) if call.shapes else found
        results = [value for value in found if value is not None]
        if call.shapes:
            results = [_shaped(value, shape) for value, shape in zip(results, call.shapes, strict=True)]
        return self._returned(results)

    def problem(self, **named: Any) -> Descriptor:
        """Return the problem of a call. Only the shapes and dtypes of tensors are read.

        Raises
        ------
        InvalidProblem
            For a bad argument.
        """
        fields = {name: value for name, value in named.items() if name not in self._names}
        return self._flattened(self._given([named.get(name) for name in self._names], fields)).problem

    def fake(self, *arguments: Any, **fields: Any) -> Any:
        """Return empty tensors with the shapes and dtypes of the result. Sizes may be symbolic.

        Raises
        ------
        InvalidProblem
            If `run` would refuse the shapes, dtypes or devices.
        """
        given = self._given(arguments, fields)
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        places = {name: str(tensor.device) for name, tensor in tensors.items()}
        if len(set(places.values())) > 1:
            devices = ", ".join(f"{name} on {place}" for name, place in places.items())
            raise InvalidProblem(self.name, "arrays", devices, "all be on one device; move them there first")
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                self._refuse_gradient(name)
        call = self._flattened(given)
        self._check(call)
        device = next(iter(tensors.values())).device
        results = [
            torch.empty(shape, dtype=torch_dtype(argument.elements[0]), device=device)
            for argument, shape in zip(call.results, call.shapes, strict=True)
        ]
        return self._returned(results) if self._several else results[0]

    def _check(self, call: _Flattened) -> None:
        """Raise `InvalidProblem` for a tensor of a wrong shape or dtype."""
        arguments = {argument.name: argument for argument in call.problem.arguments()}
        rules.refuse_unknown(self.name, arguments.values(), call.inputs)
        for name, each in call.inputs.items():
            argument = arguments[name]
            shape = call.flat if argument.flat and call.flat is not None else argument.shape
            element = next((e for e in argument.elements if torch_dtype(e) is each.dtype), None)
            if element is None:
                had = f"an array of {str(each.dtype).removeprefix('torch.')}"
                raise InvalidProblem(self.name, name, had, f"be {rules.wanted(argument, shape)}")
            rules.checked_shape(self.name, argument, element, each.shape, shape)

    def _remembered(self, key: Any, arguments: Sequence[Any], fields: Mapping[str, Any]) -> _Call:
        given = self._given(arguments, fields)
        found = self._flattened(given)
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        irregular = any(tensor.requires_grad or not tensor.is_contiguous() for tensor in tensors.values())
        rows = {name: each.shape for name, each in found.inputs.items() if each.shape != tuple(tensors[name].shape)}
        mask = tuple(argument is not None for argument in arguments)
        names = tuple(compress(self._names, mask))
        call = _Call(found.problem, names, mask, irregular, rows, found.shapes if rows else ())
        if len(self._calls) >= _MOST_REMEMBERED:
            self._calls.clear()
        self._calls[key] = call
        return call

    def _given(self, arguments: Sequence[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given arguments and fields by name."""
        found = (*zip(self._names, arguments, strict=False), *fields.items())
        return {n: tuple(value) if isinstance(value, list) else value for n, value in found if value is not None}

    def _flattened(self, given: Mapping[str, Any]) -> _Flattened:
        led = self._leading(given)
        flat, inputs = dict(given), {}
        for name, value in given.items():
            if isinstance(value, Tensor):
                shape, axes = tuple(value.shape), led.get(name)
                if axes is not None:
                    own = len(shape) - axes
                    shape = (math.prod(shape[:own]), *shape[own:])
                flat[name] = inputs[name] = _TensorType(shape, value.dtype)
        sizes = [size for each in inputs.values() for size in each.shape]
        sizes += [each for value in given.values() for each in (value if isinstance(value, tuple) else (value,))]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            problem = self._fields.sketch(flat)
        else:
            problem, _ = self._fields.split(flat)
        outputs = {argument.name: argument for argument in problem.arguments() if argument.role is Role.OUTPUT}
        names = problem.builder(*outputs) if problem.builder is not None else outputs
        results = tuple(outputs[name] for name in names if name is not None)
        whole = rules.flat_shape(self.name, problem.arguments(), {name: each.shape for name, each in inputs.items()})
        leading = self._first(given)[:-1]
        shapes = []
        for argument in results:
            shape = whole if argument.flat and whole is not None else argument.shape
            stored = storage_shape(shape, argument.elements[0])
            shapes.append((*leading, *stored[1:]) if argument.name in led else stored)
        return _Flattened(problem, inputs, whole, results, tuple(shapes))

    def _leading(self, given: Mapping[str, Any]) -> dict[str, int]:
        """Return the arguments and outputs whose leading axes are rows, with their number of other axes.

        Empty if all are matrices.
        """
        first = self._first(given)
        if not self._rows or len(first) in (0, 2):
            return {}
        led = self._fields.led(self._rows, given)
        for name, axes in led.items():
            shape = tuple(given[name].shape) if name in given else None
            if shape is not None and shape[: max(0, len(shape) - axes)] != first[:-1]:
                rule = f"have the leading axes {first[:-1]}, as the other arguments"
                raise InvalidProblem(self.name, name, f"shape {shape}", rule)
        return led

    def _first(self, given: Mapping[str, Any]) -> Shape:
        """Return the shape of the first tensor."""
        for value in given.values():
            if isinstance(value, Tensor):
                return tuple(value.shape)
        raise InvalidProblem(self.name, self._names[0], "nothing", "be given, as a tensor")

    def _dense(self, name: str, value: Any) -> Any:
        """Return a tensor as kernels take it: without a gradient, and with dense rows."""
        if not isinstance(value, Tensor):
            return value
        if value.requires_grad:
            self._refuse_gradient(name)
            value = value.detach()
        if value.is_contiguous() or (value.dim() == 2 and value.stride(1) == 1 and value.stride(0) >= value.size(1)):
            return value
        return value.contiguous()

    def _refuse_gradient(self, name: str) -> None:
        refuse_gradient(self.name, name)

    def _returned(self, results: list[Tensor]) -> list[Tensor] | tuple[Tensor, ...]:
        return results if self._varies else tuple(results)


def is_alone(tensor: Tensor) -> bool:
    """Whether torch would only run the kernel: it does not cast, compile, trace, map or profile.

    Calling `TensorOp.run` directly then saves the time of torch's dispatcher.
    """
    return (
        not _compiles()
        and type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not _casts()
        and not _dispatch_modes()
        and not _function_modes()
        and _transforms() is None
        and _traces() is None
        and not _profiles()
    )


def refuse_gradient(op: str, name: str) -> None:
    """Raise `InvalidProblem` for a tensor that requires grad while gradients are recorded."""
    if torch.is_grad_enabled():
        rule = "be detached, or used under torch.no_grad(): this op has no gradient; those of skuda.torch.autograd have"
        raise InvalidProblem(op, name, "a tensor that requires grad", rule)


def _shaped(tensor: Tensor, shape: Shape) -> Tensor:
    # Separate sizes are faster in torch than a tuple, but there must be at least one.
    return tensor.reshape(*shape) if shape else tensor.reshape(())
