"""One process of sharded training: `fsdp_worker.py RANK COUNT MODEL` trains a saved model on its part of each batch."""

import os
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

rank, count, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
distributed.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=count)
saved = torch.load(path, weights_only=False)
model = saved["model"]
mesh = distributed.device_mesh.init_device_mesh("cpu", (count,))
for part in [*model, model]:
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for parts in saved["batches"]:
    loss = model(parts[rank]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
torch.save((losses, [parameter.full_tensor() for parameter in model.parameters()]), f"{path}.{rank}")
distributed.destroy_process_group()
os._exit(0)  # threads that torch leaves behind may abort the process at its end, on a busy host
