"""Quantization-aware training: train a model with the rounding of int8, then export the int8 model.

`FakeQuant` rounds weights and inputs in the forward pass as the int8 layer will. The gradient passes straight through
the rounding. After training, `Dynamic` makes int8 layers whose codes stand for exactly the trained weights.
"""

import tempfile

import torch
from torch import nn

import skuda.torch as st

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def make():
    return nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)).to(device)


def spirals(count):
    """Draw points of two spirals, and which of the two each is on."""
    which = torch.randint(2, (count,), device=device)
    radius = torch.rand(count, device=device)
    angle = 6 * radius + torch.pi * which
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), which


model = make()
print(st.quantize_(model, st.FakeQuant()))  # the same parameters under the same names

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(600):
    points, which = spirals(256)
    loss = nn.functional.cross_entropy(model(points), which)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 150 == 0:
        print(f"step {step}: loss {losses[-1]:.3f}")
print(f"last 50 steps: loss {sum(losses[-50:]) / 50:.3f}")
assert sum(losses[-50:]) < 0.2 * sum(losses[:50])

# Export. The weights that training saw are exactly the numbers that the int8 codes stand for.
rounded = [layer.fake_quantized_weight() for layer in model if isinstance(layer, st.FakeQuantLinear)]
points, which = spirals(2000)
with torch.no_grad():
    trained = model(points)
    print(st.quantize_(model, st.Dynamic()))
    layers = [layer for layer in model if isinstance(layer, st.DynamicLinear)]
    for layer, weight in zip(layers, rounded, strict=True):
        assert torch.equal(layer.weight, weight)
    exported = model(points)
print(f"largest difference of the outputs: {float((exported - trained).abs().max()):.1e}")
print(f"accuracy in int8: {float((exported.argmax(1) == which).float().mean()):.3f}")

# A checkpoint loads into a new model, whose layers become int8 as they are read.
with tempfile.TemporaryDirectory() as folder:
    st.save(model, folder)
    again = make()
    st.load_(again, folder)
    with torch.no_grad():
        assert torch.equal(again(points), exported)
