"""`fuse_` with models whose layers have other names than those of transformers, as Meta's Llama and torchtitan."""

import copy

import pytest
import torch
from support import fresh
from tensors import normal, same
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's name

from skuda.torch import Dynamic, fuse_, quantize_
from skuda.torch.fuse.fused_modules import FusedAttention, FusedDecoderLayer, FusedGatedMLP
from skuda.torch.linear.joined import Part

D, H, HEADS = 32, 48, 4


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-5

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x, start_pos, freqs_cis, mask):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (each.view(bsz, seqlen, HEADS, -1).transpose(1, 2) for each in (xq * freqs_cis, xk, xv))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(bsz, seqlen, -1)) * start_pos


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(D, H, bias=False) for _ in range(2))
        self.w2 = nn.Linear(H, D, bias=False)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Tanh(FeedForward):
    def forward(self, x):
        return self.w2(self.w3(x) * F.gelu(self.w1(x), approximate="tanh"))


class Child(FeedForward):
    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Joined(FeedForward):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, 2 * H), None

    def forward(self, x):
        gate, up = self.w1(x).chunk(2, -1)
        return self.w2(nn.functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, feed_forward=FeedForward, attention=Attention, norm=RMSNorm):
        super().__init__()
        self.attention, self.feed_forward = attention(), feed_forward()
        self.attention_norm, self.ffn_norm = norm(D), norm(D)

    def forward(self, x, start_pos, freqs_cis, mask=None):
        h = x + self.attention(self.attention_norm(x), start_pos, freqs_cis, mask)
        return h + self.feed_forward(self.ffn_norm(h))


def made(rng, kind, *given):
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = kind(*given).bfloat16().eval()
    quantize_(model, Dynamic())
    return model.requires_grad_(requires_grad=False)


def close(got, want):
    return (got - want).float().norm() < 0.02 * want.float().norm()


@pytest.mark.parametrize("kind", [FeedForward, Tanh, Child, Joined])
def test_a_gated_mlp_of_any_names_is_fused(kind):
    rng = fresh("mlp", kind.__name__)
    mlp = made(rng, kind)
    plain, x = copy.deepcopy(mlp), normal(rng, 2, 3, D, dtype=torch.bfloat16)
    names = set(mlp.state_dict())
    assert list(fuse_(mlp).fused) == [""]
    assert isinstance(mlp, FusedGatedMLP)
    assert set(mlp.state_dict()) == names
    codes = {"q_min": -127, "q_max": 127, "output_element": "s8"}
    ops, form = torch.ops.skuda, {"approximation": "tanh"} if kind in (Tanh, Child) else {}
    op = ops.gelu_mul_quantize if form else ops.silu_mul_quantize
    gate_up = plain.w1(x) if kind is Joined else torch.cat([plain.w1(x), plain.w3(x)], -1)
    coded = op(gate_up=gate_up, **form, **codes)
    last = plain.w2.weight_q, coded[1], None, plain.w2.weight_scale.view(-1), None, None
    assert same(mlp(x), ops.scaled_linear(coded[0], *last, output_element="bf16", act_scale_scope="token"))


@pytest.mark.parametrize("norm", [RMSNorm, lambda width: nn.RMSNorm(width, eps=1e-5)])
def test_a_block_of_any_names_and_arguments_is_fused(norm):
    rng = fresh("block")
    block = made(rng, Block, FeedForward, Attention, norm)
    fused = copy.deepcopy(block)
    assert set(fuse_(fused).fused) == {"attention", "feed_forward", ""}
    kinds = [FusedDecoderLayer, FusedAttention, FusedGatedMLP]
    assert [type(each).__mro__[1] for each in (fused, fused.attention, fused.feed_forward)] == kinds
    assert all(isinstance(getattr(fused.attention, name), Part) for name in ("wq", "wk", "wv"))
    x, scale = normal(rng, 2, 3, D, dtype=torch.bfloat16), normal(rng, D, dtype=torch.bfloat16)
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    want = block(x, 2, scale, mask)
    got = fused(x, 2, scale, mask)
    assert close(got, want)
    assert same(fused(x, start_pos=2, freqs_cis=scale, mask=mask), got)
    assert same(fused(x=x, start_pos=2, freqs_cis=scale, mask=mask), got)
    assert close(fused(x, 2, scale), block(x, 2, scale))
    assert not close(fused(x, 2, scale), want)
    for given in ((x, 2), (x, 2, scale, mask, 1), ()):
        with pytest.raises(TypeError):
            block(*given)
        with pytest.raises(TypeError):
            fused(*given)
    with pytest.raises(TypeError):
        fused(x, 2, scale, other=1)


class Swish(FeedForward):
    def forward(self, x):
        return self.w2(F.mish(self.w1(x)) * self.w3(x))


class Shadowed(FeedForward):
    def forward(self, x, F=None):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class OtherHalf(Joined):
    def forward(self, x):
        gate, up = self.w1(x).chunk(2, 1)
        return self.w2(F.silu(gate) * up)


class UsesWidth(Attention):
    def forward(self, x, start_pos, freqs_cis, mask):
        bsz, seqlen, width = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        return self.wo(q + k + v).view(bsz, seqlen, width)


class Rest(Attention):
    def forward(self, x, start_pos, freqs_cis, mask):
        bsz, *rest = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        return self.wo(q + k + v).view(bsz, *rest)


class Changed(Block):
    def forward(self, x, start_pos, freqs_cis, mask=None):
        h = x + self.attention(self.attention_norm(x), start_pos, freqs_cis, x)
        return h + self.feed_forward(self.ffn_norm(h))


LEFT = {
    "another activation": (Swish, (), ""),
    "a name that is hidden": (Shadowed, (), ""),
    "another axis": (OtherHalf, (), ""),
    "the width": (Block, (FeedForward, UsesWidth), "attention"),
    "the rest of the shape": (Block, (FeedForward, Rest), "attention"),
    "another argument": (Changed, (), ""),
}


@pytest.mark.filterwarnings("ignore:fuse_ left")
@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_proven_stays(case):
    kind, given, path = LEFT[case]
    model = made(fresh("left", case), kind, *given)
    report = fuse_(model)
    assert path in report.left
    assert path not in report.fused
    assert not type(model.get_submodule(path)).__name__.startswith("Fused")
