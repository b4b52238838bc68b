"""Norms and gated activations write the codes of the layers behind them, in the graph that vLLM compiles.

vLLM's config has a place for a pass of one's own, which runs on each piece of the graph while norms are still single
ops. The pass is there wherever skuda serves a layer, also if it changes nothing: only its `uuid` tells the caches of
vLLM and Inductor that a graph calls skuda's ops.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from vllm.compilation.passes import inductor_pass
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform

import skuda
from skuda.dispatch.settings import fuses_in_vllm
from skuda.serving.preparation import prepare, problems_of, select, want
from skuda.torch.fuse import graph as graphs
from skuda.torch.fuse import patterns
from skuda.torch.fuse.fuse import Fusion
from skuda.vllm.status import NAME

logger = init_logger("vllm.skuda")

_SHOWN = 8
"""Different reasons that a line of the log has at most."""

_GATES: dict[str, tuple[str, dict[str, str]]] = {
    "silu_and_mul": ("silu", {}),
    "gelu_and_mul": ("gelu", {"approximation": "erf"}),
    "gelu_tanh_and_mul": ("gelu", {"approximation": "tanh"}),
}


class FusionPass(InductorPass):  # type: ignore[misc]
    """`skuda.torch.fuse_graph` with ``bits="fused"``, for vLLM's norms and activations, too.

    The bits are those of `rms_norm_quantize`, `silu_mul_quantize` and `gelu_mul_quantize`. vLLM's own ops, followed by
    a quantization, differ from them in places:

    - A norm of vLLM also rounds before it multiplies by the weight, and sums the squares in another order.
    - After a residual, vLLM's definition takes the norm of the f32 sum. The fused op takes that of the sum as it is
      stored, in the dtype of the data. The stored sums are the same.
    - Code of Inductor leaves out roundings between ops that it joins, such as that of an activation before its product.

    Parameters
    ----------
    before : InductorPass or None
        The user's pass, which runs first.
    fuses : bool
        Whether anything is fused.
    gates : bool
        Whether gated activations are, too.
    sizes : tuple of int
        Numbers of tokens that are planned in advance, so that graphs of them can be captured. Kernels are prepared for
        all numbers up to the largest.
    """

    def __init__(
        self, before: InductorPass | None, *, fuses: bool, gates: bool = True, sizes: tuple[int, ...] = ()
    ) -> None:
        self.before = before
        self.fuses, self.gates, self.sizes = fuses, gates, sizes
        self._warmed: set[Any] = set()

    def __call__(self, graph: fx.Graph) -> None:
        """Run the user's pass, fuse, and prepare the kernels. An error on the way leaves the graph as it is."""
        if self.before is not None and _applies(self.before):
            self.before(graph)
        try:
            if self.fuses:
                _know_ops()
                # An error on the way would leave a graph half changed.
                graphs.fuse(copy.deepcopy(graph), "fused", gates=self.gates)
                _tell(graphs.fuse(graph, "fused", gates=self.gates))
            if torch.cuda.is_available():
                device, problems = f"cuda:{torch.cuda.current_device()}", problems_of(graph, self.sizes, self._warmed)
                want(problems, max(self.sizes))
                prepare(device, logger)
                select(problems, device)
        except Exception as error:
            logger.warning_once("skuda leaves a graph that it cannot read: %s", error)
            logger.debug("skuda could not read this graph:\n%s", graph, exc_info=True)

    def uuid(self) -> str:
        """Return what decides the result: the version, the sources, whether it fuses, and the user's pass."""
        first = "" if self.before is None else f" after {self.before.uuid()}"
        what = ("all" if self.gates else "norms") if self.fuses else "nothing"
        return f"skuda {skuda.__version__} {_sources()} fuses {what}{first}"


def add_pass() -> None:
    """Add the pass to the present config of vLLM, if there is one and it is not there yet. A pass of the user stays."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return
    options, key = config.compilation_config.inductor_compile_config, current_platform.pass_key
    present = options.get(key)
    if isinstance(present, FusionPass):
        return
    if present is not None and not isinstance(present, InductorPass):
        logger.warning_once("skuda fuses no norms: %s of the config is no InductorPass, and stays", key)
        return
    sizes = {*(config.compilation_config.cudagraph_capture_sizes or ()), config.scheduler_config.max_num_batched_tokens}
    quantized = config.quant_config
    invariant = quantized is not None and quantized.get_name() == NAME
    if invariant and options.setdefault("deterministic", True):
        # Else Inductor takes the fastest order of a sum, so two starts can have different bits. The other setting
        # times kernels, too, which is an error then.
        options["benchmark_combo_kernel"] = False
    # Where ranks hold columns of a layer, they exchange maxima between its gated activation and its codes, so these
    # cannot be fused. The bits of one rank are to be the same.
    fuses = fuses_in_vllm() and not getattr(quantized, "exact", False)  # the layers of an exact model are joined
    options[key] = FusionPass(present, fuses=fuses, gates=not invariant, sizes=tuple(sorted(sizes)))


def _applies(one: InductorPass) -> bool:
    """Whether vLLM would run a pass for the numbers of tokens that it compiles for."""
    if inductor_pass._pass_context is None:  # noqa: SLF001  Inductor without vLLM's backend knows no ranges
        return True
    return bool(one.is_applicable_for_range(inductor_pass.get_pass_context().compile_range))


def _know_ops() -> None:
    """Register vLLM's norms and activations, those that this platform has, as patterns."""
    norms: Any = torch.ops.vllm_ir
    patterns.NORMS[norms.rms_norm.default] = ("x", None, "weight", "epsilon")
    patterns.NORMS[norms.fused_add_rms_norm.default] = ("x", "x_residual", "weight", "epsilon")
    for name, what in _GATES.items():
        if hasattr(torch.ops._C, name):  # noqa: SLF001  the name of vLLM's library
            patterns.GATES[getattr(torch.ops._C, name).default] = what  # noqa: SLF001


@lru_cache(maxsize=1)
def _sources() -> str:
    """Return a hash of the sources that decide what the pass does."""
    files = (__file__, graphs.__file__, patterns.__file__)
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


def _tell(report: Fusion) -> None:
    """Log what was fused in a graph and what was left, once for all graphs alike."""
    done, why = Counter(report.fused.values()), Counter(report.left.values())
    if not done and not why:
        return
    norms = done[graphs.NORM] + done[graphs.NORM_OF_SUM]
    reasons = [f"{count} x {reason}" for reason, count in why.most_common(_SHOWN)]
    more = [f"{len(why) - _SHOWN} more reasons"] if len(why) > _SHOWN else []
    left = "; ".join(reasons + more) or "nothing"
    text = "skuda: %d norms and %d gated activations of a graph write int8 codes; left: %s"
    logger.info_once(text, norms, done[graphs.GATED], left)
    for name, reason in {**report.fused, **report.left}.items():
        logger.debug("skuda: %s: %s", name, reason)
