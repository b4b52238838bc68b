"""vLLM's samplers by skuda's ops: tokens and log-probabilities do not depend on the batch, and are those of the ops."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import fresh
from vllm import SamplingParams
from vllm.config import CacheConfig, VllmConfig
from vllm.config.attention import AttentionConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import worker_base
from vllm.v1.worker.cpu import buffer_utils
from vllm.v1.worker.gpu import buffer_utils as gpu_buffer_utils
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample import prompt_logprob, states
from vllm.v1.worker.gpu.sample import sampler as second
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm_layers import described

import skuda.torch as st
from skuda.registry.errors import InvalidProblem
from skuda.serving import tokens as by_ops
from skuda.vllm import exact, exact_model, sampler, sampler_v2
from skuda.vllm.attention import CACHE_DTYPE
from skuda.vllm.config import SkudaVllmConfig

WIDTH, MOST, STEPS = 300, 16, 6


def asked():
    """What requests ask for."""
    found = {
        "greedy": {"temperature": 0, "logprobs": 2},
        "plain": {"seed": 5},
        "cool": {"seed": 2**62 + 3, "temperature": 0.7, "logprobs": 0},
        "top-k": {"seed": -9, "temperature": 1.3, "top_k": 3, "logprobs": 4},
        "top-p": {"seed": 0, "temperature": 0.9, "top_p": 0.8},
        "both": {"seed": 77, "temperature": 1.9, "top_k": 40, "top_p": 0.6, "logprobs": 1},
        "min-p": {"seed": 8, "temperature": 0.6, "min_p": 0.1, "logprobs": 3},
        "any": {"temperature": 1.1},
    }
    return {name: SamplingParams(**each) for name, each in found.items()}


def prompts(rng, names=None):
    return {name: rng.integers(0, WIDTH, rng.integers(1, 30)).tolist() for name in names or asked()}


def logits_of(name, tokens):
    """The logits of a model: they follow from the tokens of a request. Some are equal. "Few" has few likely ones."""
    seed = abs(hash((*name.encode(), *tokens))) % 2**31
    found = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) * 3
    found[:8] += 9 * name.startswith("few")
    return found.round(decimals=1) if seed % 2 else found


class First:
    """Requests in the batch of vLLM's first runner, which takes one out if it has no token in a step."""

    def __init__(self, prompts, mode="raw_logprobs", params_of=None, processors=MinPLogitsProcessor, drafts=None):
        batch = {
            "device": torch.device("cpu"),
            "vocab_size": WIDTH,
            "block_sizes": [128],
            "max_num_blocks_per_req": [9],
        }
        if "kernel_block_sizes" in InputBatch.__init__.__annotations__:  # vLLM 0.26
            batch["kernel_block_sizes"] = [128]
        config = VllmConfig()
        config.scheduler_config.max_num_seqs = MOST
        processors = LogitsProcessors([processors(config, torch.device("cpu"), is_pin_memory=False)])
        self.batch = InputBatch(MOST, 512, 512, **batch, logitsprocs=processors)
        self.requests = {}
        for name in prompts:
            params = (params_of or asked())[name]
            more = {"mm_features": [], "generator": None, "block_ids": ([0],), "num_computed_tokens": 0}
            if params.seed is not None and params.temperature:
                more["generator"] = torch.Generator().manual_seed(params.seed % 2**63)
            self.requests[name] = CachedRequestState(
                name, list(prompts[name]), sampling_params=params, output_token_ids=[], **more
            )
        model = SimpleNamespace(logprobs_mode=mode, seed=0)
        runner = {"input_batch": self.batch, "requests": self.requests, "model_config": model}
        lengths = torch.zeros(MOST, dtype=torch.int32)
        self.sampler = sampler.ExactSampler(SimpleNamespace(**runner, speculative_config=drafts, seq_lens=lengths))

    def enter(self, names):
        batch = self.batch
        for name in [each for each in batch.req_ids if each not in names]:
            batch.remove_request(name)
        for name in names:
            if name not in batch.req_id_to_index:
                batch.add_request(self.requests[name])
        batch.condense()
        batch.refresh_metadata()
        assert sorted(batch.req_ids) == sorted(names)

    def step(self, names):
        self.enter(names)
        batch = self.batch
        rows = {name: logits_of(name, self.tokens(name)) for name in batch.req_ids}
        found = self.sampler(logits=torch.stack([*rows.values()]), sampling_metadata=batch.sampling_metadata)
        tokens, table, outputs = found.sampled_token_ids[:, 0].tolist(), found.logprobs_tensors, {}
        assert not batch.generators
        for row, name in enumerate(batch.req_ids):
            count, logprobs = self.requests[name].sampling_params.logprobs, None
            if count is not None:
                ids, scores, ranks = table[:3]
                logprobs = ids[row, : count + 1].tolist(), bits(scores[row, : count + 1]), int(ranks[row])
            outputs[name] = tokens[row], logprobs
            self.requests[name].output_token_ids.append(tokens[row])
            batch.num_tokens_no_spec[row] += 1
        return outputs

    def tokens(self, name):
        request = self.requests[name]
        return [*request.prompt_token_ids, *request.output_token_ids]


class Second:
    """Requests in the tables of vLLM's second runner."""

    def __init__(self, prompts, mode="raw_logprobs", params_of=None):
        assert model_runner.Sampler is sampler_v2.ExactSamplerV2
        it = self.sampler = object.__new__(model_runner.Sampler)
        it.logprobs_mode, it.sampling_states = mode, states.SamplingStates(MOST, WIDTH)
        it.needs_logits_processing = np.ones(MOST, bool)
        it.logits_processors, nothing = [], lambda *_: None
        it.thinking_budget_state = SimpleNamespace(apply=nothing)
        it.logit_bias_state = SimpleNamespace(apply_logit_bias=nothing)
        it.penalties_state = SimpleNamespace(apply_penalties=nothing)
        it.bad_words_state = SimpleNamespace(apply_bad_words=nothing)
        it.logprob_token_ids_state = SimpleNamespace(max_num_token_ids=lambda _: 0)
        self.prompts, self.at, self.outputs = prompts, {}, {name: [] for name in prompts}
        self.params = params_of or asked()

    def enter(self, names):
        it = self.sampler.sampling_states
        for name in names:
            if name not in self.at:
                self.at[name] = MOST - 1 - len(self.at)
                it.add_request(self.at[name], self.params[name])
        it.apply_staged_writes()

    def step(self, names):
        self.enter(names)
        it = self.sampler.sampling_states
        rows = np.array([self.at[name] for name in names])
        raw = torch.stack([logits_of(name, self.tokens(name)) for name in names])
        last = torch.tensor([len(self.tokens(name)) - 1 for name in names])
        ids, given = torch.zeros(len(names), dtype=torch.int32), (rows, last)
        more = ()
        if "idx_mapping" in second.Sampler.sample.__annotations__:  # vLLM 0.33
            given, more = (torch.from_numpy(rows), *given), (rows,)
        found, processed = self.sampler.sample(raw.clone(), torch.from_numpy(rows), *given, ids, ids, *more)
        of = processed if self.sampler.logprobs_mode.startswith("processed") else raw
        count, outputs = max(it.max_num_logprobs(rows), 0), {}
        state = self.sampler.logprob_token_ids_state
        named = {"logprob_token_ids_state": state, "max_per_req_token_ids": state.max_num_token_ids(rows)}
        named |= {"expanded_idx_mapping": torch.from_numpy(rows)}
        mode = {"logits_mode": self.sampler.logprobs_mode.endswith("logits")}
        table = second.compute_topk_scores(of, count, found, **named, **mode)
        for row, name in enumerate(names):
            count, logprobs = self.params[name].logprobs, None
            if count is not None:
                found_ids, scores, ranks = table[:3]
                logprobs = found_ids[row, : count + 1].tolist(), bits(scores[row, : count + 1]), int(ranks[row])
            outputs[name] = int(found[row]), logprobs
            self.outputs[name].append(int(found[row]))
        return outputs

    def tokens(self, name):
        return [*self.prompts[name], *self.outputs[name]]


def bits(x):
    return x.view(torch.int32).tolist()


@pytest.fixture(params=[First, Second])
def runner(request, monkeypatch, alone):
    if request.param is Second:
        installed(monkeypatch)
    return request.param


def installed(monkeypatch):
    """The second runner's sampler on a CPU, for one test."""
    monkeypatch.setattr(gpu_buffer_utils, "UvaBuffer", buffer_utils.UvaBuffer)
    # Of vLLM's own function for min-p, which Triton compiles, the elementwise meaning.
    monkeypatch.setattr(states, "apply_min_p", min_p)
    for module, name in (
        (second, "compute_topk_scores"),
        (prompt_logprob, "compute_topk_scores"),
        (prompt_logprob, "compute_token_logprobs"),
        (states, "apply_temperature"),
        (model_runner, "Sampler"),
    ):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, getattr(module, name))
    sampler_v2.install()


def min_p(logits, where, least):
    p = logits.softmax(-1)
    logits.masked_fill_(p < least[where][:, None] * p.amax(-1, keepdim=True), -torch.inf)


def generated(runner, prompts, schedule, **more):
    """Tokens and log-probabilities of each request when requests have tokens by a schedule."""
    server, found = runner(prompts, **more), {name: [] for name in prompts}
    for names in schedule:
        for name, output in server.step(names).items():
            found[name].append(output)
    return {name: outputs for name, outputs in found.items() if outputs}


def alone_of(runner, prompts, steps=STEPS, **more):
    found = {}
    for name in prompts:
        found |= generated(runner, prompts, [[name]] * steps, **more)
    return found


def schedules(rng, names):
    """Schedules by which each request has as many tokens."""
    yield [names] * STEPS
    yield [names[::-1]] * STEPS
    left = dict.fromkeys(names, STEPS)
    found = []
    while left:
        some = [name for name in rng.permutation([*left]).tolist() if rng.random() < 0.6]
        for name in some:
            left[name] -= 1
        left = {name: count for name, count in left.items() if count}
        found.append(some) if some else None
    yield found


def test_a_request_has_the_same_tokens_in_any_batch_and_schedule(runner):
    rng = fresh(runner.__name__)
    given = prompts(rng)
    if runner is Second:
        del given["any"]  # its seed is vLLM's
    wanted = alone_of(runner, given)
    for schedule in schedules(rng, [*given]):
        assert generated(runner, given, schedule) == wanted


def test_tokens_and_log_probabilities_are_those_of_skuda_torch(runner):
    given = prompts(fresh(runner.__name__))
    seen = generated(runner, given, [[*given]] * STEPS)
    for name, params in asked().items():
        tokens = list(given[name])
        for token, logprobs in seen[name]:
            logits = logits_of(name, tokens)
            if params.seed is not None and not params.min_p:
                key = {"seed": params.seed, "sequence": 0, "position": len(tokens)}
                more = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
                assert token == st.sample(logits[None], **key, **more)[0]
            if not params.temperature:
                assert token == logits.argmax()
            if logprobs is not None:
                ids, scores, rank = logprobs
                of = logits.expand(len(ids), WIDTH)
                assert scores == bits(st.log_probs(of, torch.tensor(ids))[0])
                order = sorted(range(WIDTH), key=lambda i: (-logits[i].item(), i))
                assert ids == [token, *order[: params.logprobs]]
                assert rank == (logits >= logits[token]).sum()
            tokens.append(token)


def test_requests_of_one_seed_differ_by_position_or_name(alone):
    given = prompts(fresh())
    tokens = [token for token, _ in generated(First, given, [["any"]] * STEPS)["any"]]
    assert tokens == [token for token, _ in generated(First, given, [["any"]] * STEPS)["any"]]
    runner = First(given).sampler.runner
    seeds = {runner.requests[name].sampling_params.seed for name in given}
    runner.requests |= {"more": runner.requests["any"]}
    keys = [sampler.ExactSampler(runner)._seed(name) for name in ("any", "more")]
    assert len({*keys, *seeds}) == len(seeds) + 2
    runner.model_config.seed = 1
    assert sampler.ExactSampler(runner)._seed("any") != keys[0]
    logits = torch.zeros(2000, WIDTH)
    position, seed = torch.arange(2000), torch.full((2000,), 4)
    assert len(by_ops.draw(logits, seed, position, None, None).unique()) > WIDTH / 2
    wide = [torch.full((2000,), number) for number in (2**32 + 2, 0)]  # both mean all
    assert torch.equal(*(by_ops.draw(logits, seed, position, top_k, None) for top_k in wide))


def test_seeds_are_those_of_requests_of_any_sign(alone):
    assert [by_ops.signed(seed) for seed in (3, -3, 2**63, 2**64 - 1)] == [3, -3, -(2**63), -1]


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_other_modes_have_the_same_bits_in_any_batch(runner, mode):
    rng = fresh(runner.__name__, mode)
    given = prompts(rng)
    for each in ("top-k", "top-p", "both", "any"):  # their sets are vLLM's
        del given[each]
    wanted = alone_of(runner, given, mode=mode)
    for schedule in schedules(rng, [*given]):
        assert generated(runner, given, schedule, mode=mode) == wanted
    ids, scores, _ = wanted["cool"][0][1]
    logits = logits_of("cool", given["cool"])
    divisor = None if mode.startswith("raw") else asked()["cool"].temperature
    if mode.endswith("logprobs"):
        assert scores == bits(st.log_probs(logits[None], torch.tensor(ids), temperature=divisor)[0])
    else:
        assert scores == bits(logits[ids] if divisor is None else logits[ids] / torch.tensor(divisor))


def test_with_processed_scores_a_drawn_token_is_in_the_set_of_vllm(runner):
    given = {"top-k": prompts(fresh(runner.__name__))["top-k"]}
    for mode in ("processed_logprobs", "processed_logits"):
        tokens = [*given["top-k"]]
        for token, (ids, scores, _) in alone_of(runner, given, mode=mode)["top-k"]:
            logits = logits_of("top-k", tokens)
            kept = logits >= logits.topk(3).values[-1]  # vLLM keeps all that are equal
            finite = torch.tensor(scores, dtype=torch.int32).view(torch.float32).isfinite()
            assert kept[token]
            assert torch.equal(finite, kept[ids])
            tokens.append(token)


def test_log_probabilities_of_prompts(monkeypatch, alone):
    rng = fresh()
    logits = torch.from_numpy(rng.standard_normal((150, WIDTH))).float().round(decimals=1)
    tokens, count = torch.from_numpy(rng.integers(0, WIDTH, 150)), 5
    wanted = bits(st.log_probs(logits, tokens)[0])
    installed(monkeypatch)
    first = First(prompts(rng)).sampler
    scores = first.compute_logprobs(logits)  # as the first runner does, chunk by chunk
    ids, found, ranks = first.gather_logprobs(scores, count, tokens)[:3]
    assert bits(found[:, 0]) == wanted
    assert torch.equal(ids[:, 0].long(), tokens)
    parts = [first.gather_logprobs(first.compute_logprobs(each), count, at) for each, at in pairs(logits, tokens)]
    assert torch.equal(torch.cat([each[0] for each in parts]), ids)
    assert bits(torch.cat([each[1] for each in parts])) == bits(found)
    assert torch.equal(ranks, (scores >= scores.gather(1, tokens[:, None])).sum(1))
    run = prompt_logprob.compute_prompt_logprobs_with_chunking
    of_second = run(tokens, logits, lambda rows: rows, count)
    assert bits(of_second[1][:, 0]) == wanted
    assert bits(of_second[1]) == bits(found)


def pairs(logits, tokens):
    return zip(logits.split([1, 70, 79]), tokens.split([1, 70, 79]), strict=True)


def test_named_tokens_have_exact_log_probabilities(alone, monkeypatch):
    rng = fresh()
    logits = torch.from_numpy(rng.standard_normal((3, WIDTH))).float()
    names = {0: [5, 9, 250], 2: [7]}
    server = First(prompts(rng))
    server.step(["greedy", "plain", "cool"])
    metadata = replace(server.batch.sampling_metadata, logprob_token_ids=names, max_num_logprobs=None)
    found = server.sampler(logits.clone(), metadata)
    table, drawn = found.logprobs_tensors, found.sampled_token_ids.long()
    wanted = {row: [drawn[row].item(), *ids] for row, ids in ({0: [], 1: [], 2: []} | names).items()}
    for row, ids in wanted.items():
        assert table[0][row, : len(ids)].tolist() == ids
        exact_ones = st.log_probs(logits[row].expand(len(ids), WIDTH), torch.tensor(ids))[0]
        assert bits(table[1][row, : len(ids)]) == bits(exact_ones)
    counts, table = torch.tensor([9, 3, 0, 1]), torch.zeros(4, 8, dtype=torch.int32)
    table[1, :3], table[3, :1] = torch.tensor(names[0]), torch.tensor(names[2])
    held = SimpleNamespace(num_token_ids=SimpleNamespace(gpu=counts), token_ids=SimpleNamespace(gpu=table))
    more = {"logprob_token_ids_state": held, "expanded_idx_mapping": torch.tensor([1, 2, 3])}
    for count in (0, 2, 6):
        got = sampler_v2.compute_topk_scores(logits, count, drawn[:, 0], None, max_per_req_token_ids=3, **more)
        for row, named in wanted.items():
            ids = [*named, *logits[1].topk(count).indices.tolist()] if row == 1 else named
            assert got.logprob_token_ids[row, : len(ids)].tolist() == ids
            exact_ones = st.log_probs(logits[row].expand(len(ids), WIDTH), torch.tensor(ids))[0]
            assert bits(got.logprobs[row, : len(ids)]) == bits(exact_ones)
            assert (got.logprobs[row, len(ids) :] == -torch.inf).all()


def test_a_row_without_a_distribution_gives_a_known_id(runner, monkeypatch):
    told, server, healthy = [], runner(prompts(fresh())), logits_of
    monkeypatch.setattr(sampler.logger, "warning", lambda line, *values: told.append(line % values))
    monkeypatch.setattr(sampler.UNDEFINED, "__dict__", by_ops.Undefined(sampler.logger, "").__dict__)
    server.step(names := ["greedy", "both", "plain", "top-k"])
    assert not told
    assert not sampler.UNDEFINED.rows
    # A NaN alone, as of one row of the head, and a row of them, as of a token in an exact model.
    poisoned = {"greedy": (9, torch.nan), "both": (slice(None), torch.nan), "plain": (4, torch.inf)}

    def with_poison(name, tokens):
        found = healthy(name, tokens)
        if name in poisoned:
            found[poisoned[name][0]] = poisoned[name][1]
        return found

    with monkeypatch.context() as within:
        within.setitem(globals(), "logits_of", with_poison)
        found = server.step(names)
        assert [found[name][0] for name in poisoned] == [0, 0, 0]
        assert all(torch.tensor(each, dtype=torch.int32).view(torch.float32).isnan() for each in found["greedy"][1][1])
        assert sampler.UNDEFINED.rows == len(poisoned)
        server.step(names[:1])
        server.step(names)  # 3 + 1 + 3
    server.step(names)
    assert sampler.UNDEFINED.rows == 7
    assert [line.split()[1] for line in told] == ["3", "7"]


def test_largest_ones_are_in_order_and_the_lower_id_is_first():
    found = torch.tensor([[1.0, -0.5, 3.0, 3.0, -torch.inf], [-2.0, -2.0, 0.0, -7.0, -2.0]])
    assert by_ops.largest(found, 4).tolist() == [[2, 3, 0, 1], [2, 0, 1, 4]]
    assert by_ops.largest(found, 0).shape == (2, 0)
    assert by_ops.largest(found[:0], 3).shape == (0, 3)
    assert torch.equal(by_ops.largest(found.repeat(70, 1), 4), by_ops.largest(found, 4).repeat(70, 1))
    signs = torch.tensor([[-0.0, 0.0, torch.inf, -1e-45]])
    assert by_ops.largest(signs, 4).tolist() == [[2, 0, 1, 3]]


def test_vllm_measures_memory_with_rows_of_no_request(alone):
    server = First(prompts(fresh()))
    server.step(["plain", "both"])
    rows = torch.zeros(MOST, WIDTH)
    both = {"top_k": torch.full((MOST,), WIDTH - 1), "top_p": torch.full((MOST,), 0.9)}
    made = {"temperature": torch.full((MOST,), 0.5), "all_random": False, "logitsprocs": LogitsProcessors()}
    metadata = replace(server.batch.sampling_metadata, **both, **made, max_num_logprobs=None)
    assert server.sampler(logits=rows, sampling_metadata=metadata).sampled_token_ids.shape == (MOST, 1)


def config_of(**more):
    """A config of vLLM that asks for everything exact."""
    config = VllmConfig(
        cache_config=CacheConfig(cache_dtype=CACHE_DTYPE, block_size=128),
        attention_config=AttentionConfig(backend=AttentionBackendEnum.CUSTOM),
    )
    config.quant_config = SkudaVllmConfig.from_config({"quant_method": "skuda", "exact": True})
    model = SimpleNamespace(use_fp64_gumbel=False, logprobs_mode="raw_logprobs", seed=0)
    fields = {"model_config": model, "use_v2_model_runner": False, "lora_config": None} | more
    names = ("quant_config", "cache_config", "attention_config", "speculative_config", "scheduler_config")
    names = (*names, "structured_outputs_config", "parallel_config")
    return SimpleNamespace(**{name: getattr(config, name) for name in names} | fields)


def worker_of(config, device="cpu", **more):
    more |= {"device": torch.device(device), "load_model": lambda: None, "get_model": lambda: "it"}
    runner = SimpleNamespace(sampler=Sampler(), model_config=config.model_config, **more)
    worker = SimpleNamespace(vllm_config=config, model_runner=runner)
    worker.init_device = lambda: None
    wrapper = object.__new__(worker_base.WorkerWrapperBase)
    wrapper.__dict__ |= {"worker": worker, "vllm_config": VllmConfig(), "_worker_extension_cls": None}
    wrapper.init_device()
    return worker


def test_a_worker_has_the_sampler_if_the_config_asks_for_it(served, monkeypatch):
    assert type(worker_of(config_of()).model_runner.sampler) is sampler.ExactSampler
    for other in (SkudaVllmConfig(), SkudaVllmConfig(head=True), None):
        assert (
            type(worker_of(config_of(quant_config=other, speculative_config=object())).model_runner.sampler) is Sampler
        )
    installed(monkeypatch)
    model_runner.Sampler = second.Sampler
    assert type(worker_of(config_of(use_v2_model_runner=True)).model_runner.sampler) is Sampler
    assert model_runner.Sampler is sampler_v2.ExactSamplerV2
    made = []
    monkeypatch.setattr(exact_model, "make_exact", lambda model, config: made.append((model, config)))
    asks, other = config_of(), config_of(quant_config=SkudaVllmConfig(head=True))
    for config in (asks, other):
        worker_of(config).model_runner.load_model()
    assert made == [("it", asks)]
    hooked = worker_base.WorkerWrapperBase.init_device
    exact.register()
    assert worker_base.WorkerWrapperBase.init_device is hooked


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("attention_backend", {"attention_config": AttentionConfig()}),
        ("enable_lora", {"lora_config": object()}),
        ("kv_cache_dtype", {"cache_config": CacheConfig(block_size=128)}),
        ("watermark_config", {"watermark_config": object()}),
        ("use_fp64_gumbel", {"model_config": SimpleNamespace(use_fp64_gumbel=True)}),
        ("return_sampling_mask", {"model_config": SimpleNamespace(return_sampling_mask=True)}),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(served, field, more):
    with pytest.raises(InvalidProblem, match=field):
        worker_of(config_of(**more))


def test_exact_includes_the_head_and_refuses_floating_layers(served):
    from vllm.model_executor.layers.linear import ReplicatedLinear

    for of in ({"quant_method": "skuda"}, {"quant_method": "skuda", "weights": "int4"}, described()):
        found = SkudaVllmConfig.from_config(of | {"exact": True})
        assert found.exact
        assert found.head
    assert not SkudaVllmConfig.from_config(described()).exact
    left = {"quant_method": "skuda", "exact": True, "ignore": ["re:.*left"]}
    ReplicatedLinear(64, 64, quant_config=SkudaVllmConfig.from_config(left), prefix="it")
    with pytest.raises(InvalidProblem, match=r"left.*floating"):
        ReplicatedLinear(64, 64, quant_config=SkudaVllmConfig.from_config(left), prefix="left")
    with pytest.raises(InvalidProblem, match="exact"):
        SkudaVllmConfig.from_config({"quant_method": "skuda", "exact": "yes"})


def test_a_checkpoint_of_an_exact_model_is_served_exactly(served):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from skuda.torch.formats.int4 import StoredPacked
    from skuda.torch.formats.int8 import StoredInt8
    from skuda.torch.hf.scheme import ActivationScheme, Scheme, SchemeGroup
    from skuda.vllm.head import SkudaHeadMethod

    eight, four = (
        Scheme((SchemeGroup(("Linear",), ActivationScheme.DYNAMIC, stored),), own=stored.own, exact=True)
        for stored in (StoredInt8(), StoredPacked(128))
    )
    found = SkudaVllmConfig.from_config(eight.fields())
    assert found.exact
    assert SkudaVllmConfig.override_quantization_method(eight.fields(), None) == "skuda"
    assert SkudaVllmConfig.override_quantization_method(eight.fields(), "compressed-tensors") is None
    for fields, dtype in ((eight.fields(), torch.int8), (four.fields(), torch.uint8)):
        head = ParallelLMHead(128, 64, quant_config=SkudaVllmConfig.from_config(fields), prefix="lm_head")
        assert (type(head.quant_method), head.weight.dtype) == (SkudaHeadMethod, dtype)


def test_kernels_get_ready_for_every_number_of_rows_and_choice_of_sets(served, monkeypatch):
    found = list(by_ops.problems(WIDTH))
    sets = {(each.has_top_k, each.has_top_p) for each in found if each.op == "sample"}
    assert sets == {(k, p) for k in (False, True) for p in (False, True)}
    assert {each.op for each in found} == {"sample", "argmax", "log_softmax_at"}
    assert {(each.n, each.v) for each in found} == {(1, WIDTH)}
    seen = []
    monkeypatch.setattr(exact, "want", lambda problems, most: seen.append((list(problems), most)))
    monkeypatch.setattr(exact, "attend", lambda worker: None)
    config = config_of()
    config.scheduler_config.max_num_batched_tokens, config.model_config.get_vocab_size = 40, lambda: WIDTH
    worker_of(config)
    assert not seen
    worker_of(config, "cuda:1")
    assert seen == [(found, 40)]
