"""Devices as plain data: the facts about a processor that selection needs."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from skuda.registry.errors import InvalidRecord
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
    """Return a known card by name, to plan for it on a machine without it.

    Parameters
    ----------
    name : str
        A short name from `KNOWN_DEVICES`, or the card's full name or the part of it that people use, in any spelling:
        ``rtx4090``, ``RTX 4090``, ``NVIDIA L40S``, ``A100-80GB``. An architecture, ``sm_89`` or ``89``, stands for the
        first known card of that compute capability.

    Raises
    ------
    InvalidRecord
        For any other name.
    """
    found = None
    if isinstance(name, str):
        found = _known(name)
    if found is None:
        rule = f"be one of {', '.join(KNOWN_DEVICES)}, or an architecture such as sm_89"
        raise InvalidRecord("Device", "name", shown(name), rule)
    return found


def _known(name: str) -> Device | None:
    words = re.findall("[a-z0-9]+", name.lower())
    said = "".join(words)
    arch = re.fullmatch(r"(?:sm)?(\d+)[af]?", said)
    for short, card in KNOWN_DEVICES.items():
        if said == short or (arch and arch[1] == "".join(map(str, card.compute_capability or ()))):
            return card
    for short, card in KNOWN_DEVICES.items():
        full = re.sub("[^a-z0-9]", "", f"nvidia {card.name} {card.memory >> 30}gb {_FORMS.get(short)}".lower())
        # "rtx" names a family, so "4090" is enough. No word may contradict the card: an A100-40GB is another one.
        fits = len(set(words)) == len(words) and all(word in full for word in words)
        if fits and short.removeprefix("rtx") in said:
            return card
    return None


_FORMS = {"h100": "SXM5", "h200": "SXM5 HBM3e", "b200": "SXM6 HBM3e"}
"""Further words for a card that its driver's name lacks. The PCIe cards of some names have other figures."""

_SHARED_KIB = {
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (12, 0): 99,
}
"""Shared memory that one block can opt in to, by compute capability (CUDA C++ Programming Guide)."""


def _cuda(name: str, capability: tuple[int, int], sms: int, l2_mib: int, gib: int, gbs: int) -> Device:
    return Device(
        name=name,
        processor="cuda",
        compute_capability=capability,
        sm_count=sms,
        shared_memory=_SHARED_KIB[capability] << 10,
        l2_cache=l2_mib << 20,
        memory=gib << 30,
        memory_bandwidth=gbs * 10**9,
    )


KNOWN_DEVICES = {
    "cpu": Device(name="CPU", processor="cpu"),
    "a100": _cuda("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40, 80, 2039),
    "h100": _cuda("NVIDIA H100 80GB HBM3", (9, 0), 132, 50, 80, 3352),
    "h200": _cuda("NVIDIA H200", (9, 0), 132, 60, 141, 4800),
    "rtx4090": _cuda("NVIDIA GeForce RTX 4090", (8, 9), 128, 72, 24, 1008),
    "b200": _cuda("NVIDIA B200", (10, 0), 148, 126, 180, 8000),
    "a30": _cuda("NVIDIA A30", (8, 0), 56, 24, 24, 933),
    "a10": _cuda("NVIDIA A10", (8, 6), 72, 6, 24, 600),
    "a40": _cuda("NVIDIA A40", (8, 6), 84, 6, 48, 696),
    "a6000": _cuda("NVIDIA RTX A6000", (8, 6), 84, 6, 48, 768),
    "rtx3090": _cuda("NVIDIA GeForce RTX 3090", (8, 6), 82, 6, 24, 936),
    "l4": _cuda("NVIDIA L4", (8, 9), 58, 48, 24, 300),
    "l40s": _cuda("NVIDIA L40S", (8, 9), 142, 96, 48, 864),
    "rtx6000ada": _cuda("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 96, 48, 960),
    "gh200": _cuda("NVIDIA GH200 480GB", (9, 0), 132, 60, 96, 4000),
    "rtx5090": _cuda("NVIDIA GeForce RTX 5090", (12, 0), 170, 96, 32, 1792),
    "t4": _cuda("Tesla T4", (7, 5), 40, 4, 16, 320),
}
"""Cards by short name, from the vendor's published figures. The first one of a compute capability stands for it."""

HOST = Device(name="CPU", processor="cpu", ordinal=0)
"""The processor that this program runs on."""
