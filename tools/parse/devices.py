"""Devices as the command line names them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from skuda.dispatch import KNOWN_DEVICES, Device, device_named
from skuda.registry.arch import ArchSku
from skuda.registry.errors import InvalidRecord
from skuda.registry.sku import KernelSku
from skuda.tools.output import chosen, refuse, words


def named_device(command: str, name: str, *, others: tuple[str, ...] = (), cpu: bool = True) -> tuple[str, Device]:
    """Return the known device that ``--device`` names, after its short name.

    `others` are further words that the option takes, for the error. Without `cpu`, only cards are taken.
    """
    known = [short for short in KNOWN_DEVICES if cpu or short != "cpu"]
    try:
        wanted = device_named(name)
    except InvalidRecord:
        wanted = None
    for short in known:
        if KNOWN_DEVICES[short] == wanted:
            return short, wanted
    return refuse(command, "--device", name, (*others, *known), more="or an architecture such as sm_89")


def cards_of(command: str, arch: str) -> list[Device]:
    """Return the known cards of an architecture. A suffix is ignored, because a card runs kernels with and without."""
    cards = [card for card in KNOWN_DEVICES.values() if card.processor == "cuda"]
    known = {
        each.value: each.capability for each in ArchSku if each.capability in {c.compute_capability for c in cards}
    }
    chosen(command, "--arch", [arch], known)
    return [card for card in cards if card.compute_capability == known[arch]]


def card_words(name: str) -> str:
    """Return what people call a card: ``H200`` for ``NVIDIA H200``, ``RTX 4090`` for ``NVIDIA GeForce RTX 4090``."""
    name = re.sub(r"^((NVIDIA|GeForce|Tesla) )+", "", name)
    return re.sub(r"[ -]((SXM|HBM)\d\w*|\d+GB|PCIe|Generation)\b", "", name)


def served_by(skus: Iterable[KernelSku], name: str, capability: tuple[int, int] | None) -> str:
    """Return which older kernels a card runs if none are made for it, or what it lacks; empty for a CPU and others.

    `skus` are all kernels on offer, and `name` is what the note calls the card of this compute capability.
    """
    archs = {sku.arch for sku in skus if sku.arch.capability is not None}
    if capability is None or any(arch.capability == capability for arch in archs):
        return ""
    usable = [arch for arch in archs if arch.runs_on(capability)]
    if usable:
        newest = max(arch.capability or (0, 0) for arch in usable)
        best = words(sorted(arch for arch in usable if arch.capability == newest))
        return f"{name} has no kernels of its own and runs those of {best}"
    version = ".".join(map(str, capability))
    needs = words(sorted({arch.describe() for arch in archs if not arch.is_specific}))
    return f"no kernel runs on {name}: it has compute capability {version}, and kernels need {needs}"
