"""What each process of `test_parallel` does; every function returns what JSON holds."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from tensors import GatedMLP, normal, same
from torch import nn

from skuda.dispatch.shard import GroupMismatch, Shards
from skuda.registry.errors import InvalidProblem
from skuda.torch import (
    ColumnLinear,
    Dynamic,
    DynamicLinear,
    RowLinear,
    StaticLinear,
    TorchGroup,
    fuse_,
    load_,
    parallelize_,
    quantize_,
    save,
)
from skuda.torch.exact.exact import exact_
from skuda.torch.hf.checkpoint import TENSORS
from skuda.torch.int4 import int4_linear

WEIGHTS = ("int8", "int4")
GROUPS = (32, 64, 128, 0)


def layer(rng, kind, n, k):
    if kind == "packed":
        linear = nn.Linear(k, n, bias=bool(rng.random() < 0.5))
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(normal(rng, *parameter.shape))
        return int4_linear(linear, int(rng.choice(GROUPS)))
    weight = torch.from_numpy(rng.integers(-127, 128, (n, k), dtype=np.int8))
    scale = torch.from_numpy(rng.uniform(0.001, 0.01, n).astype(np.float32))
    bias = torch.from_numpy(rng.normal(size=n).astype(np.float32)) if rng.random() < 0.5 else None
    if kind == "dynamic":
        return DynamicLinear(weight, scale, bias)
    return StaticLinear(
        weight,
        scale,
        bias,
        input_scale=torch.tensor([0.02]),
        input_zero_point=torch.tensor([int(rng.integers(-20, 20))]) if kind == "shifted" else None,
        smooth=torch.from_numpy(rng.uniform(0.5, 2, k).astype(np.float32)) if rng.random() < 0.5 else None,
    )


def data(rng, shape, dtype):
    x = torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(dtype)
    if x.numel():
        x.view(-1)[rng.integers(0, x.numel(), 2)] = torch.tensor([float("nan"), float("inf")]).to(dtype)
    return x


def scheme(rng, weights):
    if weights == "int8":
        return Dynamic()
    return Dynamic(weights="int4", group_size=int(rng.choice(GROUPS)), symmetric=bool(rng.integers(2)))


def llama(act, weights, attention="eager", head_dim=None):
    """A small model. With 4-bit weights, o_proj is split along K on 2 ranks, and along N on more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=112 if weights == "int8" else 304,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=head_dim or (8 if weights == "int8" else 32),
        hidden_act=act,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


WAYS = {
    "int8": ("whole", "shared", "cheapest", "fused", "attended"),
    "int4": ("whole", "shared", "fused", "exact"),
}


def hashes(group, seed, weights):
    """Hashes of a small Llama's logits: whole, shared, shared after `fuse_`, that with int8 attention, and exact."""
    import skuda.torch.attention  # noqa: F401  it registers it

    found = {}
    for way in WAYS[weights]:
        torch.manual_seed(seed)
        # SiLU of torch on a CPU may round the end of a tensor, after the last full vectors, in another way. It has none
        # here: an even number of tokens times a multiple of 16 channels. And ReLU rounds nothing. Attention has less
        # than 400 products a head, from which on the bits of torch.bmm depend on the number of heads.
        fuses, attends = way in ("fused", "attended", "exact"), way in ("attended", "exact")
        model = llama("silu" if fuses else "relu", weights, *(("skuda", 32) if attends else ()))
        tokens = torch.randint(0, 64, (2, 3))
        quantize_(model, scheme(np.random.default_rng(seed), weights), *((lambda *_: True,) if way == "exact" else ()))
        if way == "exact":
            exact_(model)
        elif fuses:
            fuse_(model)
        if way != "whole":
            rows, chunks = (4, 3) if way == "cheapest" else (None, 2 if way == "shared" else None)
            head = way in ("shared", "exact")
            report = parallelize_(model, group, lm_head=head, rows=rows, chunks=chunks)
            chunked = [module.shards.chunks for module in model.modules() if isinstance(module, RowLinear)]
            assert set(chunked) <= {chunks}
            assert len(report.converted) == (8 if fuses else 14) + head, str(report)
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        found[way] = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
    return found


class SparingGroup(TorchGroup):
    """A group whose products leave multiprocessors free, as on GPUs."""

    spare_multiprocessors = 4


def compiled(group, seed, weights):
    """A pair of layers, and a fused gated MLP, each in one graph."""
    rng = np.random.default_rng(seed)
    kind, inner = ("dynamic", 40) if weights == "int8" else ("packed", 272)
    up, down = layer(rng, kind, inner, 24), layer(rng, kind, 24, inner)
    chunks = Shards(axis="k", count=group.count, chunks=2)
    pair = nn.Sequential(ColumnLinear(up, group), nn.ReLU(), RowLinear(down, group, chunks))
    x = data(rng, (3, 24), torch.float32)
    with torch.no_grad():
        want = down(torch.relu(up(x)))
        found = [same(f(x), want) for f in (pair, torch.compile(pair, fullgraph=True, backend="aot_eager"))]
        for act in (nn.SiLU(), nn.GELU()):
            x, mlp = data(rng, (2, 3, 24), torch.bfloat16), GatedMLP(24, inner, act)
            quantize_(mlp, scheme(rng, weights))
            fuse_(mlp)
            want = mlp(x)
            parallelize_(mlp, group)
            assert isinstance(mlp.gate_up_proj, ColumnLinear)
            found += [same(f(x), want) for f in (mlp, torch.compile(mlp, fullgraph=True, backend="aot_eager"))]
    return {"same": found}


class Mixture(nn.Module):
    """Layers of every kind, one of which stays in floating point. Layers of 8 bits are beside those of 4."""

    def __init__(self, rng, weights):
        super().__init__()
        inner, outer = (40, 33) if weights == "int8" else (300, 400)
        kinds = (
            ("dynamic", "static", "shifted", "shifted")
            if weights == "int8"
            else (*2 * ("packed",), "shifted", "packed")
        )
        sizes = ((inner, 24), (24, inner), (outer, 24), (5, outer))
        for name, kind, size in zip(SPLIT, kinds, sizes, strict=True):
            setattr(self, name, layer(rng, kind, *size))
        for each in list(self.children()):  # whether there is a bias is the model's, not the checkpoint's
            each.bias = torch.from_numpy(rng.normal(size=each.out_features).astype(np.float32))
        self.last = nn.Linear(5, 3)
        with torch.no_grad():
            for parameter in self.last.parameters():
                parameter.copy_(torch.from_numpy(rng.normal(size=parameter.shape).astype(np.float32)))

    def forward(self, x):
        return self.last(self.narrow(torch.relu(self.wide(self.down(torch.relu(self.up(x)))))))


SPLIT = {"up": "column", "down": "row", "wide": "column", "narrow": "row"}


def checkpoints(group, seed, weights, folder):
    """Checkpoints that ranks write have the bytes of the whole model's, and are read by any number of ranks."""
    rng = np.random.default_rng(seed)
    model, other = Mixture(rng, weights), Mixture(rng, weights)
    x = data(rng, (3, 24), torch.float32)
    mine = folder / f"whole {weights} {group.count} {group.rank}"
    save(model, mine)
    shared = folder / f"shared {weights} {group.count}"
    found = []
    with torch.no_grad():
        want = model(x)
        parallelize_(model, group, SPLIT)
        save(model, shared)
        found += [(shared / name).read_bytes() == (mine / name).read_bytes() for name in ("config.json", TENSORS)]
        parallelize_(other, group, SPLIT)
        for source in (shared, folder / f"shared {weights} {max(1, group.count - 1)}"):
            for name in SPLIT:
                getattr(other, name).weight_q.zero_()
            found.append(not same(other(x), want))
            found.append(load_(other, source) == ("up", "down", "wide", "narrow"))
            found += [same(other(x), want), type(other.down).__name__ == "RowLinear", other.down.name == "down"]
        whole = Mixture(rng, weights)
        load_(whole, shared)
        found.append(same(whole(x), want))
        blocked = folder / f"blocked {weights} {group.count}"
        blocked.mkdir(exist_ok=True)
        (blocked / "model.safetensors.index.json").write_text("{}")
        try:
            save(model, blocked)
        except (InvalidProblem, OSError) as error:
            found.append("be a folder without" in str(error))
    return {"right": found}


def fused_checkpoints(group, seed, weights, folder):
    """Joined layers, on ranks or not, are written like those they join, and are read from what others wrote."""
    found, logits = [], []
    tokens = torch.randint(0, 64, (2, 3), generator=torch.Generator().manual_seed(seed))
    paths = [folder / f"joined {name} {weights} {group.count}" for name in ("plain", "other", "fused", "shared")]
    models = []
    for path, own_seed in zip(paths[:2], (seed, seed + 1), strict=True):
        torch.manual_seed(own_seed)
        model = llama("silu", weights)
        quantize_(model, scheme(np.random.default_rng(seed), weights))
        if group.rank == 0:
            save(model, path)
        fuse_(model)
        models.append(model)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    if group.rank == 0:
        save(models[0], paths[2])
    group.exchange("")
    model = models[0]
    parallelize_(model, group)
    save(model, paths[3])
    for path in paths[2:]:
        found += [(path / name).read_bytes() == (paths[0] / name).read_bytes() for name in ("config.json", TENSORS)]
    with torch.no_grad():
        for path, want in ((paths[1], logits[1]), (paths[3], logits[0])):
            found.append(len(load_(model, path)) == 2 * 7 + 1)  # of each block, and the head
            found.append(same(model(tokens).logits, want))
    return {"right": found}


def differing(group, seed):
    """Ranks with another order of calls, another shape, another descriptor."""
    rank, count = group.rank, group.count
    rng, differences = np.random.default_rng(seed), []
    a, b = (RowLinear(layer(rng, "dynamic", 8, 32), group) for _ in range(2))
    a.name, b.name = "first", "second"
    x = torch.ones(2, a.in_features)

    def heard(run):
        try:
            run()
        except GroupMismatch as error:
            differences.append([error.what, [each for each, _ in error.ranks], str(error)])

    with torch.no_grad():
        heard(lambda: (a if rank else b)(x))
        heard(lambda: a(torch.ones(2 + (rank == count - 1), a.in_features)))
        cut = Shards(axis="k", count=count, chunks=1 + (rank == 1))
        heard(lambda: RowLinear(layer(rng, "dynamic", 8, 32), group, cut)(x))
        wide = ColumnLinear(layer(rng, "dynamic", 8, 32), group)
        wide(torch.ones(2, 32))
        heard(lambda: wide(torch.ones(2, 32) + (rank == 2)))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 16 if rank == 0 else 32), nn.ReLU())
    quantize_(model, Dynamic())
    heard(lambda: parallelize_(model, group, {"0": "column"}))
    torch.manual_seed(seed)
    other = nn.Sequential(nn.Linear(32, 16))
    with torch.no_grad():
        other[0].weight += rank == 1
    quantize_(other, Dynamic())
    heard(lambda: parallelize_(other, group, {"0": "column"}))
    differences += [type(each[0]).__name__ for each in (model, other)]
    return {"differences": differences}
