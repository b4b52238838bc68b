"""The op matrix in README, and the command that writes it."""

from __future__ import annotations

import re
from pathlib import Path

from skuda.dispatch import Dispatcher
from skuda.kernels.catalog import built_in_registry
from skuda.tools import listing
from skuda.tools.evidence import Records, load_records
from skuda.tools.fingerprint import reference_hash, source_hash
from skuda.tools.matrix import BEGIN, END

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def matrix(monkeypatch, capsys, records):
    monkeypatch.setattr(listing, "Dispatcher", lambda: Dispatcher(built_in_registry()))
    monkeypatch.setattr(listing, "load_records", lambda directory: records)
    assert listing.run(matrix=True) == 0
    return capsys.readouterr().out


def test_the_matrix_in_the_readme_says_what_the_records_say(monkeypatch, capsys):
    _, _, rest = README.partition(BEGIN + "\n")
    block, end, _ = rest.partition(END)
    assert end
    assert block == matrix(monkeypatch, capsys, load_records(None)), "README is out of date: run `make matrix`"


def test_no_kernel_shows_as_verified_whose_record_is_of_another_source_or_meaning(monkeypatch, capsys):
    """The records at hand, made right for one kernel, and each of its hashes made wrong again."""
    registry = built_in_registry()
    sku = next(sku for sku in registry if sku.backend == "pycuda" and sku.op == "fill")
    file = next(file for file in load_records(None).files if any(one.sku == sku.id for one in file.skus))
    (one,) = (one for one in file.skus if one.sku == sku.id)
    right = {"source_hash": source_hash(sku), "reference_hash": reference_hash(registry.ops["fill"])}

    def row(**hashes):
        mine = one.model_copy(update={"verdict": "verified", **right, **hashes})
        records = Records((file.model_copy(update={"skus": (mine,)}),))
        (found,) = re.findall(r"^\| `fill` .*$", matrix(monkeypatch, capsys, records), re.MULTILINE)
        return found

    count = sum(other.backend == "pycuda" for other in registry.skus_of("fill"))
    assert f"| 1 verified, {count - 1} unverified |" in row()
    for name in right:
        stale = row(**{name: "0" * 64})
        assert " verified" not in stale
        assert f"| 1 stale, {count - 1} unverified |" in stale


def test_the_matrix_goes_between_the_markers_of_a_file(tmp_path, capsys):
    from skuda.tools.cli import main

    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nbehind\n")
    assert main(["list", "--op", "fill", "--into", str(page)]) == 0
    text = page.read_text()
    assert re.fullmatch(rf"before\n{BEGIN}\n\| op [^§]*\| `fill` [^§]*\n{END}\nbehind\n", text)
    assert "changed" in capsys.readouterr().err
    assert main(["list", "--op", "fill", "--into", str(page)]) == 0
    assert (page.read_text(), capsys.readouterr().err) == (text, "")
    for broken in (f"{END}\n{BEGIN}\n", "nothing"):
        page.write_text(broken)
        assert main(["list", "--into", str(page)]) == 2
        assert page.read_text() == broken
        assert "one behind the other" in capsys.readouterr().err
    assert main(["list", "--into", str(tmp_path / "absent.md")]) == 2
    assert "be a file that can be read" in capsys.readouterr().err
