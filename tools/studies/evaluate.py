"""``skuda evaluate``: how far a quantized language model is from its reference, on texts and without labels."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from skuda.dispatch.select.environment import skuda_version, versions
from skuda.dispatch.system.writing import write_whole
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import one_line
from skuda.tools.files import check, read_json, read_text
from skuda.tools.frame.run import need, shown, silent
from skuda.tools.frame.view import Parts, Table
from skuda.tools.options import File, Json, Output, Word, Words, argument, flag, number, option
from skuda.tools.output import Report, one_of, progress

_LIKELIEST = 20
"""Tokens whose log-probabilities vLLM returns."""
_BOUND = f"a lower bound: that of the engine's {_LIKELIEST} likeliest tokens, and of all others as one"
_SHOWN = "perplexity divergence divergence_error divergence_median divergence_p99 agreement likelihood likelihood_error"
_HEADINGS = ("model", "MB", "perplexity", "divergence", "+-", "median", "99%", "same first", "log-likelihood", "+-")
_ABOUT = """MB: of all linear layers, the head included. divergence: KL(reference || model) of the next token, in nats.
same first: equal first choices. log-likelihood: minus the reference's. Errors, +-, take tokens as independent."""


def run(
    model: Annotated[str, argument("MODEL", "Folder of a checkpoint with its tokenizer.")],
    *,
    text: Annotated[list[Path], option("FILE", "Cut windows from this text; repeatable.")],
    reference: Annotated[Word, option("MODEL", "Compare with this one; MODEL in f32 if left out.")] = None,
    quantize: Annotated[Words, option("JSON", "Quantize MODEL so, such as {}; repeatable.")] = None,
    calibration: Annotated[list[Path] | None, option("FILE", "Quantize after a calibration, too; repeatable.")] = None,
    windows: Annotated[int, number("Windows of each text, evenly spread; 4 if left out.")] = 4,
    length: Annotated[int, number("Tokens of a window; 512 if left out.", "T", least=16)] = 512,
    skip: Annotated[int, number("Leave out so many tokens at the beginning of a text.", "TOKENS", least=0)] = 0,
    by_layer: Annotated[bool, flag("--by-layer", help="What each int8 layer costs: a call for each.")] = False,
    engine: Annotated[str, option("NAME", "transformers, or vllm: its divergence is a lower bound.")] = "transformers",
    device: Annotated[str, option("WHERE", "gpu or host; else a GPU where torch sees one.")] = "auto",
    plot: Annotated[File, option("FILE", "With --by-layer, draw the divergence by layer as SVG.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Measure a quantized model against its reference.

    Cuts windows of tokens from texts, and compares the distributions of each next token: their mean divergence
    KL(reference || model) in nats, the share of equal first choices, perplexity, and the log-likelihood of the actual
    token minus that by the reference. The reference runs in f32. With --quantize, MODEL in floating point is quantized,
    for one row each; the JSON has fields of SkudaConfig, such as {"weights": "int4", "group_size": 32}. With
    --calibration, there is a second row each, of the model with a calibration on windows of these texts; {"weights":
    "int4", "budget": 5.5} has this one only, and measures on the first four which layers get more bits. Windows
    begin with what the tokenizer puts before a text. Needs transformers.

    With --engine vllm, vLLM serves MODEL. The divergence of its 20 likeliest tokens is then a lower bound.
    """
    for name, path in (("--output", output), ("--plot", plot)):
        if path is not None:
            check("evaluate", name, path)
    one_of("evaluate", "--engine", engine, ("transformers", "vllm"))
    one_of("evaluate", "--device", device, ("auto", "gpu", "host"))
    configs: list[Any] = [_config(given) for given in quantize or ()] or [None]
    by_us, planned = engine != "vllm", any("budget" in (config or {}) for config in configs)
    for wrong, name, had, rule in (
        (plot is not None and not by_layer, "--plot", "no --by-layer", "stand beside it"),
        (by_layer and not by_us, "--by-layer", "--engine vllm", "be left out: no layers of an engine are seen"),
        (not (quantize or reference), "--quantize", "nothing", "be given, or else --reference"),
        (calibration and not (quantize and by_us), "--calibration", "vllm, or no --quantize", "stand beside it"),
        (planned and not calibration, "--calibration", "nothing", "be given with a budget"),
    ):
        if wrong:
            raise InvalidProblem("evaluate", name, had, rule)
    about: dict[str, Any] = {"kind": "skuda evaluate", "schema_version": 1, "skuda": skuda_version()}
    about |= {"model": _checkpoint("MODEL", model), "reference": _checkpoint("--reference", reference or model)}
    about |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions(("torch", "transformers"))}
    with progress() as report:
        work = _Work(model, reference or model, length, device, report or silent)
        cut = [each for path in text for each in work.windows(path, windows, skip)]
        seen = [each for path in calibration or () for each in work.windows(path, windows, skip)]
        rows = work.rows(cut, configs, seen, by_layer=by_layer, by_vllm=not by_us)
    for name, paths in (("texts", text), ("calibration", calibration or [])):
        about[name] = [{"name": path.name, "sha256": _digest(path)} for path in paths]
    about |= {"windows": windows, "length": length, "skip": skip, "engine": engine, "device": work.card}
    about |= {"divergence": "exact" if by_us else _BOUND, "rows": rows}
    from skuda.torch.evaluation.plot import drawn  # not above: torch is optional

    written = json.dumps(about, indent=1) + "\n"
    for path, content in ((output, written), (plot, drawn(rows))):
        if path is not None:
            write_whole(path, content)
    shown("evaluate", {"rows": parts(about)}, written, as_json=as_json)
    return 0


def _config(text: str) -> dict[str, Any]:
    try:
        found = read_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidProblem("evaluate", "--quantize", text, "be a JSON object, such as {}")
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _checkpoint(option: str, name: str) -> dict[str, Any]:
    folder = Path(name)
    try:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return {"name": folder.name, "config_sha256": _digest(folder / "config.json"), "bytes": size}
    except (OSError, ValueError) as error:
        raise InvalidProblem("evaluate", option, name, f"be the folder of a checkpoint ({error})") from error


class _Work:
    """A model, its reference, and how they are compared."""

    def __init__(self, model: str, reference: str, length: int, device: str, report: Report) -> None:
        need("torch", "transformers")
        import torch

        self.model, self.reference, self.length, self.report = model, reference, length, report
        on_gpu = device == "gpu" or (device == "auto" and torch.cuda.is_available())
        self.place = torch.device("cuda" if on_gpu else "cpu")
        self.card = torch.cuda.get_device_name() if on_gpu else "cpu"
        self.tokenizer = self._loaded("AutoTokenizer", model)

    def windows(self, path: Path, count: int, skip: int) -> list[Any]:
        """Return windows of a text as ids of shape (1, T)."""
        from skuda.torch.evaluation.windows import windows

        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise InvalidProblem("evaluate", "--text", str(path), f"be a readable text ({error})") from error
        return windows(self.tokenizer, text, count, self.length, skip, path.name)

    def rows(
        self, windows: Sequence[Any], configs: Sequence[Any], seen: Sequence[Any], *, by_layer: bool, by_vllm: bool
    ) -> list[Any]:
        """Return the row of the reference, and one for each way to quantize the model, or for the model itself."""
        from skuda.torch.evaluation.comparison import compare, summary
        from skuda.torch.evaluation.likeliest import likeliest
        from skuda.torch.hf.transformers import quantize_as

        self._check_floats("--reference", self.reference)
        if configs != [None]:
            self._check_floats("MODEL", self.model)
        described = [] if by_vllm else [_described(config, seen) for config in configs]  # it refuses unknown options
        served = [self._served(windows, config) for config in configs] if by_vllm else []
        reference = self._loaded("AutoModelForCausalLM", self.reference, dtype="float32")
        rows = [{"model": f"{Path(self.reference).name}, f32", "bytes": _bytes(reference)}]
        ways = [(at, False) for at, config in enumerate(configs) if "budget" not in (config or {})]
        ways = sorted(ways + [(at, True) for at in range(len(configs)) if seen])
        for done, (at, calibrated) in enumerate(ways):
            config = configs[at]
            given = {"weights": "int8", **(config or {})}
            name = Path(self.model).name if config is None else ", ".join(f"{key} {given[key]}" for key in given)
            name += ", calibrated" if calibrated else ""
            self.report(done, len(ways), name)
            if by_vllm:
                size, pairs = None, zip(windows, served[at], strict=True)
                found = summary([likeliest(reference, ids[0], places) for ids, places in pairs])
            else:
                model = self._loaded("AutoModelForCausalLM", self.model, dtype="auto" if config is None else "float32")
                if config is not None:
                    quantize_as(model, described[at] if calibrated else _described(config))
                size, found = _bytes(model), compare(model, reference, windows, by_layer=by_layer)
                del model
            rows[0]["perplexity"] = found.reference_perplexity
            rows.append({"model": name, "quantize": config, "bytes": size} | found.model_dump())
        return rows

    def _check_floats(self, option: str, name: str) -> None:
        if getattr(self._loaded("AutoConfig", name), "quantization_config", None) is not None:
            rule = "be in floating point: --reference names the checkpoint that MODEL was made from"
            raise InvalidProblem("evaluate", option, f"{name}, which is quantized", rule)

    def _loaded(self, kind: str, name: str, **more: Any) -> Any:
        """Return what a class of transformers loads from a folder."""
        import transformers

        import skuda.torch.transformers  # noqa: F401  it registers the formats of checkpoints

        try:
            found = getattr(transformers, kind).from_pretrained(name, local_files_only=True, **more)
        except (OSError, ValueError) as error:
            rule = f"be the folder of a language model that transformers loads ({one_line(str(error))})"
            raise InvalidProblem("evaluate", "MODEL", name, rule) from error
        return found.to(self.place).eval() if hasattr(found, "eval") else found

    def _served(self, windows: Sequence[Any], config: Any) -> list[Any]:
        """Return vLLM's log-probabilities of the likeliest tokens and of the actual one, for the places of windows."""
        self.report(0, 1, f"vLLM: {self.model}")
        need("vllm")
        vllm: Any = import_module("vllm")
        described = {"quantization_config": {"quant_method": "skuda", **(config or {})}}
        more: dict[str, Any] = {} if config is None else {"quantization": "skuda", "hf_overrides": described}
        llm = vllm.LLM(self.model, max_model_len=self.length + 1, max_logprobs=_LIKELIEST, **more)
        asked = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=_LIKELIEST)
        found = llm.generate([{"prompt_token_ids": each[0].tolist()} for each in windows], asked)
        del llm
        gc.collect()
        return [
            [{token: one.logprob for token, one in (place or {}).items()} for place in each.prompt_logprobs]
            for each in found
        ]


def _described(config: Mapping[str, Any] | None, calibration: Sequence[Any] = ()) -> Any:
    """Return how a model is quantized."""
    from skuda.torch.convert.budget import Budget
    from skuda.torch.hf.transformers import SkudaConfig

    options = {"quant_method": "skuda", **(config or {})}
    bits = options.pop("budget", None)
    described = SkudaConfig.from_dict(options)
    described.calibration = calibration or None
    described.budget = None if bits is None else Budget(bits, [*calibration[:4]])
    return described


def _bytes(model: Any) -> int:
    from skuda.torch.models.replaceable_layers import bytes_of, linears

    return sum(bytes_of(layer) for _, layer in linears(model))


def parts(about: Mapping[str, Any]) -> Parts:
    """Return what is shown: a row for the reference and each model, and the circumstances."""
    rows = []
    for row in about["rows"]:
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f}"
        rows.append((row["model"], size, *(f"{row[name]:.4f}" if name in row else "-" for name in _SHOWN.split())))
    bound = [] if about["divergence"] == "exact" else [f"The divergence is {about['divergence']}."]
    texts = ", ".join(text["name"] for text in about["texts"])
    of = f"{about['windows']} windows of {about['length']} tokens of each of {texts}"
    return Table(_HEADINGS, rows), *bound, _ABOUT, {"texts": of, "by": f"{about['engine']}, {about['device']}"}
