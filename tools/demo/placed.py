"""The demo's products on a GPU: host arrays in, host arrays out, weights taken over once."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.dispatch import Device, Dispatcher, Plan, PlanPreference
from skuda.dispatch.device import HOST
from skuda.dispatch.preference import NO_PREFERENCE
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.tools.output import refuse
from skuda.tools.placing import Placement, placement_for

WHERE = ("auto", "gpu", "host")
_KEPT = ("weight_q", "weight_scale", "bias")


class Placed(Dispatcher):
    """A dispatcher whose `run` takes NumPy arrays to a device and brings the results back.

    Parameters
    ----------
    dispatcher : Dispatcher
        Whose kernels and backends are used.
    device : Device
        Where they run.
    placement : Placement
        How arrays get there.
    """

    def __init__(self, dispatcher: Dispatcher, device: Device, placement: Placement) -> None:
        super().__init__(dispatcher.registry, backends=dispatcher.backends.values())
        self.device = device
        self._placement = placement
        self._weights: dict[int, Any] = {}

    def select(
        self, problem: Descriptor, preference: PlanPreference = NO_PREFERENCE, device: Device | None = None
    ) -> Plan:
        """Choose as `Dispatcher.select`, for this device unless another one is named."""
        return super().select(problem, preference, device or self.device)

    def run(
        self, problem: Descriptor, *, preference: PlanPreference = NO_PREFERENCE, stream: object = None, **arrays: Any
    ) -> Any:
        """Run as `Dispatcher.run`, with host arrays; it returns when the results are on the host."""
        there = {name: self._sent(name, value) for name, value in arrays.items()}
        found = super().run(problem, preference=preference, stream=stream, **there)
        if isinstance(found, tuple):
            return type(found)(*map(self._placement.download, found))
        return self._placement.download(found)

    def _sent(self, name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if name not in _KEPT:
            return self._upload(value)
        sent = self._weights.get(id(value))
        if sent is None:
            sent = self._weights[id(value)] = self._upload(value)
            # Before the number can be that of another array.
            weakref.finalize(value, self._weights.pop, id(value), None).atexit = False
        return sent

    def _upload(self, array: npt.NDArray[Any]) -> Any:
        return self._placement.upload(np.ascontiguousarray(array))


def placed(dispatcher: Dispatcher, where: str) -> tuple[Dispatcher, str]:
    """Return a dispatcher for the device that was asked for.

    Parameters
    ----------
    dispatcher : Dispatcher
        Takes host arrays.
    where : str
        ``host``, ``gpu``, or ``auto``: a GPU where one is usable.

    Returns
    -------
    dispatcher : Dispatcher
        The same one for the host.
    note : str
        Why a GPU that is here is not used; empty where there is nothing to say.

    Raises
    ------
    InvalidProblem
        For another word, or ``gpu`` where none is here.
    MissingDependency
        Where one is here and was asked for, and arrays cannot be taken to it.
    """
    if where not in WHERE:
        refuse("demo", "--device", where, WHERE)
    gpu = next((device for device in dispatcher.devices if device.processor == "cuda"), None)
    if gpu is None and where == "gpu":
        rule = "be host or auto: no backend here drives a GPU; `skuda doctor` says what is missing"
        raise InvalidProblem("demo", "--device", "gpu", rule)
    if gpu is None or where == "host":
        return dispatcher, ""
    try:
        placement = placement_for(gpu)
        _try(placement)
    except MissingDependency as error:
        if where == "gpu":
            raise
        return dispatcher, f"not on {gpu.name}: {error}"
    return Placed(dispatcher, gpu, placement), ""


def _try(placement: Placement) -> None:
    """Take a few bytes there and back, which a library that was built without CUDA cannot do.

    Raises
    ------
    MissingDependency
        Where that fails.
    """
    try:
        placement.download(placement.upload(np.zeros(8, np.uint8)))
    except Exception as error:
        what = f"a {placement.name} that reaches the GPU ({str(error).splitlines()[0]})"
        raise MissingDependency(what, f"pip install {placement.name}, built for CUDA") from error


def device_of(dispatcher: Dispatcher) -> Device:
    """Return where a dispatcher runs host arrays."""
    return dispatcher.device if isinstance(dispatcher, Placed) else HOST
