"""`skuda evaluate` on a tiny checkpoint: its rows, record and plot, an engine, and what is refused."""

from __future__ import annotations

import hashlib
import json
import sys
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
from support import fresh

from skuda.registry import InvalidProblem
from skuda.tools.cli import main
from skuda.tools.studies import evaluate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import decoders  # noqa: E402  torch may be absent

INT4 = '{"weights": "int4", "group_size": 32}'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model whose tokens are words, and a text of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder, rng = tmp_path_factory.mktemp("model"), fresh("evaluate")
    model = decoders.small("Llama", rng, "eager").float()
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.dim() > 1 else 1
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<s>": 1} | {f"w{number}": number for number in range(2, 64)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    text = folder / "text.txt"
    text.write_text(" ".join(f"w{number}" for number in rng.integers(2, 64, 200)))
    return folder, text


@pytest.fixture
def run(checkpoint, tmp_path, capsys):
    """Return a function that evaluates on the CPU, and returns record and output."""
    folder, text = checkpoint

    def run(*typed, model=folder):
        path = tmp_path / "record.json"
        words = ["evaluate", str(model), "--text", str(text), "--length", "16", "--device", "host", *typed]
        capsys.readouterr()
        assert main([*words, "--output", str(path)]) == 0
        return json.loads(path.read_text()), capsys.readouterr().out

    return run


def test_a_calibration_gives_each_way_a_second_row(run, checkpoint):
    _, text = checkpoint
    planned = f'{INT4[:-1]}, "budget": 12}}'
    ways = [word for each in ("{}", INT4, planned) for word in ("--quantize", each)]
    record, out = run(*ways, "--calibration", str(text), "--windows", "8")
    names = [row["model"] for row in record["rows"]]
    assert names[5:] == ["weights int4, group_size 32, budget 12, calibrated"]
    assert record["rows"][4]["bytes"] < record["rows"][5]["bytes"] < record["rows"][0]["bytes"]
    assert names[1:3] == ["weights int8", "weights int8, calibrated"]
    assert names[4] in out
    plain, calibrated = (record["rows"][at]["divergence"] for at in (3, 4))
    assert calibrated < plain
    assert record["calibration"] == record["texts"]


def test_a_floating_checkpoint_is_quantized_in_each_way_and_compared_with_itself(run, checkpoint, tmp_path):
    folder, text = checkpoint
    plot = tmp_path / "layers.svg"
    typed = ["--quantize", "{}", "--quantize", INT4, "--windows", "3", "--skip", "5", "--by-layer"]
    record, out = run(*typed, "--plot", str(plot))
    reference, int8, int4 = record["rows"]
    assert [row["quantize"] for row in (int8, int4)] == [{}, json.loads(INT4)]
    assert int8["bytes"] < reference["bytes"]
    assert reference["perplexity"] == int8["reference_perplexity"] == int4["reference_perplexity"]
    assert int8["tokens"] == 3 * 15
    assert 0 < int8["divergence"] < int4["divergence"]
    assert record["texts"] == [{"name": "text.txt", "sha256": hashlib.sha256(text.read_bytes()).hexdigest()}]
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    assert record["model"] == record["reference"]
    assert record["model"]["config_sha256"] == config
    assert record["versions"]["transformers"] == transformers.__version__
    assert [line.split(" | ")[0] for line in out.splitlines()[2:5]] == [
        f"| {folder.name}, f32",
        "| weights int8",
        "| weights int4, group_size 32",
    ]
    assert f"{int8['divergence']:.4f} | {int8['divergence_error']:.4f}" in out
    drawn = ET.parse(plot).getroot()  # noqa: S314  it was written here
    assert len(drawn.findall("{*}rect")) == len(int8["layers"]) + len(int4["layers"]) == 28
    widest = max(drawn.findall("{*}rect")[:14], key=lambda one: float(one.get("width")))
    costliest = max(int8["layers"], key=int8["layers"].get)
    assert list(drawn)[list(drawn).index(widest) - 1].text == costliest


def test_windows_begin_with_what_the_tokenizer_puts_first_and_are_spread(checkpoint):
    folder, text = checkpoint
    work = evaluate._Work(str(folder), str(folder), 16, "host", lambda *_: None)
    words = [int(word[1:]) for word in text.read_text().split()]
    first, second = work.windows(text, 2, 20)
    assert first.tolist() == [[1, *words[20:35]]]
    assert second.tolist() == [[1, *words[110:125]]]


def test_a_quantized_checkpoint_needs_its_reference(run, checkpoint, tmp_path):
    from skuda.torch.transformers import SkudaConfig

    folder, text = checkpoint
    loaded = transformers.AutoModelForCausalLM
    made = loaded.from_pretrained(folder, dtype=torch.float32, quantization_config=SkudaConfig())
    made.save_pretrained(tmp_path / "int8")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "int8")
    record, _ = run("--reference", str(folder), model=tmp_path / "int8")
    quantized, _ = run("--quantize", "{}")
    assert record["rows"][1]["divergence"] == quantized["rows"][1]["divergence"]
    assert record["rows"][1]["model"] == "int8"
    for more in ({"reference": str(tmp_path / "int8")}, {"reference": str(folder), "quantize": ["{}"]}):
        with pytest.raises(InvalidProblem, match="must be in floating point: --reference names"):
            evaluate.run(str(tmp_path / "int8"), text=[text], length=16, device="host", **more)


class FakeEngine:
    """What vLLM's `LLM` does: log-probabilities of the likeliest tokens and of the actual one."""

    def __init__(self, model, **options):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.made.append(options)

    def generate(self, prompts, asked):
        found = []
        for prompt in prompts:
            ids = torch.tensor([prompt["prompt_token_ids"]])
            with torch.no_grad():
                rows = (self.model(ids).logits[0] * 1.2).log_softmax(1)
            places = [
                {
                    one: SimpleNamespace(logprob=float(row[one]))
                    for one in {*row.topk(asked["prompt_logprobs"])[1].tolist(), token}
                }
                for row, token in zip(rows, ids[0, 1:].tolist(), strict=False)
            ]
            found.append(SimpleNamespace(prompt_logprobs=[None, *places]))
        return found


def test_an_engine_gives_a_lower_bound_and_says_so(run, monkeypatch, checkpoint):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=FakeEngine, SamplingParams=dict, __spec__="here"))
    monkeypatch.setattr(FakeEngine, "made", [], raising=False)
    record, out = run("--engine", "vllm", "--quantize", "{}", "--windows", "2")
    assert "The divergence is a lower bound" in out
    assert record["divergence"].startswith("a lower bound")
    _, row = record["rows"]
    assert row["bytes"] is None
    assert row["agreement"] == 1, "the fake only sharpens what it is sure of"
    assert row["perplexity"] != row["reference_perplexity"]
    (options,) = FakeEngine.made
    assert options["quantization"] == "skuda"
    assert options["hf_overrides"] == {"quantization_config": {"quant_method": "skuda"}}
    assert (options["max_logprobs"], options["max_model_len"]) == (20, 17)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "--quantize must be given, or else --reference"),
        ({"quantize": ["3"]}, "--quantize must be a JSON object"),
        ({"quantize": ["{"]}, "--quantize must be a JSON object"),
        ({"quantize": ['{"bits": 3}']}, "bits must be left out: the options are"),
        ({"quantize": ["{}"], "engine": "other"}, "--engine must be one of transformers, vllm"),
        ({"quantize": ["{}"], "device": "moon"}, "--device must be one of auto, gpu, host"),
        ({"quantize": ["{}"], "plot": "x.svg"}, "--plot must stand beside it"),
        ({"quantize": ["{}"], "by_layer": True, "engine": "vllm"}, "--by-layer must be left out"),
        ({"quantize": ["{}"], "windows": 99}, "text must have 1485, for 99 windows"),
        ({"quantize": ["{}"], "text": "gone.txt"}, "--text must be a readable text"),
        ({"quantize": ["{}"], "model": "gone"}, "MODEL must be the folder of a checkpoint"),
        ({"reference": "gone"}, "--reference must be the folder of a checkpoint"),
        ({"reference": "x", "calibration": ["x"]}, "--calibration must stand beside"),
        ({"quantize": ["{}"], "calibration": ["x"], "engine": "vllm"}, "--calibration must stand beside"),
        ({"quantize": ['{"weights": "int4", "budget": 5}']}, "--calibration must be given"),
    ],
)
def test_what_makes_no_sense_is_refused(given, says, checkpoint, tmp_path):
    folder, text = checkpoint
    paths = {name: tmp_path / given[name] for name in ("plot", "text") if name in given}
    paths["text"] = [paths.get("text", text)]
    options = {"model": str(folder), "length": 16, "device": "host"} | given | paths
    with pytest.raises(InvalidProblem, match=says):
        evaluate.run(**options)
