"""vLLM's sampler by `skuda.serving.tokens`: tokens and log-probabilities of a row have the same bits in any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from skuda.serving.tokens import Undefined, chosen, draw, greedy, hashed, largest, log_probabilities, ranks_of, signed

logger = init_logger("vllm.skuda")  # vLLM shows what loggers below its own say
UNDEFINED = Undefined(logger, "VLLM_COMPUTE_NANS_IN_LOGITS=1 counts such requests.")


class ExactSampler(Sampler):  # type: ignore[misc]
    """The sampler of vLLM's first runner.

    vLLM's own steps change logits before: masks of structured outputs, allowed tokens, bad words, penalties, biases,
    temperature, min-p. Then skuda's ops choose tokens and compute log-probabilities.

    Parameters
    ----------
    runner
        The runner of vLLM that calls it.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.model_config.logprobs_mode)
        self.runner = runner

    def forward(self, logits: Tensor, sampling_metadata: Any) -> Any:
        """Choose tokens, and compute log-probabilities of those that are asked for only.

        Parameters
        ----------
        logits : tensor of shape (rows, V), f32
            They may be changed.
        sampling_metadata : SamplingMetadata

        Returns
        -------
        SamplerOutput
        """
        at, count = sampling_metadata, sampling_metadata.max_num_logprobs
        if self.logprobs_mode != "raw_logprobs" or count is None or count < 0 or at.logprob_token_ids:
            return super().forward(logits, at)
        raw = logits.clone()
        output = super().forward(logits, replace(at, max_num_logprobs=None))
        tokens = output.sampled_token_ids[:, 0].long()
        ids = torch.cat([tokens[:, None], largest(raw, count)], 1)
        output.logprobs_tensors = LogprobsTensors(ids.int(), log_probabilities(raw, ids), ranks_of(raw, tokens))
        return output

    @staticmethod
    def greedy_sample(logits: Tensor) -> Tensor:
        """Return what `greedy` finds."""
        return greedy(logits)

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        """Return the log-probabilities of all tokens, f32 of shape (rows, V)."""
        return log_probabilities(logits)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Return the log-probabilities of a token and of the most likely ones, of equals that of the lower id first.

        Parameters
        ----------
        logprobs : tensor of shape (rows, V), f32
        num_logprobs : int
            How many of the most likely.
        token_ids : tensor of shape (rows,), s64

        Returns
        -------
        LogprobsTensors
            Ids and log-probabilities of shape (rows, 1 + num_logprobs), and the ranks of the given tokens.
        """
        ids = torch.cat([token_ids[:, None], largest(logprobs, num_logprobs)], 1)
        ranks = ranks_of(logprobs, token_ids)
        return LogprobsTensors(ids.int(), logprobs.gather(1, ids), ranks)

    def sample(self, logits: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        """Choose tokens.

        Parameters
        ----------
        logits : tensor of shape (rows, V), f32
            They may be changed.
        sampling_metadata : SamplingMetadata

        Returns
        -------
        tensor, tensor or None
            Tokens, s64 of shape (rows,), and processed logits or log-probabilities if they are wanted.
        """
        at = sampling_metadata
        if at.all_greedy:
            tokens, processed = super().sample(logits, at)
            return UNDEFINED.settle(tokens), processed
        largest_ones = None if at.all_random else greedy(logits)
        logits = self.apply_temperature(logits, at.temperature, at.all_random)
        for processor in at.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        mode, processed, top_k, top_p = self.logprobs_mode, None, at.top_k, at.top_p
        if mode.startswith("processed"):
            # The sets that these scores are of are vLLM's, so that every drawn token is in its set.
            logits, top_k, top_p = apply_top_k_top_p(logits, top_k, top_p), None, None
            if at.max_num_logprobs is not None or at.logprob_token_ids:
                processed = logits if mode == "processed_logits" else self.compute_logprobs(logits)
        seed, position = self._keys(len(logits), logits.device)
        drawn = draw(logits, seed, position, top_k, top_p)
        at.generators.clear()  # vLLM would take back draws of those that it throws away
        tokens = drawn if largest_ones is None else chosen(at.temperature, largest_ones, drawn)
        return UNDEFINED.settle(tokens), processed

    def _keys(self, rows: int, device: torch.device) -> Tensor:
        """Return the seed and the position of each row; 0 for rows of no request, as when vLLM measures memory."""
        batch = self.runner.input_batch
        names = batch.req_ids[:rows]
        keys = np.zeros((2, rows), np.int64)
        keys[0, : len(names)] = [self._seed(name) for name in names]
        keys[1, : len(names)] = batch.num_tokens_no_spec[: len(names)]
        found: Tensor = async_tensor_h2d(torch.from_numpy(keys), device)
        return found

    def _seed(self, name: str) -> int:
        """Return the seed of a request. Without one it follows from its name, which all ranks know."""
        given = self.runner.requests[name].sampling_params.seed
        return hashed(self.runner.model_config.seed, name) if given is None else signed(given)
