"""Responses of the engine in this process, against clean forward passes of transformers and float64 arithmetic."""

import dataclasses
import random

import pytest
import torch

pytest.importorskip("transformers")

from p3o_train.engine import RolloutFailed
from p3o_train.hf_model import hf_config, transformers
from p3o_train.local_engine import LocalEngine
from p3o_train.model import ModelConfig
from p3o_train.recording import Request, Sampling, VersionSpan
from p3o_train.token_sampler import invert

pytestmark = pytest.mark.host_only
VOCABULARY = 40
CONFIG = ModelConfig(
    num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=VOCABULARY, init_std=0.2
)
LENGTHS = (3, 1, 7, 5, 2, 7)
REQUESTS = [
    Request(f"sample-{index}", tuple((5 * index + step) % VOCABULARY for step in range(length)), 100 + index)
    for index, length in enumerate(LENGTHS)
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny matrices: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference_model(config: ModelConfig = CONFIG, seed: int = 0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers().AutoModelForCausalLM.from_config(hf_config(config)).eval()
    return model


@pytest.fixture(scope="module")
def model():
    return reference_model()


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def engine(model):
    made = LocalEngine(hf_config(CONFIG))
    made.update_weights(weights_of(model), version=4)
    return made


@torch.no_grad()
def clean_logits(model, request, response) -> torch.Tensor:
    """[R, V] float64 of one whole sequence, without a cache, padding or a batch."""
    ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
    return model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].double()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.2])
def test_log_probs_are_those_of_a_clean_forward_pass(engine, model, temperature):
    sampling = Sampling(max_new_tokens=9, temperature=temperature)
    for request, response in zip(REQUESTS, engine.generate(REQUESTS, sampling), strict=True):
        truth = (clean_logits(model, request, response) / temperature).log_softmax(-1)
        chosen = truth.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
        # float32 logits of size 5 from sums in another order: some ten roundings of 3e-7, divided by 0.6
        assert (torch.tensor(response.log_probs, dtype=torch.float64) - chosen).abs().max() <= 1e-5


def test_raw_log_probs_are_those_before_the_temperature(engine, model):
    """The same tokens, and log-probs of softmax(z)."""
    sampling = Sampling(max_new_tokens=9, temperature=0.6)
    raw = LocalEngine(hf_config(CONFIG), records_raw=True)
    raw.update_weights(weights_of(model), version=4)
    scaled = engine.generate(REQUESTS, sampling)
    for request, response, other in zip(REQUESTS, raw.generate(REQUESTS, sampling), scaled, strict=True):
        assert response.recording.log_prob_kind == "raw" and response.token_ids == other.token_ids
        truth = clean_logits(model, request, response).log_softmax(-1)
        chosen = truth.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
        assert (torch.tensor(response.log_probs, dtype=torch.float64) - chosen).abs().max() <= 1e-5
        assert (torch.tensor(other.log_probs, dtype=torch.float64) - chosen).abs().max() > 0.1


@pytest.mark.parametrize("family", [{"qkv_bias": True}, {"qk_norm": True, "head_dim": 16}, {"tie_embeddings": True}])
def test_every_family_samples(family):
    config = dataclasses.replace(CONFIG, **family)
    model = reference_model(config)
    engine = LocalEngine(hf_config(config))
    engine.update_weights(weights_of(model), 0)
    for request, response in zip(REQUESTS, engine.generate(REQUESTS, Sampling(4)), strict=True):
        truth = clean_logits(model, request, response).log_softmax(-1)
        chosen = truth.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
        assert (torch.tensor(response.log_probs, dtype=torch.float64) - chosen).abs().max() <= 1e-5  # as above


def test_a_response_depends_on_its_seed_and_not_on_its_batch(model):
    sampling = Sampling(max_new_tokens=12)
    together, by_two = LocalEngine(hf_config(CONFIG)), LocalEngine(hf_config(CONFIG), max_batch_tokens=2 * 19)
    for engine in (together, by_two):
        engine.update_weights(weights_of(model), 0)
    truth = [response.token_ids for response in together.generate(REQUESTS, sampling)]
    alone = [together.generate([request], sampling)[0].token_ids for request in REQUESTS]
    backwards = [response.token_ids for response in together.generate(REQUESTS[::-1], sampling)][::-1]
    assert alone == backwards == truth
    assert [response.token_ids for response in by_two.generate(REQUESTS, sampling)] == truth
    # a shorter response is the beginning of the longer one
    assert [response.token_ids for response in together.generate(REQUESTS, Sampling(5))] == [ids[:5] for ids in truth]


def test_tokens_per_batch_are_bounded(model, engine, monkeypatch):
    bounded = LocalEngine(hf_config(CONFIG), max_batch_tokens=20)
    bounded.update_weights(weights_of(model), 0)
    sizes = []
    generate = type(model).generate
    monkeypatch.setattr(
        type(model), "generate", lambda self, ids, **rest: sizes.append(tuple(ids.shape)) or generate(self, ids, **rest)
    )
    assert len(bounded.generate(REQUESTS, Sampling(3))) == len(REQUESTS)
    assert sum(rows for rows, _ in sizes) == len(REQUESTS)
    assert max(rows * (prompt + 3) for rows, prompt in sizes) == 20  # two prompts of 7
    with pytest.raises(ValueError, match=r"'sample-2'.* 21 tokens, more than max_batch_tokens=20"):
        bounded.generate(REQUESTS, Sampling(14))


def test_seeds_differ_in_all_of_their_bits(engine):
    seeds = [0, 1, 1 << 32, 1 << 62]
    requests = [Request("", (1, 2, 3), seed) for seed in seeds]
    assert len({tuple(response.token_ids) for response in engine.generate(requests, Sampling(8))}) == len(seeds)


def test_frequencies_follow_the_distribution(engine, model):
    draws, temperature = 4000, 0.8
    requests = [Request("", (3, 1, 4), seed) for seed in range(draws)]
    responses = engine.generate(requests, Sampling(1, temperature=temperature))
    counts = torch.bincount(torch.tensor([response.token_ids[0] for response in responses]), minlength=VOCABULARY)
    probabilities = (clean_logits(model, requests[0], responses[0])[0] / temperature).softmax(-1)
    # Bernstein: one token is this far off with probability 2 exp(-15), any of 40 with 2.5e-5; the seeds are fixed
    spread = (2 * draws * probabilities * (1 - probabilities) * 15).sqrt() + 10
    assert ((counts - draws * probabilities).abs() <= spread).all()


def test_inversion_is_exact_at_the_boundaries():
    probabilities = torch.tensor([0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    rows = probabilities.log().expand(len(uniforms), -1)
    assert invert(rows, uniforms).tolist() == [0, 0, 2, 2, 3, 3]


def test_the_last_number_below_one_picks_a_possible_token():
    # rounding leaves sums below and above 1; whatever they are, no token of probability 0 may be chosen
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 60, generator=generator, dtype=torch.float64)
    logits[:, 40:] = -torch.inf
    tokens = invert(logits.log_softmax(-1), torch.full((500,), 1 - 2**-53, dtype=torch.float64))
    assert (tokens < 40).all() and (tokens > 30).any()


def test_numbers_come_from_pythons_generator(engine, model):
    """One for each token, in their order: what makes a response repeatable by others."""
    (response,) = engine.generate([Request("", (1, 2), 77)], Sampling(6))
    stream = random.Random(77)
    cumulative = clean_logits(model, Request("", (1, 2), 77), response).softmax(-1).cumsum(-1)
    expected = [int((row <= stream.random()).sum()) for row in cumulative]
    assert response.token_ids == expected


@pytest.mark.parametrize(
    "knobs",
    [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.8, "top_k": 6, "min_p": 0.05}, {"top_p": 1e-9}],
    ids=str,
)
def test_truncated_sets_and_log_probs(engine, model, knobs):
    sampling = Sampling(max_new_tokens=6, temperature=0.9, **knobs)
    for request, response in zip(REQUESTS, engine.generate(REQUESTS, sampling), strict=True):
        assert response.recording.log_prob_kind == "truncated"
        rows = (clean_logits(model, request, response) / 0.9).softmax(-1).tolist()
        kept = [kept_by_hand(row, sampling) for row in rows]
        assert response.recording.kept_token_ids == tuple(kept)
        for row, ids, token, log_prob in zip(rows, kept, response.token_ids, response.log_probs, strict=True):
            expected = torch.tensor(row[token] / sum(row[one] for one in ids), dtype=torch.float64).log().item()
            assert log_prob == pytest.approx(expected, abs=1e-5)  # float32 logits, as above


def kept_by_hand(probabilities: list[float], sampling: Sampling) -> tuple[int, ...]:
    ranked = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    kept, before = [], 0.0
    for place, token in enumerate(ranked):
        in_top_k = sampling.top_k < 0 or place < sampling.top_k
        if in_top_k and before < sampling.top_p and probabilities[token] >= sampling.min_p * probabilities[ranked[0]]:
            kept.append(token)
        before += probabilities[token]
    return tuple(sorted(kept))


def test_a_response_ends_with_the_first_stop_token(engine):
    free = engine.generate(REQUESTS, Sampling(20))
    stops = (free[0].token_ids[4], free[3].token_ids[7])
    stopped = engine.generate(REQUESTS, Sampling(20, stop_token_ids=stops))
    reasons = set()
    for before, after in zip(free, stopped, strict=True):
        at = next((place for place, token in enumerate(before.token_ids) if token in stops), None)
        assert after.token_ids == (before.token_ids if at is None else before.token_ids[: at + 1])
        assert len(after.log_probs) == len(after.token_ids)
        assert after.recording.finish_reason == ("length" if at is None else "stop")
        assert after.recording.version_spans == (VersionSpan(4, 0, len(after.token_ids)),)
        reasons.add(after.recording.finish_reason)
    assert reasons == {"stop", "length"}  # or the prompts say nothing


def test_special_tokens_of_the_configuration_end_nothing(model):
    config = hf_config(CONFIG)
    config.eos_token_id, config.bos_token_id, config.pad_token_id = list(range(VOCABULARY)), 1, 2
    engine = LocalEngine(config)
    engine.update_weights(weights_of(model), 0)
    responses = engine.generate(REQUESTS, Sampling(6))
    assert [len(response.token_ids) for response in responses] == [6] * len(REQUESTS)
    assert config.eos_token_id == list(range(VOCABULARY))


def test_recording(engine):
    sampling = Sampling(3, temperature=0.7)
    recording = engine.generate(REQUESTS[:1], sampling)[0].recording
    assert (recording.engine, recording.engine_version) == ("local", transformers().__version__)
    assert recording.sampling == sampling and recording.log_prob_kind == "scaled" and recording.source == "output"
    assert recording.kept_token_ids is None and recording.pause_mode is None


def test_global_random_streams_stay_where_they_are(model):
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    engine = LocalEngine(hf_config(CONFIG))
    engine.update_weights(weights_of(model), 0)
    first = engine.generate(REQUESTS, Sampling(4, top_p=0.9))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    torch.manual_seed(4)
    assert engine.generate(REQUESTS, Sampling(4, top_p=0.9)) == first


def test_new_weights_change_version_and_responses(model):
    engine = LocalEngine(hf_config(CONFIG))
    engine.update_weights(weights_of(model), 1)
    old = engine.generate(REQUESTS, Sampling(6))
    other = reference_model(seed=9)
    given = weights_of(other)
    engine.update_weights(given, 2)
    for weight in given.values():  # the engine has copies
        weight.zero_()
    new = engine.generate(REQUESTS, Sampling(6))
    assert [response.recording.version_spans for response in new] == [(VersionSpan(2, 0, 6),)] * len(REQUESTS)
    assert [response.token_ids for response in new] != [response.token_ids for response in old]
    truth = clean_logits(other, REQUESTS[0], new[0]).log_softmax(-1)
    assert new[0].log_probs[0] == pytest.approx(truth[0, new[0].token_ids[0]].item(), abs=1e-5)  # as above


NAN = float("nan")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda weights: weights.pop("model.norm.weight"), r"1 \(model.norm.weight\) missing, none left over"),
        (lambda weights: weights.update({"extra": torch.zeros(1)}), r"none missing, 1 \(extra\) left over"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(31)}), r"shape \(32,\), got .*\(31,\)"),
        (lambda weights: weights["lm_head.weight"][0].fill_(NAN), "version 5 must be finite.*first lm_head.weight"),
    ],
)
def test_wrong_weights_are_refused_and_the_old_ones_stay(model, engine, change, message):
    before = engine.generate(REQUESTS, Sampling(3))
    wrong = weights_of(reference_model(seed=9))
    change(wrong)
    with pytest.raises(ValueError, match=message):
        engine.update_weights(wrong, 5)
    assert engine.generate(REQUESTS, Sampling(3)) == before


@torch.no_grad()
def test_logits_that_overflow_are_an_error_with_what_was_finished(model):
    engine = LocalEngine(hf_config(CONFIG), max_batch_tokens=8)
    # one column of the head overflows for the prompt of sample-3 and, with all before it in this order, not for others
    hidden = {
        index: model.model(torch.tensor([REQUESTS[index].prompt_ids])).last_hidden_state[0, -1] for index in (2, 5, 3)
    }
    fits = (hidden[3].abs() > 1.2) & (hidden[2].abs() < 1.1) & (hidden[5].abs() < 1.1)
    weights = weights_of(model)
    weights["lm_head.weight"][0] = 0
    weights["lm_head.weight"][0, int(fits.nonzero()[0])] = 3e38
    engine.update_weights(weights, 6)
    with pytest.raises(
        RolloutFailed, match=r"'sample-3': .*response token 0 are not finite; weights of version 6"
    ) as caught:
        engine.generate(REQUESTS, Sampling(1))
    finished = caught.value.finished
    assert sorted(finished) == [2, 5]  # the longest prompts, which are sampled first
    assert all(response == engine.generate([REQUESTS[index]], Sampling(1))[0] for index, response in finished.items())


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
        ({"temperature": NAN}, "temperature must be positive"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_k": 0}, "top_k must be -1"),
        ({"min_p": 1.5}, "min_p must be in"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"stop_token_ids": (VOCABULARY,)}, r"stop_token_ids must be in \[0, 40\)"),
        ({"frequency_penalty": 0.1}, "frequency_penalty must be 0.0, got 0.1"),
        ({"presence_penalty": 0.1}, "presence_penalty must be"),
        ({"repetition_penalty": 1.1}, "repetition_penalty must be 1.0"),
        ({"min_new_tokens": 1}, "min_new_tokens must be 0"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias must be"),
        ({"other": {"typical_p": 0.9}}, "other must be"),
    ],
)
def test_knobs_that_are_not_applied_are_refused(engine, knobs, message):
    with pytest.raises(ValueError, match=f"sampling.{message}"):
        engine.generate(REQUESTS, Sampling(**{"max_new_tokens": 2} | knobs))


@pytest.mark.parametrize(
    "request_, message",
    [
        (Request("who", (), 0), "'who': prompt_ids must hold at least one token"),
        (Request("who", (1, VOCABULARY), 0), r"'who': prompt_ids must be in \[0, 40\).* got 40"),
        (Request("who", (-1,), 0), "got -1"),
        (Request("who", (1,), -1), r"'who': seed must be in \[0, 2\^63\), got -1"),
    ],
)
def test_impossible_requests_are_refused(engine, request_, message):
    with pytest.raises(ValueError, match=message):
        engine.generate([REQUESTS[0], request_], Sampling(2))


def test_no_requests_no_responses(engine):
    assert engine.generate([], Sampling(2)) == []


def test_an_engine_without_weights_or_closed_samples_nothing(model):
    engine = LocalEngine(hf_config(CONFIG))
    with pytest.raises(RuntimeError, match="call update_weights"):
        engine.generate(REQUESTS, Sampling(2))
    engine.update_weights(weights_of(model), 0)
    engine.close()
    for call in (lambda: engine.generate(REQUESTS, Sampling(2)), lambda: engine.update_weights({}, 1)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    with pytest.raises(ValueError, match="max_batch_tokens must be at least 1, got 0"):
        LocalEngine(hf_config(CONFIG), max_batch_tokens=0)
