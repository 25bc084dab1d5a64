"""Sequences whose tokens are supplied from outside: each waits for its next, with its logits."""

from dataclasses import replace
from threading import Thread

import pytest
import torch

from tests.support.cases import text
from tests.support.patience import PATIENCE
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, SamplingParams

NEW = 8
CONFIG = EngineConfig(reference_rows=16, page_size=4)


def prompts(count):
    return [text(3 + 2 * n, seed=n) for n in range(count)]


def params(deterministic=True, new=NEW):
    return SamplingParams(max_new_tokens=new, ignore_eos=True, deterministic=deterministic)


def begin(engine, ids, **settings):
    """Requests that wait for their tokens, and their sequences."""
    requests = engine.ready().requests(ids, params(**settings))
    for request in requests:
        request.supplied = True
    engine.tracker.submit(requests)
    return [request.sequences[0] for request in requests]


def supplied(count=5, **config):
    """The logits that so many wait with in an engine of their own."""
    with Engine(tiny(), config=replace(CONFIG, **config)) as engine:
        return supply(engine, begin(engine, prompts(count)))


def supply(engine, sequences, disturb=lambda step: None):
    """Greedy tokens to the end, by the logits that all wait with, which are returned."""
    seen = []
    for step in range(NEW):
        engine.tracker.drive(
            "test", lambda: all(s.next_logits is not None or s.finished for s in sequences), bool
        )
        disturb(step)
        with engine.driver.turn("test"), engine.runner.torch_state():
            assert all(s.next_logits is not None for s in sequences)
            seen.append(torch.stack([s.next_logits for s in sequences]))
            tokens = seen[-1].argmax(-1).tolist()
            engine.core.committer.supply(sequences, tokens)
            engine.tracker.end(sequences, ["length" if step == NEW - 1 else ""] * len(sequences))
    assert all(s.finished and s.num_generated == NEW for s in sequences)
    assert engine.has_unfinished() or engine.pool.num_held == len(engine.admission.waiting) == 0
    return seen


def same(some, others):
    return all(map(torch.equal, some, others))


def test_beside_others_that_wait_for_nobody():
    """Whose tokens come meanwhile, in the same passes; the logits keep their bits. Also of rows
    that are preempted while they wait."""
    other, done = prompts(6)[5], {}
    with Engine(tiny(), config=CONFIG) as engine:
        (alone,) = engine.generate([other], params(new=30))
        number = engine.add_request(other, params(new=30))

        def disturbs(step):
            done.update({output.request_id: output for output in engine.step()})
            if step % 3 == 1:
                engine.admission.preempt_all()

        found = supply(engine, begin(engine, prompts(5)), disturbs)
        assert engine.stats().preemptions >= 5
        while engine.has_unfinished():
            disturbs(0)
    assert same(found, supplied())
    assert done[number].completions[0].token_ids == alone.completions[0].token_ids


def test_control_plain_rows_beside_others():
    """The comparison can fail."""
    found = []
    with Engine(tiny().bfloat16(), config=CONFIG) as engine:
        for count in (0, 9):
            numbers = [engine.add_request(p, params(False)) for p in prompts(count)]
            found.append(supply(engine, begin(engine, prompts(2), deterministic=False)))
            for number in {*numbers} & {*engine.tracker.requests}:
                engine.abort(number)
            engine.step()
    assert not same(*found)


@pytest.mark.parametrize("limits", [{"max_sequences": 2}, {"num_pages": 13}])
def test_more_of_them_than_fit_come_to_an_end(limits):
    """Who waits gives up its pages for another that has no logits yet."""
    found = []
    thread = Thread(target=lambda: found.extend(supplied(**limits)), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert torch.equal(*(torch.stack(each).argmax(-1) for each in (found, supplied())))


def test_a_pass_that_fails_costs_one_request_and_nobody_waits_for_ever():
    """A hook that fails wherever one prompt runs: the others, rows in step among them, go on."""
    model, bad = tiny(), []

    def fails(module, args):
        if bad and (args[0] == bad[0]).any():
            raise MemoryError("of one request")

    model.get_input_embeddings().register_forward_pre_hook(fails)
    with Engine(model, config=CONFIG) as engine:
        sequences = begin(engine, prompts(4))
        expected = supply(engine, sequences)
        known = {token for sequence in sequences for token in sequence.tokens}
        bad.append(next(token for token in range(128) if token not in known))
        number = engine.add_request([bad[0], *prompts(1)[0]], params())
        found = supply(engine, begin(engine, prompts(4)))
        (output,) = engine.step()
        assert output.request_id == number
        assert "of one request" in output.completions[0].error
    assert same(found, expected)


def test_prompts_that_begin_the_same():
    """None waits for pages that come with another one's next token only."""
    ids = [[*text(9, seed=1), n] for n in range(3)]
    with Engine(tiny(), config=CONFIG) as engine:
        found = supply(engine, begin(engine, ids))
        assert engine.stats().preemptions == 0
    for n, prompt in enumerate(ids):
        with Engine(tiny(), config=CONFIG) as engine:
            assert same(
                [step[n : n + 1] for step in found], supply(engine, begin(engine, [prompt]))
            )
