"""`Backend`: prepares and runs the kernels of one kind."""

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
        Versions if it works, else the reason why not.
    remedy : str
        The command or step that makes it work. Empty if it works.
    """

    available: bool
    detail: str
    remedy: str = ""


class Runner(Protocol):
    """A prepared kernel for one problem on one device. It holds none of the caller's arrays."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user on how the kernel runs."""

    def check(self, arrays: Mapping[str, object]) -> None:
        """Raise the error that `run` would raise for these arguments, without running."""

    def run(self, arrays: Mapping[str, object], stream: object) -> object:
        """Run the kernel and return the op's result."""

    def bind(self, arrays: Mapping[str, object], stream: object) -> Callable[[], object]:
        """Check the arguments once. Return a callable that runs the kernel on them and returns the op's result."""


class Backend(ABC):
    """Prepares and runs the kernels of one kind. The constructor must be cheap and must not touch a device.

    Attributes
    ----------
    spec : BackendSpec
        The facts about the backend. `KernelSku.backend` is its name.
    """

    spec: BackendSpec

    @abstractmethod
    def status(self) -> BackendStatus:
        """Return whether the backend works here and, if not, how to make it work."""

    @abstractmethod
    def devices(self) -> tuple[Device, ...]:
        """Return the devices that it drives here, best first. Empty if it does not work."""

    def notes(self) -> tuple[str, ...]:
        """Return remarks on other software that runs the kernels and that their ids do not show."""
        return ()

    def choices(self, sku: KernelSku, problem: Descriptor, device: Device) -> tuple[Choice, ...]:  # noqa: ARG002  most have none
        """Return the configurations in which a kernel can run a problem, best first. The device may be absent."""
        return ()

    def describe_choice(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> tuple[str, ...]:  # noqa: ARG002  as above
        """Return remarks on how a kernel would run a problem, for example its tile. The device may be absent."""
        return ()

    def kernel_of(
        self,
        sku: KernelSku,  # noqa: ARG002  as above
        problem: Descriptor,  # noqa: ARG002
        device: Device,  # noqa: ARG002
        choice: str = "",
    ) -> tuple[tuple[str, ...], int]:
        """Return what tells the kernel that `make_ready` loads from others of the SKU, and `Launch.alike`. Pure."""
        return (choice,), 0

    def make_ready(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> bool | None:
        """Compile and load all that a run needs, as `prepare` does, but allocate nothing.

        Returns
        -------
        bool or None
            Whether it was compiled; False if it came from elsewhere; None if nothing was to be done.
        """
        self.prepare(sku, problem, device, **({"choice": choice} if choice else {}))
        return None

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
            The name of one of `choices`. Empty means the best. A backend without choices never gets a name.
        """
