"""`PlanPreference`: a caller's requirements on the chosen kernel."""

from __future__ import annotations

from skuda.registry.device import Device
from skuda.registry.guarantee import PrecisionRequirement
from skuda.registry.value import Size, Value


class PlanPreference(Value):
    """A caller's requirements. Every op honours every field. A selection that cannot is refused with the reason.

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
    spare_multiprocessors : int
        Multiprocessors to leave free for other kernels. It concerns persistent kernels, which otherwise occupy all
        multiprocessors until they end. The bits are the same.
    """

    backend: str | None = None
    sku: str | None = None
    require: PrecisionRequirement = PrecisionRequirement()
    max_workspace_bytes: Size | None = None
    allow_arch_specific: bool = True
    spare_multiprocessors: Size = 0

    def part_of(self, device: Device) -> Device:
        """Return the device without the spare multiprocessors, but with at least one."""
        if not self.spare_multiprocessors or not device.sm_count:
            return device
        return device.model_copy(update={"sm_count": max(1, device.sm_count - self.spare_multiprocessors)})


NO_PREFERENCE = PlanPreference()
