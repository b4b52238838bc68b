"""What each rank of `test_training` does: it trains a model on its part of each batch."""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def averaged(model, parts):
    """Return the gradients of a step with torch's data parallelism."""
    model = DistributedDataParallel(model)
    model(parts[distributed.get_rank()]).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def sharded(model, batches):
    """Return the losses of steps of a sharded model, and its parameters in the end."""
    mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
    for part in [*model, model]:
        fully_shard(part, mesh=mesh)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for parts in batches:
        loss = model(parts[distributed.get_rank()]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [parameter.full_tensor().detach() for parameter in model.parameters()]
