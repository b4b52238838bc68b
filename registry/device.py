"""Devices as plain data: the facts about a processor that selection needs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from skuda.registry.text import shown
from skuda.registry.value import Integer, Size, Value

Capability = tuple[Annotated[Integer, Field(ge=1)], Annotated[Integer, Field(ge=0)]]


class Device(Value):
    """One processor.

    Attributes
    ----------
    name : str
        The vendor's name; measured times count only for devices of the same name.
    processor : str
        ``cpu`` or ``cuda``.
    ordinal : int or None
        Index among the processors of its kind in this process; None for an absent device, for which
        plans can be made but not run.
    compute_capability : (int, int) or None
        Major and minor; None for a CPU.
    sm_count : int
        Streaming multiprocessors.
    shared_memory : int
        Bytes of shared memory that one block can opt in to.
    l2_cache : int
        Bytes of L2 cache.
    memory : int
        Bytes of device memory.
    memory_bandwidth : int
        Peak bytes per second of device memory.
    """

    name: str
    processor: Literal["cpu", "cuda"]
    ordinal: Size | None = None
    compute_capability: Capability | None = None
    sm_count: Size = 0
    shared_memory: Size = 0
    l2_cache: Size = 0
    memory: Size = 0
    memory_bandwidth: Size = 0

    @property
    def place(self) -> tuple[str, int | None]:
        """Processor kind and ordinal: the identity of the device in this process."""
        return (self.processor, self.ordinal)

    @property
    def overlaps_launches(self) -> bool:
        """Whether a kernel may start before the previous one of its stream ends (programmatic dependent launch)."""
        return self.compute_capability is not None and self.compute_capability >= (9, 0)

    def describe(self) -> str:
        """Return a description in a few words."""
        if self.compute_capability is None:
            return self.name
        major, minor = self.compute_capability
        return f"{self.name} (compute capability {major}.{minor})"


def device_named(name: str) -> Device:
    """Return the facts about a well-known card by its short name, for planning on a machine without it.

    Parameters
    ----------
    name : str
        One of `KNOWN_DEVICES`, in any case, with or without spaces and dashes.

    Raises
    ------
    InvalidRecord
        For a name that is not listed.
    """
    found = None
    if isinstance(name, str):
        found = KNOWN_DEVICES.get("".join(character for character in name.lower() if character.isalnum()))
    if found is None:
        Device.refuse("name", shown(name), f"be one of {', '.join(KNOWN_DEVICES)}")
    return found


def _cuda(name: str, capability: tuple[int, int], sms: int, shared_kib: int, l2_mib: int, gib: int, gbs: int) -> Device:
    return Device(
        name=name,
        processor="cuda",
        compute_capability=capability,
        sm_count=sms,
        shared_memory=shared_kib << 10,
        l2_cache=l2_mib << 20,
        memory=gib << 30,
        memory_bandwidth=gbs * 10**9,
    )


KNOWN_DEVICES = {
    "cpu": Device(name="CPU", processor="cpu"),
    "a100": _cuda("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163, 40, 80, 2039),
    "h100": _cuda("NVIDIA H100 80GB HBM3", (9, 0), 132, 227, 50, 80, 3352),
    "h200": _cuda("NVIDIA H200", (9, 0), 132, 227, 60, 141, 4800),
    "rtx4090": _cuda("NVIDIA GeForce RTX 4090", (8, 9), 128, 99, 72, 24, 1008),
    "b200": _cuda("NVIDIA B200", (10, 0), 148, 227, 126, 180, 8000),
}
"""Cards by short name, from the vendor's published figures."""

HOST = Device(name="CPU", processor="cpu", ordinal=0)
"""The processor that this program runs on."""
