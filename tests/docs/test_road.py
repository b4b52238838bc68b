"""The road of one call in CONTRIBUTING is the one that calls take."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from fakes import FakeArray, Rig
from paths import ROOT
from toykernels.scaled import ScaledDescriptor, scaled

import skuda
from skuda.dispatch import Dispatcher
from skuda.dispatch.host import binding

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROAD = TEXT.partition("## The road of one call\n")[2].partition("\n## ")[0]
STEPS = re.findall(r"^\| ([^|]+) \| `skuda\.([\w.]+:[\w.]+)` \| [^|]+ \|$", ROAD, re.MULTILINE)
MOST_FILES, MOST_HOPS = 15, 4


class Walk:
    """The functions of skuda that were called, in order, and how many of them were open at most.

    Attributes
    ----------
    codes : list of code
        Each function once.
    hops : list of str
        The functions of skuda that were open when `until` was called, outermost first.
    """

    def __init__(self, until):
        self.codes, self.hops, self._until = [], [], until

    def __call__(self, frame, event, arg):
        if event == "call":
            code = frame.f_code
            if ours(code) and code not in self.codes:
                self.codes.append(code)
            if code is self._until and not self.hops:
                while frame is not None:
                    if ours(frame.f_code):
                        self.hops.insert(0, frame.f_code.co_name)
                    frame = frame.f_back

    @property
    def files(self):
        """The files of dispatch/ that the road crosses."""
        return {code.co_filename for code in self.codes if "/dispatch/" in code.co_filename}


def ours(code):
    name = code.co_filename
    known = any(f"/{folder}/" in name for folder in ("dispatch", "registry", "kernels"))
    return (known and name.startswith(str(ROOT)) and "/tests/" not in name) or name.startswith("<skuda")


@contextmanager
def walked(until=None):
    walk = Walk(None if until is None else until.__code__)
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def codes_of(steps):
    """Return the code of every function that the page names for these steps."""
    found = []
    for _, name in steps:
        module, _, path = name.partition(":")
        target = importlib.import_module(f"skuda.{module}")
        for part in path.split("."):
            target = getattr(target, part)
        found.append((target.__init__ if isinstance(target, type) else target).__code__)
    return found


def in_order(wanted, walk):
    """Assert that a walk called these functions in this order."""
    missing = [code.co_qualname for code in wanted if code not in walk.codes]
    assert not missing
    places = [walk.codes.index(code) for code in wanted]
    assert places == sorted(places), [code.co_qualname for code in wanted]


def test_a_cold_call_on_a_cpu_takes_the_steps_and_crosses_few_files():
    steps = [step for step in STEPS if "GPU" not in step[0]]
    dispatcher, x = Dispatcher(), np.ones(8, np.float32)
    how = {"scale": 0.5, "zero_point": 0, "q_min": -128, "q_max": 127, "dispatcher": dispatcher}
    skuda.ops.fake_quantize(input=x[:4], **how)  # imports what comes later
    with walked() as walk:
        skuda.ops.fake_quantize(input=x, **how)
    in_order(codes_of(steps), walk)
    assert len(walk.files) <= MOST_FILES, sorted(walk.files)


def test_a_cold_call_on_a_gpu_takes_the_steps():
    rig = Rig(ScaledDescriptor(numel=32), scaled)
    arrays = {"x": FakeArray((4, 8)), "scale": 0.5, "y": FakeArray((4, 8), address=0x20000)}
    with walked() as walk:
        rig.run(**arrays)
    names = ("first run", "checks, GPU", "launch, GPU")
    in_order(codes_of([step for step in STEPS if step[0] in names]), walk)


def test_a_warm_call_takes_few_hops():
    rig = Rig(ScaledDescriptor(numel=32), scaled)
    arrays = {"x": FakeArray((4, 8)), "scale": 0.5, "y": FakeArray((4, 8), address=0x20000)}
    rig.run(**arrays)
    with walked(type(rig.engine).launch) as walk:
        rig.run(**arrays)
    assert walk.hops == ["run", "launch"], "Plan.run, and the launch that was generated"
    dispatcher, x = Dispatcher(), np.ones(8, np.float32)
    problem = dispatcher.describe("fake_quantize", numel=8, q_min=-128, q_max=127, input_element="f32")
    call = {"input": x, "scale": 0.5, "zero_point": 0}
    dispatcher.run(problem, **call)
    with walked(binding.new_array) as walk:
        dispatcher.run(problem, **call)
    assert walk.hops[:2] == ["run", "launch"]
    assert len(walk.hops) - 1 <= MOST_HOPS


def test_a_warm_layer_takes_few_hops():
    torch = pytest.importorskip("torch")
    from skuda.torch.linear.int8_linear import DynamicLinear

    layer, x = DynamicLinear.from_linear(torch.nn.Linear(16, 8)), torch.ones(2, 3, 16)
    with torch.no_grad():
        layer(x)
        with walked(binding.new_array) as walk:
            layer(x)
    assert walk.hops[:3] == ["forward", "launched", "launch"]
    assert len(walk.hops) - 1 <= MOST_HOPS + 1, "the host's launch makes its outputs in a function of its own"
