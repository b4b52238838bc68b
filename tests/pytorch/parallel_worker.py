"""One rank of a group: `parallel_worker.py FUNCTION RANK COUNT FOLDER SEED` runs a function of `parallel_cases`."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import parallel_cases
import torch
from torch import distributed

name, rank, count, folder, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5])
torch.set_num_threads(1)
distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=timedelta(seconds=60)
)
found = getattr(parallel_cases, name)(rank, count, seed)
(folder / f"{rank}.json").write_text(json.dumps(found))
distributed.barrier()
distributed.destroy_process_group()
