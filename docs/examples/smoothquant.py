"""SmoothQuant: static activation scales from calibration, for inputs with a few channels much larger than the rest.

A static scale costs nothing at run time, but one large channel leaves few codes for all others. SmoothQuant divides
each input channel by a factor and multiplies the weight's column by it. The product stays the same, and both sides
quantize well. If the input comes from a norm, the norm's weight takes over the division.
"""

import copy

import torch
from torch import nn

import skuda.torch as st


class Block(nn.Module):
    """A feed-forward block behind a norm."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(*(Block(128) for _ in range(4))).to(device).eval()
with torch.no_grad():
    for block in model:
        block.norm.weight[::32] *= 60  # outlier channels, as large language models have them
        block.up.weight[:, ::32] /= 20


def batch():
    return torch.randn(8, 16, 128, device=device)


# Calibration runs the model on typical inputs. It keeps the largest magnitude of every channel, and some rows.
with st.calibrate(model) as calibration:
    for _ in range(8):
        model(batch())

# `alpha` is the share of the range that moves into the weights. "search" tries none, and 0, 0.05 to 1 on the kept rows.
configs = {
    "one static scale": st.SmoothStatic(calibration, alpha=None),
    "SmoothQuant": st.SmoothStatic(calibration, alpha="search"),
    "a scale per row": st.Dynamic(),
}
x = batch()
errors = {}
with torch.no_grad():
    exact = model(x) - x  # without the residual, which nothing rounds
    for name, config in configs.items():
        int8 = copy.deepcopy(model)
        report = st.quantize_(int8, config)
        errors[name] = float((int8(x) - x - exact).norm() / exact.norm())
        print(f"{name}: relative error {errors[name]:.4f}, {len(report.folded)} norms took over factors")

assert errors["SmoothQuant"] < errors["one static scale"] / 2
