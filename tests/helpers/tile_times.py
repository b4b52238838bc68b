"""Measured times of a kernel's configurations: files of `skuda tune`, and compact records in docs/evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skuda.dispatch.select.tuning import Tuning
from skuda.registry.sku import SkuIdentity

KIND = "skuda tile times"

Times = Mapping[str, Any]
"""A set of times of one card: medians in us of a kernel's configurations at many shapes of a problem.

Each of ``shapes`` is m, n, k, and then for each configuration its number in ``configurations`` and its time. ``layers``
is as in `skuda tune`. No costs may be fitted to a set that is ``held``.
"""


def sets_of(path: Path, kernel: str, *, held: bool = False) -> list[Times]:
    """Return the sets of a record, or the times of a kernel in a file of `skuda tune`."""
    content = json.loads(path.read_text())
    if content.get("kind") == KIND:
        return [{**times, "held": times["held"] or held} for times in content["sets"]]
    tuning, sets = Tuning.load(path), {}
    for entry in tuning.entries:
        names = ("m", "c_out" if "c_out" in entry.problem else "n", "k")
        own = [one for one in entry.candidates if SkuIdentity.parse(one.sku).variant == kernel and one.timing]
        if not own:
            continue
        problem = {name: value for name, value in entry.problem.items() if name not in names}
        about = {"kernel": kernel, "problem": problem, "layers": entry.layers, "held": held}
        about |= {"device": tuning.environment.device.model_dump(mode="json"), "source_hash": own[0].source_hash}
        times: dict[str, Any] = sets.setdefault(str(about), {**about, "configurations": [], "shapes": []})
        times["configurations"] += [one.choice for one in own if one.choice not in times["configurations"]]
        us = [(times["configurations"].index(one.choice), round(one.timing.median, 2)) for one in own if one.timing]
        times["shapes"].append([*(entry.problem[name] for name in names), *(value for pair in us for value in pair)])
    return list(sets.values())


def write(path: Path, sets: Sequence[Times]) -> None:
    """Write a record, one set to a line; sets of other kernels that it has stay."""
    kernels = {times["kernel"] for times in sets}
    others = [times for times in sets_of(path, "") if times["kernel"] not in kernels] if path.exists() else []
    sets = [*sets, *others]
    lines = ",\n".join(json.dumps(times, separators=(",", ":")) for times in sets)
    path.write_text(f'{{"kind":"{KIND}","schema_version":1,"sets":[\n{lines}\n]}}\n')


def laid_out(value: Any, indent: str = "") -> str:
    """Return JSON with a line for each of the innermost objects."""
    if not isinstance(value, dict) or not any(isinstance(each, dict) for each in value.values()):
        return json.dumps(value)
    inner = (f"{indent}  {json.dumps(name)}: {laid_out(each, f'{indent}  ')}" for name, each in value.items())
    return "{\n" + ",\n".join(inner) + f"\n{indent}}}"
