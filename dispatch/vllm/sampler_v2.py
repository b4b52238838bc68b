"""The sampler of vLLM's second runner by skuda's ops; see `skuda.vllm.sampler`.

This runner keeps the seeds, positions and parameters of requests on the device. It finds its sampler and some functions
by names in vLLM's modules, so these names are replaced in the worker's process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample import prompt_logprob, sampler, states
from vllm.v1.worker.gpu.spec_decode import rejection_sampler, speculator

from skuda.serving.tokens import chosen, draw, greedy, largest, log_probabilities, ranks_of, verified
from skuda.vllm.sampler import UNDEFINED


class ExactSamplerV2(sampler.Sampler):  # type: ignore[misc]
    """The sampler of vLLM's second runner."""

    def sample(
        self, logits: Tensor, expanded_idx_mapping: Tensor, *given: Any, return_logprobs: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Choose tokens.

        Parameters
        ----------
        logits : tensor of shape (rows, V)
            They may be changed.
        expanded_idx_mapping : tensor of shape (rows,)
            Where the parameters of each row are.
        given
            What vLLM's `apply_sampling_params` takes after these, which depends on the version. The array of where the
            parameters are on the host is followed by the position of the last token of each row.
        return_logprobs : bool
            Not needed.

        Returns
        -------
        tensor, tensor
            Tokens, s64 of shape (rows,), and processed logits.
        """
        del return_logprobs
        logits = self.apply_sampling_params(logits, expanded_idx_mapping, *given, skip_top_k_top_p=True)
        at, where = self.sampling_states, expanded_idx_mapping
        host = next(index for index, value in enumerate(given) if isinstance(value, np.ndarray))
        rows, position = given[host], given[host + 1].long() + 1
        temperatures = at.temperature.np[rows]
        top_k = at.top_k.gpu[where] if (at.top_k.np[rows] != at.vocab_size).any() else None
        top_p = at.top_p.gpu[where] if (at.top_p.np[rows] != 1).any() else None
        if self.logprobs_mode.startswith("processed"):
            # The sets that these scores are of are vLLM's, so that every drawn token is in its set.
            logits, top_k, top_p = at.apply_top_k_top_p(logits, where, rows), None, None
        if not temperatures.any():
            return UNDEFINED.settle(greedy(logits)), logits
        drawn = draw(logits, at.seeds.gpu[where], position, top_k, top_p)
        if temperatures.all():
            return UNDEFINED.settle(drawn), logits
        return UNDEFINED.settle(chosen(at.temperature.gpu[where], greedy(logits), drawn)), logits


class ExactRejectionSampler(rejection_sampler.RejectionSampler):  # type: ignore[misc]
    """It takes drafts while they are what is drawn without them, in the second runner of vLLM 0.33."""

    def _verify_in_chunks(self, logits: Tensor, input_batch: Any, *given: Any) -> Any:
        """Verify some requests after others, with as many columns of log-probabilities."""
        self._columns = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        return super()._verify_in_chunks(logits, input_batch, *given)

    def _verify(self, logits: Tensor, draft_logits: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return processed logits, tokens of shape (requests, most drafts + 1), and how many there are of each."""
        del draft_logits
        ids, pos, starts, requests, host, where, local, most_lengths, guessed = given
        tokens, processed = self.sampler.sample(logits, where, requests, host, pos, ids, local, most_lengths)
        # The token of a row is what the row after it was guessed from.
        drafts = torch.nn.functional.pad(guessed[1:].long(), (0, 1), value=-1)
        drafts[starts[1:].long() - 1] = -1
        found, _ = verified(tokens, drafts, starts[:-1].long(), self.num_speculative_steps + 1)
        self._drawn = where, tokens
        return processed, found, (found >= 0).sum(1, dtype=torch.int32)

    def _get_logprobs_tensors(
        self, sampled: Tensor, num_sampled: Tensor, logits: Tensor, cu_num_logits: Any, cu_num_logits_np: Any, most: int
    ) -> LogprobsTensors | None:
        """Return log-probabilities of what was drawn for each row, and of the tokens that requests name."""
        del sampled, num_sampled, cu_num_logits, most
        if self._columns is None:
            return None
        (where, tokens), (likely, named), it = self._drawn, self._columns, self.sampler
        return compute_topk_scores(
            logits,
            likely,
            tokens,
            cu_num_logits_np.tolist(),
            logprob_token_ids_state=it.logprob_token_ids_state,
            expanded_idx_mapping=where,
            max_per_req_token_ids=named,
            logits_mode=it.logprobs_mode.endswith("logits"),
        )


def guess(logits: Tensor, where: Tensor, temperature: Tensor, seeds: Tensor, position: Tensor, **given: Any) -> Tensor:
    """Draw drafts with the random numbers of the tokens that they stand for. A draft model calls it.

    Parameters
    ----------
    logits : tensor of shape (rows, V)
    where : tensor of shape (rows,)
        Where the parameters of each row are.
    temperature, seeds : tensors
        Of all requests.
    position : tensor of shape (rows,)
        Of the last token of each row.
    given
        Not needed.

    Returns
    -------
    tensor of shape (rows,), s64
    """
    del given
    scaled = logits.to(torch.float32, copy=True)
    apply_temperature(scaled, where, temperature)
    drawn = draw(scaled, seeds[where], position.long() + 1, None, None)
    return chosen(temperature[where], greedy(scaled), drawn).clamp_(min=0)


def compute_topk_scores(
    logits: Tensor,
    num_logprobs: int,
    sampled_token_ids: Tensor,
    cu_num_logits: Any = None,
    *,
    logprob_token_ids_state: Any = None,
    expanded_idx_mapping: Tensor | None = None,
    max_per_req_token_ids: int = 0,
    logits_mode: bool = False,
) -> LogprobsTensors:
    """Return log-probabilities of a token and of the most likely ones, or of those that a request names.

    Parameters
    ----------
    logits : tensor of shape (rows, V)
    num_logprobs : int
        How many of the most likely.
    sampled_token_ids : tensor of shape (rows,)
    cu_num_logits
        Where the rows of each request begin and end, if requests have several, because of drafts.
    logprob_token_ids_state, expanded_idx_mapping
        The named tokens of all requests, and where those of each row are.
    max_per_req_token_ids : int
        The most tokens that a request names.
    logits_mode : bool
        Whether scores are logits.

    Returns
    -------
    LogprobsTensors
        Ids, scores and ranks. A score is minus infinity where a request names fewer tokens than others.
    """
    sampled = sampled_token_ids.long()
    ids = torch.cat([sampled[:, None], largest(logits, num_logprobs)], 1)
    absent = None
    if max_per_req_token_ids:
        columns = torch.arange(max(num_logprobs, max_per_req_token_ids), device=logits.device)
        of = logprob_token_ids_state
        counts = of.num_token_ids.gpu[expanded_idx_mapping][:, None]
        named = of.token_ids.gpu[expanded_idx_mapping, : len(columns)].long()
        named = torch.nn.functional.pad(named, (0, len(columns) - named.shape[1]))
        likely = torch.nn.functional.pad(ids[:, 1:], (0, len(columns) - num_logprobs))
        absent = columns >= torch.where(counts > 0, counts, num_logprobs)
        others = torch.where(counts > 0, named, likely).masked_fill(absent, 0)
        ids = torch.cat([ids[:, :1], others], 1)
    scores = logits.gather(1, ids).float() if logits_mode else log_probabilities(logits, ids)
    if absent is not None:
        scores[:, 1:].masked_fill_(absent, -torch.inf)
    return LogprobsTensors(ids, scores, ranks_of(logits, sampled), cu_num_logits)


def apply_temperature(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor) -> None:
    """Divide each row by its temperature, with one rounding, which Triton's division does not have."""
    divisor = temperature[expanded_idx_mapping]
    logits.div_(divisor.masked_fill(divisor == 0, 1)[:, None])


def install() -> None:
    """Let the runners that this process makes have the sampler."""
    for module in (sampler, prompt_logprob):
        module.compute_topk_scores = compute_topk_scores
    if hasattr(rejection_sampler.RejectionSampler, "_verify"):  # vLLM 0.33; 0.26 has no drafts here that are served
        model_runner.RejectionSampler, speculator.gumbel_sample = ExactRejectionSampler, guess
    if hasattr(prompt_logprob, "compute_token_logprobs"):  # vLLM 0.33
        prompt_logprob.compute_token_logprobs = log_probabilities
    states.apply_temperature = apply_temperature
    model_runner.Sampler = ExactSamplerV2
