"""The demo's products on a GPU: host arrays go in and come out."""

from __future__ import annotations

from typing import Any

import numpy as np

from skuda.dispatch import Device, Dispatcher, PlanPreference
from skuda.dispatch.preference import NO_PREFERENCE
from skuda.registry.argument import Role
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import HOST
from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.tools.output import refuse
from skuda.tools.verify.placement import Placement, placement_for

WHERE = ("auto", "gpu", "host")


class Placed(Dispatcher):
    """A dispatcher whose `run` copies NumPy arrays to a device and the results back to the host."""

    def __init__(self, dispatcher: Dispatcher, device: Device, placement: Placement) -> None:
        super().__init__(dispatcher.registry, backends=dispatcher.backends.values())
        self.device = device
        self._placement = placement

    def run(
        self,
        problem: Descriptor,
        preference: PlanPreference | None = NO_PREFERENCE,
        *,
        stream: object = None,
        **arrays: Any,
    ) -> Any:
        """Run as `Dispatcher.run` does, with host arrays; return when the results are on the host."""
        host = {name: np.ascontiguousarray(value) for name, value in arrays.items() if isinstance(value, np.ndarray)}
        there = {name: self._placement.upload(value) for name, value in host.items()}
        found = super().run(problem, preference=preference, stream=stream, **{**arrays, **there})
        for argument in problem.arguments():
            if argument.role is Role.STATE:  # written in place
                arrays[argument.name][...] = self._placement.download(there[argument.name])
        if isinstance(found, tuple):
            return type(found)(*map(self._placement.download, found))
        return self._placement.download(found)


def placed(dispatcher: Dispatcher, where: str) -> tuple[Dispatcher, str]:
    """Return a dispatcher for ``host``, ``gpu`` or ``auto``, and the reason, if any, why a present GPU is not used.

    Raise `InvalidProblem` for another word, or for ``gpu`` without one, and `MissingDependency` if a requested GPU is
    present but arrays cannot be copied to it.
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
        return Placed(dispatcher, gpu, _reaching(gpu)), ""
    except MissingDependency as error:
        if where == "gpu":
            raise
        return dispatcher, f"not on {gpu.name}: {error}"


def _reaching(gpu: Device) -> Placement:
    """Return the placement for a GPU, after a test copy of a few bytes, which fails with a library without CUDA."""
    placement = placement_for(gpu)
    try:
        placement.download(placement.upload(np.zeros(8, np.uint8)))
    except Exception as error:
        what = f"a {placement.name} that reaches the GPU ({str(error).splitlines()[0]})"
        raise MissingDependency(what, f"pip install {placement.name}, built for CUDA") from error
    return placement


def device_of(dispatcher: Dispatcher) -> Device:
    """Return the device on which a dispatcher runs host arrays."""
    return dispatcher.device if isinstance(dispatcher, Placed) else HOST
