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

Call = Callable[[], Any]

CAPABILITY = (9, 0)
"""What the objects are built for."""

_Options = tuple[int, int, int]
"""Tiles of a rasterization band; the order, 0 CUTLASS's own rule, 1 along M; and the split of K, see `_SPLITS`."""

_DEFAULT = (1, 0, 0)
_ORDERS = {"": _DEFAULT, " swizzle=8": (8, 0, 0), " raster=1 swizzle=2": (2, 1, 0)}
_SPLITS = {"": _DEFAULT, " stream-K": (1, 0, 1)} | {f" split={parts}": (1, 0, parts + 1) for parts in (2, 3, 4, 8)}
"""How K is split: 0 CUTLASS's own rule, 1 stream-K, above 2 that number less one of parts."""

_SCHEDULERS = {"pp": _ORDERS, "co": _ORDERS, "sk": _SPLITS}
"""Options worth a try, by the part of a name that says its schedule: pingpong, cooperative and stream-K."""

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
        """Scheduler options worth a try, by what they add to the name."""
        return next((_SCHEDULERS[part] for part in self.name.split("_") if part in _SCHEDULERS), {"": _DEFAULT})

    def workspace(self, sizes: tuple[int, int, int], options: _Options = _DEFAULT) -> int:
        """Return the bytes of workspace for a product of sizes M, N and K."""
        self.library.tune(*options)
        return int(self.library.workspace(*sizes))

    def run(
        self,
        addresses: tuple[int, ...],
        sizes: tuple[int, int, int],
        options: _Options = _DEFAULT,
        *,
        workspace: tuple[int, int] = (0, 0),
        stream: int = 0,
    ) -> None:
        """Enqueue one product of sizes M, N and K; a ValueError where it refuses, a RuntimeError if the launch fails.

        `addresses` are those of codes [M, K], weight [N, K], scales of rows and of columns, and output [M, N];
        `options` are those of the scheduler; `workspace` is address and bytes.
        """
        # The options stand in the object, for whatever runs next.
        self.library.tune(*options)
        code = self.library.run(*addresses, *sizes, *workspace, stream)
        if code:
            why = _REASONS.get(code, f"the launch failed with CUTLASS status {code - 100}")
            raise (ValueError if code in _REASONS else RuntimeError)(f"{self.name}: {why}")


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

    def calls(self, operands: tuple[Any, ...], output: Any) -> Mapping[str, Call]:
        """Return a call for every configuration, by name, on tensors in the order of `Configuration.run`."""
        codes, weight = operands[:2]
        sizes = (len(codes), len(weight), codes.shape[1])
        return {
            f"{each.name}{name}": _bound(each, (*operands, output), sizes, options)
            for each in self.configurations
            for name, options in each.options.items()
        }


def _bound(
    configuration: Configuration, tensors: tuple[Any, ...], sizes: tuple[int, int, int], options: _Options
) -> Call:
    torch: Any = importlib.import_module("torch")
    place = tensors[0].device
    size = configuration.workspace(sizes, options)
    space = torch.empty(size, dtype=torch.uint8, device=place)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)

    # The addresses know no owners: the call holds the tensors.
    def call(_kept: object = tensors) -> None:
        stream = torch.cuda.current_stream(place).cuda_stream if place.type == "cuda" else 0
        configuration.run(addresses, sizes, options, workspace=(space.data_ptr(), size), stream=stream)

    return call
