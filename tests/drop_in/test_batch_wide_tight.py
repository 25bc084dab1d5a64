"""Batch-wide code where not all rows of a call fit at once: those that wait are preempted and
computed again, and nobody can tell by the results.
"""

from threading import Thread

import pytest
import torch

from tests.drop_in.test_batch_wide import Matchers, RowWise, UntilSequences, block, generate
from tests.support import zoo
from tests.support.drop_in import patched
from tests.support.patience import PATIENCE
from tinyspec import EngineConfig

ROWS = zoo.prompts(5)
WIDTH = max(map(len, ROWS))
NEW = 16
ROOMY = {"reference_rows": 16, "page_size": 8}
FEW_PAGES = -(-(WIDTH + NEW) // 8) + 2
TIGHT = {
    "two places": {"max_sequences": 2},
    "one place": {"max_sequences": 1},
    "few pages": {"num_pages": FEW_PAGES},
    "a row's pages": {"num_pages": -(-(WIDTH + NEW) // 8)},
    "no prefix cache": {"max_sequences": 2, "prefix_cache": False},
    "always verified": {"max_sequences": 2, "verify": "always", "overlap": True},
    "small passes": {"num_pages": FEW_PAGES, "max_rows": 16, "reference_rows": 8},
}


def asked(model, limits, count=5, **settings):
    """What comes out, what the user's code was given, and preemptions."""
    settings = {"deterministic": True, "do_sample": True, "seed": 3} | settings
    criterion, matchers = UntilSequences(WIDTH, count), Matchers(count)
    code = {"stopping_criteria": [criterion], "logits_processor": [matchers]}
    given = settings.pop("given", block(ROWS))
    with patched(model, EngineConfig(**ROOMY | limits)):
        out = generate(model, given, output_logits=True, **settings, **code)
        engine = model.generate._engine
        assert engine.pool.num_held == 0 and not engine.admission.waiting
        assert model.generate.stats().committed > 0
        return out, criterion, matchers, model.generate.stats().preemptions


def tensors(out):
    """All that a call returned."""
    return [out.sequences, *out.scores, *(out.logits or ())]


def same(one, other):
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


@pytest.mark.crossed(1.0)
@pytest.mark.parametrize("eos", [None, [9, 13, 54]], ids=["no eos", "eos"])
@pytest.mark.parametrize("limits", TIGHT.values(), ids=TIGHT)
def test_bits_are_those_of_rows_that_all_fit(limits, eos):
    """Tokens, scores and logits, and every value that the code saw."""
    model, more = zoo.tiny("llama"), {"eos_token_id": eos}
    reference = {key: limits[key] for key in ("reference_rows",) if key in limits}
    roomy, criterion, matchers, none = asked(model, reference, **more)
    tight, *ours, preempted = asked(model, limits, **more)
    assert none == 0 and preempted > len(ROWS)
    assert same(roomy, tight)
    assert ours[0].seen == criterion.seen and ours[1].seen == matchers.seen
    assert all(map(torch.equal, ours[1].scores, matchers.scores))


def test_the_comparison_can_fail():
    """The control: other chunks and passes than canonical ones give other bits."""
    model = zoo.tiny("llama").bfloat16()
    found = {}
    for name, deterministic in (("canonical", True), ("plain", False)):
        calls = [
            asked(model, limits, deterministic=deterministic)[0]
            for limits in ({}, {"max_sequences": 2, "max_rows": 16})
        ]
        found[name] = same(*calls)
    assert found == {"canonical": True, "plain": False}


@pytest.mark.parametrize("limits", TIGHT.values(), ids=TIGHT)
def test_plain_rows_are_those_of_transformers(limits):
    model, given = zoo.tiny("llama"), block(ROWS)
    criterion, matchers = UntilSequences(WIDTH, 5), Matchers(5)
    own = generate(
        model, given, stopping_criteria=[criterion], logits_processor=[matchers], eos_token_id=9
    )
    plain = {"deterministic": False, "do_sample": False, "seed": None, "eos_token_id": 9}
    out, *ours, preempted = asked(model, limits, **plain)
    assert preempted > 0
    assert torch.equal(own.sequences, out.sequences)
    assert ours[0].seen == criterion.seen and ours[1].seen == matchers.seen


@pytest.mark.parametrize("name", ["two places", "few pages"])
def test_several_completions_of_a_prompt(name):
    model, more = zoo.tiny("llama"), {"num_return_sequences": 3, "given": block(ROWS[:2], WIDTH)}
    roomy, *_, none = asked(model, {}, count=6, **more)
    tight, *_, preempted = asked(model, TIGHT[name], count=6, **more)
    assert none == 0 and preempted > 0 and same(roomy, tight)
    assert len({tuple(row.tolist()) for row in tight.sequences}) == 6


def test_the_prefix_cache_helps():
    """A row that comes back starts from the pages that it left, where others did not need them."""
    model, rows = zoo.tiny("llama"), {}
    for cached in (False, True):
        with patched(model, EngineConfig(**ROOMY, max_sequences=2, prefix_cache=cached)):
            generate(model, block(ROWS), deterministic=True, logits_processor=[Matchers(5)])
            rows[cached] = sum(model.generate.stats().rows.values())
    assert rows[True] < rows[False] / 2


def test_prompts_that_are_embeddings():
    """They are never in the prefix cache."""
    model, found = zoo.tiny("llama"), []
    ids, mask = block(ROWS).values()
    given = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "attention_mask": mask}
    for limits in ({}, TIGHT["two places"], TIGHT["few pages"]):
        with patched(model, EngineConfig(**ROOMY | limits)):
            code = {"logits_processor": [RowWise()], "deterministic": True}
            found.append(generate(model, given, **code))
            assert bool(model.generate.stats().preemptions) == bool(limits)
    assert same(*found[:2]) and same(*found[1:])


def test_a_trace_has_every_token():
    model, found = zoo.tiny("llama"), []
    for limits in ({}, TIGHT["two places"]):
        with patched(model, EngineConfig(**ROOMY | limits, trace=True)):
            out = generate(model, block(ROWS), logits_processor=[Matchers(5)], deterministic=True)
            passes = model.generate._engine.trace.passes()
        told = {
            name: [] for name in sorted({work.request_id for one in passes for work in one.works})
        }
        for work in (work for one in passes for work in one.works):
            told[work.request_id] += work.tokens
        found.append(list(told.values()))
    assert found[0] == found[1] == out.sequences[:, WIDTH:].tolist()


def test_it_comes_to_an_end():
    """More rows than anything else there is, each of them in nearly all pages."""
    model, rows, done = zoo.tiny("llama"), zoo.prompts(8), []
    pages = -(-(max(map(len, rows)) + NEW) // 8)
    limits = {"num_pages": pages, "max_rows": 8, "reference_rows": 8, "page_size": 8}

    def call():
        with patched(model, EngineConfig(**limits)):
            for deterministic in (False, True):
                asked = {"logits_processor": [Matchers(8)], "deterministic": deterministic}
                asked["max_new_tokens"] = 8
                done.append(generate(model, block(rows), **asked).sequences)

    thread = Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive() and len(done) == 2


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamers_get_a_token_of_every_row_a_step():
    model = zoo.tiny("llama")
    streamers = [Streamer() for _ in ROWS]
    with patched(model, EngineConfig(**ROOMY, max_sequences=2)):
        out = generate(
            model,
            block(ROWS),
            deterministic=True,
            logits_processor=[Matchers(5)],
            streamer=streamers,
        )
        assert model.generate.stats().preemptions > 0
    for n, streamer in enumerate(streamers):
        assert streamer.ended and streamer.tokens[-NEW:] == out.sequences[n, -NEW:].tolist()
