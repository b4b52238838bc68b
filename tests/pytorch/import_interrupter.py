"""Interrupts the first import of a module, imports it again, and checks what it has registered.

    python import_interrupter.py MODULE COUNT PACKAGES PART...

Each interrupt comes before a random bytecode of the files whose path contains a part, in a fork of a process that has
imported the packages. Every other one is an error, which code cannot hold back. Tracebacks are kept, as in a notebook.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from functools import partial

import torch
from interrupts import bytecodes, fork, interrupted
from support import fresh


def check_ops(ours):
    """Every op is registered once, and the layers on them run forward and backward."""
    registry = importlib.import_module("torch._library.simple_registry").singleton
    for op in ours.ops.tensor_op.OPS.values():
        for name in op.schemas:
            for key in ("CPU", "CUDA", "Meta", "AutogradCPU", "AutogradNestedTensor", "FuncTorchBatched"):
                assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"skuda::{name}", key), (name, key)
            assert op.state or "TensorOp.before" in ours.ops.registering.overload_of(name)._op.__qualname__, name
            assert len(registry.find(f"skuda::{name}").fake_impl.kernels) == 1, name
    assert ours.fuse.graph._RANGE is torch.ops.skuda.dynamic_range.default
    assert torch.ops.skuda.smooth(torch.ones(3, 2, device="meta"), torch.ones(2, device="meta")).shape == (3, 2)
    x = torch.randn(3, 16, requires_grad=True)
    for config in (ours.Dynamic(), ours.Mixed()):
        floats, model = (torch.nn.Sequential(torch.nn.Linear(16, 8)) for _ in range(2))
        model.load_state_dict(floats.state_dict())
        ours.quantize_(model, config)
        torch.testing.assert_close(model(x), floats(x), atol=0.1, rtol=0)
        got, want = (torch.autograd.grad(each(x).sum(), x)[0] for each in (model, floats))
        torch.testing.assert_close(got, want, atol=0.1, rtol=0)


def check_transformers(ours):
    """Transformers knows this module's classes, each once, and its own reader of other formats."""
    auto = importlib.import_module("transformers.quantizers.auto")
    configs, kinds = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.LOADING_ATTRIBUTES_CONFIG_TYPES
    assert auto.AUTO_QUANTIZER_MAPPING["skuda"] is ours.SkudaQuantizer
    assert configs["skuda"] is ours.SkudaConfig
    assert configs["compressed-tensors"].own.__module__.startswith("transformers.")
    assert [kind for kind in kinds if "skuda" in kind.__module__] == [ours.SkudaConfig]


def check_peft(ours):
    """An int8 layer gets adapters of this module's class, through one wrapper."""
    peft, package = importlib.import_module("peft"), sys.modules["skuda.torch"]
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8))
    package.quantize_(model, package.Dynamic())
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    assert type(adapted.base_model.model[0]) is ours.LoraInt8Linear
    for function in (peft.LoraConfig.__post_init__, peft.tuners.tuners_utils._maybe_include_all_linear_layers):
        assert function.__wrapped__.__module__.startswith("peft.")
        assert "skuda" not in function.__wrapped__.__globals__["__name__"]


CHECKS = {"skuda.torch.hf.transformers": check_transformers, "skuda.torch.hf.peft": check_peft}


def interrupt(module, parts, at, *, error):
    """Interrupt an import, import again, and check; end the process, with status 1 if something is wrong."""
    kept = []

    def imported():
        try:
            importlib.import_module(module)
        except BaseException as stopped:
            kept.append(stopped)
            raise

    try:
        came = interrupted(imported, at, *parts, error=error)
        where = traceback.extract_tb(kept[0].__traceback__)[-1] if kept else "not in the import"
        sys.stderr.write(f"{module} at {at}, {'an error' if error else 'a signal'}: {where}\n")
        assert came
        importlib.import_module(module)
        for name, each in sys.modules.items():
            package, _, own = name.rpartition(".")
            if package in ("skuda", "skuda.torch"):
                assert getattr(sys.modules[package], own) is each, name
        check_ops(sys.modules["skuda.torch"])
        if module in CHECKS:
            CHECKS[module](sys.modules[module])
    except BaseException:  # noqa: BLE001  a fork must not go on as pytest or the program
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def counted(module, parts):
    """Return the bytecodes of an import, which a fork counts."""
    read, write = os.pipe()
    if fork() == 0:
        os.write(write, str(bytecodes(partial(importlib.import_module, module), *parts)).encode())
        os._exit(0)
    os.wait()
    return int(os.read(read, 100))


if __name__ == "__main__":
    module, count, packages, *parts = sys.argv[1:]
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    for package in packages.split(","):
        importlib.import_module(package)
    points = fresh(module).permutation(counted(module, parts))[: int(count)]
    for number, at in enumerate(points + 1):
        if fork() == 0:
            interrupt(module, parts, int(at), error=bool(number % 2))
        assert os.wait()[1] == 0, f"interrupted at {at}"
