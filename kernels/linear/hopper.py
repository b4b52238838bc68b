"""Limits that the kernels with Hopper's TMA loads (``hopper.cuh``) share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.linear.problem import longest_sum
from skuda.registry.constraints import Between, Constraint, MultipleOf
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.registry.device import Device

H200 = 132
"""Multiprocessors assumed for a device that does not report them."""

MAX_SHARED = 232_448
"""Bytes of shared memory that a block may have."""

ALIGNED = "arrays or rows that do not begin at multiples of 16 bytes run on the next kernel"
"""The note that these kernels add to a plan."""

_UNIT, _BOX = 16, 128
_H200_BANDWIDTH = 4_800_000_000_000
_HALF = 500_000_000_000


def bandwidth(device: Device) -> float:
    """Return a card's memory bandwidth in TB/s, an H200's if it reports none.

    It is rounded to a multiple of 0.5: the value of a driver and that of a data sheet then lead to the same choice.
    """
    return round((device.memory_bandwidth or _H200_BANDWIDTH) / _HALF) / 2


def card_of(device: Device) -> tuple[int, float]:
    """Return multiprocessors and memory bandwidth, of an H200 where a device does not report them."""
    return device.sm_count or H200, bandwidth(device)


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what these kernels require: rows that TMA can read, and sums that fit in 32 bits.

    `weight` is s8 or u8, and the activation either of them or s16; or both are s16. A box may only reach from the high
    halves of a row into the low ones where the weight has zeros, as those of 8 bits do.
    """
    limit = Between(field="k", minimum=_UNIT, maximum=longest_sum(weight))
    return (MultipleOf(field="k", divisor=_UNIT), MultipleOf(field="k_between_halves", divisor=_BOX), limit)
