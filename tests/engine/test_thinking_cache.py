"""Prompts that are thought about start from pages of their like: to the bits of a cold cache."""

import pytest
import torch

from tests.support.cases import drain, whole
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.thinking import all_bits, engine_of, exact, params, prompt_of, thinking_model
from tinyspec.thinking.thinker import NOT_FINITE, Thinker

PROMPT = prompt_of(80, 80)


def cached(output):
    return output.completions[0].stats.cached_prompt_tokens


def turns(model, cache, wanted=exact, **settings):
    """Bits and cached tokens of three turns, each with the answers before it."""
    with engine_of(model, prefix_cache=cache, **settings) as engine:
        history, found = prompt_of(53, 2), []
        for turn in range(3):
            history = history + prompt_of(11 + turn, turn)
            output = engine.generate([history], wanted(20))[0]
            found.append((all_bits(output), cached(output)))
            history = history + output.completions[0].token_ids
        assert whole(engine)
    return [bits for bits, _ in found], [count for _, count in found]


@pytest.mark.crossed(8)
@pytest.mark.parametrize("chunk_size", [8, 6, 24])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_chat(kind, chunk_size):
    """Nothing of what was decoded is taken: the second turn thinks about the first answer."""
    model = thinking_model(kind, chunk_size=chunk_size)
    cold, none = turns(model, False)
    for settings in ({}, {"thinking_window": 1}, {"max_rows": 28}):
        warm, counts = turns(model, True, **settings)
        assert warm == cold
        # Pages of 16 within the prompt before, as far as there are whole chunks.
        before = (0, 64, 96)
        assert counts == [n // 16 * 16 // chunk_size * chunk_size for n in before]
    assert none == [0, 0, 0]
    plain = turns(model, True, lambda tokens: exact(tokens, thinking=False))
    assert [bits for _, bits in plain[0]] != [bits for _, bits in cold], "control"


def test_the_same_prompt():
    model = thinking_model()
    with engine_of(model) as engine:
        cold, warm = (engine.generate([PROMPT], exact(prompt_logprobs=False))[0] for _ in range(2))
        assert all_bits(warm) == all_bits(cold) and cached(cold) == 0 and cached(warm) == 79
        assert warm.completions[0].stats.thinking_passes == 0
        # A sampled one, and several completions.
        many = engine.generate([PROMPT], params(num_return_sequences=2))[0]
        assert many.thoughts == cold.thoughts and cached(many) == 79
        # A part of it, and more.
        part, more = engine.generate([PROMPT[:40], PROMPT + PROMPT], exact())
        assert (cached(part), cached(more)) == (32, 80)
        assert part.thoughts == cold.thoughts[:5] and more.thoughts[:10] == cold.thoughts
    with engine_of(model, prefix_cache=False) as engine:
        assert all_bits(engine.generate([PROMPT[:40]], exact())[0]) == all_bits(part)
        assert all_bits(engine.generate([PROMPT + PROMPT], exact())[0]) == all_bits(more)


def test_cached_values_are_used():
    """Control: other values in a cached page, or another state beside it, show."""
    model = thinking_model()
    longer = PROMPT + prompt_of(16, 5)
    with engine_of(model) as engine:
        for spoil in ("nothing", "page", "state"):
            engine.admission.forget_pages()
            cold = all_bits(engine.generate([longer], exact())[0])
            engine.admission.forget_pages()
            engine.generate([PROMPT], exact())
            with torch.inference_mode():
                if spoil == "page":
                    engine.runner.cache.v[0].mul_(1.5)
                if spoil == "state":
                    made = [m for page in engine.admission.prefix._thoughts.values() for m in page]
                    last = next(m for m in made if m.thought.chunk == 9)
                    assert last.state is not None
                    last.state.mul_(3)
            found = engine.generate([longer], exact())[0]
            assert cached(found) == 80 and (all_bits(found) == cold) == (spoil == "nothing")


@pytest.mark.parametrize("first", [True, False])
def test_plain_and_thinking_requests_share_nothing(first):
    model = thinking_model()
    with engine_of(model, prefix_cache=False) as engine:
        alone = [all_bits(engine.generate([PROMPT], exact(thinking=t))[0]) for t in (True, False)]
    with engine_of(model) as engine:
        order = (first, not first, first)
        found = [engine.generate([PROMPT], exact(thinking=thinking))[0] for thinking in order]
    assert [cached(output) for output in found] == [0, 0, 79]
    assert [all_bits(output) for output in found] == [alone[not thinking] for thinking in order]


def test_of_plain_thinking_requests_only_canonical_pages():
    """A deterministic one takes no page that was computed in any pass, nor its thoughts."""
    model = thinking_model()
    with engine_of(model) as engine:
        engine.generate([PROMPT], params())
        exactly = engine.generate([PROMPT], exact())[0]
        assert cached(exactly) == 0
        assert cached(engine.generate([PROMPT], params())[0]) == 79


def test_thoughts_of_evicted_pages_are_dropped():
    model = thinking_model()
    with engine_of(model, num_pages=9) as engine:
        for n in range(6):
            engine.generate([prompt_of(70, n)], exact(4))
        prefix = engine.admission.prefix
        assert set(prefix._thoughts) == set(prefix.keys) and len(prefix) <= 9
        assert whole(engine)
        engine.release()
        assert not prefix._thoughts


@pytest.mark.parametrize("wanted", [exact, params])
@pytest.mark.parametrize("chunk_size, place", [(40, 0), (12, 1)])
def test_logits_that_are_not_finite_once(monkeypatch, wanted, chunk_size, place):
    """By what was computed ahead: the chunk runs again without it, behind shared pages that hold a
    part of it, and sees nothing of it in its own page."""
    model = thinking_model(chunk_size=chunk_size)
    longer = PROMPT[:64] + prompt_of(66, 9)
    with engine_of(model, prefix_cache=False) as engine:
        cold = all_bits(engine.generate([longer], wanted())[0])
    first_tokens, broken = Thinker.first_tokens, []
    with engine_of(model) as engine:
        engine.generate([PROMPT], wanted())

        def broken_once(thinker, chunks):
            found = first_tokens(thinker, chunks)
            if broken or len(found) <= place or any(token != 1 for token in found[:place]):
                return found
            (sequence,) = engine.admission.running
            known = sequence.request.thoughts.known + place * chunk_size
            broken.append(known)
            for pool in (*engine.runner.cache.k, *engine.runner.cache.v):
                for position in range(max(known, sequence.frozen), 16 * len(sequence.pages)):
                    pool[sequence.pages[position // 16], position % 16] = torch.nan
            found[place] = NOT_FINITE
            return found

        monkeypatch.setattr(Thinker, "first_tokens", broken_once)
        output = engine.generate([longer], wanted())[0]
        assert broken and cached(output) == 64 // chunk_size * chunk_size
        assert output.completions[0].error is None and all_bits(output) == cold
        assert whole(engine)


class Loud(ShapeSensitiveLinear):
    """Passes of other sizes than the canonical one think otherwise."""

    def forward(self, x):
        return super().forward(x) * (1.0 if x.shape[:-1].numel() == 16 else 1.2)


def test_thoughts_of_fast_passes_outlive_a_preemption():
    """A plain request thinks in fast passes and is computed again in canonical ones: its pages are
    no start for a deterministic one."""
    model = thinking_model()
    replace_linears(model.backbone, Loud)
    with engine_of(model, prefix_cache=False) as engine:
        cold = all_bits(engine.generate([PROMPT], exact())[0])
    with engine_of(model, verify="padded") as engine:
        engine.generate([[5]], exact(1))
        name = engine.add_request(PROMPT, params(20))
        request = engine.tracker.requests[name]
        while request.thoughts.unthought:
            engine.step()
        fast = [made.thought.token_ids for made in request.thoughts.found]
        assert fast != [thought.token_ids for thought in cold[0]]
        beside = engine.add_request(prompt_of(6, 3), exact(60, thinking=False))
        while not engine.tracker.requests[beside].sequences[0].num_generated:
            engine.step()
        engine.admission.preempt_all()
        engine.admission.prefix.drop_plain()  # as if others had taken its pages
        engine.step()
        while request.sequences[0].pending > 1:
            engine.step()
        assert request.sequences[0].canonical >= 80
        drain(engine)
        warm = engine.generate([PROMPT], exact())[0]
        assert cached(warm) == 0 and all_bits(warm) == cold
        assert cached(engine.generate([PROMPT], exact())[0]) == 79
