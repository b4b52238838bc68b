"""Every command with streams, places, words and files that are no good: one line and an exit status, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT
from support import SEED, fresh, sampled

from skuda.tools import cli, commands
from skuda.tools.files import read_json, read_text
from skuda.tools.output import one_line, shortened

RECORD = ROOT / "docs" / "evidence" / "h200-bench.json"
LOCK = ROOT / "docs" / "selection.lock.json"
PROBLEM = '{"op": "fill", "numel": 3, "output_element": "f32"}'

COMMANDS = {
    "list": ("list",),
    "show": ("show", "fill"),
    "explain": ("explain", "quantized_linear", "--m", "8", "--n", "64", "--k", "64", "--device", "h200", "--all"),
    "verify": ("verify", "--device", "cpu", "--op", "fill", "--quick", "--json"),
    "bench": ("bench", "--show", str(RECORD)),
    "bench-model": ("bench-model", "--help"),
    "tune": ("tune", "fill", "--numel", "5", "--repeats", "2", "--output", "tuning.json"),
    "certify": ("certify", "nowhere", "--device", "host"),
    "evaluate": ("evaluate", "nowhere", "--text", "problems.json", "--quantize", "{}"),
    "compile": ("compile", "--op", "fill", "--arch", "sm_90", "--backend", "cuda_core"),
    "bundle": ("bundle", "bundle", "--op", "fill", "--arch", "sm_90", "--backend", "cuda_core"),
    "lock": ("lock", "--descriptors", "problems.json", "--device", "cpu", "--output", "-"),
    "diff": ("diff", str(LOCK), "lock.json"),
    "cache ls": ("cache", "ls", "--json"),
    "cache verify": ("cache", "verify", "--json"),
    "cache gc": ("cache", "gc", "--older-than", "1s"),
    "cache clear": ("cache", "clear"),
    "doctor": ("doctor",),
    "demo": ("demo", "--device", "moon"),
    "help": ("--help",),
    "version": ("--version",),
}
SILENT = {"certify", "evaluate", "compile", "bundle", "cache ls", "cache verify", "cache gc", "cache clear", "demo"}
PRINTING = COMMANDS.keys() - SILENT
"""Commands that print on standard output whatever is installed here."""


def test_every_command_is_here():
    assert commands.COMMANDS.keys() <= COMMANDS.keys()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the files that the commands name."""
    made = tmp_path / "work"
    made.mkdir()
    (made / "problems.json").write_text(PROBLEM)
    lock = json.loads(LOCK.read_text())
    del lock["selection"]["fill"]
    (made / "lock.json").write_text(json.dumps(lock))
    monkeypatch.chdir(made)
    for name in ("FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SKUDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    return made


def assert_reported(status, err):
    """Nothing but lines, and an exit status that is documented."""
    assert status in (0, 1, 2), err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert len(err) < 8000
    assert all(character.isprintable() or character == "\n" for character in err)
    assert status != 2 or "skuda" in err.splitlines()[-1]


# ---------------------------------------------------------------------------------------- the process, as it is started

STREAMS = {
    "closed standard output": ">&-",
    "closed standard error": "2>&-",
    "a full disk behind standard output": ">/dev/full",
    "a full disk behind standard error": "2>/dev/full",
    "a full disk behind both": ">/dev/full 2>/dev/full",
    "a reader that has left": "",
    "a deleted working directory": "",
    "ASCII": "",
    "no home": "",
    "a home in which nothing can be made": "",
    "variables without sense": "",
}
SAID = {">&-": "closed\n", ">/dev/full": "No space left on device\n"}
SENSELESS = dict.fromkeys(("SKUDA_CACHE_DIR", "SKUDA_BUNDLE", "SKUDA_PLUGINS", "TERM", "LC_ALL"), "�" * 9)
CONDITIONS = {
    "ASCII": {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C", "PYTHONUTF8": "0"},
    "no home": {"HOME": None, "SKUDA_CACHE_DIR": None},
    "a home in which nothing can be made": {"HOME": "/dev/null", "SKUDA_CACHE_DIR": None},
    "variables without sense": SENSELESS,
}


# Each is a process, which takes a second: everything runs eight commands in every condition, others each time.
DRAW = np.random.default_rng(SEED)
PROCESSES = [(condition, str(name)) for condition in STREAMS for name in DRAW.permutation(list(COMMANDS))[:8]]


@pytest.mark.parametrize(
    ("condition", "name"),
    sampled([pytest.param(*it) for it in PROCESSES], each=lambda condition, _: condition, key="streams"),
)
def test_a_process_in_bad_conditions(folder, condition, name):
    changed = {**os.environ, **CONDITIONS.get(condition, {})}
    environment = {key: value for key, value in changed.items() if value is not None}
    read, write = os.pipe()
    os.close(read)
    script = f'exec "$@" {STREAMS[condition]}'
    if condition == "a deleted working directory":
        script = f"mkdir gone && cd gone && rmdir ../gone && {script}"
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "skuda", *COMMANDS[name]]
    out = write if condition == "a reader that has left" else subprocess.PIPE
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=-1, check=False)
    os.close(write)
    err = done.stderr.decode()
    assert_reported(done.returncode, err if "2>" not in script else "skuda")
    if name in PRINTING and STREAMS[condition] in SAID:
        assert done.returncode == 2
        assert err.splitlines(keepends=True)[-1].startswith("skuda: ")
        assert err.endswith(SAID[STREAMS[condition]])
    if name in PRINTING and condition == "a reader that has left":
        assert done.returncode == 1
    if condition == "ASCII":
        done.stdout.decode("ascii")
    assert not list(folder.rglob(".*")), "nothing is left"


def test_what_is_written_to_a_file_needs_no_standard_output(folder):
    command = [sys.executable, "-m", "skuda", *COMMANDS["lock"][:-1], "made"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0
    assert (folder / "made").read_text().startswith("{")
    assert done.stderr.count(b"\n") == 1


INTERRUPTED = """
import os, signal, sys, threading
from skuda.tools.cli import main
threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT)).start()
sys.exit(main(["verify", "--device", "cpu"]))
"""


@pytest.mark.parametrize("number", sampled(range(20), 2))
def test_an_interrupt_is_one_from_the_start(folder, number):
    after = fresh("interrupt", number).uniform(0, 1.5)
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(after)], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


DROPPED = """
import signal, sys, threading, time, typing, weakref, pydantic
from skuda.tools import cli
def interrupt(_): signal.raise_signal(signal.SIGINT)
def command(words):
    weakref.ref(threading.Event(), lambda _: 1 / 0)
    try:
        if sys.argv[1] == "finalizer":
            weakref.ref(threading.Event(), interrupt)
        else:
            pydantic.TypeAdapter(typing.Annotated[int, pydantic.PlainSerializer(interrupt)]).dump_json(1)
    except Exception as error:
        sys.stderr.write(f"{error!r}")
    time.sleep(60)
cli._called = command
sys.exit(cli.main([]))
"""


@pytest.mark.parametrize("dropper", ["finalizer", "serializer"])
def test_an_interrupt_is_not_dropped(dropper):
    command = [sys.executable, "-c", DROPPED, dropper]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 130
    assert done.stderr.count("Traceback") == done.stderr.count("ZeroDivisionError") == 1
    assert ("SerializationError" in done.stderr) is (dropper == "serializer")


# ------------------------------------------------------------------------------------------------- terminals and words


@pytest.mark.parametrize("columns", ["0", "1", "16", "39"])
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"compile", "bundle", "cache clear"}))
def test_narrow_terminals(folder, skuda, monkeypatch, columns, name):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    status, out, err = skuda(*COMMANDS[name])
    assert status in (0, 1, 2)
    assert "defect" not in err
    assert "…" not in out


WORDS = {
    "400 digits": "9" * 400,
    "5000 digits": "9" * 5000,
    "infinite": "1e999",
    "not a number": "nan",
    "hexadecimal": "0x10",
    "empty": "",
    "negative": "-1",
    "100 KB": "x" * 100_000,
    "100 KB of words": "a b " * 25_000,
    "not UTF-8": "a\udcff",
    "half a pair": "a\ud800",
    "NUL": "a\0b",
    "an escape": "x\x1b[31m",
    "right to left": "é\u202e",
    "a dash": "-",
    "dashes": "--",
    "slashes": "/" * 5000,
    "digits that are none": "²",
    "a long option": "--" + "y" * 100_000,
}
PLACES = (
    "show @",
    "list --op @",
    "list --evidence @",
    "explain @",
    "explain fill --numel @",
    "explain fill --numel 3 --output-element @",
    "explain fill --@ 3",
    "explain fill --numel 3 --require max_ulp=@",
    "explain fill --numel 3 --max-workspace-bytes @",
    "explain fill --numel 3 --device @",
    "list --device @",
    "explain fill --numel 3 --tuning @",
    "explain quantize_per_channel --shape @ --axis 0",
    "explain smoothquant_linear --m 1 --n 1 --k 1 --act-scale @",
    "verify --device cpu --op fill --quick --seed @",
    "verify --device cpu --op fill --quick --output @",
    "verify --device @",
    "verify --sku @",
    "bench @",
    "bench fill --shapes @",
    "bench --shapes minilm --m @",
    "bench fill --repeats @",
    "bench --cutlass @",
    "bench --show @",
    "tune fill --numel @ --output tuning.json",
    "tune fill --shapes @ --output tuning.json",
    "tune fill --numel 3 --margin @ --repeats 2 --output tuning.json",
    "tune fill --numel 3 --seed @ --repeats 2 --output tuning.json",
    "tune --show @",
    "lock --descriptors @",
    "lock --device @",
    "lock --descriptors problems.json --device cpu --output @",
    "diff @ @",
    "cache gc --max-size @",
    "cache gc --older-than @",
    "cache @",
    "doctor @",
    "bundle @ --show",
    "bundle @ --op fill --device h300",
    "compile --op @",
    "compile --arch @",
    "certify @ --device host",
    "certify qwen3 --device @",
    "evaluate @ --text @ --quantize {}",
    "evaluate . --text @ --quantize @",
    "@",
)


@pytest.mark.parametrize(
    ("word", "place"),
    sampled(
        [pytest.param(word, place) for word in WORDS for place in PLACES], 3, each=lambda word, _: word, key="words"
    ),
)
def test_words_without_sense(folder, skuda, word, place):
    arguments = [part.replace("@", WORDS[word]) for part in place.split(" ")]
    status, _, err = skuda(*arguments)
    assert_reported(status, err)
    assert not list(folder.rglob(".*")), "nothing is left"


def test_one_line_is_one_and_printable():
    assert one_line("a\nb\x1b[1m\udcff\u202e") == "a b\\x1b[1m\\udcff\\u202e"
    assert one_line("x" * 301) == "x" * 80 + "... (301 characters)"
    assert len(one_line("word " * 5000)) < 4100
    assert shortened("x" * 300) == "x" * 300


# -------------------------------------------------------------------------------------------------- files that are read

FILES = {
    "a deep list": "[" * 200_000 + "]" * 200_000,
    "deep objects": '{"op":' * 3000 + "1" + "}" * 3000,
    "a deep tuning": '{"kind": "skuda tuning", "schema_version": 1, "x": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "a deep field": '{"kind": "skuda bench", "schema_version": 1, "cases": ' + "[" * 900 + "]" * 900 + "}",
    "digits": '[{"op": "fill", "output_element": "f32", "numel": ' + "9" * 5000 + "}]",
    "400 digits": '[{"op": "fill", "output_element": "f32", "numel": ' + "9" * 400 + "}]",
    "infinite": '[{"op": "fill", "output_element": "f32", "numel": 1e999}]',
    "half a pair": '[{"op": "\\ud800"}]',
    "an escape": '[{"op": "fill", "numel": 3, "output_element": "\\u001b[31mred"}]',
    "not UTF-8": bytes(range(256)) * 100,
    "NULs": bytes(5000),
    "empty": "",
    "long shapes": "9" * 5000 + "x4\n",
    "shapes of 400 digits": "9" * 400 + "x4\n",
}
READERS = (
    "lock --descriptors @ --device cpu",
    "compile --descriptors @ --arch sm_90",
    "bench --show @",
    "bench-model --show @",
    "bench fill --shapes @",
    "tune --show @",
    "diff @ @",
    "bundle @ --show",
    "bundle @ --op fill --arch sm_90",
    "explain fill --numel 3 --tuning @",
)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("suffix", sampled(["", ".json"]))
@pytest.mark.parametrize("name", FILES)
def test_files_without_sense(folder, skuda, name, suffix, reader):
    content = FILES[name]
    path = folder / f"file{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    status, _, err = skuda(*(part.replace("@", str(path)) for part in reader.split()))
    assert_reported(status, err)
    assert status != 0 or name == "empty"  # a list of no problems
    assert path.read_bytes() == before


HUGE = (64 << 20) + 1


def test_files_are_read_up_to_a_limit(folder):
    (folder / "file").touch()
    os.truncate(folder / "file", HUGE)
    with pytest.raises(ValueError, match="more than 64 MiB"):
        read_text(folder / "file")
    os.truncate(folder / "file", HUGE - 1)
    assert len(read_text(folder / "file")) == HUGE - 1
    with pytest.raises(OSError, match="no regular file"):
        read_text(Path("/dev/zero"))
    with pytest.raises(ValueError, match="recursion limit"):
        read_json("[" * 200_000 + "]" * 200_000)
    assert read_json("[" * 100 + "]" * 100)


# ----------------------------------------------------------------------------------------------- files that are written

WRITERS = (
    "verify --device cpu --op fill --output @",
    "lock --output @",
    "tune fill --numel 3 --output @",
    "bench --output @",
    "bundle @ --op fill --arch sm_90",
)


def there(folder):
    """What each file is, by its path."""
    return {path: (at.st_mode, at.st_ino, at.st_size) for path in folder.rglob("*") for at in (path.lstat(),)}


def make_pipe(folder):
    os.mkfifo(folder / "it")


REFUSED = {
    "a pipe": (make_pipe, "it"),
    "a folder of that name": (lambda folder: (folder / "it").mkdir(), "it"),
    "no folder": (lambda _: None, "no/it"),
    "a name too long": (lambda _: None, "n" * 300),
    "empty": (lambda _: None, ""),
    "a dash": (lambda _: None, "-"),
}


@pytest.mark.parametrize(
    ("writer", "kind"),
    sampled(
        [pytest.param(writer, kind) for writer in WRITERS for kind in REFUSED],
        4,
        each=lambda writer, _: writer,
        key="places",
    ),
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(folder, skuda, monkeypatch, writer, kind):
    for worker in ("verify.command.verify", "ship.lock.make_lock", "bench.tune_command.Tuner", "frame.run.Study.made"):
        monkeypatch.setattr(f"skuda.tools.{worker}", lambda *_, **__: pytest.fail("it works"))
    make, name = REFUSED[kind]
    make(folder)
    if (writer, kind) == ("lock --output @", "a dash"):
        pytest.skip("it prints the lock")
    before = there(folder)
    status, out, err = skuda(*(part.replace("@", name) for part in writer.split()))
    assert (status, out) == (2, "")
    assert_reported(status, err)
    assert err.count("\n") == 1
    assert there(folder) == before


def test_a_disk_that_fills_up_is_reported_with_the_file(folder, skuda, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    status, out, err = skuda("lock", "--descriptors", "problems.json", "--output", "made")
    assert (status, out, err) == (2, "", "skuda: made: No space left on device\n")
    assert not (folder / "made").exists()
    assert not list(folder.rglob(".*"))


def test_a_machine_without_memory_is_no_defect(skuda, monkeypatch):
    def fails(_):
        raise MemoryError

    monkeypatch.setattr(cli, "_called", fails)
    assert skuda("list") == (2, "", "skuda: the memory of this machine is not enough\n")
