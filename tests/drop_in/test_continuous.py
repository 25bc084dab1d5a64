"""``generate_batch`` of a patched model: transformers' types, with the tokens of ``generate``.

Controls: what transformers' own continuous batching ignores changes the tokens here; logits that
depend on the row count show in plain requests."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from tests.support.drop_in import PAD, AfterEven, AtMultiples, greedy, own, patched, random_ids
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import tiny

PROMPTS = [random_ids(5, 1), random_ids(12, 2), random_ids(8, 3)]
SAMPLED = {"do_sample": True, "temperature": 2.0, "top_k": 0}
FINISHED = RequestStatus.FINISHED


@pytest.fixture(scope="module")
def served():
    with patched(tiny()) as model:
        yield model


def config(**settings):
    return GenerationConfig(**{"max_new_tokens": 8, "pad_token_id": PAD, **settings})


def rows(model, prompts=PROMPTS, **settings):
    """What ``generate`` adds to each prompt, up to the end that ``generate_batch`` gives it."""
    return model.generate(prompts, **settings)[:, max(map(len, prompts)) :].tolist()


def tokens(outputs):
    return [output.generated_tokens for output in outputs]


def test_outputs_are_transformers_own(served):
    given = config(num_return_sequences=2, **SAMPLED)
    cb = ContinuousBatchingConfig(return_logprobs=True)
    outputs = served.generate_batch(PROMPTS, given, cb, seed=[4, 5, 6])
    names = [f"req_{n}{child}" for n in range(3) for child in ("__child#0", "")]
    assert list(outputs) == names == [output.request_id for output in outputs.values()]
    assert tokens(outputs.values()) == rows(served, generation_config=given, seed=[4, 5, 6])
    for number, output in enumerate(outputs.values()):
        assert type(output) is GenerationOutput and output.is_finished()
        assert {field.name for field in fields(output)} <= vars(output).keys()
        assert output.prompt_ids == PROMPTS[number // 2] and output.seed == 4 + number // 2
        assert (output.status, output.error) == (FINISHED, None)
        assert len(output.logprobs) == 8 and max(output.logprobs) <= 0
        begun, ended = output.lifespan
        assert output.created_time <= begun < ended
    plain = served.generate_batch(PROMPTS[:1], given)["req_0"]
    assert plain.logprobs == []
    assert served.generate_batch([]) == {}


def test_tokens_are_those_of_generate(served):
    """Of a seed in an argument, and of torch's. Greedy ones: below."""
    for more in ({"seed": 3}, {}):
        torch.manual_seed(0)
        expected = rows(served, generation_config=config(**SAMPLED), **more)
        torch.manual_seed(0)
        found = served.generate_batch(PROMPTS, config(**SAMPLED), **more)
        assert tokens(found.values()) == expected
    assert expected != rows(served, generation_config=config(**SAMPLED), seed=3)


def test_what_continuous_batching_ignores_is_honoured(served):
    """Processors, criteria, EOS and the default top_k."""
    plain = tokens(served.generate_batch(PROMPTS, config()).values())
    for settings in (
        {"logits_processor": [AfterEven()]},
        {"stopping_criteria": [AtMultiples()]},
        {"eos_token_id": plain[0][2]},
        {"repetition_penalty": 5.0, "no_repeat_ngram_size": 2},
    ):
        found = tokens(served.generate_batch(PROMPTS, config(), **settings).values())
        assert found[0] != plain[0]
        assert found == [greedy(own(), prompt, **settings) for prompt in PROMPTS]
    sampled = config(do_sample=True, temperature=5.0, max_new_tokens=1)
    top = own()(torch.tensor([PROMPTS[0]])).logits[0, -1].topk(50).indices.tolist()
    for seed in range(5):
        (output,) = served.generate_batch(PROMPTS[:1], sampled, seed=seed).values()
        assert output.generated_tokens[0] in top


def test_generate_with_a_paged_cache(served, caplog):
    """transformers hands such a call to ``generate_batch``, pads included."""
    ids = torch.tensor([PROMPTS[0], PROMPTS[1][:5]])
    with caplog.at_level(logging.ERROR):
        found = served.generate(ids, cache_implementation="paged", max_new_tokens=4)
    assert torch.equal(found[0, :, :5], ids) and not caplog.records
    assert found[0, :, 5:].tolist() == [greedy(own(), row, 4) for row in ids.tolist()]


def test_processors_are_called_for_each_row_alone(served):
    seen = []

    def odd(ids, scores):
        seen.append(ids.tolist())
        scores[:, ids.shape[1] % 2 :: 2] = -torch.inf
        return scores

    given = {"generation_config": config(), "logits_processor": [odd]}
    found = tokens(served.generate_batch(PROMPTS, **given).values())
    assert {len(ids) for ids in seen} == {1} and {len(ids[0]) for ids in seen} >= {5, 12, 8}
    assert found == rows(served, **given | {"logits_processor": [[odd]] * 3})
    # Control: for all rows at once it sees pads, and lengths with them.
    seen.clear()
    assert found != rows(served, **given)
    assert {len(ids) for ids in seen} == {3} and {len(ids[0]) for ids in seen} == set(range(12, 20))


WRONG = [
    ({"prompt": []}, ValueError, r"input_ids\[1\]=\[\]"),
    ({"prompt": "text"}, ValueError, "input_ids="),
    ({"prompt": [1, 2.5]}, ValueError, r"prompt\[1\]=2.5"),
    ({"prompt": [1, 128]}, ValueError, "prompt token id=128"),
    ({"seed": -1}, ValueError, "seed=-1"),
    ({"streamer": object()}, ValueError, "streamer"),
    ({"no_such": 1}, NotImplementedError, "no_such"),
    ({"inputs_embeds": torch.ones(1, 2, 3)}, NotImplementedError, "inputs_embeds"),
    ({"num_beams": 2}, NotImplementedError, "beam"),
    ({"max_new_tokens": 10_000}, NotImplementedError, "positions"),
]


def raises(ids, scores):
    raise KeyError("mine")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bad_requests_name_the_field(served):
    """Nothing of what is not served runs elsewhere, and a request that fails raises."""
    for wrong, error, message in WRONG:
        settings = {"prompt": PROMPTS[0], **wrong}
        prompt = settings.pop("prompt")
        with pytest.raises(error, match=message):
            served.generate_batch([PROMPTS[0], prompt], **settings)
    with pytest.raises(KeyError, match="mine"):
        served.generate_batch(PROMPTS, config(), logits_processor=[raises])
    found = served.generate_batch(PROMPTS, config(), progress_bar=True)
    assert tokens(found.values()) == [greedy(own(), prompt) for prompt in PROMPTS]


def test_a_base_of_seeds():
    """Of a config, also of continuous batching's: equal prompts differ, and a script repeats."""

    def script(*configs):
        with patched(tiny()) as model:
            found = [model.generate_batch(PROMPTS[:1] * n, *configs) for n in (4, 2)]
            return tokens([*found[0].values(), *found[1].values()])

    based = script(config(seed=9, **SAMPLED))
    assert based == script(config(**SAMPLED), ContinuousBatchingConfig(seed=9))
    assert based == script(config(seed=9, **SAMPLED)) != script(config(seed=8, **SAMPLED))
    assert len(set(map(tuple, based))) == 6


def test_deterministic_bits_alone_and_in_a_crowd():
    """Control: this model's plain logits depend on the row count."""
    asked = {"generation_config": config(**SAMPLED), "seed": 7}
    logprobs = {"continuous_batching_config": ContinuousBatchingConfig(return_logprobs=True)}
    crowd = [random_ids(3 + n, n) for n in range(6)]
    with patched(replace_linears(tiny(), ShapeSensitiveLinear)) as model:
        for deterministic in (True, False):
            asked = {"generation_config": config(**SAMPLED), "seed": 7}
            asked["deterministic"] = deterministic
            found = []
            for others in ([], crowd):
                outputs = model.generate_batch(PROMPTS[:2] + others, **asked, **logprobs)
                made = list(outputs.values())[:2]
                found.append([(o.generated_tokens, list(map(repr, o.logprobs))) for o in made])
            assert (found[0] == found[1]) is deterministic
            if deterministic:
                assert [row for row, _ in found[0]] == rows(model, PROMPTS[:2], **asked)
