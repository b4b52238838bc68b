"""One process of `test_parallel`: `parallel_worker.py RANK COUNT FOLDER SEED` does all cases for 1 to COUNT ranks."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import parallel_cases
import torch
from torch import distributed

from skuda.torch import TorchGroup

rank, count, folder, seed = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
distributed.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=100), count, rank)
found = {}
for size in range(1, count + 1):
    ranks = distributed.new_group(range(size))
    if rank < size:
        group = (parallel_cases.SparingGroup if size == 2 else TorchGroup)(ranks)
        for weights in parallel_cases.WEIGHTS:
            cases = (parallel_cases.hashes, *((parallel_cases.compiled,) if size == 2 else ()))
            found |= {f"{case.__name__} {weights} {size}": case(group, seed, weights) for case in cases}
            found[f"checkpoints {weights} {size}"] = parallel_cases.checkpoints(group, seed, weights, folder)
            found[f"fused checkpoints {weights} {size}"] = parallel_cases.fused_checkpoints(
                group, seed, weights, folder
            )
found["differing"] = parallel_cases.differing(TorchGroup(), seed)
(folder / f"{rank}.json").write_text(json.dumps(found))
distributed.barrier()
distributed.destroy_process_group()
os._exit(0)  # threads that torch leaves behind may abort the process at its end, on a busy host
