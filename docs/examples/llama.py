"""A Hugging Face model in int8: quantize it while it loads, compare it with f32, save it, and load it again.

The model is a small Llama with random weights, so that nothing is downloaded. With a real one, `floats` is its name on
the Hugging Face hub or the folder that holds it, and nothing else changes.
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import skuda.torch
from skuda.torch.transformers import SkudaConfig

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
prompt = torch.randint(shape.vocab_size, (2, 12), device=device)

with tempfile.TemporaryDirectory() as floats, tempfile.TemporaryDirectory() as codes:
    LlamaForCausalLM(shape).save_pretrained(floats)

    # The three lines. Every linear layer but the one that returns the logits becomes W8A8: the weights have a scale per
    # output channel, and the inputs a scale per row, which the layer computes when it runs.
    model = AutoModelForCausalLM.from_pretrained(floats, quantization_config=SkudaConfig())
    print(model.hf_quantizer.report)  # what became int8, what did not, and why

    # Fewer kernels: one product for layers that share an input, and norms and activations that write codes.
    print(skuda.torch.fuse_(model.to(device).eval()))

    # How far is it from f32? Both see the same prompt.
    exact = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32).to(device).eval()
    with torch.no_grad():
        ours, theirs = model(prompt).logits, exact(prompt).logits
    similarity = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).min()
    print(f"lowest cosine similarity of the logits with those of f32: {similarity:.4f}")
    assert similarity > 0.99

    # Every layer can say which kernel serves a number of rows here.
    print(model.model.layers[0].mlp.down_proj.explain(24).chosen)

    # The checkpoint has the compressed-tensors format, which vLLM reads, too. It is loaded as int8 layers.
    model.save_pretrained(codes)
    again = AutoModelForCausalLM.from_pretrained(codes).to(device).eval()
    skuda.torch.fuse_(again)
    with torch.no_grad():
        assert torch.equal(again(prompt).logits, ours)

    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert torch.equal(text, again.generate(prompt, attention_mask=torch.ones_like(prompt), **settings))
    print(f"generated {text.shape[1] - prompt.shape[1]} tokens for each of {len(text)} prompts")
