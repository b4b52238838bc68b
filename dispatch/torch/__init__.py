"""Int8 quantization for PyTorch: ops, modules, and one call that quantizes a model.

Importing this package imports torch and registers ``torch.ops.skuda``. No other package of skuda imports torch.
"""

from __future__ import annotations

import sys

if __name__ != "skuda.torch":
    # In a checkout the folder lies in that of `skuda.dispatch`. A second import would register the ops twice.
    raise ImportError("this package is imported as skuda.torch", name=__name__)

from skuda.torch import moved
from skuda.torch.certification.certificate import Certificate, certify
from skuda.torch.convert.budget import Budget
from skuda.torch.convert.calibration import Calibration, calibrate
from skuda.torch.convert.dequantize import Dequantization, dequantize_
from skuda.torch.convert.fold import Folding, fold_
from skuda.torch.convert.preparation import prepare
from skuda.torch.convert.quantize import Config, Dynamic, Report, quantize_
from skuda.torch.convert.smoothing import SmoothDynamic, SmoothStatic
from skuda.torch.convert.update import update_
from skuda.torch.distributed.group import TorchGroup
from skuda.torch.distributed.parallelize import Parallelization, parallelize_
from skuda.torch.distributed.sharded_linear import ColumnLinear, RowLinear
from skuda.torch.evaluation.comparison import Comparison, compare
from skuda.torch.fuse.fuse import Fusion, fuse_
from skuda.torch.fuse.graph import fuse_graph, fused_backend, graph_pass
from skuda.torch.hf import hooks as _hooks  # noqa: F401  it listens to changes of models
from skuda.torch.hf.checkpoint import load_, save
from skuda.torch.linear.autograd import fake_quantize, frozen_linear, mixed_linear
from skuda.torch.linear.int8_linear import CodesLinear, DynamicLinear, Int8Linear, SmoothedLinear, StaticLinear
from skuda.torch.ops.registered import linear_codes, linear_dynamic, linear_scaled, linear_static, register
from skuda.torch.ops.sampling import log_probs, sample
from skuda.torch.training.layers import FakeQuant, FakeQuantLinear, Mixed, MixedLinear, observe

__all__ = [
    "Budget",
    "Calibration",
    "Certificate",
    "CodesLinear",
    "ColumnLinear",
    "Comparison",
    "Config",
    "Dequantization",
    "Dynamic",
    "DynamicLinear",
    "FakeQuant",
    "FakeQuantLinear",
    "Folding",
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
    "compare",
    "dequantize_",
    "fake_quantize",
    "fold_",
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

moved.serve()

# Python makes a module an attribute of its package when it loads it. It does not do so again for what an interrupted
# import of the package has left.
for _name, _module in tuple(sys.modules.items()):
    _package, _, _own = _name.rpartition(".")
    if _package.partition(".")[0] == "skuda":
        vars(sys.modules[_package]).setdefault(_own, _module)
