"""``skuda certify``: the log-probabilities of a whole model have the same bits in every way to compute them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

from skuda.dispatch import Dispatcher
from skuda.dispatch.select.environment import skuda_version, versions
from skuda.dispatch.system.writing import write_whole
from skuda.registry.errors import InvalidProblem, SkudaError
from skuda.registry.text import one_line
from skuda.tools.files import check
from skuda.tools.frame.run import NoDevice, fresh_seed, need, silent
from skuda.tools.options import Json, Number, Output, Seed, argument, flag, number, option
from skuda.tools.output import new_console, one_of, progress, tell
from skuda.tools.studies.processes import place_of_ranks, run_ranks

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Models that need no files: small ones with random weights."""
_SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
_WINDOWS = {"mistral": {"sliding_window": 100}}
_MOST_RANKS = 8


def run(
    model: Annotated[str, argument("MODEL", "What transformers loads; or llama, mistral, qwen2, qwen3.")],
    *,
    device: Annotated[str, option("WHERE", "gpu or host; else a GPU where torch sees one.")] = "auto",
    engine: Annotated[str, option("NAME", "transformers, or vllm: vLLM serves the model, too.")] = "transformers",
    codes: Annotated[str, option("NAME", "int8 or int16: those of weights and of inputs.")] = "int8",
    ranks: Annotated[Number, number("Ranks that share the layers; 2 on the CPU, or all GPUs, if left out.")] = None,
    batch: Annotated[int, number("Sequences of the largest batch; 16 if left out.", least=2)] = 16,
    cpu_layers: Annotated[
        Number, number("Layers that a GPU shares with the CPU; 2, or all of small models, if left out.", "LAYERS")
    ] = None,
    layers: Annotated[Number, number("The first layers of the model; all if left out.", "LAYERS")] = None,
    prompts: Annotated[Number, number("Prompts, of 5 that are drawn; all if left out.", most=5)] = None,
    plain: Annotated[bool, flag("--plain", help="Show the model in floating point beside it.")] = False,
    seed: Seed = None,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Show that a model has the same bits in every way.

    Makes the model exact, and computes the log-probabilities of random prompts alone, step by step, in chunks, padded,
    in batches, after a shared prefix, compiled, on ranks, in training and, from a GPU, captured and on the CPU. Prints
    a hash of each way and, without a terminal, a line as each ends; the record of --output grows with them. Exits with
    1 where one differs, and names the first layer, op and row. The models named llama, mistral, qwen2 and qwen3 are
    small and random, and so is one whose folder has only a config. Needs transformers.

    With --engine vllm, exact vLLM serves the same floating checkpoint on GPUs: prompts alone, in a batch, after a warm
    prefix, in chunks, and on ranks. Where it differs, the first weights that do are named.
    """
    if output is not None:
        check("certify", "--output", output)
    one_of("certify", "--engine", engine, ("transformers", "vllm"))
    one_of("certify", "--codes", codes, ("int8", "int16"))
    one_of("certify", "--device", device, ("auto", "gpu", "host"))
    need("torch", engine, "transformers")
    import torch

    from skuda.torch.certification.certificate import certify
    from skuda.vllm.certified import ways_of

    seed = fresh_seed() if seed is None else seed
    on_gpu = device == "gpu" or (device == "auto" and torch.cuda.is_available())
    place = torch.device("cuda" if on_gpu else "cpu")
    count = (torch.cuda.device_count() if on_gpu else 2) if ranks is None else ranks
    if not 1 <= count <= _MOST_RANKS:
        raise InvalidProblem("certify", "--ranks", str(count), f"be at least 1 and at most {_MOST_RANKS}")
    with progress() as watch, TemporaryDirectory(prefix="skuda-certify-") as folder:
        report = watch or silent

        def told(way: str) -> None:
            report(0, 1, way)

        told(f"loading {model}")
        floats = loaded(model, seed, place)
        _cut(floats, layers)
        card = next((d.name for d in Dispatcher().devices if d.processor == ("cuda" if on_gpu else "cpu")), "")
        cut = {name: n for name, n in (("layers", layers), ("prompts", prompts)) if n is not None}
        course = _Course(
            {"model": model, "codes": codes, "device": card, "seed": seed, **cut}, output, shown=watch is None
        )
        served, trained = exact(floats, Path(folder), codes), exact(floats, None, codes)
        drawn: dict[str, Any] = {"prompts": prompts, "seed": seed, "batch": batch}
        others: dict[str, Any] = {}
        if count > 1:
            others[f"on {count} ranks"] = _Ranks(count, Path(folder, "model.pt"), on_gpu)
        if engine == "vllm":
            place_of_ranks(count, cpu=False)
            others |= ways_of(served, floats, str(Path(folder, "floats")), codes=codes, ranks=count, **drawn)
        given = drawn | {"report": told, "cpu_layers": cpu_layers}
        found = certify(served, trainer=trained, others=others, done=course.of("exact"), **given)
        beside = certify(floats, compiler="", done=course.of("plain"), **given) if plain else None
    course.known |= {"exact": asdict(found), **({} if beside is None else {"plain": asdict(beside)})}
    text = course.save()
    if as_json:
        sys.stdout.write(text)
    else:
        new_console().print(f"{model} on {card}, seed {seed}\n\n{found}", soft_wrap=True, highlight=False)
        if beside is not None:
            new_console().print(f"\nfor comparison, plain transformers: {beside}", soft_wrap=True, highlight=False)
    if not found.ok:
        different = [way.name for way in found.ways if not way.same]
        tell(f"FAIL: other bits {', '.join(different)}", "bold red")
        return 1
    tell(f"PASS: {len(found.ways)} ways have the same bits", "green")
    return 0


class _Course:
    """The record of a run, which grows as ways end, and a line for each of them, with an estimate of what is left."""

    def __init__(self, about: dict[str, Any], output: Path | None, *, shown: bool) -> None:
        made = {"versions": versions(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        self.about = {"kind": "skuda certify", "schema_version": 1, "skuda": skuda_version(), **about, **made}
        self.output, self.shown = output, shown
        self.known: dict[str, Any] = {}

    def of(self, kind: str) -> Callable[[Any, float], None]:
        """Return what `skuda.torch.certify` calls after each way."""
        began = perf_counter()
        ends = [began]

        def done(way: Any, share: float) -> None:
            ends.append(perf_counter())
            if self.shown:
                left = (ends[-1] - began) * (1 / share - 1)
                verdict = f"{'same' if way.same else 'DIFFERS'}, {ends[-1] - ends[-2]:.1f} s"
                tell(f"{kind}, {way.name}: {verdict}; about {left:.0f} s left")
            self.known.setdefault(kind, {"ways": []})["ways"].append(asdict(way))
            self.save(partial=True)

        return done

    def save(self, *, partial: bool = False) -> str:
        """Write the record, if a file is named, and return its text."""
        text = json.dumps({**self.about, **({"partial": True} if partial else {}), **self.known}, indent=1) + "\n"
        if self.output is not None:
            write_whole(self.output, text)
        return text


def _cut(model: Any, layers: int | None) -> None:
    """Leave the first layers of a model, if a number is given."""
    config, most = model.config, model.config.num_hidden_layers
    if layers is None:
        return
    if not 1 <= layers <= most:
        raise InvalidProblem("certify", "--layers", str(layers), f"be at least 1 and at most {most}, those of MODEL")
    model.base_model.layers = model.base_model.layers[:layers]
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def loaded(name: str, seed: int, place: Any) -> Any:
    """Return a model in floating point: a random one of a family or of a folder's config, or a checkpoint."""
    import torch
    import transformers

    torch.manual_seed(seed)
    folder = Path(name)
    config = None
    if name in FAMILIES:
        config = getattr(transformers, f"{FAMILIES[name]}Config")(**_SIZES, **_WINDOWS.get(name, {}))
    elif folder.is_dir() and not any(folder.glob("*.safetensors")):
        config = transformers.AutoConfig.from_pretrained(folder)
    try:
        if config is not None:
            dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
            with place:
                made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            made = transformers.AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    except (OSError, ValueError) as error:
        rule = f"be one of {', '.join(FAMILIES)}, or a language model that transformers loads ({one_line(str(error))})"
        raise InvalidProblem("certify", "MODEL", name, rule) from error
    if any(not parameter.is_floating_point() for parameter in made.parameters()) or made.config.to_dict().get(
        "quantization_config"
    ):
        raise InvalidProblem("certify", "MODEL", name, "be in floating point: it is quantized here, twice")
    return made.to(place).eval()


def exact(floats: Any, folder: Path | None, codes: str) -> Any:
    """Return an exact copy of a model: for serving, which is also saved in `folder` for ranks; or in training."""
    import copy

    import torch

    from skuda.torch import Dynamic, Mixed, quantize_
    from skuda.torch.exact.exact import exact_

    made = copy.deepcopy(floats)
    quantize_(made, (Mixed if folder is None else Dynamic)(weights=codes, activations=codes), lambda *_: True)
    exact_(made)
    if folder is not None:
        torch.save(made, folder / "model.pt")
    return made


class _Ranks:
    """The way of several ranks: a process each, which share the layers."""

    def __init__(self, count: int, path: Path, on_gpu: bool) -> None:  # noqa: FBT001  it is an argument of nobody else
        try:
            _, self.backend = place_of_ranks(count, cpu=not on_gpu)
        except NoDevice as error:
            raise InvalidProblem("certify", "--ranks", str(count), f"suit this machine: {error}") from error
        self.count, self.path = count, path

    def __call__(self, prompts: Sequence[Any]) -> dict[int, Any]:
        import torch

        from skuda.tools.studies.certify_rank import CertifyJob, work

        ids = tuple(tuple(prompt.tolist()) for prompt in prompts)
        job = CertifyJob(backend=self.backend, count=self.count, seed=0, path=str(self.path), prompts=ids)
        found, failed = run_ranks(work, job)
        if failed:
            raise SkudaError(failed)  # it says which rank, and why
        # Every rank has all log-probabilities; where they differ, the first one that differs is shown.
        first, *rest = ([torch.tensor(bits, dtype=torch.int32) for bits in mine] for mine in found)
        return {
            number: next((each[number] for each in rest if not torch.equal(each[number], own)), own).view(torch.float32)
            for number, own in enumerate(first)
        }
