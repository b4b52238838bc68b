"""What a caller may require of the chosen kernel."""

from __future__ import annotations

from skuda.registry.guarantee import PrecisionRequirement
from skuda.registry.value import Size, Value


class PlanPreference(Value):
    """A caller's requirements. Every op honours every field; a selection that cannot is refused with the reason.

    Attributes
    ----------
    backend : str or None
        Only kernels of this backend.
    sku : str or None
        Exactly this kernel, by id.
    require : PrecisionRequirement
        Only kernels that promise at least this.
    max_workspace_bytes : int or None
        Only kernels that need no more scratch than this.
    allow_arch_specific : bool
        Whether kernels for one chip or family only (``sm_90a``) may be chosen.
    """

    backend: str | None = None
    sku: str | None = None
    require: PrecisionRequirement = PrecisionRequirement()
    max_workspace_bytes: Size | None = None
    allow_arch_specific: bool = True


NO_PREFERENCE = PlanPreference()
