"""One rank of ``skuda certify``: the log-probabilities of prompts, of a model whose layers the ranks share."""

from __future__ import annotations

import torch

from skuda.tools.studies.processes import RankJob, Save
from skuda.torch import TorchGroup, parallelize_
from skuda.torch.certification.ways import LEFT, batches, run


class CertifyJob(RankJob):
    """The model, in a file of torch, and the prompts that ranks share."""

    path: str
    prompts: tuple[tuple[int, ...], ...]


def work(job: CertifyJob, rank: int, save: Save) -> None:
    """Save the bits of the log-probabilities, of each prompt."""
    place = torch.device(f"cuda:{rank}" if job.backend == "nccl" else "cpu")
    model = torch.load(job.path, weights_only=False, map_location=place)  # the command wrote it
    # Without checked calls, so that a rank that differs shows in the bits.
    parallelize_(model, TorchGroup(check_calls=False), lm_head=True)
    prompts = [torch.tensor(ids) for ids in job.prompts]
    found = run(model, prompts, batches(prompts, 2, torch.Generator())[LEFT])
    save([found[number].view(torch.int32).tolist() for number in range(len(prompts))])
