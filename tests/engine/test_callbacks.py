"""Code of the user's that a step calls, and that calls the engine, raises or interrupts: nothing is
committed half, lost or told twice."""

import _signal
from dataclasses import replace

import pytest
import torch

import tinyspec
from tests.support import signals
from tests.support.drop_in import PAD, SMALL
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams, interrupts
from tinyspec.engine import request_tracker

CONFIG = EngineConfig(reference_rows=16)


def params(**settings):
    return SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=True, **settings)


def after(number, call):
    """A criterion that calls ``call`` once, when the sequence has ``number`` tokens or more."""
    calls = []

    def criterion(ids, scores):
        if ids.shape[1] >= number and not calls:
            calls.append(number)
            call()
        return torch.tensor([False])

    return criterion


def stops_at(number):
    return lambda ids, scores: torch.tensor([ids.shape[1] >= number])


def finished(engine):
    """Outputs of all steps to the end, by id."""
    found = {}
    for _ in range(60):
        if not engine.has_unfinished():
            return found
        for output in engine.step():
            assert output.request_id not in found
            found[output.request_id] = output.completions[0]
    raise AssertionError(f"unfinished: {list(engine.tracker.requests)}")


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_interrupt_from_a_criterion(deterministic):
    """What ended in the same step stays ended, and every token keeps its log-probability."""
    ids = prompts(2)
    with Engine(tiny(), config=CONFIG) as engine:
        wanted = params(deterministic=deterministic)
        alone = [engine.generate([p], wanted)[0].completions[0] for p in ids]
        asked = [
            stops_at(len(ids[0]) + 5),
            after(len(ids[1]) + 5, lambda: (_ for _ in ()).throw(KeyboardInterrupt())),
        ]
        numbers = [
            engine.add_request(p, params(stopping_criteria=[c], deterministic=deterministic))
            for p, c in zip(ids, asked, strict=True)
        ]
        outputs = {}
        with pytest.raises(KeyboardInterrupt):
            while True:
                outputs |= {o.request_id: o.completions[0] for o in engine.step()}
        assert not outputs
        outputs = finished(engine)
    for number, expected, count in zip(numbers, alone, (5, 12), strict=True):
        assert outputs[number].token_ids == expected.token_ids[:count]
        assert len(outputs[number].logprobs) == count and 0.0 not in outputs[number].logprobs
        if deterministic:
            assert outputs[number].logprobs == expected.logprobs[:count]


@pytest.mark.parametrize("where", ["criterion", "own criterion", "processor"])
def test_a_callback_that_aborts_a_request(where):
    """Another's, of a stream or not, or its own."""
    ids = prompts(2)
    with Engine(tiny(), config=CONFIG) as engine:
        expected = engine.generate([ids[0]], params())[0].completions[0].token_ids
        aborted = []

        def abort():
            for request_id in aborted:
                engine.abort(request_id)

        criterion = after(len(ids[0]) + 4, abort)
        calls = {"stopping_criteria": [criterion]}
        if where == "processor":
            calls = {"logits_processors": [lambda ids, scores: scores + 0 * criterion(ids, scores)]}
        first = engine.add_request(ids[0], params(**calls))
        stream = engine.stream([ids[1]], params())
        aborted += [first] if where == "own criterion" else [stream.requests[0].request_id]
        aborted.append(engine.add_request(ids[1], params()))
        outputs = finished(engine)
        assert outputs == {} if where == "own criterion" else outputs[first].token_ids == expected
        assert [e.finish_reason for e in stream][-1] == ("length" if first in aborted else "abort")
        assert engine.pool.num_held == 0


def test_a_tokenizer_that_raises_costs_one_output():
    class Tokenizer:
        calls = 0

        def decode(self, ids, **_):
            Tokenizer.calls += 1
            if Tokenizer.calls == 1:
                raise ValueError("decode")
            return "text"

    with Engine(tiny(), Tokenizer(), config=CONFIG) as engine:
        numbers = [engine.add_request(p, params()) for p in prompts(3)]
        with pytest.raises(ValueError, match="decode"):
            finished(engine)
        assert set(finished(engine)) == set(numbers[1:])
        assert not engine.has_unfinished()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("what", ["abort", "weights"])
def test_a_hook_that_ends_requests(what, overlap):
    """A hook of the model, called while a pass runs: nobody gets a token that no pass has given."""
    model = tiny()
    asked = {"max_new_tokens": 10, "ignore_eos": True}
    with Engine(model, config=CONFIG) as engine:
        alone = engine.generate(prompts(2), SamplingParams(**asked))
    whole = [output.completions[0].token_ids for output in alone]
    calls = []

    def hook(*_):
        calls.append(len(calls))
        if len(calls) == 5:
            if what == "abort":
                found[ids[0]] = engine.abort(ids[0]).completions[0]
            else:
                engine.weights_changed()

    model.lm_head.register_forward_hook(hook)
    with Engine(model, config=replace(CONFIG, overlap=overlap)) as engine:
        calls.clear()
        found = {}
        ids = [engine.add_request(prompt, SamplingParams(**asked)) for prompt in prompts(2)]
        found |= finished(engine)
    tokens = [found[request_id].token_ids for request_id in ids]
    assert tokens[1] == whole[1] and tokens[0] == whole[0][: len(tokens[0])]
    assert (len(tokens[0]) < 10) == (what == "abort") and len(calls) > 5
    error = "engine.abort was called for it" if what == "abort" else None
    assert found[ids[0]].error == error


def test_ctrl_c_at_once_while_transformers_runs(sigint):
    """A call that is not served takes no notice of what is held back for others."""
    model, call = tiny(), {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD}
    ids = torch.tensor([[5, 17, 3]])
    expected = model.generate(ids, **call)
    tinyspec.patch(model, SMALL)

    def interrupts_itself(*_):
        signals.interrupt()
        raise AssertionError("went on")

    handle = model.lm_head.register_forward_pre_hook(interrupts_itself)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, num_beams=2, **call)
    handle.remove()
    assert torch.equal(model.generate(ids, **call), expected)


def test_a_handler_that_is_not_pythons_stays(monkeypatch):
    """It could not be put back."""
    monkeypatch.setattr(_signal, "getsignal", lambda number: None)
    set_to = []
    monkeypatch.setattr(_signal, "signal", lambda *args: set_to.append(args))
    with interrupts.between_steps(), interrupts.at_once():
        pass
    assert set_to == []


def test_a_bar_counts_completions_and_waits(monkeypatch, capsys):
    """That of ``progress=True``: it shows where a call takes more than two seconds."""
    bars, few = [], SamplingParams(max_new_tokens=3)

    class Bar(request_tracker.tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            assert self.delay == 2.0 and not self.disable
            bars.append(self)

    monkeypatch.setattr(request_tracker, "tqdm", Bar)
    with Engine(tiny(), config=CONFIG) as engine:
        engine.generate(prompts(2), few, progress=True)
        engine.score(prompts(1), [[5, 6]], progress=True)
        engine.generate(prompts(1), few)
    assert [(bar.total, bar.n) for bar in bars] == [(2, 2), (1, 1)], "without progress none"
    assert capsys.readouterr().err == "", "it took less than two seconds"
