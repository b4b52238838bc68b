"""Torch tensors: calls of the ops of torch, conversion from and to arrays, comparison bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from support import arguments_of, draw
from torch import nn

from skuda.kernels.catalog import built_in_registry
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.torch import calibrate
from skuda.torch.ops.tensor_op import OPS

REGISTRY = built_in_registry().ops
NAMES = tuple(OPS)


class Call(NamedTuple):
    """A call of an op, and the same call of a dispatcher."""

    op: Any
    problem: Descriptor
    tensors: dict[str, Any]
    fields: dict[str, Any]
    arrays: dict[str, Any]

    def __call__(self, **changes: Any) -> tuple[Any, ...]:
        """Return the results, with some tensors replaced."""
        return results(self.op(**(self.tensors | changes), **self.fields))


def tensor_of(value: Any) -> Any:
    """Return a tensor with the values of an array; a number as it is."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(value.copy())


def array_of(tensor: Any) -> Any:
    """Return the array with the values of a tensor."""
    tensor = tensor.detach()
    return (
        tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype is torch.bfloat16 else tensor.numpy()
    )


def normal(rng: np.random.Generator, *shape: int, dtype: Any = torch.float32) -> Any:
    """Draw a tensor of Gaussian numbers."""
    return torch.from_numpy(np.asarray(rng.standard_normal(shape))).to(dtype)


def results(found: Any) -> tuple[Any, ...]:
    """Return an op's results as a tuple."""
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def overloads(name: str) -> list[str]:
    """Return the names of an op's overloads."""
    return list(getattr(torch.ops.skuda, name).overloads())


def call_of(name: str, case: Any, rng: np.random.Generator, overload: str = "default") -> Call:
    """Draw a call for a case; of the fields that follow from the tensors, some are given."""
    op = getattr(getattr(torch.ops.skuda, name), overload)
    arrays = dict(draw(REGISTRY[name], case, rng).inputs)
    for argument in arguments_of(case.problem):
        value = arrays.get(argument.name)
        if argument.is_scalar and overload == "number":
            arrays[argument.name] = value.item() if isinstance(value, np.ndarray) else value
        elif argument.is_scalar and not isinstance(value, np.ndarray):
            arrays[argument.name] = np.asarray(value).astype(storage_dtype(argument.elements[0])).reshape(1)
    packed = {a.name for a in case.problem.arguments() if a.elements[0].is_packed}
    if getattr(case.problem, "weight_element", None) == "s4":
        packed.add("weight_q")
    split = {a.name for a in case.problem.arguments() if a.elements[0].is_split}  # the dtype is that of the halves
    fields = {}
    for argument in op._schema.arguments:
        value = getattr(case.problem, argument.name, None) if argument.kwarg_only else None
        follows = (set(OPS[name]._fields.sources(argument.name)) & arrays.keys()) - packed
        follows -= split if isinstance(value, ElementKind) else set()
        if value is not None and not (follows and rng.random() < 0.5):
            fields[argument.name] = str(value) if isinstance(value, str) else value
    order = [argument.name for argument in op._schema.arguments if argument.name in arrays]
    return Call(op, case.problem, {name: tensor_of(arrays[name]) for name in order}, fields, arrays)


def same(got: Any, want: Any) -> bool:
    """Whether tensors are equal bit for bit; NaN equals NaN."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    if not got.is_floating_point():
        return bool(torch.equal(got, want))
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    different = got.contiguous().view(bits) != want.contiguous().view(bits)
    return not bool((different & ~(got.isnan() & want.isnan())).any())


def assert_same(got: Any, want: Any) -> None:
    """Check that tensors are equal bit for bit."""
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    assert same(got, want), f"{int((got != want).sum())} of {got.numel()} differ"


def all_same(got: Any, want: Any) -> bool:
    """Whether two results are equal bit for bit."""
    return len(got) == len(want) and all(map(same, got, want))


def copies(model: Any) -> Iterator[Any]:
    """Yield a module through everything that copies or stores one."""
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))  # noqa: S301  our own
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


class GatedMLP(nn.Module):
    """The MLP of a Llama block: it has the names and the `forward` that `fuse_` and `parallelize_` recognize."""

    def __init__(self, width: int, inner: int, act: Any = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down_proj, self.act_fn = nn.Linear(inner, width), act or nn.SiLU()

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def calibrated(model: Any, *inputs: Any, **options: Any) -> Any:
    """Return the calibration of a model that runs on some inputs."""
    with calibrate(model, **options) as calibration:
        for x in inputs:
            model(x)
    return calibration
