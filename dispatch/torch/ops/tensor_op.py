"""`TensorOp`: an op of the registry as an op of torch, with schemas, for real tensors and for tensors without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from pydantic.fields import FieldInfo
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.fx.proxy import Proxy

from skuda.dispatch.host import rules
from skuda.dispatch.host.arrays import is_plain_tensor
from skuda.dispatch.launch_cache import PositionalCall
from skuda.dispatch.select.fields import Fields
from skuda.functional import LAUNCHES, default_dispatcher
from skuda.registry.argument import Argument, DeclaredAxis, Role, storage_shape
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op
from skuda.torch.ops.dtypes import torch_dtype

_SCALARS = {Role.SCALE: "float", Role.ZERO_POINT: "int", Role.VALUE: "float"}
_LIST = "SymInt[]"

# Looked up once, because every call pays for it. Torch's public functions take longer than all of these together.
_compiles = torch.compiler.is_compiling
_casts = _C._is_any_autocast_enabled  # noqa: SLF001
_transforms = _C._functorch.maybe_current_level  # noqa: SLF001
_traces = _C._get_tracing_state  # noqa: SLF001
_gradients = torch._C.is_grad_enabled  # type: ignore[attr-defined]  # noqa: SLF001

MODES: Mapping[str, Any] = {
    "records_gradients": _gradients,
    "function_modes": _C._len_torch_function_stack,  # noqa: SLF001
    "dispatch_modes": _C._len_torch_dispatch_stack,  # noqa: SLF001
    "profiles": torch.autograd._profiler_enabled,  # noqa: SLF001
    "forward_ad": forward_ad,
}
"""What the expression of a launch may ask about this thread."""

BUSY = "function_modes() or dispatch_modes() or profiles() or forward_ad._current_level >= 0"
"""An expression of `MODES` that is true if torch would do more than run the kernel, whatever the tensors. The check of
the tensors refuses the rest: under autocast, functorch or a trace, tensors have other dispatch keys."""

is_busy: Callable[[], bool] = eval(f"lambda: {BUSY}", dict(MODES))  # noqa: S307  our text
"""Whether torch would do more than run a kernel in this thread: `BUSY`."""

_VECTORS = {"weight_scale"}
"""Arguments that may be matrices of one column, as checkpoints and so modules hold them."""

OPS: dict[str, TensorOp] = {}
"""The ops of torch by name; `skuda.torch.ops` makes them."""

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


class TensorOp:
    """One op of the registry as an op of torch.

    Parameters
    ----------
    op : Op
        The op. Its descriptor must declare a signature, and its first input must be a tensor.

    Attributes
    ----------
    name : str
        Its name in ``torch.ops.skuda``.
    inputs : tuple of ArgumentSpec
        The inputs that are tensors, in the order of the schema.
    names : tuple of str
        Their names.
    always : frozenset of str
        Names of the arguments that every problem has.
    outputs : tuple of ArgumentSpec
        The results. A problem may have only some of them.
    state : frozenset of str
        Names of the inputs that the op writes in place.
    """

    def __init__(self, op: Op) -> None:
        self.name = op.name
        self._fields = Fields(op)
        self.always = always = self._fields.always
        given = tuple(each for each in self._fields.arguments.values() if each.role not in (Role.OUTPUT, Role.SCRATCH))
        self.inputs = tuple(sorted(given, key=lambda argument: (argument.name not in always, argument.is_scalar)))
        self.names = tuple(argument.name for argument in self.inputs)
        self.outputs = tuple(each for each in self._fields.arguments.values() if each.role is Role.OUTPUT)
        self.state = frozenset(argument.name for argument in self.inputs if argument.role is Role.STATE)
        self._several = op.descriptor.result is not None
        self._varies = not {a.name for a in self.outputs} <= always
        seen = [(a.name, a.elements[0]) for case in op.cases for a in case.problem.arguments()]
        packed = {name for name, element in seen if element.is_packed}
        # Fields that follow from a tensor that every call has, that is not packed and whose axes mean one thing. The
        # dtype of one in halves does not tell its element; such a field comes last, as it came later than others.
        axes = {name: {len(a.shape) for a in op.descriptor.signature if a.name == name} for name in self.names}
        shows = {name for name in always.intersection(self.names) - packed if len(axes[name]) == 1}
        tells = shows - {name for name, element in seen if element.is_split}
        left_out = {"op", *(f"has_{name}" for name in self.names)}
        fields = {name: info for name, info in op.descriptor.model_fields.items() if name not in left_out}
        sources = {name: shows.intersection(self._fields.sources(name)) for name in fields}
        elements = (name for name, info in fields.items() if info.annotation is ElementKind)
        late = (name for name in elements if sources[name] and not sources[name] & tells)
        listed = (*(name for name, of in sources.items() if not of), *late)
        self._types = {name: self._type(name, fields[name]) for name in listed}
        self._listed = _LIST in self._types.values()
        # The field that counts rows: the first size of a matrix.
        rows, *others = self.inputs[0].shape or (DeclaredAxis(""),)
        self._rows = rows.name if len(others) == 1 and rows == DeclaredAxis(rows.name) else ""
        self._result: type[tuple[Any, ...] | list[Any]] | None = None
        if self._several:
            self._result = list if self._varies else tuple

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
                written = f"({argument.name}!)" if argument.name in self.state else ""
                kind = scalars.get(argument.role, f"Tensor{written}")
                needed = argument.name in self.always
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
        how = self.how(fields)
        found = self.known(how, arguments)
        return self.first_run(self._key(how, arguments), arguments, fields) if found is None else found

    def run_in_place(self, *arguments: Any, **fields: Any) -> Any:
        """Do what `run` does, and tell autograd which tensors are written."""
        found = self.run(*arguments, **fields)
        given = dict(zip(self.names, arguments, strict=False))
        torch.autograd.graph.increment_version([given[name] for name in self.state])
        return found

    def how(self, fields: Mapping[str, Any]) -> Hashable:
        """Return what tells calls with these fields from others."""
        # A list has no hash, 0.0 equals -0.0, and 1 equals True.
        values: Any = repr(fields) if self._listed or 0 in fields.values() else tuple(fields.items())
        return values, *map(type, fields.values())

    def _key(self, how: Hashable, arguments: Sequence[Any]) -> Hashable:
        return (self, how, *[each.shape if isinstance(each, Tensor) else type(each) for each in arguments])

    def known(self, how: Hashable, arguments: Sequence[Any]) -> Any:
        """Run a known launch, or do nothing and return None."""
        for launch in LAUNCHES.of.get(self._key(how, arguments), ()):
            found = launch(*arguments)
            if found is not None:
                return found
        return None

    def before(self, dispatched: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a known launch if torch would only run the kernel, and else calls `dispatched`.

        Torch's dispatcher takes as long as the launch itself.
        """
        names = frozenset(self.names)

        def run(*arguments: Any, **fields: Any) -> Any:
            found = None
            if not is_busy() and names.isdisjoint(fields):
                # As torch gives them to `run`: without what is None by default.
                given = {name: value for name, value in fields.items() if value is not None}
                while arguments and arguments[-1] is None:
                    arguments = arguments[:-1]
                try:
                    found = self.known(self.how(given), arguments)
                except RuntimeError:  # a nested tensor has no shape, and torch has a kernel that refuses it
                    if not any(isinstance(each, Tensor) and each.is_nested for each in arguments):
                        raise
            return dispatched(*arguments, **fields) if found is None else found

        return run

    def first_run(
        self, key: Hashable, arguments: Sequence[Any], fields: Mapping[str, Any], *, module: bool = False
    ) -> Any:
        """Run a call that no known launch serves, and keep a launch for calls like it.

        Parameters
        ----------
        key : hashable
            The key under which the launch is kept.
        arguments, fields
            As in `run`.
        module : bool
            Whether a module calls, and not torch's dispatcher. Its launch does nothing where torch would do more than
            run the kernel.
        """
        given = self._given(arguments, fields)
        found = self._flattened(given)
        tensors = {n: each for n, each in zip(self.names, arguments, strict=False) if isinstance(each, Tensor)}
        arrays = {name: given[name] for name in self.names if name in given}
        arrays |= {name: self._dense(name, _shaped(arrays[name], found.inputs[name].shape)) for name in tensors}
        copied = [name for name, tensor in tensors.items() if arrays[name].data_ptr() != tensor.data_ptr()]
        if copied:  # the copies have other memory than the tensors of the next call
            again = dict(zip(self.names, arguments, strict=False))
            again |= {name: arrays[name].reshape(given[name].shape) for name in copied}
            return self.run(*again.values(), **fields)
        unless = BUSY if module else "False"
        if any(tensor.requires_grad for tensor in tensors.values()):
            unless = f"{unless} or records_gradients()"
        positions = PositionalCall(
            names=tuple(None if each is None else name for name, each in zip(self.names, arguments, strict=False)),
            arrays=tensors,
            shapes={one.name: shape for one, shape in zip(found.results, found.shapes, strict=True)},
            results=tuple(one.name for one in found.results),
            several=self._result,
            unless=unless,
            known=MODES,
        )
        result = default_dispatcher().first_run(key, found.problem, arrays, positions)
        results = [value for value in result if value is not None] if self._several else [result]
        # Torch refuses to change a view in place that an autograd function returns; `data` is no view.
        results = [_shaped(value, shape).data for value, shape in zip(results, found.shapes, strict=True)]
        return self._result(results) if self._result is not None else results[0]

    def mapped(self, info: Any, in_dims: Sequence[int | None], *arguments: Any, **fields: Any) -> Any:
        """Run the op for `torch.vmap`: once for each part of the mapped tensors. The results are mapped over axis 0."""
        parts = [
            [each if axis is None else each.select(axis, at) for each, axis in zip(arguments, in_dims, strict=True)]
            for at in range(info.batch_size)
        ]
        if not parts:
            raise InvalidProblem(self.name, self.names[0], "an axis of size 0 under vmap", "have elements to map over")
        op = getattr(torch.ops.skuda, self.name)
        several = [op(*part, **fields) for part in parts]
        if self._result is None:
            return torch.stack(several), 0
        return self._result(map(torch.stack, zip(*several, strict=True))), self._result([0] * len(several[0]))

    def refuse(self, *arguments: Any, **_: Any) -> NoReturn:
        """Refuse tensors of other kinds than kernels take, such as sparse ones."""
        tensors = {n: each for n, each in zip(self.names, arguments, strict=False) if isinstance(each, Tensor)}
        if not tensors:
            self._first(tensors)
        for name, tensor in tensors.items():
            refuse_other(self.name, name, tensor)
        for name, tensor in tensors.items():
            if tensor.device.type not in ("cpu", "cuda"):
                raise InvalidProblem(self.name, name, f"on {tensor.device}", "be on a CPU or on a CUDA device")
        raise AssertionError  # torch calls this for no other tensors

    def problem(self, **named: Any) -> Descriptor:
        """Return the problem of a call. Only the shapes and dtypes of tensors are read.

        Raises
        ------
        InvalidProblem
            For a bad argument.
        """
        fields = {name: value for name, value in named.items() if name not in self.names}
        return self._flattened(self._given([named.get(name) for name in self.names], fields)).problem

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
        return self._result(results) if self._result is not None else results[0]

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

    def _given(self, arguments: Sequence[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given arguments and fields by name. A vector may be a matrix of one column."""
        found = (*zip(self.names, arguments, strict=False), *fields.items())
        given: dict[str, Any] = {}
        given |= {n: tuple(value) if isinstance(value, list) else value for n, value in found if value is not None}
        for name in _VECTORS & given.keys():
            if isinstance(given[name], Tensor) and given[name].shape[1:] == (1,):
                given[name] = given[name].reshape(-1)
        return given

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
        raise InvalidProblem(self.name, self.names[0], "nothing", "be given, as a tensor")

    def _dense(self, name: str, value: Any) -> Any:
        """Return a tensor as kernels take it: without a gradient, and with dense rows."""
        if not isinstance(value, Tensor):
            return value
        if value.requires_grad:
            self._refuse_gradient(name)
            value = value.detach()
        if (
            name in self.state
            or value.is_contiguous()
            or (value.dim() == 2 and value.stride(1) == 1 and value.stride(0) >= value.size(1))
        ):
            return value
        return value.contiguous()

    def _refuse_gradient(self, name: str) -> None:
        refuse_gradient(self.name, name)


def is_alone(tensor: Tensor) -> bool:
    """Whether torch would only run the kernel: it does not cast, trace, map or profile.

    Calling `TensorOp.first_run` directly is then right.
    """
    return (
        is_plain_tensor(tensor)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not is_busy()
        and not _casts()
        and _transforms() is None
        and _traces() is None
    )


def launched(key: Hashable, *tensors: Tensor | None) -> Any:
    """Run a known launch on the tensors of a module's call, or do nothing and return None.

    A launch is there after a first `run_module` under this key. It runs only if torch would do nothing else.
    """
    if not _compiles():
        for launch in LAUNCHES.of.get(key, ()):
            found = launch(*tensors)
            if found is not None:
                return found
    return None


def run_module(op: str, key: Hashable, tensors: Sequence[Tensor | None], fields: Mapping[str, Any]) -> Any:
    """Run an op for a module that `launched` does not serve. Keep a launch if torch would only run the kernel.

    Parameters
    ----------
    op : str
        Name of the op.
    key : hashable
        What tells the call from others, except for dtypes, strides and devices: the op, sizes, and fields.
    tensors, fields
        As in `TensorOp.first_run`.
    """
    # Dynamo checks in every call what it has read here, so it reads little.
    if not _compiles():
        given = [each for each in tensors if each is not None]
        if all(map(is_alone, given)) and not (_gradients() and any(tensor.requires_grad for tensor in given)):
            return OPS[op].first_run(key, tensors, fields, module=True)
        for name, each in zip(OPS[op].names, tensors, strict=False):
            if each is not None:
                refuse_other(op, name, each)
    return getattr(torch.ops.skuda, op).default(*tensors, **fields)


def refuse_other(subject: str, name: str, value: object) -> None:
    """Raise `InvalidProblem` for anything but a dense tensor."""
    if isinstance(value, Proxy):
        rule = "be a tensor: trace a model that contains the module, before fuse_, or let the tracer take it for a leaf"
        raise InvalidProblem(subject, name, "a proxy of torch.fx", rule)
    if not isinstance(value, Tensor):
        rule = "be a tensor of torch: use torch.as_tensor, or torch.from_numpy"
        raise InvalidProblem(subject, name, f"a {type(value).__name__}", rule)
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        kind = f"quantized, {value.dtype}" if value.is_quantized else "nested" if value.is_nested else value.layout
        rule = "be dense: use to_dense(), dequantize() or to_padded_tensor()"
        raise InvalidProblem(subject, name, f"a tensor that is {kind}", rule)


def check_tensors(subject: str, **given: object) -> None:
    """Raise `InvalidProblem` for anything but dense tensors. Compiled code, which dynamo has checked, is not slowed."""
    if not _compiles():
        for name, value in given.items():
            refuse_other(subject, name, value)


def not_scripted(module: object) -> NoReturn:
    """Raise `InvalidProblem`: torch calls this as ``__prepare_scriptable__`` of the modules of a model."""
    rule = "be compiled with torch.compile, exported, or traced with torch.jit.trace: TorchScript has no such layers"
    raise InvalidProblem(type(module).__name__, "module", "a call of torch.jit.script", rule)


def refuse_gradient(op: str, name: str) -> None:
    """Raise `InvalidProblem` for a tensor that requires grad while gradients are recorded."""
    if torch.is_grad_enabled():
        rule = "be detached, or used under torch.no_grad(): this op has no gradient; see skuda.torch.linear.autograd"
        raise InvalidProblem(op, name, "a tensor that requires grad", rule)


def _shaped(tensor: Tensor, shape: Shape) -> Tensor:
    # Separate sizes are faster in torch than a tuple, but there must be at least one.
    return tensor.reshape(*shape) if shape else tensor.reshape(())
