"""Stamps of evidence: what runs on a GPU for a kernel, as hashes of its machine code and of its launches.

A record is valid while a kernel's sources are unchanged. After a change that was not meant to alter kernels, such as a
new name, their stamps are made again and compared, without a GPU: see ``tests/programs/restamp.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import astuple, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from skuda.dispatch import Device
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.compile.cubin import machine_code
from skuda.kernels.launch import Launch
from skuda.registry.descriptor import Descriptor
from skuda.registry.op import Op
from skuda.registry.sku import KernelSku
from skuda.tools.verify.trial import Examples

DIGITS = 16
"""Hexadecimal digits of a hash, as in records. Another tree gets this module, and its records may not say it."""


class Stamp(NamedTuple):
    """What runs on a GPU for a kernel, as two hashes.

    Attributes
    ----------
    machine_code : str
        Of the machine code of all its entries, see `skuda.dispatch.compile.cubin.machine_code`.
    launches : str
        Of its promise and of its launches for some problems: grids, blocks, shared memory and parameters, with tensor
        maps. Flags are in the machine code already, and names of entries do not count.
    """

    machine_code: str = ""
    launches: str = ""


def stamp(
    sku: KernelSku,
    problems: Iterable[Descriptor],
    device: Device,
    backend: object,
    choice: str = "",
    *,
    compiles: bool = True,
) -> Stamp:
    """Return the stamp of a kernel on a device, which need not be present.

    Parameters
    ----------
    sku : KernelSku
    problems : iterable of Descriptor
        Those that the kernel does not serve are left out.
    device : Device
        The card that launches are for.
    backend : Backend
        The kernel's backend. The stamp is empty if it compiles nothing. Without a compiler, `machine_code` is empty.
    choice : str
        Name of a configuration; empty for the one that the launch rule prefers.
    compiles : bool
        Whether `machine_code` is wanted.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    """
    if not isinstance(backend, CudaBackend):
        return Stamp()
    served = [each for each in problems if each.key() == sku.key and not any(c.check(each) for c in sku.constraints)]
    found = [backend.launch_of(sku, each, device, choice) for each in served]
    numbers: dict[tuple[tuple[str, ...], str], int] = {}
    for launch in found:
        for step in launch.steps:
            numbers.setdefault((launch.flags, step.entry), len(numbers))
    promise = sku.precision_guarantee.model_dump_json()
    launches = _hash([promise, *(_plain(launch, numbers) for launch in found)])
    if not compiles or backend.compiler() is None:
        return Stamp("", launches)
    variants = {launch.flags: launch for launch in found if launch.steps}
    code = {flags: machine_code(backend.cubin(sku, one, device).cubin) for flags, one in variants.items()}
    return Stamp(_hash([code[flags][entry] for flags, entry in numbers]), launches)


def _plain(launch: Launch, numbers: Mapping[tuple[tuple[str, ...], str], int]) -> object:
    """Return what a GPU sees of a launch, with numbers in place of the names of entries."""
    steps = [
        (numbers[launch.flags, s.entry], s.grid, s.block, s.shared, s.overlaps, [_parameter(p) for p in s.parameters])
        for s in launch.steps
    ]
    return steps, launch.view, launch.scratch, launch.aligned


def _parameter(parameter: Any) -> tuple[object, ...]:
    fields = astuple(parameter) if is_dataclass(parameter) and not isinstance(parameter, type) else tuple(parameter)
    return type(parameter).__name__, *map(str, fields)


def meaning(op: Op) -> str:
    """Return a hash of what an op's reference computes for its cases, whatever its code looks like."""
    found, examples = [], Examples(op, 0)
    for case in op.cases:
        example = examples.of(case)
        arrays = [*sorted(example.drawn.inputs.items()), *sorted(example.want.items())]
        found.append([(name, *_content(value)) for name, value in arrays])
    return _hash(found)


def _content(value: Any) -> tuple[object, ...]:
    if not isinstance(value, np.ndarray):
        return type(value).__name__, repr(value)
    return str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def _hash(found: object) -> str:
    return hashlib.sha256(repr(found).encode()).hexdigest()[:DIGITS]
