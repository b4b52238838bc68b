"""Soak: random problems and arguments under random faults, for a bounded time.

    python tests/programs/soak.py --seconds 600

Every round is a process of its own, so that a round that hangs is killed and reported with the stacks of its threads. A
round is one of `SCENARIOS`: what it must never see is a hang, a wrong value, or an error that skuda does not raise on
purpose. Threads and signals make a round differ a little each time, even from the same seed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import faulthandler
import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import oracle
from support import Role, arguments_of, assert_same_bits, coordinates, draw, every_case, parts_of, run

from skuda.dispatch import Dispatcher
from skuda.dispatch.compile.cache import CubinCache, remove
from skuda.dispatch.compile.member import Key
from skuda.kernels.catalog import built_in_registry
from skuda.registry.errors import SkudaError

ROUND, PATIENCE = 4.0, 60.0
"""Seconds that a round works, and seconds after which it counts as hanging."""
Tally = Counter[str]
Rng = np.random.Generator


class Fault(AssertionError):
    """What must never happen."""


_armed: list[bool] = []


def _interrupt(_: int, frame: Any) -> None:
    if _armed:
        _armed.clear()
        signal.default_int_handler(signal.SIGINT, frame)


def interrupted(work: Callable[[], Any], rng: Rng, tally: Tally, longest: float) -> Any:
    """Call `work` with a Ctrl-C within `longest` seconds; return its result, or None where the Ctrl-C came first."""
    try:
        _armed.append(True)
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, rng.uniform(0, longest)))
            return work()
        finally:
            _armed.clear()
    except KeyboardInterrupt:
        tally["interrupts"] += 1
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def in_fork(work: Callable[[], Any], tally: Tally) -> None:
    """Call `work` in a forked child, which must end well within seconds."""
    tally["forks"] += 1
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            faulthandler.register(signal.SIGALRM, chain=True)
            signal.alarm(20)
            work()
            status = 0
        except BaseException:  # noqa: BLE001  it goes to the log of the round
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if status:
        raise Fault("a forked child fails or hangs; its error or its stack is above")


class Question:
    """A small problem with inputs, whose answer is known from the exact definition and from a calm run."""

    def __init__(self, rng: Rng) -> None:
        cases = every_case()
        while True:
            _, op, case = cases[rng.integers(len(cases))]
            drawn = draw(op, case, rng)
            if sum(np.prod(shape) for shape in drawn.shapes.values()) < 20_000:
                break
        self.problem, self.inputs = case.problem, drawn.inputs
        self.want = run(self.problem, self.inputs)
        define = oracle.definition(self.problem, self.inputs)
        for argument in arguments_of(self.problem, Role.OUTPUT):
            for at in coordinates(drawn.shapes[argument.name], rng, 10):
                got = oracle.element_at(self.want[argument.name], argument.elements[0], at)
                if not oracle.matches(got, define(argument.name, at)):
                    raise Fault(f"{argument.name}{list(at)} of {self.problem!r} is {got!r}")

    def ask(self, *dispatchers: Any) -> None:
        """Ask each dispatcher and compare every bit."""
        for dispatcher in dispatchers:
            result = dispatcher.run(self.problem, **self.inputs)
            for (name, want), got in zip(self.want.items(), parts_of(result), strict=True):
                assert_same_bits(got, want, f"{name} of {self.problem!r}")


def values(rng: Rng, tally: Tally, seconds: float) -> None:
    """Ask the same questions from several threads, under interrupts and forks, while the clock jumps."""
    questions = [Question(rng) for _ in range(6)]
    registry = built_in_registry()
    shared = [Dispatcher(registry)]
    stop = threading.Event()
    clock, end = time.time, time.monotonic() + seconds

    def jumping() -> float:
        return clock() + random.uniform(-1e9, 1e9)  # noqa: S311  not a secret

    def beside(seed: int) -> int:
        mine = np.random.default_rng(seed)
        asked = 0
        while not stop.is_set():
            questions[mine.integers(len(questions))].ask(shared[0])
            asked += 1
            if mine.random() < 0.05:
                shared[0] = Dispatcher(registry)
        return asked

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(beside, int(rng.integers(2**31))) for _ in range(rng.integers(3))]
        time.time = jumping
        try:
            while time.monotonic() < end:
                question = questions[rng.integers(len(questions))]
                start = time.perf_counter()
                question.ask(Dispatcher(registry))
                longest = 1.1 * (time.perf_counter() - start)
                for _ in range(4):
                    fresh = Dispatcher(registry)
                    ask = partial(question.ask, fresh)
                    interrupted(ask, rng, tally, longest)
                    # Whatever the interrupt left behind, every thread still gets its answer.
                    pool.submit(ask).result()
                    tally["calls"] += 2
                if rng.random() < 0.2:
                    in_fork(partial(question.ask, fresh, shared[0], Dispatcher(registry)), tally)
        finally:
            time.time = clock
            stop.set()
    tally["calls"] += sum(other.result() for other in others)


_MOST_MEMORY = 6 << 30


def mistakes(rng: Rng, tally: Tally, seconds: float) -> None:
    """Change fields and arguments of real calls: each ends with a result or with an error of skuda."""
    from wrong import WRONG  # it loads torch, with which forks may hang

    # A field may ask for any number of bytes; the machine must not give them.
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, resource.RLIM_INFINITY))
    dispatcher = Dispatcher()
    cases, wrong = every_case(), list(WRONG)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _, op, case = cases[rng.integers(len(cases))]
        drawn = draw(op, case, rng)
        fields = {name: getattr(case.problem, name) for name in type(case.problem).model_fields if name != "op"}
        given: dict[str, Any] = dict(drawn.inputs)
        more: dict[str, Any] = {}
        asked = f"{case.problem!r}"
        for _ in range(rng.integers(1, 3)):
            names = (fields, given, more)[rng.choice(3, p=(0.4, 0.5, 0.1))]
            known = [*names, "unheard_of"] if names is not more else ["preference", "stream"]
            name = known[rng.integers(len(known))]
            if rng.random() < 0.1 and name in names:
                del names[name]
                asked += f", without {name}"
            else:
                what = wrong[rng.integers(len(wrong))]
                names[name] = WRONG[what]()
                asked += f", {name} = {what}"
        try:
            dispatcher.run(dispatcher.describe(op.name, **fields), **given, **more)
            tally["accepted"] += 1
        except SkudaError as error:
            text = str(error)
            tally["refused"] += 1
            if len(text) > 4000 or not text.replace("\n", "").isprintable():
                raise Fault(f"a long or unprintable error, {text!r:.500}, for {asked}") from error
        except Exception as error:
            raise Fault(f"a raw {type(error).__name__} for {asked}") from error


def _damage(folder: Path, rng: Rng) -> None:
    """Do something to the cache that a failing disk, a careless user or a hostile one may do."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    if not files:
        return
    path = files[rng.integers(len(files))]
    content = bytearray(path.read_bytes())
    kind = rng.integers(10)
    if kind < 4 and content:
        content[rng.integers(min(len(content), 600))] ^= 1 << rng.integers(8)
        path.write_bytes(content)
    elif kind == 4:
        path.write_bytes(content[: rng.integers(len(content) + 1)])
    elif kind == 5:
        path.write_bytes(rng.bytes(100))
    elif kind == 6:
        path.chmod(int(rng.choice([0o000, 0o622, 0o666, 0o400])))
    else:
        path.unlink()
        if kind == 7:
            os.mkfifo(path)
        elif kind == 8:
            path.mkdir()
        elif rng.random() < 0.5:
            path.symlink_to("/dev/zero" if rng.random() < 0.5 else path.parent)


@contextlib.contextmanager
def _full_disk(*, full: bool) -> Iterator[None]:
    """Let every write to a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else before[0], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class _Uses:
    """What processes do with one cache; every cubin that comes out must be the one that was asked for."""

    def __init__(self, folder: Path) -> None:
        self.store = CubinCache(folder)

    def get(self, number: int, compiler: str) -> None:
        """Ask for one of a few cubins."""
        source = hashlib.sha256(bytes([number])).hexdigest()
        key = Key(source, ("-O3",), "sm_90a", "launch", "pycuda")
        right = hashlib.sha512(repr((key, compiler)).encode()).digest() * (1 + number % 7)
        if self.store.get(key, compiler, lambda: right, sku=f"sku {number}", file="kernel.cu.cubin").cubin != right:
            raise Fault(f"the cache gave another cubin for {key}")

    def survey(self) -> None:
        """List everything in every way, and sweep."""
        with contextlib.suppress(FileNotFoundError):
            for entry in self.store.survey():
                if not entry.trouble.isprintable():
                    raise Fault(f"an unprintable trouble, {entry.trouble!r}")
        self.store.has_any("pycuda")
        remove(self.store.leftovers())

    def clear(self) -> None:
        """Remove every entry."""
        with contextlib.suppress(FileNotFoundError):
            remove(entry.path for entry in self.store.survey())

    def some(self, rng: Rng) -> Callable[[], None]:
        """Return one of these at random, mostly `get`."""
        if rng.random() < 0.85:
            return partial(self.get, int(rng.integers(8)), f"nvcc {rng.integers(2)}")
        return self.survey if rng.random() < 0.8 else self.clear


def cache(rng: Rng, tally: Tally, seconds: float) -> None:
    """Damage a cache while threads and forks read, write, list and clear it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    folder = Path(tempfile.mkdtemp(prefix="skuda-soak-"))
    uses, end = _Uses(folder), time.monotonic() + seconds

    def beside(seed: int) -> int:
        mine, asked = np.random.default_rng(seed), 0
        while time.monotonic() < end:
            uses.some(mine)()
            asked += 1
        return asked

    try:
        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(beside, int(rng.integers(2**31))) for _ in range(2)]
            while time.monotonic() < end:
                with contextlib.suppress(OSError):  # the damage itself may meet a file that another thread moves
                    _damage(folder, rng)
                    tally["damages"] += 1
                work = uses.some(rng)
                with _full_disk(full=rng.random() < 0.1):
                    interrupted(work, rng, tally, 0.003) if rng.random() < 0.5 else work()
                tally["calls"] += 1
                if rng.random() < 0.02:
                    in_fork(uses.some(rng), tally)
        tally["calls"] += sum(other.result() for other in others)
    finally:
        for path in folder.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(stat.S_IRWXU)
        shutil.rmtree(folder)


SCENARIOS: dict[str, Callable[[Rng, Tally, float], None]] = {
    scenario.__name__: scenario for scenario in (values, mistakes, cache)
}


def one_round(name: str, seed: list[int], seconds: float) -> Tally:
    """Run one round in this process."""
    warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested here
    # An interrupt between two bytecodes of the standard library's Handler.handle (before 3.13) leaves its lock locked.
    logging.disable()
    faulthandler.dump_traceback_later(seconds + PATIENCE, exit=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    signal.signal(signal.SIGALRM, _interrupt)
    random.seed(repr(seed))
    tally: Tally = Counter()
    SCENARIOS[name](np.random.default_rng(seed), tally, seconds)
    return tally


def soak(seconds: float, seed: int, names: list[str], jobs: int) -> bool:
    """Run rounds until the time is over; print what was done, and return whether nothing went wrong."""
    end = time.monotonic() + seconds
    tally: Tally = Counter()

    def rounds(job: int) -> str:
        number = job
        while time.monotonic() < end:
            name = names[number % len(names)]
            length = max(0.1, min(ROUND, end - time.monotonic()))
            command = [sys.executable, __file__, "--round", name, f"--seconds={length:g}", f"--seed=[{seed}, {number}]"]
            more = os.environ | {"SKUDA_PLUGINS": "0", "SKUDA_TEST_SEED": str(seed)}
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=more, check=False)
            if done.returncode:
                return f"{' '.join(command)!r} fails:\n{done.stdout}{done.stderr}"
            tally.update(json.loads(done.stdout.splitlines()[-1]))
            tally["rounds"] += 1
            number += jobs
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        troubles = list(filter(None, pool.map(rounds, range(jobs))))
    sys.stdout.write("".join(f"{trouble}\n" for trouble in troubles))
    counts = ", ".join(f"{number} {what}" for what, number in sorted(tally.items()))
    sys.stdout.write(f"soak: seed {seed}, {seconds:g} s: {counts}; {len(troubles) or 'nothing'} went wrong\n")
    return not troubles


def main() -> int:
    """Read the command line and soak."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=ast.literal_eval, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="these scenarios; all if left out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--round", choices=SCENARIOS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.round:
        sys.stdout.write(json.dumps(one_round(given.round, given.seed, given.seconds)) + "\n")
        return 0
    return 0 if soak(given.seconds, given.seed, given.only or list(SCENARIOS), given.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
