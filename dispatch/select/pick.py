"""`Pick`: what a selection chose."""

from __future__ import annotations

from typing import NamedTuple

from skuda.registry.sku import KernelSku


class Pick(NamedTuple):
    """A kernel and the configuration to run it in.

    Attributes
    ----------
    sku : KernelSku
        The kernel.
    choice : str
        Name of its configuration; empty for the one that its launch rule ranks first.
    reason : str
        The measurement that chose it; empty if the ranking did.
    """

    sku: KernelSku
    choice: str = ""
    reason: str = ""
