"""Drafts in exact models of vLLM: tokens and log-probabilities are those without them, whatever the drafts are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import fresh
from test_sampler import WIDTH, First, Second, alone_of, bits, config_of, installed, logits_of, prompts, worker_of
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from skuda.registry.errors import InvalidProblem
from skuda.vllm import sampler, sampler_v2

MOST_DRAFTS, STEPS = 4, 12
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3}
ASKED = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "plain": {"seed": 5},
    "sets": {"seed": 77, "temperature": 1.9, "top_k": 40, "top_p": 0.6, "logprobs": 1},
    "late": {"seed": 4, "min_tokens": 6, "stop_token_ids": [*range(0, WIDTH, 2)], "logprobs": 0},
    "few": {"seed": 6, "logprobs": 3, **PENALTIES},
    "few greedy": {"temperature": 0, **PENALTIES},
    "few words": {"seed": 9},
    "named": {"seed": 3, "logprobs": 2, "logprob_token_ids": [7, 250]},
    "structured": {"min_tokens": 5, "stop_token_ids": [3], "structured_outputs": StructuredOutputsParams(regex="a")},
    "allowed": {"seed": 1, "allowed_token_ids": [*range(30)]},
}


def asked():
    found = {name: SamplingParams(**each) for name, each in ASKED.items()}
    found["few words"]._bad_words_token_ids = [[i, j] for i in range(8) for j in range(8) if (i + j) % 3 == 0] + [[5]]
    return found


class Drafting(First):
    """Drafts in vLLM's first runner. With asynchronous scheduling its host takes drafts of the last step for tokens."""

    def __init__(self, *given, behind=False, **more):
        processors = MinTokensLogitsProcessor
        super().__init__(*given, params_of=asked(), processors=processors, drafts=object(), **more)
        self.behind, self.last = behind, {}

    def speculate(self, drafts):
        batch, unknown = self.batch, {name: self.last.get(name, 0) if self.behind else 0 for name in drafts}
        for name, count in unknown.items():
            self.requests[name].output_token_ids.extend([-1] * count)
        self.enter([*drafts])
        for name, count in unknown.items():
            batch.num_tokens_no_spec[batch.req_id_to_index[name]] += count
        drafts, unknown = ({name: each[name] for name in batch.req_ids} for each in (drafts, unknown))
        counts, rows, lengths = np.array([len(each) for each in drafts.values()]), [], []
        for name, given in drafts.items():
            batch.update_req_spec_token_ids(self.requests[name], {name: given})
            tokens = [each for each in self.tokens(name) if each >= 0]
            rows += [logits_of(name, [*tokens, *given[:j]]) for j in range(len(given) + 1)]
            lengths.append(len(tokens) + len(given))
        self.sampler.runner.seq_lens[: len(lengths)] = torch.tensor(lengths)
        ids = torch.tensor([token for given in drafts.values() for token in (0, *given)], dtype=torch.int32)
        fields = {"arange_np": np.arange(512), "_arange_scratch": np.empty(512, np.int64), "device": "cpu"}
        of = SimpleNamespace(**fields, input_ids=SimpleNamespace(gpu=ids))
        of._get_cumsum_and_arange = partial(GPUModelRunner._get_cumsum_and_arange, of)
        metadata = GPUModelRunner._calc_spec_decode_metadata(of, counts.astype(np.int32), (counts + 1).cumsum())
        found = self.sampler.verify(metadata, None, torch.stack(rows), batch.sampling_metadata)
        tokens, table = RejectionSampler.parse_output(found.sampled_token_ids, WIDTH, (), found.logprobs_tensors)
        outputs, first = {}, 0
        for name, some, count in zip(drafts, tokens, unknown.values(), strict=True):
            of, logprobs = self.requests[name], [None] * len(some)
            if (most := of.sampling_params.logprobs) is not None:
                part = [torch.from_numpy(each[first : first + len(some)]) for each in table[:3]]
                logprobs = [
                    (ids[: most + 1].tolist(), bits(scores[: most + 1]), int(rank))
                    for ids, scores, rank in zip(*part, strict=True)
                ]
            first += len(some)
            outputs[name] = [*zip(some, logprobs, strict=True)]
            del of.output_token_ids[len(of.output_token_ids) - count :]
            of.output_token_ids.extend(some)
            batch.num_tokens_no_spec[batch.req_id_to_index[name]] = len(self.tokens(name))
            self.last[name] = len(drafts[name]) + 1 - len(some)
        return outputs


class DraftingV2(Second):
    """Drafts in vLLM's second runner; chunks of its verification have few rows."""

    def __init__(self, *given):
        super().__init__(*given, params_of=asked())
        it = self.verifier = object.__new__(model_runner.RejectionSampler)
        it.sampler, it.num_speculative_steps, it.enable_adaptive_verification = self.sampler, MOST_DRAFTS, False
        named = SimpleNamespace(gpu=torch.zeros(99, dtype=torch.int32)), SimpleNamespace(gpu=torch.zeros(99, 2))
        state = SimpleNamespace(num_token_ids=named[0], token_ids=named[1], max_num_token_ids=self.most_named)
        self.sampler.logprob_token_ids_state, self.sampler.return_sampling_mask = state, False
        self.sampler.logits_processors = [SimpleNamespace(apply=self.discourage)]

    def most_named(self, rows):
        return 2 * (self.at.get("named") in rows)

    def enter(self, names):
        super().enter(names)
        if "named" in names:
            state, at = self.sampler.logprob_token_ids_state, self.at["named"]
            state.num_token_ids.gpu[at] = 2
            state.token_ids.gpu[at] = torch.tensor(asked()["named"].logprob_token_ids)

    def discourage(self, logits, at):
        """Count tokens of "few", drafts included, as vLLM's processors find them."""
        for row, (where, local) in enumerate(zip(at.expanded_idx_mapping, at.expanded_local_pos, strict=True)):
            if int(where) == self.at.get("few"):
                every = [*self.outputs["few"], *at.input_ids[row + 1 - int(local) : row + 1].tolist()]
                for token in every:
                    logits[row, token % 8 :: 8] -= 2
        return logits

    def speculate(self, drafts):
        self.enter([*drafts])
        counts = [len(given) + 1 for given in drafts.values()]
        every = [(name, given[:j]) for name, given in drafts.items() for j in range(len(given) + 1)]
        rows = [logits_of(name, [*self.tokens(name), *given]) for name, given in every]
        at, starts = np.array([self.at[name] for name in drafts]), np.array([0, *counts]).cumsum()
        local = torch.cat([torch.arange(count) for count in counts])
        before = torch.tensor([len(self.tokens(name)) - 1 for name in drafts]).repeat_interleave(torch.tensor(counts))
        ids = torch.tensor([token for name, given in drafts.items() for token in (self.tokens(name)[-1], *given)])
        where = torch.from_numpy(at.repeat(counts))
        batch = SimpleNamespace(num_reqs=len(at), cu_num_logits_np=starts, cu_num_logits=torch.from_numpy(starts).int())
        batch.idx_mapping, batch.idx_mapping_np = torch.from_numpy(at), at
        batch.expanded_idx_mapping, batch.expanded_local_pos = where, local
        batch.seq_lens_cpu_upper_bound = torch.full((len(at),), 99)
        most = max(self.sampler.sampling_states.max_num_logprobs(at), -1)
        found = self.verifier._verify_in_chunks(torch.stack(rows), batch, None, ids.int(), before + local, 9, most)
        tokens, amounts, table = found[:3]
        outputs = {}
        for i, (name, amount) in enumerate(zip(drafts, amounts.tolist(), strict=True)):
            assert (tokens[i, amount:] == -1).all()
            some, logprobs = tokens[i, :amount].tolist(), [None] * amount
            if (count := asked()[name].logprobs) is not None:
                first = table.cu_num_generated_tokens[i]
                assert first == starts[i]
                logprobs = [
                    (table[0][row, : count + 1].tolist(), bits(table[1][row, : count + 1]), int(table[2][row]))
                    for row in range(first, first + amount)
                ]
            outputs[name] = [*zip(some, logprobs, strict=True)]
            self.outputs[name] += some
        return outputs


# The second runner of vLLM 0.26 has no drafts that are served.
RUNNERS = ["first", "asynchronous", *(["second"] if hasattr(model_runner.RejectionSampler, "_verify") else [])]


@pytest.fixture(params=RUNNERS)
def drafting(request, monkeypatch, alone):
    """A runner with drafts, one without, and the names of requests, of which batches are made."""
    if request.param == "second":
        installed(monkeypatch)
        return DraftingV2, DraftingV2, [["greedy", "plain", "sets", "few", "named"]]
    behind = request.param == "asynchronous"
    plain = partial(First, params_of=asked(), processors=MinTokensLogitsProcessor)
    together = ["greedy", "plain", "sets", "late", *([] if behind else ["few", "few greedy", "few words"])]
    return partial(Drafting, behind=behind), plain, [together, ["named"], ["allowed"]]


def compared(rng, drafting):
    """Whether requests have the same outputs with drafts, for each batch."""
    with_drafts, without, batches = drafting
    for names in batches:
        given = prompts(rng, names)
        server, found = with_drafts(given), {name: [] for name in names}
        wanted = alone_of(without, given, steps=STEPS + MOST_DRAFTS)
        while any(len(each) < STEPS for each in found.values()):
            left = [name for name in rng.permutation(names).tolist() if len(found[name]) < STEPS]
            some = [name for name in left if rng.random() < 0.7] or left
            drafts = {}
            for name in some:
                rest = [token for token, _ in wanted[name][len(found[name]) :]][: rng.integers(0, MOST_DRAFTS + 1)]
                drafts[name] = [token if rng.random() < 0.8 else int(rng.integers(WIDTH)) for token in rest]
            drafts[some[0]] = drafts[some[0]] or [3]  # vLLM verifies only where there is a draft
            for name, outputs in server.speculate(drafts).items():
                found[name] += outputs
        yield all(found[name][:STEPS] == wanted[name][:STEPS] for name in names)


def test_tokens_and_log_probabilities_are_those_without_drafts(drafting):
    rng = fresh(drafting[2])
    for _ in range(3):
        assert all(compared(rng, drafting))


def without_positions(rows, it, at, counts):
    found = rows(it, at, counts)
    return replace(found, position=it.runner.seq_lens[torch.from_numpy(found.of)].long())


def without_drafts(discourage, it, logits, at):
    return discourage(it, logits, replace(at, expanded_local_pos=torch.zeros_like(at.expanded_local_pos)))


def takes_all(verified, drawn, drafts, starts, most):
    return verified(torch.where(drafts < 0, drawn, drafts), drafts, starts, most)


FAULTS = [
    ("first", sampler.ExactSampler, "rows", without_positions),
    ("first", sampler, "verified", takes_all),
    ("first", InputBatch, "update_req_spec_token_ids", lambda *_: None),
    ("asynchronous", sampler.ExactSampler, "_unstopped", lambda _, it, logits, at: logits),
    ("second", sampler_v2, "verified", takes_all),
    ("second", DraftingV2, "discourage", without_drafts),
]


@pytest.mark.parametrize(
    ("drafting", "where", "name", "fault"), [each for each in FAULTS if each[0] in RUNNERS], indirect=["drafting"]
)
def test_a_fault_is_seen(drafting, monkeypatch, where, name, fault):
    rng, real = fresh(name), getattr(where, name)
    monkeypatch.setattr(where, name, lambda *given: fault(real, *given))
    assert not all(all(compared(rng, drafting)) for _ in range(3))


class Drafter:
    """A draft model of the first runner, which is the target."""

    _enable_probabilistic_draft_probs, parallel_drafting, _sample_from_logits = True, False, None

    def propose(self, *, server, common_attn_metadata, num_rejected_tokens_gpu):
        found = {name: [] for name in server.batch.req_ids}
        for _ in range(MOST_DRAFTS):
            logits = torch.stack([logits_of(name, [*server.tokens(name), *given]) for name, given in found.items()])
            guesses, probabilities = self._sample_from_logits(logits, server.batch.sampling_metadata)
            assert probabilities is None
            for given, guess in zip(found.values(), guesses.tolist(), strict=True):
                given.append(guess)
        return found


def test_a_draft_model_draws_with_the_numbers_of_the_target(alone):
    rng, names = fresh(), ["greedy", "plain", "sets"]
    server, drafter = Drafting(prompts(rng, names)), Drafter()
    server.sampler.guide(drafter)
    runner = server.sampler.runner
    server.step(names)
    runner.seq_lens[:3] = torch.tensor([len(server.tokens(name)) - 1 for name in server.batch.req_ids])
    rejected = None
    for _ in range(3):
        common = SimpleNamespace(seq_lens=runner.seq_lens[:3])
        drafts = drafter.propose(server=server, common_attn_metadata=common, num_rejected_tokens_gpu=rejected)
        wrong = str(rng.choice(names))
        drafts[wrong][1] = WIDTH - 1 - drafts[wrong][1]
        found = server.speculate(drafts)
        assert {name: len(each) for name, each in found.items()} == dict.fromkeys(names, MOST_DRAFTS + 1) | {wrong: 2}
        rejected = torch.tensor([MOST_DRAFTS + 1 - len(found[name]) for name in server.batch.req_ids])


def test_the_second_runner_draws_drafts_with_the_numbers_of_the_target(monkeypatch, alone):
    installed(monkeypatch)
    rng, names = fresh(), ["greedy", "plain", "late"]
    server = Second(prompts(rng, names), params_of=asked())
    server.enter(names)
    logits = torch.stack([logits_of(name, server.tokens(name)) for name in names])
    where = torch.tensor([server.at[name] for name in names])
    last, at = torch.tensor([len(server.tokens(name)) - 1 for name in names]), server.sampler.sampling_states
    found = sampler_v2.guess(logits, where, at.temperature.gpu, at.seeds.gpu, last, is_drafting=True).tolist()
    assert found == [token for token, _ in server.step(names).values()]


def test_rows_of_no_request_and_a_structured_output_with_nothing_but_its_end_left(alone):
    servers = [Drafting({"structured": [5]}), First({"structured": [5]}, None, asked(), MinTokensLogitsProcessor)]
    for server in servers:
        server.enter(["structured"])
    metadata, logits = servers[0].batch.sampling_metadata, torch.full((1, WIDTH), -torch.inf)
    logits[0, 3] = 1.0
    rows = servers[0].sampler.rows(metadata, np.ones(1, np.int64))
    found, wanted = (
        server.sampler.apply_logits_processors(logits.clone(), at, predict_bonus_token=False)
        for server, at in zip(servers, (rows, metadata), strict=True)
    )
    assert torch.equal(found, wanted)
    # vLLM measures memory with these.
    some = {"temperature": torch.full((9,), 0.5), "spec_token_ids": [[]] * 9, "output_token_ids": [[]] * 9}
    nothing = {name: torch.zeros(9) for name in ("frequency_penalties", "presence_penalties", "repetition_penalties")}
    metadata = replace(metadata, **some, **nothing, all_random=False, max_num_logprobs=None)
    dummy = SpecDecodeMetadata.make_dummy([[0]] * 9, torch.device("cpu"))
    found = servers[0].sampler.verify(dummy, None, torch.zeros(18, WIDTH), metadata)
    assert found.sampled_token_ids.shape == (9, 2)


def drafts_of(**more):
    return SimpleNamespace(**{"method": "draft_model", "rejection_sample_method": "standard"} | more)


def test_a_worker_verifies_drafts_and_guides_a_draft_model(served):
    config, drafter = config_of(speculative_config=drafts_of()), Drafter()
    runner = worker_of(config).model_runner
    assert runner.rejection_sampler == runner.sampler.verify
    for draws in (True, False):
        drafter._enable_probabilistic_draft_probs = draws
        drafter._sample_from_logits = None
        worker_of(config, drafter=drafter)
        assert (drafter._sample_from_logits is not None) is draws


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("speculative_config.method", {"speculative_config": drafts_of(method="eagle3")}),
        ("rejection_sample_method", {"speculative_config": drafts_of(rejection_sample_method="block")}),
        ("reasoning_parser", {"structured_outputs_config": SimpleNamespace(reasoning_parser="qwen3")}),
        ("reasoning_parser", {"reasoning_config": object()}),
        ("enable_batch_sharded_sampling", {"parallel_config": SimpleNamespace(enable_batch_sharded_sampling=True)}),
    ],
)
def test_drafts_that_would_change_tokens_are_refused_by_name(served, field, more):
    with pytest.raises(InvalidProblem, match=field):
        worker_of(config_of(**{"speculative_config": drafts_of()} | more))
