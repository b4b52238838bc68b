"""Checks of the ways to call a plan: outputs given or left out, bound calls, repeated calls, process state."""

from __future__ import annotations

import ctypes
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from skuda.dispatch.host.arrays import host_view
from skuda.dispatch.plan import Plan
from skuda.kernels.draw import Drawn
from skuda.registry.descriptor import Descriptor, Role
from skuda.tools.verify.compare import Spoiled, bits_of, disagreement
from skuda.tools.verify.placement import Geometry, Image, Placement, images_of, placed

Array = npt.NDArray[Any]
Outputs = dict[str, Array]
CALLS = 512
"""Number of consecutive calls whose outputs are all compared."""

_AT_ONCE = 1 << 23
"""Bytes of outputs that are kept before they are compared."""
_APART = 256
"""Alignment of each call's outputs, in bytes."""


@dataclass(frozen=True)
class Laid:
    """The arguments of one run: arrays between guard zones, poisoned outputs, and scalars."""

    placement: Placement
    images: dict[str, Image]
    buffers: dict[str, Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    read: tuple[str, ...]

    @classmethod
    def out(cls, problem: Descriptor, drawn: Drawn, placement: Placement) -> Laid:
        """Place the drawn inputs and the poisoned outputs of a problem on the device."""
        arguments = problem.arguments()
        written = [a.name for a in arguments if a.role is Role.OUTPUT]
        images, numbers = images_of(arguments, drawn, "contiguous", 0)
        buffers, views = placed(placement, images)
        inputs = {**{name: view for name, view in views.items() if name not in written}, **numbers}
        outputs = {name: views[name] for name in written}
        return cls(placement, images, buffers, inputs, outputs, tuple(images.keys() & drawn.inputs.keys()))

    def written(self) -> Outputs:
        """Return the current contents of the outputs, as host arrays."""
        return {
            name: np.array(self.images[name].geometry.view(self.placement.download(self.buffers[name])))
            for name in self.outputs
        }

    def overwrite(self, other: Laid) -> None:
        """Copy the contents of another run's inputs into these inputs."""
        for name in self.read:
            self.buffers[name][...] = self.placement.upload(other.images[name].before)

    def changed(self) -> str:
        """Return the name of the first input whose bytes have changed, or an empty string."""
        downloaded = ((name, self.placement.download(self.buffers[name])) for name in self.read)
        return next((name for name, after in downloaded if self.images[name].changed(after) is not None), "")


@dataclass
class Calls:
    """Checks of every way to call a plan; each raises `Spoiled` where a call breaks a promise.

    Attributes
    ----------
    plan : Plan
        The plan to check.
    drawn : Drawn
        The inputs.
    want : mapping of str to array
        The reference's outputs for these inputs.
    placement : Placement
        Moves arrays to the device and back.
    count : int
        Number of consecutive calls that are compared.
    """

    plan: Plan
    drawn: Drawn
    want: Mapping[str, Array]
    placement: Placement
    count: int = CALLS

    @cached_property
    def turned(self) -> Drawn:
        """The same inputs with their elements in reverse order."""

        def reverse(value: Any) -> Any:
            return value.reshape(-1)[::-1].reshape(value.shape) if isinstance(value, np.ndarray) else value

        return Drawn({name: reverse(value) for name, value in self.drawn.inputs.items()}, self.drawn.shapes)

    @cached_property
    def first(self) -> Outputs:
        """The outputs of one run with outputs given."""
        return self._run(self.drawn)

    def outputs(self) -> None:
        """Check that given outputs are returned, and that omitted ones are new arrays that alias no input."""
        laid = self._laid(self.drawn)
        for name, result in self._named(self.plan.run(**laid.inputs, **laid.outputs)).items():
            if result is not laid.outputs[name]:
                self._refuse(name, f"it was given, and another {type(result).__name__} came back")
        made = self._named(self.plan.run(**laid.inputs))
        for name, result in made.items():
            if laid.read and type(result) is not type(laid.outputs[name]):
                kinds = f"a {type(result).__name__}; the inputs are {type(laid.outputs[name]).__name__}"
                self._refuse(name, f"it was left out, and came as {kinds}")
        if changed := laid.changed():
            self._refuse(changed, "an input was written where an output was left out")
        self._agree({name: _on_host(result) for name, result in made.items()}, "outputs", "it was left out")
        other = self._laid(self.turned)
        self.plan.run(**other.inputs)
        kept = {name: _on_host(result) for name, result in made.items()}
        self._agree(kept, "outputs", "it was left out, and a later run on other inputs wrote to it")
        for name, result in made.items():
            result[...] = 1
            if shared := laid.changed():
                self._refuse(name, f"it was left out, and shares memory with {shared}")

    def bound(self) -> None:
        """Check two calls of a bound plan, and a third after the values in its inputs changed."""
        laid = self._laid(self.drawn)
        launch = self.plan.bind(**laid.inputs, **laid.outputs)
        for turn in ("first", "second"):
            launch()
            self._agree(laid.written(), "bind", f"bind(), {turn} call")
        if self.plan.precision_guarantee.deterministic:
            laid.overwrite(self._laid(self.turned))
            launch()
            how = "bind(), a call after the values of its inputs changed"
            self._agree(laid.written(), "bind", how, self._run(self.turned))

    def in_a_row(self) -> None:
        """Check that `count` consecutive calls, each into other memory, print nothing and give the same outputs."""
        laid, first = self._laid(self.drawn), self.first
        geometries = {name: laid.images[name].geometry for name in first}
        sizes = {name: -(-array.nbytes // _APART) * _APART for name, array in first.items()}
        at_once = min(self.count, max(1, _AT_ONCE // sum(sizes.values())))
        for start in range(0, self.count, at_once):
            count = min(at_once, self.count - start)
            stacked = {
                n: Geometry((count, *g.shape), g.dtype, (sizes[n], *g.strides), 0, count * sizes[n])
                for n, g in geometries.items()
            }
            buffers = {n: self.placement.upload(np.zeros(g.size, np.uint8)) for n, g in stacked.items()}
            views = {name: self.placement.view(buffers[name], geometry) for name, geometry in stacked.items()}
            with silence():
                for call in range(count):
                    self.plan.run(**laid.inputs, **{name: view[call, ...] for name, view in views.items()})
                held = {name: self.placement.download(buffer) for name, buffer in buffers.items()}
            got = {name: geometry.view(held[name]) for name, geometry in stacked.items()}
            for call in self._unequal(got):
                how = f"call {start + call + 1} of {self.count} in a row"
                self._agree({name: array[call, ...] for name, array in got.items()}, "calls", how)

    def _unequal(self, got: Outputs) -> list[int]:
        """Return the indices along the first, stacked axis at which outputs differ from the expected bits."""
        held_to = self.first if self.plan.precision_guarantee.deterministic else self.want
        unequal = [
            (bits_of(array) != bits_of(held_to[name])).reshape(len(array), -1).any(axis=1)
            for name, array in got.items()
        ]
        return [int(call) for call in np.flatnonzero(np.logical_or.reduce(unequal))]

    def _laid(self, drawn: Drawn) -> Laid:
        return Laid.out(self.plan.problem, drawn, self.placement)

    def _run(self, drawn: Drawn) -> Outputs:
        laid = self._laid(drawn)
        self.plan.run(**laid.inputs, **laid.outputs)
        return laid.written()

    def _named(self, result: Any) -> dict[str, Any]:
        """Return the outputs that a run returned, by name."""
        return by_name(self.plan.problem, self.first, result)

    def _agree(self, got: Outputs, check: str, how: str, first: Outputs | None = None) -> None:
        said = disagreement(self.plan, got, self.want, self.first if first is None else first, how)
        if said:
            raise Spoiled(check=check, **said)

    def _refuse(self, name: str, message: str) -> NoReturn:
        raise Spoiled(check="outputs", output=name, message=message)


def by_name(problem: Descriptor, names: Iterable[str], result: Any) -> dict[str, Any]:
    """Return the outputs in a result by name; an output that the problem does not have is None in it."""
    several = problem.builder is not None
    return dict(zip(names, (part for part in result if part is not None) if several else (result,), strict=True))


def _on_host(result: Any) -> Array:
    """Return a NumPy copy of an array of any framework."""
    way = next((way for way in ("cpu", "get") if hasattr(result, way)), "")  # torch's, CuPy's
    return np.array(host_view("", "output", getattr(result, way)() if way else result))


@contextmanager
def unchanged_state() -> Iterator[None]:
    """Restore NumPy's handling of floating-point errors, and raise `Spoiled` if the block changed it."""
    before = np.geterr()
    try:
        yield
    finally:
        after = np.geterr()
        np.seterr(**before)
    if after != before:
        changes = ", ".join(f"{name} {before[name]} to {after[name]}" for name in before if before[name] != after[name])  # type: ignore[literal-required]  # its own keys
        raise Spoiled(check="process", message=f"NumPy's handling of floating errors was changed: {changes}")


@contextmanager
def silence() -> Iterator[None]:
    """Raise `Spoiled` if this thread or compiled code prints within the block."""
    listeners = [_Listener(sys.stdout), _Listener(sys.stderr)]
    with ExitStack() as stack, tempfile.TemporaryFile() as heard:
        _flush()
        # A terminal may show another thread's progress bar, so it is not redirected.
        for number in (1, 2):
            with suppress(OSError):  # it may be closed
                if not os.isatty(number):
                    stack.callback(_restored, os.dup(number), number)
                    os.dup2(heard.fileno(), number)
        stack.enter_context(redirect_stdout(listeners[0]))
        stack.enter_context(redirect_stderr(listeners[1]))
        yield
        _flush()
        heard.seek(0)
        said = "".join(listener.heard.getvalue() for listener in listeners) or heard.read(100).decode(errors="replace")
    if said:
        raise Spoiled(check="process", message=f"a call prints {said[:60]!r}")


def _flush() -> None:
    """Flush the buffers of Python and of the C library."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)


def _restored(saved: int, number: int) -> None:
    os.dup2(saved, number)
    os.close(saved)


class _Listener:
    """A stream that keeps what one thread writes and passes on what other threads write."""

    def __init__(self, stream: Any) -> None:
        self.heard, self._stream, self._thread = io.StringIO(), stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Keep the text if this thread wrote it; pass it on otherwise."""
        return int((self.heard if threading.get_ident() == self._thread else self._stream).write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
