"""The report page: it says what registry and records say, is whole in one file, and nothing in it can become markup."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from measured import REGISTRY, measured, record_of, some_record

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.kernels.catalog import built_in_ops
from skuda.registry import Registry
from skuda.registry.device import device_named
from skuda.tools import plot
from skuda.tools.cli import main
from skuda.tools.report import page as report_page
from skuda.tools.report.page import page
from skuda.tools.show import list as listing
from skuda.tools.verify import command as verify_page
from skuda.tools.verify.evidence import EvidenceFile, Failure, Records, SkuEvidence, load_records
from skuda.tools.verify.fingerprint import reference_hash, source_hash, verifier_hash

VOID = {"meta", "link", "input", "br", "hr", "img"}
HOSTILE = '<script>alert("x")</script>&amp;\'"><img src=x>'


class Tree(HTMLParser):
    """What a browser would see: elements with attributes and text; refuses tags that do not nest."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)
        assert self._open == [], "left open"

    def handle_starttag(self, tag, attributes):
        self.elements.append({"tag": tag, "text": "", **dict(attributes)})
        if tag not in VOID:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag, **attributes):
        return [e for e in self.elements if e["tag"] == tag and all(e.get(k) == v for k, v in attributes.items())]


OPS = {op.name: op for op in built_in_ops()}
FILL = OPS["fill"]
CUDA = [sku for sku in FILL.skus if sku.backend == "pycuda"]


def evidence_of(*skus, **changes):
    """Return a run of `fill`'s kernels as they are today on an H200."""
    right = {"reference_hash": reference_hash(FILL), "verdict": "verified", "cases": 3, "outputs": 1234567}
    found = tuple(SkuEvidence(sku=sku.id, source_hash=source_hash(sku), **right) for sku in skus)
    fields = {"date": "2026-02-03T04:05:06+00:00", "skuda": "0", "seed": 9, "driver": "580.1", "skus": found}
    fields["verifier_hash"] = verifier_hash()
    return EvidenceFile(**{"device": device_named("h200"), "versions": {"torch": "2.9"}, **fields, **changes})


def page_of(registry=None, records=(), benches=()):
    if registry is None:
        registry = Registry([FILL], origin="a test")
    found = [(op, registry.skus_of(op.name)) for op in registry.ops.values()]
    return page(found, registry, Records(tuple(records)), benches, version="9.8.7")


def kernels(text):
    return [e for e in Tree(text).all("tr") if "data-status" in e]


# ----------------------------------------------------------------------------------------------------- what it says


def test_every_kernel_is_a_row_with_its_status():
    one, two, three = CUDA[:3]
    run = evidence_of(one, two, three)
    bad = run.skus[2].model_copy(update={"verdict": "failed", "note": ""})
    old = run.skus[1].model_copy(update={"source_hash": "0" * 64})
    text = page_of(records=[run.model_copy(update={"skus": (run.skus[0], old, bad)})])
    rows = kernels(text)
    assert len(rows) == len(FILL.skus)
    words = {sku.id: row["data-status"] for sku in FILL.skus for row in rows if sku.id in row["text"]}
    assert (words[one.id], words[two.id], words[three.id]) == ("verified", "stale", "failed")
    left = Counter(words.values()) - Counter(["verified", "stale", "failed"])
    assert left == {
        "unverified": sum(sku.backend != "numpy" for sku in FILL.skus) - 3,
        "reference": sum(sku.backend == "numpy" for sku in FILL.skus),
    }
    (row,) = (row for row in rows if one.id in row["text"])
    assert "NVIDIA H200, 2026-02-03" in row["text"]
    assert one.precision_guarantee.describe() in row["text"]
    tiles = {tile["href"]: tile["text"] for tile in Tree(text).all("a") if tile["href"].startswith("#status=")}
    assert tiles["#status=stale"] == "1 ~ stale"
    assert tiles["#status=reference"].startswith(str(left["reference"]))


def test_the_matrix_counts_every_element_arch_and_backend():
    text = page_of(REGISTRY)
    tree = Tree(text)
    rows = [e for e in tree.all("tr") if "data-op" in e and "data-status" not in e]
    assert len(rows) == len({(sku.op, sku.element) for sku in REGISTRY})
    links = [e for e in tree.all("a") if "&arch=" in e["href"]]
    told = {link["href"]: int(re.search(r"\d+", link["text"])[0]) for link in links}
    expected = Counter(
        f"#op={s.op}&element={s.element}&arch={s.arch}&backend={s.backend}"
        f"&status={'reference' if s.backend == 'numpy' else 'unverified'}"
        for s in REGISTRY
    )
    assert told == expected
    heads = [e["text"] for e in tree.all("th", scope="col")]
    assert heads[:7] == [
        "op",
        "element",
        "pycuda sm_80",
        "pycuda sm_90a",
        "cuda_core sm_80",
        "cuda_core sm_90a",
        "numpy cpu",
    ]
    cells = len(rows) * 5
    absent = [e for e in tree.all("span") if e.get("class") == "absent"]
    assert len(absent) == cells - len({(s.op, s.element, s.arch, s.backend) for s in REGISTRY})


def test_an_op_without_kernels_is_a_row_of_the_matrix():
    bare = replace(FILL, skus=())
    text = page_of(Registry([bare], origin="a test"))
    assert kernels(text) == []
    (row,) = [e for e in Tree(text).all("tr") if e.get("data-op") == "fill"]
    assert row["text"].startswith("fill")


def test_filters_offer_what_there_is():
    tree = Tree(page_of())
    options = [e["value"] for e in tree.all("option")]
    assert options.count("") == 5
    assert {"fill", "f32", "sm_80", "cpu", "pycuda", "numpy", "reference", "unverified"} <= set(options)
    (form,) = tree.all("form")
    assert "hidden" in form, "it does nothing until the script runs"


def test_runs_of_verify_are_told_with_their_failures():
    failure = Failure(
        case=3, problem="{}", values="ties", layout="strided", check="bits", output="y", at=(2, 1), got="1", want="2"
    )
    run = evidence_of(*CUDA[:2])
    bad = run.skus[1].model_copy(update={"verdict": "failed", "first_failure": failure})
    old = evidence_of(CUDA[0], date="2025-01-01T00:00:00+00:00", quick=True, device=device_named("a100"))
    text = page_of(records=[old, run.model_copy(update={"skus": (run.skus[0], bad)})])
    told = " ".join(Tree(text).all("section")[-2]["text"].split())
    first = "NVIDIA H200 (compute capability 9.0), 2026-02-03 04:05 UTC"
    assert told.index(first) < told.index("NVIDIA A100-SXM4-80GB (compute capability 8.0), 2025-01-01")
    assert "driver580.1versionstorch 2.9seed9result2 kernels run, 1 failed" in told
    assert "seed9, quick" in told
    assert f"{CUDA[1].id}{failure.describe()}" in told
    assert "2,469,134" in told
    assert "`" not in told
    assert "No run is recorded here" in Tree(page_of()).all("section")[-2]["text"]


def test_runs_of_bench_are_told_as_the_table_of_the_command_tells_them():
    stale = measured("quantize_per_token", (1024, 4096), 5.0, eager=2.5)
    record = some_record(absent={"torchao": "torchao is not installed; run: pip install torchao"})
    record = record.model_copy(update={"cases": (*record.cases, stale.judged(record.ceilings))})
    tree = Tree(page_of(benches=[record]))
    told = tree.all("section")[-1]["text"]
    assert "torchao is not installed" in told
    assert "copy 4 TB/s; bf16 product 800 TFLOP/s; fp8 product 1600 TFLOP/s" in told
    assert "int_mm refuses 16x512x512 bf16: M must exceed 16" in told
    rows = {e["text"].strip().splitlines()[0] for e in tree.all("tr")}
    (row,) = (text for text in rows if text.startswith("1024x512x512"))
    assert re.match(r"1024x512x512bf168\.08\.0 to 8\.067\.1 TOPS\d+%0\.501\.12", row)
    assert "x bf16" in {e["text"] for e in tree.all("th")}
    assert any(text.startswith("4096x4096bf16") and "refused: wrong" in text for text in rows)
    # Made-up records carry no hash, so every kernel of theirs has changed.
    assert "stale: changed since" in row
    assert "No run is recorded here" in Tree(page_of()).all("section")[-1]["text"]


def test_means_stand_below_products():
    tree = Tree(page_of(benches=[some_record()]))
    (means,) = (e for e in tree.all("table") if e.get("aria-label") == "Geometric means of smoothquant_linear")
    assert means["text"].split("\n")[0].startswith("geometric meanM >= 100064 <= M < 1000M < 64")
    assert re.search(r"x bf160\.500\.502\.00", means["text"])


def test_plots_are_drawings_of_the_page_with_ids_of_their_own(monkeypatch):
    benches = [some_record(), some_record(seed=2)]
    tree = Tree(page_of(benches=benches))
    drawings = tree.all("svg")
    assert len(drawings) == 10
    assert all(e["aria-label"] and e["role"] == "img" for e in drawings)
    ids = [e["id"] for e in tree.elements if "id" in e]
    assert len(set(ids)) == len(ids)
    used = {e["href"][1:] for e in tree.all("use")}
    clips = {clip for e in tree.elements for clip in re.findall(r"url\(#(.*?)\)", " ".join(map(str, e.values())))}
    assert used
    assert clips
    assert used | clips <= set(ids)
    styles = " ".join(e.get("style", "") for e in tree.elements)
    assert "currentColor" in styles
    assert "var(--plot-0072b2, #0072b2)" in styles
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    text = page_of(benches=benches)
    assert "<svg" not in text
    assert "pip install 'matplotlib" in Tree(text).all("section")[-1]["text"]


# ------------------------------------------------------------------------------------------------------ how it is made


def test_it_asks_nobody_for_anything_and_runs_one_script():
    text = page_of(benches=[some_record()])
    tree = Tree(text)
    (policy,) = (e["content"] for e in tree.all("meta") if e.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]{43}='", policy)
    assert len(tree.all("script")) == 1
    for element in tree.elements:
        assert element.get("src") is None
        assert element.get("href", "#").startswith(("#", "data:,"))
        assert not [name for name in element if name.startswith("on")]
    assert not re.search(r"@import|url\((?!#)", text)
    assert tree.all("html")[0]["lang"] == "en"
    assert "width=device-width" in tree.all("meta", name="viewport")[0]["content"]


def test_nothing_that_a_record_says_becomes_markup():
    op = replace(FILL, skus=tuple(sku.model_copy(update={"summary": HOSTILE}) for sku in FILL.skus))
    registry = Registry([op], origin="a test")
    failure = Failure(case=0, problem="{}", values="ties", layout="x", check="error", message=HOSTILE)
    run = evidence_of(CUDA[0], device=device_named("h200").model_copy(update={"name": HOSTILE}), driver=HOSTILE)
    bad = run.skus[0].model_copy(update={"verdict": "failed", "first_failure": failure})
    case = measured("smoothquant_linear", (16, 512, 512), 5.0, **{HOSTILE: 4.0})
    wrong = measured("fake_quantize", (16, 512), 5.0).model_copy(update={"timing": None, "refused": HOSTILE})
    bench = record_of(case, wrong, command=HOSTILE, absent={HOSTILE: HOSTILE}, device=run.device)
    text = page_of(registry, [run.model_copy(update={"skus": (bad,)})], [bench])
    tree = Tree(text)
    assert len(tree.all("script")) == 1
    assert tree.all("img") == []
    assert "alert" not in tree.all("script")[0]["text"]
    for e in tree.all("small"):
        assert e["text"].startswith(HOSTILE)
    assert tree.all("h3")[2]["text"].startswith(HOSTILE)


def test_the_same_values_give_the_same_page():
    made = [page_of(records=[evidence_of(CUDA[0])], benches=[some_record()]) for _ in range(2)]
    assert made[0] == made[1]
    assert "9.8.7" in made[0]


def test_the_page_of_everything_is_small():
    text = page_of(REGISTRY, load_records().files)
    assert len(kernels(text)) == len(REGISTRY)
    assert len(text) < 900 * len(REGISTRY), "with plots it should stay near 1 MB for a thousand kernels"


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def skuda(capsys, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    registry = Registry([FILL, OPS["fake_quantize"]], origin="a test")
    for module in (listing, verify_page):
        monkeypatch.setattr(
            module, "Dispatcher", lambda **more: Dispatcher(registry, backends=(NumpyBackend(),), **more)
        )

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def test_list_writes_what_its_filters_leave_and_the_records_of_the_folder(skuda, tmp_path):
    evidence_of(CUDA[0]).save(tmp_path / "run.json")
    some_record().save(tmp_path / "bench.json")
    path = tmp_path / "report.html"
    filters = ("--op", "fill", "--backend", "pycuda")
    assert skuda("list", *filters, "--html", path, "--evidence", tmp_path) == (0, "", f"wrote {path}\n")
    text = path.read_text()
    assert Counter(row["data-status"] for row in kernels(text)) == {"verified": 1, "unverified": len(CUDA) - 1}
    assert {row["data-op"] for row in kernels(text)} == {"fill"}
    assert "No run is recorded here" in Tree(text).all("section")[-1]["text"], "of this op"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bench.json", "report.html", "run.json"]


def test_list_writes_what_was_measured_of_the_ops_that_its_filters_leave(skuda, tmp_path):
    some_record().save(tmp_path / "bench.json")
    record_of(measured("smoothquant_linear", (64, 512, 512), 5.0), driver="elsewhere").save(tmp_path / "other.json")
    path = tmp_path / "report.html"

    def timed(*filters):
        assert skuda("list", *filters, "--html", path, "--evidence", tmp_path)[0] == 0
        tree = Tree(path.read_text())
        return tree.all("section")[-1]["text"], len(tree.all("svg"))

    text, plots = timed("--op", "fake_quantize")
    assert [word in text for word in ("1024x4096", "1024x512x512", "elsewhere")] == [True, False, False]
    everything, all_plots = timed()
    assert [word in everything for word in ("1024x4096", "1024x512x512", "elsewhere")] == [True, True, True]
    assert 0 < plots < all_plots


def test_verify_writes_its_run_beside_the_recorded_ones(skuda, tmp_path, monkeypatch):
    monkeypatch.setattr(verify_page, "load_records", lambda: Records((evidence_of(CUDA[0]),)))
    monkeypatch.setattr(report_page, "load_measured", lambda _: ())
    path = tmp_path / "report.html"
    status, out, err = skuda("verify", "--device", "cpu", "--op", "fill", "--quick", "--seed", "4", "--html", path)
    assert (status, out.startswith("fill\t")) == (0, True)
    assert err.splitlines()[1:] == [f"wrote {path}"]
    told = Tree(path.read_text()).all("section")[-2]["text"]
    assert "CPU" in told
    assert "seed4, quick" in told
    assert "NVIDIA H200" in told


def test_bench_writes_the_record_that_it_shows(skuda, tmp_path, monkeypatch):
    monkeypatch.setattr(report_page, "load_records", lambda _: Records())
    some_record().save(tmp_path / "bench.json")
    path = tmp_path / "report.html"
    status, out, err = skuda("bench", "--show", tmp_path / "bench.json", "--html", path)
    assert (status, err) == (1, f"wrote {path}\n"), "a case of it was refused"
    assert out.count("\n") > 6
    assert "1024x512x512" in Tree(path.read_text()).all("section")[-1]["text"]


@pytest.mark.parametrize("command", [("list",), ("verify", "--device", "cpu"), ("bench",)])
def test_a_place_that_cannot_be_is_refused_first(skuda, tmp_path, command):
    for path in (tmp_path, tmp_path / "nowhere" / "a.html"):
        status, out, err = skuda(*command, "--html", path)
        assert (status, out) == (2, "")
        assert f"{command[0]}: --html must be a file in a folder that exists, that can be written (" in err
        assert f"; had {path}\n" in err
        assert err.count("\n") == 1
