"""The backend `triton_interpreter`: Triton's interpreter runs the same kernels in Python, for tests without a GPU.

`HostRunner` checks the arguments, as `CudaRunner` does for a GPU, and calls a function with NumPy arrays.
"""

import threading
from importlib import metadata
from importlib.util import find_spec

import numpy as np

from skuda.dispatch import Backend, BackendStatus, HostRunner, Leading, Pointer
from skuda.registry import HOST, BackendSpec, Role
from skuda_triton.backend import kernel_of, unavailable
from skuda_triton.records import INTERPRETED, launch

ONE_AT_A_TIME = threading.Lock()  # the interpreter keeps the state of a launch in global variables


class InterpreterBackend(Backend):
    spec = BackendSpec(name="triton_interpreter", processor="cpu")

    def status(self):
        if find_spec("triton") is None:
            return unavailable("triton is not installed", "pip install triton")
        if not INTERPRETED:
            return unavailable("the interpreter is off", "set TRITON_INTERPRET=1")
        return BackendStatus(available=True, detail=f"the interpreter of triton {metadata.version('triton')}")

    def devices(self):
        return (HOST,) if self.status().available else ()

    def prepare(self, sku, problem, device, choice=""):
        return HostRunner(problem, interpret)


def interpret(problem, **arrays):
    """Run the kernel of a problem on contiguous copies of NumPy arrays."""
    kernel, constants = kernel_of(problem)
    copies = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    for step in launch(problem).steps:
        values = [value_of(parameter, copies) for parameter in step.parameters]
        with ONE_AT_A_TIME, np.errstate(all="ignore"):
            kernel[step.grid](*values, **constants)
    for argument in problem.arguments():
        if argument.role is Role.OUTPUT:
            arrays[argument.name][...] = copies[argument.name]


def value_of(parameter, arrays):
    """Return what the kernel takes for a parameter of the launch rule."""
    match parameter:
        case Pointer(name):
            return arrays[name].ctypes.data
        case Leading(name):
            return arrays[name].shape[1]
    return parameter.value
