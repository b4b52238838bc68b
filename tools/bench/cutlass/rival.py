"""CUTLASS as a rival of the linear ops: shared objects that ``build.sh`` builds, called through ctypes.

For a bench only; no kernel of the library comes from here. Nothing is loaded before a folder is named.
"""

from __future__ import annotations

import ctypes
import importlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.tools.bench.rival import Alternatives, Check, Inputs, Rival, operands, refusal
from skuda.tools.output import count

CAPABILITY = (9, 0)
"""The compute capability that the objects are built for."""
_Options = tuple[int, int, int]
"""Of the scheduler: tiles of a band; their order, 0 CUTLASS's own rule, 1 along M; and the split of K, 0 CUTLASS's own
rule, 1 stream-K, n + 1 into n parts."""
_DEFAULT = (1, 0, 0)
_ORDERS = {"": _DEFAULT, " swizzle=8": (8, 0, 0), " raster=1 swizzle=2": (2, 1, 0)}
_SPLITS = {"": _DEFAULT, " stream-K": (1, 0, 1)} | {f" split={parts}": (1, 0, parts + 1) for parts in (2, 3, 4, 8)}
_SCHEDULERS = {"pp": _ORDERS, "co": _ORDERS, "sk": _SPLITS}
"""Options to try, by the part of a name that says its schedule: pingpong, cooperative and stream-K."""
_REASONS = {
    1: "K must be a multiple of 16 and N of 8",
    2: "a pointer is not a multiple of 16 bytes",
    3: "CUTLASS cannot implement it",
    4: "the workspace is too small",
}


def build_command() -> str:
    """Return the command that builds the objects."""
    return f"bash {shlex.quote(str(Path(__file__).resolve().parent / 'build.sh'))} FOLDER"


@dataclass(frozen=True)
class Configuration:
    """One shared object: a tile, a cluster and a schedule, with a name such as ``t64x256x128_pp``."""

    name: str
    library: Any

    @classmethod
    def load(cls, path: Path) -> Configuration:
        """Load an object; an OSError if it cannot be loaded, an AttributeError if it is something else."""
        library = ctypes.CDLL(str(path.resolve()))
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        library.run.argtypes = [*[pointer] * 5, *[integer] * 3, pointer, ctypes.c_size_t, pointer]
        library.run.restype = integer
        library.workspace.argtypes = [integer] * 3
        library.workspace.restype = ctypes.c_size_t
        library.tune.argtypes = [integer] * 3
        library.tune.restype = None
        library.name.argtypes = []
        library.name.restype = ctypes.c_char_p
        return cls(library.name().decode(), library)

    @property
    def options(self) -> dict[str, _Options]:
        """Scheduler options to try, by what they add to the name."""
        return next((_SCHEDULERS[part] for part in self.name.split("_") if part in _SCHEDULERS), {"": _DEFAULT})

    def call(self, tensors: tuple[Any, ...], options: _Options = _DEFAULT) -> Callable[[], None]:
        """Return a call that enqueues one product; it raises ValueError for a refusal, RuntimeError for other failures.

        The tensors are codes [M, K], weight [N, K], scales of rows and of columns, and output [M, N].
        """
        torch: Any = importlib.import_module("torch")
        codes, weight = tensors[:2]
        sizes, place = (len(codes), len(weight), codes.shape[1]), codes.device
        self.library.tune(*options)
        space = torch.empty(int(self.library.workspace(*sizes)), dtype=torch.uint8, device=place)
        given = (*(tensor.data_ptr() for tensor in tensors), *sizes, space.data_ptr(), len(space))

        # The addresses know no owners: the call holds the tensors.
        def call(_kept: object = (tensors, space)) -> None:
            stream = torch.cuda.current_stream(place).cuda_stream if place.type == "cuda" else 0
            self.library.tune(*options)  # for whatever runs next
            code = self.library.run(*given, stream)
            if code:
                why = _REASONS.get(code, f"the launch failed with CUTLASS status {code - 100}")
                raise (ValueError if code in _REASONS else RuntimeError)(f"{self.name}: {why}")

        return call


@dataclass(frozen=True)
class Cutlass:
    """The configurations that one folder holds, in order of their names, or why they cannot run."""

    configurations: tuple[Configuration, ...] = ()
    away: str = f"no folder of built objects is named; run: {build_command()}, then bench with --cutlass FOLDER"

    @classmethod
    def load(cls, folder: Path | None, device: Device | None) -> Cutlass:
        """Load every object of a folder, if one is named; refuse one that holds none, or something else."""
        if folder is None:
            return cls()
        had, found = f"{folder}, without any", list[Configuration]()
        try:
            found += map(Configuration.load, sorted(folder.glob("*.so")))
        except (OSError, AttributeError) as error:
            had, found = f"{folder}, with what does not load: {error}", []
        if not found:
            must = f"be a folder of what this builds, alone: {build_command()}"
            raise InvalidProblem("bench", "--cutlass", had, must)
        if device is None or device.compute_capability == CAPABILITY:
            return cls(tuple(found), "")
        has = ".".join(map(str, device.compute_capability or ("unknown",)))
        return cls(tuple(found), f"its objects run on compute capability 9.0 only, and the device's is {has}")

    @property
    def count(self) -> int:
        """How many configurations there are to choose from, options included."""
        return sum(len(each.options) for each in self.configurations)

    def rival(self, problem: Descriptor) -> Rival | None:
        """Return the rival for a problem; None for other ops than products."""
        if not isinstance(problem, LinearProblem):
            return None
        some = count(self.count, "configuration") if self.configurations else "its configurations"
        how = f"CUTLASS 3, both scales in its epilogue: the fastest of {some} for this shape, found by quick runs"
        before = "; the product alone, activation quantized before" if problem.dynamic else ""
        return Rival("cutlass", how + before, self.calls, away=self.away)

    def calls(self, problem: Any, inputs: Inputs) -> Alternatives:
        """Return a call for every configuration by name; a ValueError says why CUTLASS does not serve a problem."""
        _, columns, inner = problem.sizes
        why = refusal(problem, (ElementKind.BF16,)) or (_REASONS[1] if inner % 16 or columns % 8 else "")
        if why:
            raise ValueError(why)
        codes, scale, weight, weight_scale = operands(problem, inputs)
        torch: Any = importlib.import_module("torch")
        output = torch.empty((len(codes), len(weight)), dtype=torch.bfloat16, device=codes.device)
        tensors = (codes.contiguous(), weight, scale.reshape(-1).contiguous(), weight_scale, output)
        calls = {
            f"{each.name}{name}": each.call(tensors, options)
            for each in self.configurations
            for name, options in each.options.items()
        }
        return Alternatives(calls, (Check(problem, inputs, {"output": output}),))
