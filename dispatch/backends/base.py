"""What a backend is: how kernels of one kind are found able, prepared and run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

from skuda.dispatch.device import Device
from skuda.kernels.launch import Choice
from skuda.registry.backend import BackendSpec
from skuda.registry.descriptor import Descriptor
from skuda.registry.sku import KernelSku
from skuda.registry.value import Value


class BackendStatus(Value):
    """Whether a backend works here.

    Attributes
    ----------
    available : bool
        Whether its kernels can run on this machine.
    detail : str
        Versions where it works, what is wrong where it does not.
    remedy : str
        The command or step that makes it work; empty where it does.
    """

    available: bool
    detail: str
    remedy: str = ""


class Runner(Protocol):
    """A prepared kernel for one problem on one device. It owns no memory of the caller's.

    Attributes
    ----------
    notes : tuple of str
        What a person should know about how it runs.
    """

    notes: tuple[str, ...]

    def check(self, arrays: Mapping[str, object]) -> None:
        """Raise what `run` would raise for these arguments, without running."""

    def run(self, arrays: Mapping[str, object], stream: object) -> object:
        """Run the kernel and return the op's result."""

    def bind(self, arrays: Mapping[str, object], stream: object) -> Callable[[], object]:
        """Check the arguments once; return what runs the kernel on them and returns the op's result."""


class Backend(ABC):
    """How kernels of one kind run. Constructing one must be cheap and must not touch a device.

    Attributes
    ----------
    spec : BackendSpec
        Its facts; the name is what `KernelSku.backend` says.
    """

    spec: BackendSpec

    @abstractmethod
    def status(self) -> BackendStatus:
        """Say whether the backend works here, and if not what would make it."""

    @abstractmethod
    def devices(self) -> tuple[Device, ...]:
        """Return the devices it drives here, best first; empty where it does not work."""

    def notes(self) -> tuple[str, ...]:
        """Say what its kernels' ids do not: what else has a hand in running them."""
        return ()

    def choices(self, sku: KernelSku, problem: Descriptor, device: Device) -> tuple[Choice, ...]:  # noqa: ARG002  most have none
        """Return the configurations in which a kernel can run a problem, best first; needs no device to be here."""
        return ()

    def told(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> tuple[str, ...]:  # noqa: ARG002  as above
        """Say how a kernel would run a problem, for example with which tile; needs no device to be here."""
        return ()

    @abstractmethod
    def prepare(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> Runner:
        """Make `sku` ready to run `problem` on `device`: compile, load, allocate scratch.

        Parameters
        ----------
        sku : KernelSku
            The kernel.
        problem : Descriptor
            The problem.
        device : Device
            Where it runs.
        choice : str
            The name of one of `choices`; empty for the best. A backend without choices is never given one.
        """
