"""Packages as an installation leaves them, for tests of plug-ins, and the code of one with an op."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TWICE = """
    from typing import Any, ClassVar, Literal
    from skuda.registry import *

    class TwiceDescriptor(Descriptor):
        "Problem of `twice`."
        op: Literal["twice"] = "twice"
        category: ClassVar = OpCategory.UNARY_ELEMENTWISE
        element_field: ClassVar = "element"
        n: int
        element: ElementKind = ElementKind.F32
        signature = (ArgumentSpec("x", Role.INPUT, "element", "n"), ArgumentSpec("y", Role.OUTPUT, "element", "n"))

    def reference(problem, *, x: Any, y: Any) -> None:
        y[...] = 2 * x

    def sku(backend, entry_point):
        return KernelSku(category="unary_elementwise", op="twice", element="f32", arch="cpu", backend=backend,
                         variant=entry_point, source=__name__, entry_point=entry_point,
                         precision_guarantee={"math_precision": "f32", "accumulator": "f32"})
"""


def install(folder: Path, package: str, **points: Mapping[str, str]) -> None:
    """Write the metadata of a package into a folder of `sys.path`; `points` are its entry points by group."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    groups = {group: "".join(f"{name} = {value}\n" for name, value in own.items()) for group, own in points.items()}
    (info / "entry_points.txt").write_text("\n".join(f"[skuda.{group}]\n{own}" for group, own in groups.items()))
