"""Devices as the command line names them."""

from __future__ import annotations

from collections.abc import Mapping

from skuda.dispatch import KNOWN_DEVICES, Device, device_named
from skuda.registry.arch import ArchSku
from skuda.registry.errors import InvalidRecord
from skuda.tools.output import chosen, refuse

CARDS = {name: device for name, device in KNOWN_DEVICES.items() if device.processor == "cuda"}
"""The known CUDA devices by their short names."""


def named_device(
    command: str, name: str, known: Mapping[str, Device] = KNOWN_DEVICES, *, others: tuple[str, ...] = ()
) -> tuple[str, Device]:
    """Return a known device by the name in ``--device``, with its short name.

    `others` are further words that the option takes; an error lists them too.
    """
    try:
        wanted = device_named(name)
    except InvalidRecord:
        wanted = None
    for short, device in known.items():
        if device == wanted:
            return short, device
    return refuse(command, "--device", name, (*others, *known))


def cards_of(command: str, arch: str) -> list[Device]:
    """Return the known cards of an architecture; its suffix is ignored, because a card runs both kinds of kernels."""
    capabilities = {card.compute_capability for card in CARDS.values()}
    known = {each.value: each.capability for each in ArchSku if each.capability in capabilities}
    chosen(command, "--arch", [arch], known)
    return [card for card in CARDS.values() if card.compute_capability == known[arch]]
