"""`Pick`: what a selection chose."""

from __future__ import annotations

from typing import NamedTuple

from skuda.registry.sku import KernelSku


class Pick(NamedTuple):
    """A kernel and the configuration to run it in."""

    sku: KernelSku
    choice: str = ""  # name of its configuration; empty for the one that its launch rule ranks first
    reason: str = ""  # the measurement that chose it; empty if the ranking did
