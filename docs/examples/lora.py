"""LoRA: train adapters beside a frozen int8 model, save and load them, and merge them into the int8 layers.

The base runs in int8 and passes on the gradients of its inputs. Only the adapters, in floating point, are trained.
"""

import copy
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import skuda.torch as st
import skuda.torch.peft  # noqa: F401  from now on peft knows the int8 layers

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)
model = LlamaForCausalLM(config)
print(st.quantize_(model, st.Dynamic(), lambda _, name: name != "lm_head"))
base = copy.deepcopy(model)

model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=8))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
print(f"{sum(parameter.numel() for parameter in trained)} parameters are trained")
optimizer = torch.optim.AdamW(trained, lr=1e-2)
tokens = torch.arange(24).remainder(6).repeat(2, 1)  # 0 1 2 3 4 5 0 1 ...
for step in range(21):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.2f}")
assert loss < 1


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens).logits


# A checkpoint of the adapters goes with any copy of the base.
want = logits(model.eval())
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = PeftModel.from_pretrained(base, folder)
assert torch.equal(logits(again), want)

# Merged layers are quantized again, so the outputs differ by rounding, and the model is as fast as the base.
# To merge into layers in floating point, call `skuda.torch.dequantize_` before.
merged = model.merge_and_unload()
assert type(merged.model.layers[0].self_attn.q_proj) is st.DynamicLinear
similar = nn.functional.cosine_similarity(logits(merged), want, dim=-1).min()
print(f"merged, lowest cosine similarity of the logits: {float(similar):.3f}")
