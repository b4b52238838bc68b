"""Int8 quantization for PyTorch: ops, modules, and one call that quantizes a model.

Importing this package imports torch and registers ``torch.ops.skuda``. No other package of skuda imports torch.
"""

from __future__ import annotations

import sys

if __name__ != "skuda.torch":
    # In a checkout the folder lies in that of `skuda.dispatch`. A second import would register the ops twice.
    raise ImportError("this package is imported as skuda.torch", name=__name__)

from skuda.torch.autograd import fake_quantize, frozen_linear, mixed_linear
from skuda.torch.calibration import Calibration, calibrate
from skuda.torch.certification import Certificate, certify
from skuda.torch.checkpoint import load_, save
from skuda.torch.dequantize import Dequantization, dequantize_
from skuda.torch.fuse import Fusion, fuse_
from skuda.torch.graph import fuse_graph, fused_backend, graph_pass
from skuda.torch.group import TorchGroup
from skuda.torch.int8_linear import CodesLinear, DynamicLinear, Int8Linear, SmoothedLinear, StaticLinear
from skuda.torch.ops import linear_codes, linear_dynamic, linear_scaled, linear_static, register
from skuda.torch.parallelize import Parallelization, parallelize_
from skuda.torch.preparation import prepare
from skuda.torch.quantize import Config, Dynamic, Report, quantize_
from skuda.torch.sampling import log_probs, sample
from skuda.torch.sharded_linear import ColumnLinear, RowLinear
from skuda.torch.smoothing import SmoothDynamic, SmoothStatic
from skuda.torch.training import FakeQuant, FakeQuantLinear, Mixed, MixedLinear, observe
from skuda.torch.update import update_

__all__ = [
    "Calibration",
    "Certificate",
    "CodesLinear",
    "ColumnLinear",
    "Config",
    "Dequantization",
    "Dynamic",
    "DynamicLinear",
    "FakeQuant",
    "FakeQuantLinear",
    "Fusion",
    "Int8Linear",
    "Mixed",
    "MixedLinear",
    "Parallelization",
    "Report",
    "RowLinear",
    "SmoothDynamic",
    "SmoothStatic",
    "SmoothedLinear",
    "StaticLinear",
    "TorchGroup",
    "calibrate",
    "certify",
    "dequantize_",
    "fake_quantize",
    "frozen_linear",
    "fuse_",
    "fuse_graph",
    "fused_backend",
    "graph_pass",
    "linear_codes",
    "linear_dynamic",
    "linear_scaled",
    "linear_static",
    "load_",
    "log_probs",
    "mixed_linear",
    "observe",
    "parallelize_",
    "prepare",
    "quantize_",
    "register",
    "sample",
    "save",
    "update_",
]

# Python makes a module an attribute of its package when it loads it. It does not do so again for what an interrupted
# import of the package has left.
for _name, _module in tuple(sys.modules.items()):
    _package, _, _own = _name.rpartition(".")
    if _package.partition(".")[0] == "skuda":
        vars(sys.modules[_package]).setdefault(_own, _module)
