"""What `skuda bench --shapes` takes beside shapes that are typed: models and files."""

from __future__ import annotations

import os

import pytest

from skuda.registry import InvalidProblem
from skuda.tools.parse.shapes import MODELS, ROWS, random_products, read_rows, read_shapes


def test_typed_shapes_are_read_each_once():
    assert read_shapes(["4096x8192", "1X2x3", "4096x8192"]) == ((4096, 8192), (1, 2, 3))
    for text in ("4096", "1x2x3x4x5", "0x4", "-1x4", "ax4", "4x", "4 x²", "llama-2-7b"):
        rule = r"--shapes must be ROWSxCOLUMNS, MxNxK or SEQUENCESxNEWxKEYSxHEAD_SIZE.*llama-3-8b"
        with pytest.raises(InvalidProblem, match=rule) as found:
            read_shapes([text])
        assert repr(text) in str(found.value)


def test_models_have_the_published_sizes():
    """Parameters of all blocks' linear layers, counted by hand from the published sizes."""
    llama = {"llama-3-8b": (32, 6979321856), "llama-3-70b": (80, 68451041280)}
    for name, (blocks, parameters) in llama.items():
        assert blocks * sum(n * k for n, k in MODELS[name]) == parameters
    assert MODELS["llama-3-8b"] == ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    assert MODELS["llama-3-70b"][0] == (10240, 8192)
    assert set(MODELS["minilm"]) == {(384, 384), (1536, 384), (384, 1536)}


def test_a_model_gives_the_shapes_that_the_ops_take():
    products = read_shapes(["MiniLM"], {3}, [1, 7])
    assert products == ((1, 384, 384), (7, 384, 384), (1, 1536, 384), (7, 1536, 384), (1, 384, 1536), (7, 384, 1536))
    assert read_shapes(["minilm"], {2}, [5]) == ((5, 384), (5, 1536))
    both = read_shapes(["minilm", "3x4"], {2, 3})
    assert {len(shape) for shape in both} == {2, 3}
    assert {shape[0] for shape in both} == {*ROWS, 3}
    assert len(read_shapes(["llama-3-8b"], {3})) == 4 * len(ROWS)
    assert len(read_shapes(["llama-3-70b"], {3})) == len(set(MODELS["llama-3-70b"])) * len(ROWS)


def test_rows_are_numbers_and_belong_to_a_model():
    assert read_rows(["16", "1", "16"]) == (16, 1)
    for text in ("0", "-1", "1.5", "x", "²", "9" * 19, "9" * 5000):
        with pytest.raises(InvalidProblem, match="--m must be whole numbers above 0, of up to 18 digits; had"):
            read_rows([text])
    with pytest.raises(InvalidProblem, match="--m must stand beside --shapes with a model: llama-3-8b"):
        read_shapes(["4x4"], {2}, [16])


def test_a_shape_is_a_shape_whatever_files_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2x3").write_text("4x5")
    assert read_shapes(["2x3"]) == ((2, 3),)


def test_a_file_holds_one_shape_a_line(tmp_path):
    path = tmp_path / "shapes.txt"
    path.write_text("# of our service\n16x4096   # decode\n\n1x4096x4096\n16x4096\n")
    assert read_shapes([str(path), "2x2"]) == ((16, 4096), (1, 4096, 4096), (2, 2))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "16x4096\nsixteen\n", r"had 'sixteen' in line 2 of .*a\.txt"),
        ("a.txt", "# nothing\n", "must hold a shape"),
        ("a.txt", b"\xff\xfe16x4096", "be a file of text that can be read"),
    ],
)
def test_a_file_with_something_else_is_refused(tmp_path, name, text, says):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidProblem, match=says):
        read_shapes([str(path)])


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_read(tmp_path, make):
    make(tmp_path / "shapes")
    with pytest.raises(InvalidProblem, match="be a file of text that can be read"):
        read_shapes([str(tmp_path / "shapes")])


def test_random_products_follow_a_seed_and_spread_over_logarithms():
    shapes = random_products(400, 11)
    assert shapes == random_products(400, 11)
    assert shapes[:50] == random_products(50, 11), "more of them begin with the same"
    assert not set(shapes) & set(random_products(400, 12))
    assert len(set(shapes)) == 400
    for m, n, k in shapes:
        assert 1 <= m <= 16384
        assert n % 16 == k % 16 == 0
        assert 512 <= min(n, k) <= max(n, k) <= 32768
        assert m * n * k <= 2**42
    # Half of the logarithms lie below the middle of each range; large products are drawn again, so a little more.
    for at, middle in ((0, 128), (1, 4096), (2, 4096)):
        assert 0.4 < sum(shape[at] < middle for shape in shapes) / 400 < 0.65
    assert min(shapes)[0] == 1
