"""`Backend`: how kernels of one kind are prepared and run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from skuda.registry.backend import BackendSpec
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.sku import KernelSku
from skuda.registry.value import Value

if TYPE_CHECKING:
    from skuda.kernels.launch import Choice


class BackendStatus(Value):
    """Whether a backend works on this machine.

    Attributes
    ----------
    available : bool
        Whether its kernels can run on this machine.
    detail : str
        Versions if it works, else what is wrong.
    remedy : str
        The command or step that makes it work; empty if it works.
    """

    available: bool
    detail: str
    remedy: str = ""


class Runner(Protocol):
    """A prepared kernel for one problem on one device. It holds none of the caller's arrays."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on how it runs."""

    def check(self, arrays: Mapping[str, object]) -> None:
        """Raise the error that `run` would raise for these arguments, without running."""

    def run(self, arrays: Mapping[str, object], stream: object) -> object:
        """Run the kernel and return the op's result."""

    def bind(self, arrays: Mapping[str, object], stream: object) -> Callable[[], object]:
        """Check the arguments once; return a callable that runs the kernel on them and returns the op's result."""


class Backend(ABC):
    """Prepares and runs the kernels of one kind. Constructing one must be cheap and must not touch a device.

    Attributes
    ----------
    spec : BackendSpec
        Its facts; `KernelSku.backend` is its name.
    """

    spec: BackendSpec

    @abstractmethod
    def status(self) -> BackendStatus:
        """Return whether the backend works here and, if not, how to make it work."""

    @abstractmethod
    def devices(self) -> tuple[Device, ...]:
        """Return the devices it drives here, best first; empty if it does not work."""

    def notes(self) -> tuple[str, ...]:
        """Return remarks on what else is used to run its kernels, which their ids do not show."""
        return ()

    def choices(self, sku: KernelSku, problem: Descriptor, device: Device) -> tuple[Choice, ...]:  # noqa: ARG002  most have none
        """Return the configurations in which a kernel can run a problem, best first; the device may be absent."""
        return ()

    def told(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> tuple[str, ...]:  # noqa: ARG002  as above
        """Return remarks on how a kernel would run a problem, for example its tile; the device may be absent."""
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
            The device to run on.
        choice : str
            The name of one of `choices`; empty for the best. A backend without choices is never given one.
        """
