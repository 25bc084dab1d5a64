"""The peers' own scenarios: one prompt many times, shared prefixes, decode against prefill.

A family compares what a request gives in two situations and yields (where, expected, found). With
the flag all are equal. Control: without it, on a model whose linears are sensitive to the row
count, every family finds a difference.
"""

from dataclasses import replace

import pytest

from tests.support.budget import first
from tests.support.cases import DTYPES, KINDS, bits_of, engine_of, greedy, model_of, run, text
from tests.support.mixes import bits, plain, solo

SAMPLED = {"temperature": 0.9, "seed": 17, "top_p": 0.95}


def asked(tokens, deterministic, **style):
    wanted = greedy(tokens, **style)
    return wanted if deterministic else plain(wanted)


def one_prompt_many_times(model, deterministic):
    """n copies of one request in one call, and n completions of it."""
    for style in ({}, SAMPLED):
        request = (text(19, seed=2), asked(12, deterministic, **style))
        with engine_of(model) as engine:
            alone = bits(solo(engine, request))
        for count, cache in ((11, False), (13, True)):
            with engine_of(model, page_size=8, prefix_cache=cache) as engine:
                copies = bits_of(run(engine, [request] * count))
            for place, found in enumerate(copies):
                yield f"copy {place} of {count}, cache {cache}, {style}", alone, found
        several = replace(request[1], num_return_sequences=4)
        with engine_of(model, page_size=8) as engine:
            found = bits(solo(engine, (request[0], several)))
        yield f"first of 4 completions, {style}", alone, found[:1]


def shared_prefixes(model, deterministic):
    """Prompts that share 0 to 97 tokens, with the cache off, on and cold, on and warm."""
    common = text(97, seed=3)
    requests = [
        (common[:shared] + text(own, seed=shared + own), asked(8, deterministic))
        for shared in (0, 7, 16, 33, 96, 97)
        for own in (1, 9)
    ]
    with engine_of(model, prefix_cache=False) as engine:
        alone = [bits(solo(engine, request)) for request in requests]
    for cache, again in ((False, 0), (True, 0), (True, 1)):
        with engine_of(model, page_size=16, prefix_cache=cache) as engine:
            for _ in range(again):
                run(engine, requests)
            warmed = engine.stats().cached_prompt_tokens
            together = bits_of(run(engine, requests))
            hits = engine.stats().cached_prompt_tokens - warmed
        # Cold: what the call's own prompts share. Warm: all full pages of every prompt.
        assert (hits > 0) == cache and (not again or hits > sum(len(p) for p, _ in requests) / 2)
        for place, found in enumerate(together):
            yield f"prompt {place}, cache {cache}, warm {again}", alone[place], found


def decode_against_prefill(model, deterministic):
    """What was decoded token by token, scored in one piece and generated on from each place."""
    styles = ({}, SAMPLED, {"repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 4})
    requests = [
        (text(9 + 8 * n, seed=n), asked(18, deterministic, **style))
        for n, style in enumerate(styles)
    ]
    with engine_of(model, page_size=8) as engine:
        outputs = run(engine, requests)
        tokens = [output.completions[0].token_ids for output in outputs]
        decoded = [output.completions[0].logprobs for output in outputs]
    with engine_of(model, page_size=8) as engine:
        scored = engine.score([p for p, _ in requests], tokens, [s for _, s in requests])
    yield from zip(("scored",) * len(styles), decoded, scored, strict=True)
    for kept in (1, 13):
        rest = [
            (prompt + own[:kept], replace(wanted, max_new_tokens=18 - kept))
            for (prompt, wanted), own in zip(requests, tokens, strict=True)
        ]
        with engine_of(model, page_size=8) as engine:
            regenerated = [bits(output)[0][:2] for output in run(engine, rest)]
        for place, found in enumerate(regenerated):
            expected = (tokens[place][kept:], decoded[place][kept:])
            yield f"request {place} from token {kept}", expected, found


FAMILIES = {
    family.__name__: family
    for family in (
        one_prompt_many_times,
        shared_prefixes,
        decode_against_prefill,
    )
}


@pytest.mark.crossed(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", first(2, FAMILIES, 2))
def test_same_bits(family, kind, dtype):
    compared = list(FAMILIES[family](model_of(kind, dtype), deterministic=True))
    assert len(compared) >= 4
    assert [where for where, expected, found in compared if expected != found] == []


@pytest.mark.crossed(0.5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_control_without_the_flag_bits_differ(family, dtype):
    compared = FAMILIES[family](model_of("shape-sensitive", dtype), deterministic=False)
    assert any(expected != found for _, expected, found in compared)
