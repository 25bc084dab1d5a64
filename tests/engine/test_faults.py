"""Nothing is lost: Ctrl-C, drafters that fail and values that are not finite.

tests/engine/test_failed_passes.py has the passes that raise.
"""

import pytest
import torch

from tests.engine.test_failed_passes import alone, asked
from tests.support import signals
from tests.support.cases import bits_of, engine_of, greedy, model_of, run, steady, text, whole
from tests.support.mixes import bits
from tests.support.tiny import VOCAB, prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams

DETERMINISTIC = SamplingParams(max_new_tokens=12, deterministic=True, logprobs=True)


def test_interrupt_leaves_a_usable_engine(sigint):
    """Ctrl-C at any moment of a long call: in its preparation, its prompts, its decoding."""
    long = prompts(20), SamplingParams(max_new_tokens=200)
    with engine_of(tiny()) as engine:
        expected = bits(engine.generate(prompts(4)[3:], DETERMINISTIC)[0])
        for call in (1, 700, 3000, 11_000):
            with pytest.raises(KeyboardInterrupt), signals.interrupt_at_call(call):
                engine.generate(*long)
            assert not engine.has_unfinished()
            assert whole(engine)
            assert bits(engine.generate(prompts(4)[3:], DETERMINISTIC)[0]) == expected


def poisoned(token):
    """A model in which the embedding of one token is NaN."""

    def poison(_, args, out):
        return out + torch.where(args[0] == token, torch.nan, 0.0)[..., None]

    model = tiny()
    model.get_input_embeddings().register_forward_hook(poison)
    return model


def unused_token():
    """A token that neither the needle nor its continuation holds."""
    with engine_of(tiny()) as engine:
        output = engine.generate([[5, 9, 11]], DETERMINISTIC)[0]
    held = {5, 9, 11, *output.completions[0].token_ids}
    return next(t for t in range(VOCAB) if t not in held), bits(output)


def test_a_request_that_is_not_finite_fails_alone():
    """It has the first page, with which shorter rows of the page table are filled up."""
    token, _ = unused_token()
    config = EngineConfig(page_size=16, reference_rows=16)
    with Engine(tiny(), config=config) as engine:
        expected = bits(engine.generate([[5, 9, 11]], DETERMINISTIC)[0])
    with Engine(poisoned(token), config=config) as engine:
        mixed = [[token] * 100, [5, 9, 11]]
        outputs = engine.generate(mixed, DETERMINISTIC)
        assert "finite" in outputs[0].completions[0].error
        assert bits(outputs[1]) == expected
        assert whole(engine)
        # The pages that held NaN are clean again.
        assert bits(engine.generate([[5, 9, 11]], DETERMINISTIC)[0]) == expected


class Drafts:
    """Drafts the right tokens, but ``odd[token](n)`` for sequences that begin with such a token."""

    def __init__(self, truths, odd):
        self.truths, self.odd = truths, odd

    def propose(self, sequences, n):
        return [self.follow(list(sequence), n) for sequence in sequences]

    def follow(self, sequence, n):
        if sequence[0] in self.odd:
            return self.odd[sequence[0]](n)
        found = [t[len(sequence) :][:n] for t in self.truths if t[: len(sequence)] == sequence]
        return found[0] if found else []


def raises(n):
    raise LookupError("no idea")


def test_a_drafter_that_fails_for_some_sequences():
    """These abort and say why, plain ones too; the others have their drafts, and their bits."""
    model = model_of("shape-sensitive")
    truths = [p + r[0][0] for (p, _), r in zip(asked(), alone(), strict=True)]
    drafter = Drafts(truths, {7: raises, 8: lambda n: ["a"]})
    odd = [([token, 7, 7], params) for token in (7, 8) for params in (greedy(9), SamplingParams())]
    with steady(model, drafter=drafter, page_size=8) as engine:
        outputs = run(engine, [*asked(), *odd, ([9, 2], SamplingParams())])
        assert bits_of(outputs[:6]) == alone()
        assert outputs.pop().completions[0].finish_reason == "length"
        told = ["LookupError: no idea"] * 2 + ["TypeError"] * 2
        for output, said in zip(outputs[6:], told, strict=True):
            (failed,) = output.completions
            assert failed.finish_reason == "abort"
            assert "the drafter raised" in failed.error and said in failed.error
        assert sum(o.completions[0].stats.accepted for o in outputs[:6]) > 20
        assert whole(engine)


def test_drafts_that_are_no_tokens_are_left_out():
    """And no more than the window are taken at a time."""
    model, odd = model_of("shape-sensitive"), {7: lambda n: [VOCAB] * n, 8: lambda n: [5] * 100}
    wanted = [([token] * 3, greedy(9)) for token in odd]
    with steady(model) as engine:
        expected = bits_of(run(engine, wanted))
    with steady(model, drafter=Drafts([], odd), draft_window=6) as engine:
        assert bits_of(run(engine, wanted)) == expected
        drafted = [record.drafted for record in engine.records]
    assert 0 < max(drafted) <= 6


@pytest.mark.parametrize("place", [0, 4])
def test_a_poisonous_draft_beside_good_ones(place):
    """In its own proposal and in the others': what was right before it is still accepted."""
    token, expected = unused_token()
    own = expected[0][0]
    drafter = Drafts([], {})
    drafter.follow = lambda sequence, n: (
        [*own[len(sequence) - 3 :][:place], token] if sequence[0] == 5 else [1, 2, 3]
    )
    with engine_of(poisoned(token), drafter=drafter) as engine:
        mixed = [[5, 9, 11], text(20, seed=1), [5, 9, 11]]
        outputs = engine.generate(mixed, DETERMINISTIC)
        assert bits(outputs[0]) == bits(outputs[2]) == expected
        assert all(o.completions[0].error is None for o in outputs)
        accepted = outputs[0].completions[0].stats.accepted
        assert accepted > 0 if place else accepted == 0
        assert whole(engine)
