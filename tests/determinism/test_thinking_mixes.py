"""Random mixes of requests that think and that do not, in random engines: the bits of a cold one.

Control: tests/determinism/test_thinking.py::test_plain_bits_depend_on_what_else_runs.
"""

import random

import pytest

from tests.support.cases import drain, whole
from tests.support.mixes import Liar
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.thinking import KINDS, all_bits, engine_of, params, prompt_of, thinking_model


def model_of(rng):
    settings = {"chunk_size": rng.choice((1, 3, 5, 8, 8, 16))}
    settings |= {"max_thought_tokens": rng.choice((2, 4, 9)), "quiet": rng.choice((0.0, 2.0, 3.0))}
    model = thinking_model(rng.choice(list(KINDS)), **settings)
    return replace_linears(model, ShapeSensitiveLinear) if rng.random() < 0.5 else model


def requests_of(rng, seed):
    """Prompts that begin alike, so that they find pages of each other."""
    bases = [prompt_of(100, seed * 7 + n) for n in range(2)]
    found = []
    for n in range(rng.randint(3, 9)):
        prompt = rng.choice(bases)[: rng.randint(1, 100)]
        if rng.random() < 0.3:
            prompt = prompt + prompt_of(rng.randint(1, 30), seed + n)
        wanted = params(
            rng.randint(1, 20),
            deterministic=rng.random() < 0.6,
            thinking=rng.random() < 0.75,
            temperature=rng.choice((0.0, 0.9)),
            num_return_sequences=rng.choice((1, 1, 2)),
            prompt_logprobs=rng.random() < 0.2,
            logprobs=True,
            seed=n,
        )
        found.append((prompt, wanted))
    return found


def settings_of(rng, seed):
    found = {"thinking_window": rng.choice((1, 2, 3, 8, None)), "page_size": rng.choice((8, 16))}
    found["verify"] = rng.choice(("auto", "auto", "always", "padded"))
    for chance, name, values in (
        (0.5, "max_rows", (17, 20, 33, 64)),
        (0.4, "num_pages", (36, 48)),
        (0.4, "drafter", (Liar(seed),)),
        (0.3, "overlap", (True,)),
        (0.3, "max_sequences", (1, 2, 4)),
    ):
        if rng.random() < chance:
            found[name] = rng.choice(values)
    return found


def run(engine, requests, rng):
    """Outputs by number, of those that were not aborted; preempted now and then."""
    ids, done, aborted = {}, {}, set()
    for n in rng.sample(range(len(requests)), len(requests)):
        ids[n] = engine.add_request(*requests[n])
        for _ in range(rng.randint(0, 4)):
            done |= {output.request_id: output for output in engine.step()}
        if rng.random() < 0.1 and ids[n] in engine.tracker.requests:
            engine.abort(ids[n])
            aborted.add(n)
        if rng.random() < 0.1:
            engine.admission.preempt_all()
    done |= drain(engine)
    assert whole(engine)
    return {n: done[ids[n]] for n in ids if n not in aborted}


def said(output):
    return all_bits(output), output.prompt_logprobs


def test_a_random_mix():
    run_mix(1)


@pytest.mark.slow("random mixes", 4, cases=50)
def test_many_random_mixes(case_seed):
    run_mix(case_seed)


def run_mix(seed):
    rng = random.Random(seed)
    model, requests = model_of(rng), requests_of(rng, seed)
    exact = [n for n, (_, wanted) in enumerate(requests) if wanted.deterministic]
    with engine_of(model, prefix_cache=False, thinking_window=1) as engine:
        cold = {n: said(engine.generate([requests[n][0]], requests[n][1])[0]) for n in exact}
    with engine_of(model, **settings_of(rng, seed)) as engine:
        for _ in range(2):  # a cold cache, and a warm one
            outputs = run(engine, requests, rng)
            assert {n: said(outputs[n]) for n in exact if n in outputs} == {
                n: cold[n] for n in exact if n in outputs
            }
            assert all(c.error is None for o in outputs.values() for c in o.completions)
