"""Shows that a model has the same bits in every way; see `skuda.torch.certification.certificate`."""

from __future__ import annotations

from skuda.torch.certification.certificate import Certificate, Way, certify

__all__ = ["Certificate", "Way", "certify"]
