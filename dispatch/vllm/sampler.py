"""vLLM's sampler by `skuda.serving.tokens`: tokens and log-probabilities of a row have the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from skuda.serving.tokens import (
    Undefined,
    chosen,
    draw,
    greedy,
    hashed,
    largest,
    log_probabilities,
    ranks_of,
    signed,
    verified,
)

logger = init_logger("vllm.skuda")  # vLLM shows what loggers below its own say
UNDEFINED = Undefined(logger, "VLLM_COMPUTE_NANS_IN_LOGITS=1 counts such requests.")


@dataclass(kw_only=True)
class Rows(SamplingMetadata):  # type: ignore[misc]
    """What vLLM knows of each row, where requests have several: for the next token, and after each draft.

    Attributes
    ----------
    of : array of shape (rows,)
        The request of each.
    position : tensor of shape (rows,), s64
        The tokens before that of the row, drafts included.
    """

    of: Any
    position: Tensor


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
        if self.runner.speculative_config is not None and not isinstance(at, Rows):
            at = self.rows(at, np.ones(len(logits), np.int64))
        if self.logprobs_mode != "raw_logprobs" or count is None or count < 0 or at.logprob_token_ids:
            return super().forward(logits, at)
        raw = logits.clone()
        output = super().forward(logits, replace(at, max_num_logprobs=None))
        tokens = output.sampled_token_ids[:, 0].long()
        ids = torch.cat([tokens[:, None], largest(raw, count)], 1)
        output.logprobs_tensors = LogprobsTensors(ids.int(), log_probabilities(raw, ids), ranks_of(raw, tokens))
        return output

    def rows(self, sampling_metadata: Any, counts: Any) -> Rows:
        """Return what vLLM knows of each row, for so many rows of each request."""
        at, of = sampling_metadata, np.repeat(np.arange(len(counts)), counts)
        ends = counts.cumsum()
        after = np.arange(len(of)) - np.repeat(ends - counts, counts)
        # vLLM's copies on the host may count drafts whose result is not known there.
        lengths = self.runner.seq_lens
        index, behind = async_tensor_h2d(torch.from_numpy(np.stack([of, counts[of] - 1 - after])), lengths.device)
        drafts, texts, given = at.spec_token_ids, at.output_token_ids, vars(at)
        named = {name: value[index] for name, value in given.items() if isinstance(value, Tensor)}
        for name in ("bad_words_token_ids", "logprob_token_ids"):
            named[name] = {row: given[name][i] for row, i in enumerate(of) if i in (given[name] or ())}
        named["output_token_ids"] = [[*texts[i], *drafts[i][:j]] for i, j in zip(of, after, strict=True) if texts]
        named |= {"spec_token_ids": None, "logitsprocs": LogitsProcessors()}
        return Rows(**given | named, of=of, position=lengths[index].long() - behind)

    def verify(self, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        """Take drafts while they are what is drawn without them; it has the place of vLLM's rejection sampler.

        Parameters
        ----------
        metadata : SpecDecodeMetadata
        draft_probs
            Not needed.
        logits : tensor of shape (rows, V), f32
            Of each request's next token, and after each of its drafts. They may be changed.
        sampling_metadata : SamplingMetadata

        Returns
        -------
        SamplerOutput
            Tokens of shape (requests, most drafts + 1), -1 where there are no more, and log-probabilities of all.
        """
        del draft_probs
        found = self(logits, self.rows(sampling_metadata, np.array(metadata.num_draft_tokens) + 1))
        drawn, table = found.sampled_token_ids[:, 0], found.logprobs_tensors
        drafts = torch.full_like(drawn, -1)
        drafts[metadata.target_logits_indices.long()] = metadata.draft_token_ids.to(drawn.dtype)
        starts = torch.nn.functional.pad(metadata.cu_num_sampled_tokens[:-1], (1, 0))
        tokens, rows = verified(drawn, drafts, starts, metadata.max_spec_len + 1)
        if table is not None:
            table = LogprobsTensors(*(part[rows.flatten()] for part in table[:3]))
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=table)

    def apply_logits_processors(self, logits: Tensor, sampling_metadata: Any, predict_bonus_token: Any) -> Tensor:
        """Change logits as requests ask for it."""
        logits = super().apply_logits_processors(logits, sampling_metadata, predict_bonus_token)
        return self._unstopped(logits, sampling_metadata) if isinstance(sampling_metadata, Rows) else logits

    def _unstopped(self, logits: Tensor, at: Rows) -> Tensor:
        """Forbid to stop before `min_tokens`, as vLLM does where it knows how many tokens there are."""
        batch, keeps = self.runner.input_batch, hasattr(MinTokensLogitsProcessor, "_mask_stop_token_logits")
        params = [self.runner.requests[name].sampling_params for name in batch.req_ids]
        asked = {i: each for i, each in enumerate(params) if each.min_tokens}
        entries = [
            (row, stop, batch.num_prompt_tokens[i] + asked[i].min_tokens, keeps and bool(asked[i].structured_outputs))
            for row, i in enumerate(at.of)
            if i in asked
            for stop in asked[i].all_stop_token_ids
        ]
        if not entries:
            return logits
        row, stop, first, structured = async_tensor_h2d(torch.tensor(entries).T.contiguous(), logits.device)
        before = logits[row, stop]
        early = at.position[row] < first
        logits[row, stop] = before.masked_fill(early, -torch.inf)
        if any(entry[3] for entry in entries):  # vLLM 0.33 lets a structured output stop where nothing else is left
            stuck = early & structured.bool() & before.isfinite() & logits[row].isneginf().all(1)
            logits[row, stop] = torch.where(stuck, before, logits[row, stop])
        return logits

    def guide(self, drafter: Any) -> None:
        """Let a draft model draw with the random numbers of the tokens that it guesses, so that more are right."""
        propose: Callable[..., Any] = drafter.propose
        position = torch.empty(0)

        def positioned(**named: Any) -> Any:
            nonlocal position
            lengths, rejected = named["common_attn_metadata"].seq_lens, named["num_rejected_tokens_gpu"]
            position = (lengths + 1 if rejected is None else lengths + 1 - rejected).long()
            return propose(**named)

        def guess(logits: Tensor, at: Any) -> tuple[Tensor, None]:
            nonlocal position
            logits = self.apply_temperature(logits.float(), at.temperature, at.all_random)
            seed, here = self._keys(at, len(logits), logits.device)[0], position
            position = here + 1
            drawn = draw(logits, seed, here, at.top_k, at.top_p)
            return chosen(at.temperature, greedy(logits), drawn).clamp_(min=0), None

        vars(drafter).update(propose=positioned, _sample_from_logits=guess)

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
        seed, position = self._keys(at, len(logits), logits.device)
        drawn = draw(logits, seed, position, top_k, top_p)
        at.generators.clear()  # vLLM would take back draws of those that it throws away
        tokens = drawn if largest_ones is None else chosen(at.temperature, largest_ones, drawn)
        return UNDEFINED.settle(tokens), processed

    def _keys(self, at: Any, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the seed and the position of each row; 0 for rows of no request, as when vLLM measures memory."""
        batch, several = self.runner.input_batch, isinstance(at, Rows)
        names = batch.req_ids[: at.of[-1] + 1 if several else rows]
        keys = np.zeros((2, rows), np.int64)
        keys[0, : len(names)] = [self._seed(name) for name in names]
        keys[1, : len(names)] = batch.num_tokens_no_spec[: len(names)]
        seed, position = async_tensor_h2d(torch.from_numpy(keys[:, at.of] if several else keys), device)
        return seed, at.position if several else position

    def _seed(self, name: str) -> int:
        """Return the seed of a request. Without one it follows from its name, which all ranks know."""
        given = self.runner.requests[name].sampling_params.seed
        return hashed(self.runner.model_config.seed, name) if given is None else signed(given)
