"""CUTLASS as a rival of the linear ops: shared objects that ``build.sh`` builds, called through ctypes.

For a bench only; no kernel of the library comes from here. Nothing is loaded before a folder is named.
"""

from __future__ import annotations

import ctypes
import importlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.vocabulary import EpilogueKind

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


def refusal(problem: Any) -> str:
    """Say why CUTLASS does not serve a linear problem here; nothing where it does."""
    codes = problem.code_element if hasattr(problem, "code_element") else problem.activation_element
    output = problem.output if hasattr(problem, "output") else problem.output_element
    columns = problem.c_out if hasattr(problem, "c_out") else problem.n
    if (codes, problem.weight_element) != (ElementKind.S8, ElementKind.S8):
        return f"built for s8 by s8, not {codes} by {problem.weight_element}"
    if problem.has_zero_points:
        return "built without zero points"
    if problem.epilogue is not EpilogueKind.IDENTITY:
        return f"built without an epilogue such as {problem.epilogue}"
    if output is not ElementKind.BF16:
        return f"built for a bf16 output, not {output}"
    if problem.compute is not ElementKind.F32:
        return f"built for scales in f32, not {problem.compute}"
    if problem.k % 16 or columns % 8:
        return _REASONS[1]
    return ""


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
    """The configurations that one folder holds, in order of their names."""

    configurations: tuple[Configuration, ...]

    @classmethod
    def load(cls, folder: Path) -> Cutlass:
        """Load every object of a folder; refuse one that holds none, or something else."""
        found = []
        for path in sorted(folder.glob("*.so")):
            try:
                found.append(Configuration.load(path))
            except (OSError, AttributeError) as error:
                must = f"hold what this builds, and nothing else: {build_command()}"
                raise InvalidProblem("bench", "--cutlass", f"{path}, which does not load: {error}", must) from error
        if not found:
            must = f"be a folder with the objects that this builds: {build_command()}"
            raise InvalidProblem("bench", "--cutlass", f"{folder}, without any", must)
        return cls(tuple(found))

    @property
    def count(self) -> int:
        """How many configurations there are to choose from, options included."""
        return sum(len(each.options) for each in self.configurations)

    def calls(self, tensors: tuple[Any, ...]) -> Mapping[str, Callable[[], None]]:
        """Return a call for every configuration by name, on the tensors of `Configuration.call`."""
        return {
            f"{each.name}{name}": each.call(tensors, options)
            for each in self.configurations
            for name, options in each.options.items()
        }
