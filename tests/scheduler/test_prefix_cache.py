"""What an engine may start from: prompts in a warm cache, to the bits of a cold one.

tests/scheduler/test_pages.py has the index itself.
"""

from dataclasses import replace

import pytest

from tests.support.cases import KINDS, drain, engine_of, greedy, model_of, one_by_one, text, whole
from tests.support.mixes import bits
from tests.support.pages import indexed_kv, page_kv
from tests.support.tiny import tiny
from tinyspec import SamplingParams

PROMPT = text(48, seed=1)


def tokens_cached(output):
    return [completion.stats.cached_prompt_tokens for completion in output.completions]


@pytest.mark.crossed(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_chat_reuses_its_earlier_turns(dtype, kind):
    """Outputs included; page_size 8, so all but the last 0 to 7 known tokens are reused."""
    found = {}
    for cache in (True, False):
        with engine_of(model_of(kind, dtype), page_size=8, prefix_cache=cache) as engine:
            history, found[cache] = text(21, seed=9), []
            for turn in range(3):
                # The newest token is committed, its KV not computed before the next turn.
                known = max(0, len(history) - 1) if turn else 0
                history += text(6, seed=turn)
                output = engine.generate([history], greedy(13, temperature=0.8, seed=turn))[0]
                (cached,) = tokens_cached(output)
                if cache and known and engine.served.recurrent:  # the last drafts moved no state
                    assert known // 8 * 8 - cached in (0, 8, 16)
                else:
                    assert cached == (known // 8 * 8 if cache else 0)
                history += output.completions[0].token_ids
                found[cache].append(bits(output))
            assert whole(engine)
    assert found[True] == found[False]


def half_each():
    """Two requests that share PROMPT, deterministic ones with bits to compare."""
    return [(PROMPT + text(5, seed=n), greedy(10, temperature=0.5, seed=n)) for n in range(2)]


def test_a_deterministic_request_starts_from_canonical_pages_only():
    """Plain ones serve plain ones; the deterministic computes its own, which serve everyone."""
    model = model_of("shape-sensitive")
    with engine_of(model, prefix_cache=False) as engine:
        alone = one_by_one(engine, half_each())
    with engine_of(model, page_size=16) as engine:
        wanted = SamplingParams(max_new_tokens=2)
        assert tokens_cached(engine.generate([PROMPT], wanted)[0]) == [0]
        theirs = indexed_kv(engine)
        assert [canonical for (_, canonical, _), _ in theirs] == [False] * 3
        assert tokens_cached(engine.generate([PROMPT], wanted)[0]) == [47]
        first, second = (bits_of_one(engine, request) for request in half_each())
        assert (first[0], second[0]) == ([0], [48])
        assert [first[1], second[1]] == alone
        mine = indexed_kv(engine)
        assert sum(canonical for (_, canonical, _), _ in mine) == 3
        # Control: the same tokens have other KV in the pages that it did not start from.
        for (_, _, digest), page in theirs:
            ours = next(p for (_, c, d), p in mine if c and d == digest)
            assert page_kv(engine, page) != page_kv(engine, ours)
        # Plain ones take the canonical pages now.
        output = engine.generate([[*PROMPT, 1]], wanted)[0]
        assert tokens_cached(output) == [48]


def bits_of_one(engine, request):
    output = engine.generate([request[0]], request[1])[0]
    return tokens_cached(output), bits(output)


def test_canonical_rows_behind_others_are_not_canonical():
    """A plain request, prefilled on the fast path, decodes in canonical passes of its neighbour:
    what it computes there rests on other KV, and is of no use to a deterministic request."""
    model = model_of("shape-sensitive")
    with engine_of(model, page_size=16, verify="padded") as engine:
        plain_id = engine.add_request(PROMPT, SamplingParams(max_new_tokens=20))
        engine.step()
        engine.add_request(text(9, seed=4), greedy(25))
        done = drain(engine)
        decoded = [r for r in engine.records if r.sequences.get("decode") == 2 and r.canonical]
        assert len(decoded) > 16
        prompt = PROMPT + done[plain_id].completions[0].token_ids
        assert tokens_cached(engine.generate([PROMPT], greedy(1))[0]) == [0]
        # Control: the page behind PROMPT is there, for plain requests.
        assert sum(canonical for _, canonical, _ in engine.admission.prefix.pages) == 5
        assert len(engine.admission.prefix) == 9
        found = bits_of_one(engine, (prompt, greedy(9)))
    with engine_of(model, prefix_cache=False) as engine:
        assert found == ([48], bits_of_one(engine, (prompt, greedy(9)))[1])


def test_control_pages_of_another_kind_would_change_bits():
    """With a plain request's pages indexed as canonical, a deterministic one has other bits."""
    model = model_of("shape-sensitive")
    request = ([*PROMPT, 7], greedy(10))
    with engine_of(model, page_size=16) as engine:
        alone = bits_of_one(engine, request)[1]
    with engine_of(model, page_size=16) as engine:
        engine.generate([PROMPT], SamplingParams(max_new_tokens=2))
        prefix = engine.admission.prefix
        forged = {(v, True, digest): page for (v, _, digest), page in prefix.pages.items()}
        prefix.pages, prefix.keys = forged, {page: key for key, page in forged.items()}
        cached, found = bits_of_one(engine, request)
    assert cached == [48]
    assert found != alone


@pytest.mark.parametrize("length", [47, 48, 49])
def test_a_prompt_that_is_there_already(length):
    """Also where it ends with its last page: only its last row runs, and writes nothing."""
    request = (text(length, seed=1), greedy(12, num_return_sequences=2, temperature=1.0, seed=1))
    with engine_of(model_of("shape-sensitive"), page_size=16, prefix_cache=False) as engine:
        alone = bits_of_one(engine, request)[1]
    with engine_of(model_of("shape-sensitive"), page_size=16) as engine:
        expected = min(length // 16 * 16, length - 1)
        for cached in ([0, length - 1], [expected, length - 1], [expected, length - 1]):
            assert bits_of_one(engine, request) == (cached, alone)
            before = indexed_kv(engine)
        assert len(before) >= 3 and indexed_kv(engine) == before


class Breaks:
    """A logits processor that raises at its tenth call."""

    stateless = False
    calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        if self.calls == 10:
            raise RuntimeError("tenth")
        return scores


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "plain"])
def test_what_a_failed_request_had_indexed_is_dropped(deterministic):
    """Also its earlier turns: nothing that it computed or started from is trusted."""
    wanted = replace(greedy(20), deterministic=deterministic)
    with engine_of(tiny(), page_size=4) as engine:
        engine.generate([PROMPT], greedy(1))
        (other,) = engine.generate([text(16, seed=3)], greedy(1))
        before = len(engine.admission.prefix)
        request_id = engine.add_request(PROMPT, replace(wanted, logits_processors=[Breaks()]))
        while len(engine.admission.prefix) < before + 2:
            engine.step()
        done = drain(engine)[request_id].completions[0]
        assert "tenth" in done.error and len(done.token_ids) == 9
        # Control: the pages of the other request are still there.
        assert len(engine.admission.prefix) == 4
        (output,) = engine.generate([text(16, seed=3)], greedy(1))
        assert tokens_cached(output) == [15] and bits(output) == bits(other)
        assert tokens_cached(engine.generate([PROMPT], greedy(1))[0]) == [0]
        assert whole(engine)


def test_what_plain_requests_left_is_forgotten_canonical_or_not():
    """Which of their rows ran in canonical passes is chance, that later bits must not hang on."""
    plain, exact = SamplingParams(max_new_tokens=2), greedy(2)
    prompts = [text(40, seed=1), text(40, seed=2)]
    with engine_of(model_of("as is"), page_size=8, verify="padded") as engine:
        engine.generate(prompts, [plain, exact])
        kept = [canonical for _, canonical, _ in engine.admission.prefix.pages]
        assert len(kept) == 10 and all(kept), "control: those of the plain one are canonical"
        engine.forget_plain()
        outputs = engine.generate(prompts, [plain, exact])
        cached = [output.completions[0].stats.cached_prompt_tokens for output in outputs]
        assert cached == [0, 39]
