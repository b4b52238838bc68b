"""One rank of ``skuda demo --gpus``: the hashes of what gated MLPs return in every form, batch and group."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, distributed, nn

from skuda.tools.studies.llama import LlamaMLP, LlamaSizes, drawn
from skuda.tools.studies.parallel_rank import SlicedMLP, exact
from skuda.tools.studies.processes import Save
from skuda.tools.studies.ranks import BATCHES, FORMS, POSITIONS, Hashes, HashJob
from skuda.torch import DynamicLinear, TorchGroup


def work(job: HashJob, rank: int, save: Save) -> None:
    """Hash the outputs for every number of ranks; rank 0 also those of one process on the CPU, without a group."""
    sizes = LlamaSizes(job.hidden, job.intermediate)
    mlps = [drawn(LlamaMLP, sizes, seed=job.seed + number) for number in range(job.layers)]
    found = {"0": hashes(job, mlps, None, torch.device("cpu"))} if rank == 0 else {}
    place = torch.device(f"cuda:{rank}" if job.backend == "nccl" else "cpu")
    for count in range(1, job.count + 1):
        # Every process takes part in making a group, its members or not.
        members = distributed.new_group(list(range(count)))
        if rank < count:
            # Without checked calls, so that a rank that differs shows in the hashes.
            found[str(count)] = hashes(job, mlps, TorchGroup(members, check_calls=False), place)
    save(found)


def hashes(job: HashJob, mlps: list[LlamaMLP], group: TorchGroup | None, place: torch.device) -> Hashes:
    """Return the hashes of sequence 0's output by batch and form; without a group, of whole layers."""
    generator = torch.Generator().manual_seed(job.seed)
    given = torch.randn(5, POSITIONS, job.hidden, generator=generator).to(torch.bfloat16)
    sliced = nn.Sequential(*(SlicedMLP(mlp, group, DynamicLinear.from_linear) for mlp in mlps))
    real = nn.Sequential(*(SlicedMLP(mlp, group) for mlp in mlps))
    forms = dict(zip(FORMS, (exact(*mlps, group=group), sliced, real), strict=True))
    found: Hashes = {batch: {} for batch in BATCHES}
    for form, module in forms.items():
        module.to(place)
        for batch, chosen in BATCHES.items():
            output = module(given[list(chosen)].to(place))
            first: Tensor = output[chosen.index(0)].cpu().contiguous()
            found[batch][form] = hashlib.sha256(first.view(torch.int16).numpy().tobytes()).hexdigest()[:12]
    return found
