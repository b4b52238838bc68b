"""The op matrix: what it says about stale records, and the command that writes it into a page."""

from __future__ import annotations

import re

from skuda.dispatch import Dispatcher
from skuda.kernels.catalog import built_in_registry
from skuda.tools.show import list as listing
from skuda.tools.show.matrix import COMMAND
from skuda.tools.verify.evidence import Records, load_records
from skuda.tools.verify.fingerprint import reference_hash, source_hash, verifier_hash


def matrix(monkeypatch, capsys, records):
    monkeypatch.setattr(listing, "Dispatcher", lambda: Dispatcher(built_in_registry()))
    monkeypatch.setattr(listing, "load_records", lambda directory: records)
    assert listing.run(matrix=True) == 0
    return capsys.readouterr().out


def test_no_kernel_shows_as_verified_whose_record_is_of_another_source_or_meaning(monkeypatch, capsys):
    """The records at hand, made right for one kernel, and each of its hashes made wrong again."""
    registry = built_in_registry()
    sku = next(sku for sku in registry if sku.backend == "pycuda" and sku.op == "fill")
    file = next(file for file in load_records(None).files if any(one.sku == sku.id for one in file.skus))
    (one,) = (one for one in file.skus if one.sku == sku.id)
    right = {"source_hash": source_hash(sku), "reference_hash": reference_hash(registry.ops["fill"])}

    def row(**wrong):
        verifier = wrong.pop("verifier", verifier_hash())
        mine = one.model_copy(update={"verdict": "verified", **right, **wrong})
        records = Records((file.model_copy(update={"skus": (mine,), "verifier_hash": verifier}),))
        (found,) = re.findall(r"^\| `fill` .*$", matrix(monkeypatch, capsys, records), re.MULTILINE)
        return found

    count = sum(other.backend == "pycuda" for other in registry.skus_of("fill"))
    assert f"| 1 verified, {count - 1} unverified |" in row()
    for name in (*right, "verifier"):
        stale = row(**{name: "0" * 64})
        assert " verified" not in stale
        assert f"| 1 stale, {count - 1} unverified |" in stale


def test_the_matrix_goes_between_the_markers_of_a_file(tmp_path, capsys):
    from skuda.tools.cli import main

    page = tmp_path / "page.md"
    begin, end = f"<!-- op matrix: made by `{COMMAND}` -->", "<!-- end of the op matrix -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nbehind\n")
    assert main(["list", "--op", "fill", "--into", str(page)]) == 0
    text = page.read_text()
    assert re.fullmatch(rf"before\n{begin}\n\| op [^§]*\| `fill` [^§]*\n{end}\nbehind\n", text)
    assert "changed" in capsys.readouterr().err
    assert main(["list", "--op", "fill", "--into", str(page)]) == 0
    assert (page.read_text(), capsys.readouterr().err) == (text, "")
    for broken in (f"{end}\n{begin}\n", "nothing"):
        page.write_text(broken)
        assert main(["list", "--into", str(page)]) == 2
        assert page.read_text() == broken
        assert "one behind the other" in capsys.readouterr().err
    assert main(["list", "--into", str(tmp_path / "absent.md")]) == 2
    assert "be a file that can be read" in capsys.readouterr().err
