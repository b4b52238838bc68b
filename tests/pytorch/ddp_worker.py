"""One process of a distributed step: `ddp_worker.py RANK COUNT MODEL` steps a saved model on its part of the batch."""

import os
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

rank, count, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
distributed.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=count)
saved = torch.load(path, weights_only=False)
model = DistributedDataParallel(saved["model"])
model(saved["parts"][rank]).square().sum().backward()
torch.save([parameter.grad for parameter in model.parameters()], f"{path}.{rank}")
distributed.destroy_process_group()
os._exit(0)  # threads that torch leaves behind may abort the process at its end, on a busy host
