"""The modules of version 0.1 under their old names, for pickles and code that name them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ROOMS = {
    "ops": ("dtypes", "tensor_op", "registering", "derivatives", "inductor", "sampling"),
    "linear": ("autograd", "dequantized_weight", "int8_linear", "joined"),
    "models": ("source", "replaceable_layers"),
    "fuse": ("fused_modules", "patterns", "graph"),
    "convert": ("calibration", "smoothing", "quantize", "dequantize", "update", "preparation"),
    "attention": ("handed", "sequences", "kv_cache", "rope_attention"),
    "exact": ("exact_modules",),
    "distributed": ("digest", "peers", "group", "sharded_linear", "parallelize"),
    "hf": ("scheme", "stored", "renaming", "checkpoint"),
    "certification": ("recorder", "ways"),
    "formats": ("int4_checkpoint",),
}
"""The modules by the package in which they are now."""
_RENAMED = {"int4_checkpoint": "grouped"}
_PACKAGE = "skuda.torch"


_WHERE = {
    f"{_PACKAGE}.{old}": f"{_PACKAGE}.{room}.{_RENAMED.get(old, old)}"
    for room, names in _ROOMS.items()
    for old in names
}


class _Moved(MetaPathFinder, Loader):
    """Finds a module of ours by its old name, and gives the one that there is."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(name, type(self)()) if name in _WHERE else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        found = import_module(_WHERE[spec.name])
        self.own = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own  # the import has put that of the old name in its place


def serve() -> None:
    """Let imports find the old names."""
    if not any(type(each).__name__ == _Moved.__name__ for each in sys.meta_path):
        sys.meta_path.append(_Moved())
