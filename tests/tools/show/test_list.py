"""``skuda list``: the ops and kernels, what the evidence says about them, and the page of all runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from paths import ROOT

from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.registry import KernelSku, Registry
from skuda.registry.device import device_named
from skuda.tools.show import page as page_module
from skuda.tools.verify.evidence import EvidenceFile, Failure, SkuEvidence
from skuda.tools.verify.fingerprint import reference_hash, source_hash, verifier_hash

FILL = next(op for op in built_in_ops() if op.name == "fill")
CUDA = [sku for sku in FILL.skus if sku.backend == "pycuda"]
HOSTILE = '<script>alert("x")</script>&amp;\'"><img src=x onerror=y>'


def test_list_piped_is_one_record_an_op(skuda, host):
    status, out, err = skuda("list")
    assert (status, err) == (0, "")
    rows = [line.split("\t") for line in out.splitlines()]
    assert {len(row) for row in rows} == {9}
    assert [row[0] for row in rows if row[1] == "quantization"] == sorted(
        op.name for op in host.ops.values() if op.category == "quantization"
    )
    assert {row[0] for row in rows} == {op.name for op in host.ops.values()}
    linear = next(row for row in rows if row[0] == "quantized_linear")
    assert linear[2:] == ["f32,f64,f16,bf16", "s8,u8", "cpu", "numpy", "40", "bit-exact", "reference"]
    assert "\x1b" not in out


def test_every_op_is_one_line_of_80_columns(terminal, use):
    registry = use(built_in_registry())
    status, text, _ = terminal("list")
    assert status == 0
    lines = text.splitlines()
    rows = [line for line in lines if re.match(r"\w+ .* \d+ +\S", line) and " ops, " not in line]
    assert len(rows) == len(registry.ops)
    for op in registry.ops.values():
        (row,) = (row for row in rows if row.startswith(f"{op.name} "))
        assert f" {len(registry.skus_of(op.name))} " in row
    assert f"{len(registry.ops)} ops, {len(registry)} kernels: " in text
    assert "float = f32 f64 f16 bf16" in text


def test_list_on_a_terminal_shows_the_weakest_promise(terminal, with_cuda):
    _, text, _ = terminal("list", "--op", "quantized_linear")
    assert re.search(r"^quantized_linear +float x int8 +sm_90a sm_80 +120 +2 ulp, varies", text, re.MULTILINE)
    _, text, _ = terminal("list", "--skus", "--op", "quantized_linear")
    joined = text.replace("\n  ", "")
    assert all(f"{sku.id}\n" in joined for sku in with_cuda.skus_of("quantized_linear"))


FILTERS = [
    (["--element", "bf16"], lambda sku: "bf16" in (sku.element, sku.aux_element)),
    (["--element", "bf16,f64"], lambda sku: sku.element in ("bf16", "f64")),
    (["--element", "bf16", "--element", "f64"], lambda sku: sku.element in ("bf16", "f64")),
    (["--element", "u4"], lambda sku: "u4" in (sku.element, sku.aux_element)),
    (["--op", "fill,dynamic_range"], lambda sku: sku.op in ("fill", "dynamic_range")),
    (["--arch", "sm_90a"], lambda sku: sku.arch == "sm_90a"),
    (["--arch", "sm_90a,cpu", "--backend", "numpy"], lambda sku: sku.backend == "numpy"),
    (["--backend", "cuda_core", "--arch", "sm_80"], lambda sku: sku.backend == "cuda_core" and sku.arch == "sm_80"),
    (["--device", "h200"], lambda sku: sku.arch in ("sm_80", "sm_90a")),
    (["--device", "cpu"], lambda sku: sku.arch == "cpu"),
    (["--device", "l40s,cpu", "--backend", "pycuda"], lambda sku: sku.arch == "sm_80" and sku.backend == "pycuda"),
    (["--element", "fp8_e4m3"], lambda _: False),
    (["--device", "t4"], lambda _: False),
]


@pytest.mark.parametrize(("arguments", "keeps"), FILTERS, ids=[" ".join(arguments) for arguments, _ in FILTERS])
def test_list_filters(skuda, with_cuda, arguments, keeps):
    wanted = {sku.id for sku in with_cuda if keeps(sku)}
    status, out, _ = skuda("list", "--skus", *arguments)
    assert status == 0
    assert set(out.splitlines()) == wanted
    assert len(out.splitlines()) == len(wanted)
    _, out, _ = skuda("list", *arguments)
    assert sum(int(line.split("\t")[6]) for line in out.splitlines()) == len(wanted)


def test_an_architecture_without_kernels_lists_the_older_ones_that_serve_it(skuda, terminal, with_cuda):
    older = {sku.id for sku in with_cuda if sku.arch == "sm_80"}
    for arguments, name in ((["--arch", "sm_89"], "sm_89"), (["--device", "rtx-4090"], "NVIDIA GeForce RTX 4090")):
        status, out, err = skuda("list", "--skus", *arguments)
        assert (status, set(out.splitlines())) == (0, older)
        assert err == f"skuda: {name} has no kernels of its own and runs those of sm_80\n"
    assert skuda("list", "--skus", "--arch", "sm_90")[1:] == ("".join(f"{s.id}\n" for s in ranked(with_cuda)), "")
    status, text, err = terminal("list", "--device", "t4")
    assert (status, text) == (0, "no op passes these filters\n")
    assert "it has compute capability 7.5, and kernels need compute capability 8.0 or later" in err


def ranked(registry):
    return [sku for sku in registry.skus_of("quantized_linear") if sku.arch != "cpu"]


def test_list_says_when_nothing_passes(terminal, host):
    assert terminal("list", "--element", "fp8_e4m3")[:2] == (0, "no op passes these filters\n")


def test_list_json(skuda, host):
    _, out, _ = skuda("list", "--json")
    rows = {row["op"]: row for row in json.loads(out)}
    assert rows["fill"]["elements"] == [str(sku.element) for sku in host.skus_of("fill")]
    assert rows["quantized_linear"]["backends"] == {"numpy": ["cpu"]}
    _, out, _ = skuda("list", "--skus", "--json")
    read = [KernelSku.model_validate(row["sku"]) for row in json.loads(out)]
    assert set(read) == set(host)
    assert all(row["id"] == sku.id for row, sku in zip(json.loads(out), read, strict=True))


# ----------------------------------------------------------------------------------------------------------- evidence


def evidence_of(*skus, **changes):
    """Return a run of kernels of `fill` as they are today on an H200."""
    right = {
        "reference_hash": reference_hash(FILL),
        "verdict": "verified",
        "cases": 3,
        "runs": 9,
        "outputs": 1234567,
    }
    found = tuple(SkuEvidence(sku=sku.id, source_hash=source_hash(sku), **right) for sku in skus)
    fields = {"date": "2026-02-03T04:05:06+00:00", "skuda": "0", "seed": 9, "driver": "580.1", "skus": found}
    fields["verifier_hash"] = verifier_hash()
    return EvidenceFile(**{"device": device_named("h200"), "versions": {"torch": "2.9"}, **fields, **changes})


@pytest.fixture
def fill(use):
    return use(Registry([FILL], origin="a test"))


def test_verified_names_the_card(skuda, terminal, fill, tmp_path):
    evidence_of(*CUDA[:2]).save(tmp_path / "run.json")
    _, out, _ = skuda("list", "--backend", "pycuda", "--evidence", tmp_path)
    left = len(CUDA) - 2
    assert out.splitlines()[0].split("\t")[8] == f"2 verified on H200, {left} unverified"
    _, text, _ = terminal("list", "--backend", "pycuda", "--evidence", tmp_path)
    assert f"{len(CUDA)} kernels: 2 verified on H200, {left} unverified." in text
    _, out, _ = skuda("list", "--evidence", tmp_path, "--json")
    assert json.loads(out)[0]["evidence"]["verified"] == 2
    assert json.loads(out)[0]["verified_on"] == ["NVIDIA H200"]
    _, out, _ = skuda("show", CUDA[0].id, "--evidence", tmp_path)
    assert "verified\tyes: verified on H200, 2026-02-03" in out


@pytest.mark.parametrize("wrong", ["source_hash", "reference_hash", "verifier_hash"])
def test_no_kernel_shows_as_verified_whose_record_is_of_another_source_or_meaning(
    skuda, terminal, fill, tmp_path, wrong
):
    run, sku = evidence_of(CUDA[0]), CUDA[0]
    if wrong == "verifier_hash":
        run = run.model_copy(update={wrong: "0" * 64})
    else:
        run = run.model_copy(update={"skus": (run.skus[0].model_copy(update={wrong: "0" * 64}),)})
    run.save(tmp_path / "run.json")
    _, out, _ = skuda("list", "--skus", "--evidence", tmp_path, "--json")
    (found,) = (row for row in json.loads(out) if row["id"] == sku.id)
    assert (found["evidence"], found["device"]) == ("stale", "NVIDIA H200")
    _, out, _ = skuda("list", "--backend", "pycuda", "--evidence", tmp_path)
    assert "1 stale" in out
    assert " verified" not in out
    _, out, _ = skuda("show", sku.id, "--evidence", tmp_path, "--json")
    assert json.loads(out)["verified"] is False
    assert " verified on" not in terminal("list", "--evidence", tmp_path)[1]


def test_a_kernel_that_failed_shows_where(skuda, terminal, fill, tmp_path):
    run = evidence_of(*CUDA[:2])
    bad = run.skus[1].model_copy(update={"verdict": "failed", "failures": (Failure(check="reference"),)})
    run.model_copy(update={"skus": (run.skus[0], bad)}).save(tmp_path / "run.json")
    _, text, _ = terminal("list", "--evidence", tmp_path)
    assert re.search(r"^fill .* failed *$", text, re.MULTILINE)
    assert "1 failed on H200" in text
    assert skuda("list", "--html", tmp_path / "page.html", "--evidence", tmp_path)[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert f"<code>{CUDA[1].id}</code>" in page
    assert f"<code>{CUDA[0].id}</code>" not in page


# ----------------------------------------------------------------------------------------------------------- the page


class Tree(HTMLParser):
    """What a browser would see: elements with attributes and text; refuses tags that do not nest."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)
        assert self._open == [], "left open"

    def handle_starttag(self, tag, attributes):
        self.elements.append({"tag": tag, "text": "", **dict(attributes)})
        if tag not in {"meta", "img"}:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag):
        return [element for element in self.elements if element["tag"] == tag]


def written(skuda, folder, *arguments):
    path = folder / "page.html"
    assert skuda("list", "--html", path, "--evidence", folder, *arguments) == (0, "", f"wrote {path}\n")
    return path.read_text()


def save_run(folder, name, **changes):
    fields = {
        "kind": "skuda bench",
        "device": {"name": "NVIDIA H200"},
        "date": "2026-02-03T04:05",
        "command": "skuda b",
    }
    (folder / f"{name}.json").write_text(json.dumps(fields | changes))


def save_plot(folder, run, name, content="<svg xmlns='http://www.w3.org/2000/svg'><text>100 % #1</text></svg>"):
    (folder / run).mkdir(exist_ok=True)
    (folder / run / f"{name}.svg").write_text(content)


def test_the_page_has_one_heading_a_run_and_its_stored_plots(skuda, fill, tmp_path):
    evidence_of(CUDA[0]).save(tmp_path / "run.json")
    save_run(tmp_path, "bench", versions={"torch": "2.9"})
    save_run(tmp_path, "two", kind="skuda bench-parallel", device="NVIDIA H100 80GB HBM3", date="2026-03-01T00:00")
    save_run(tmp_path, "no", kind="another program")
    save_plot(tmp_path, "bench", "speed")
    save_plot(tmp_path, "bench", "bytes")
    save_plot(tmp_path, "elsewhere", "of-no-run")
    tree = Tree(written(skuda, tmp_path))
    assert [heading["text"] for heading in tree.all("h3")] == [
        "bench-parallel on H100, 2026-03-01T00:00",
        "verify on H200, 2026-02-03T04:05",
        "bench on H200, 2026-02-03T04:05",
    ]
    images = tree.all("img")
    assert [image["alt"] for image in images] == ["bytes", "speed"]
    assert all(image["src"].startswith("data:image/svg+xml,<svg") for image in images)
    assert "100 %25 %231" in images[0]["src"]
    cells = [cell["text"] for cell in tree.all("td")]
    assert {"skuda b", "torch 2.9", "bench.json", "NVIDIA H200"} <= set(cells)
    assert cells[:2] == ["fill", "float int s32"]


def test_the_page_lists_what_the_filters_leave(skuda, use, tmp_path):
    use(built_in_registry())
    tree = Tree(written(skuda, tmp_path, "--op", "fill,rescale", "--backend", "pycuda"))
    ops = [row["text"] for row in tree.all("tr")[1:]]
    assert [row.split("\n")[0][:4] for row in ops] == ["resc", "fill"]
    assert [heading["text"] for heading in tree.all("th")] == ["op", "elements", "pycuda", "promise", "evidence"]
    assert "No record is here" in tree.all("body")[0]["text"]


def test_the_page_runs_nothing_and_loads_nothing(skuda, fill, tmp_path):
    run = evidence_of(CUDA[0], device=device_named("h200").model_copy(update={"name": HOSTILE}), driver=HOSTILE)
    run.save(tmp_path / "run.json")
    save_run(tmp_path, "bench", command=HOSTILE, kind=f"skuda {HOSTILE}", date=HOSTILE)
    save_plot(tmp_path, "bench", "x'><script>", "<svg onload='a()'><script>1</script></svg>")
    text = written(skuda, tmp_path)
    tree = Tree(text)
    assert not tree.all("script")
    assert len(tree.all("img")) == 1
    assert not [name for element in tree.elements for name in element if name.startswith("on")]
    for element in tree.elements:
        assert element.get("src", "data:image/svg+xml,").startswith("data:image/svg+xml,")
        assert "href" not in element
    assert not re.search(r"@import|url\(", text.partition("<body>")[0])
    (policy,) = (e["content"] for e in tree.all("meta") if e.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_plots_beyond_a_megabyte_are_named_the_oldest_first(skuda, fill, tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "LARGEST", 12_000)
    for number in range(4):
        save_run(tmp_path, f"r{number}", date=f"2026-01-0{number}")
        save_plot(tmp_path, f"r{number}", "speed", f"<svg>{'x' * 1000}</svg>")
    text = written(skuda, tmp_path)
    assert len(text.encode()) < 12_000
    tree = Tree(text)
    assert 0 < len(tree.all("img")) < 4
    assert "The plot speed is in r0/speed.svg." in tree.all("body")[0]["text"]
    assert text.index("data:") < text.index("The plot speed")


def test_the_page_of_the_checkout_is_small_and_the_same_twice(skuda, use, tmp_path):
    use(built_in_registry())
    for name in ("one", "two"):
        assert skuda("list", "--html", tmp_path / name)[0] == 0
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()
    assert (tmp_path / "one").stat().st_size <= 1_000_000
    tree = Tree((tmp_path / "one").read_text())
    kinds = [json.loads(path.read_text()) for path in (ROOT / "docs" / "evidence").glob("*.json")]
    runs = [record for record in kinds if str(record.get("kind")).startswith("skuda ") and "date" in record]
    assert len(tree.all("h3")) == len(runs) > 2
    assert tree.all("img")


def test_progress_is_shown_while_records_are_read(terminal, fill, tmp_path):
    save_run(tmp_path, "bench")
    status, _, err = terminal("list", "--html", tmp_path / "page.html", "--evidence", tmp_path)
    assert status == 0
    assert "kernels and records" in err
    assert Path(tmp_path / "page.html").exists()
