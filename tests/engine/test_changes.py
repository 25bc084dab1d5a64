"""A model that code of the user's changes while requests run: noticed before the next token.

The oracle is an engine on another model of the same weights, to which the change was made before.
"""

import threading
import time
from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.support import changes
from tests.support.cases import drain
from tests.support.changes import FOLLOWED, model_for
from tests.support.mixes import bits
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams

CONFIG = {"reference_rows": 8, "max_rows": 16, "page_size": 16, "max_sequences": 1}
TOKENS, AT = 10, 4  # the change comes behind so many tokens
PROMPT, OTHER = prompts(6)[2:4]
LENGTH = len(PROMPT) + AT
NAME = dict(ids=lambda f: f.__name__)


def each(all_changes, *usual):
    """All of them as parameters; those that are not ``usual`` are slow tests."""
    slow = pytest.mark.slow("crosses", 1)
    return [c if c in usual else pytest.param(c, marks=slow) for c in all_changes]


@pytest.fixture(autouse=True)
def two_threads(two_threads):
    """What ``changes.threads`` changes."""


def asking(**settings):
    return SamplingParams(
        max_new_tokens=TOKENS, deterministic=True, logprobs=True, ignore_eos=True, **settings
    )


def engine_of(model, **config):
    """One token a step, unless drafts are verified."""
    return Engine(model, config=EngineConfig(**{**CONFIG, "verify": "padded", **config}))


@cache
def fresh(change, changed):
    """Bits of both prompts, and fingerprint, of an engine that has seen no change."""
    model, before = model_for(change), torch.get_num_threads()
    if changed:
        change(model)
    found = answers(model)
    torch.set_num_threads(before)
    return found


def answers(model):
    """Those of a new engine."""
    with engine_of(model) as engine:
        outputs = engine.generate([PROMPT, OTHER], asking())
    (fingerprint,) = {output.fingerprint for output in outputs}
    return [bits(output) for output in outputs], fingerprint


class Once:
    """Makes a change the first time that a sequence has so many tokens; then never again. A
    processor and a drafter, too."""

    stateless = False

    def __init__(self, model, change, length=LENGTH):
        self.model, self.change, self.length = model, change, length

    def look(self, length):
        if length >= self.length and self.change is not None:
            change, self.change = self.change, None
            change(self.model)

    def __call__(self, input_ids, scores):
        self.look(input_ids.shape[1])
        return scores

    def propose(self, sequences, n):
        self.look(max(map(len, sequences)))
        return [[1, 2, 3][:n] for _ in sequences]


def run(engine, params=None):
    """One request, and another one that waits for it to end; their outputs."""
    ids = [engine.add_request(PROMPT, params or asking()), engine.add_request(OTHER, asking())]
    done = drain(engine)
    return [done[request_id] for request_id in ids]


def in_processor(model, change):
    with engine_of(model) as engine:
        return run(engine, asking(logits_processors=(Once(model, change),)))


def in_generate(model, change):
    """The steps of one call, between which the engine's caller runs no code; in a criterion."""
    once = Once(model, change)
    first = asking(stopping_criteria=[lambda ids, scores: once(ids, False)])
    with engine_of(model) as engine:
        return engine.generate([PROMPT, OTHER], [first, asking()])


def in_drafter(model, change):
    with engine_of(model, drafter=Once(model, change), verify="always") as engine:
        return run(engine)


def between_steps(model, change):
    with engine_of(model) as engine:
        ids = [engine.add_request(PROMPT, asking()), engine.add_request(OTHER, asking())]
        sequence, once, done = engine.tracker.requests[ids[0]].sequences[0], Once(model, change), {}
        while engine.has_unfinished():
            once.look(len(sequence.tokens))
            done |= {output.request_id: output for output in engine.step()}
        return [done[request_id] for request_id in ids]


RUNNING = (in_processor, in_generate, in_drafter, between_steps)


USUAL = (
    *(changes.data_replaced, changes.adapter, changes.adapter_merged_and_unmerged),
    *(changes.hook, changes.threads),
)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("change", each(FOLLOWED, *USUAL), **NAME)
@pytest.mark.parametrize("place", RUNNING, **NAME)
def test_a_change_under_a_running_request(place, change):
    """It is aborted with tokens of the old model alone; who waits has the bits of the new one. But
    another number of threads, between steps: they run on the number of their submit."""
    (before, other), old = fresh(change, False)
    (_, after), new = fresh(change, True)
    first, second = place(model_for(change), change)
    if (place, change) == (between_steps, changes.threads):
        assert [bits(first), bits(second)] == [before, other]
        assert torch.get_num_threads() == 1 and {first.fingerprint, second.fingerprint} == {old}
        return
    (tokens, logprobs, reason), (expected, its_logprobs, _) = bits(first)[0], before[0]
    assert reason == "abort" and "changed while it was running" in first.completions[0].error
    assert 0 < len(tokens) < TOKENS
    assert (tokens, logprobs) == (expected[: len(tokens)], its_logprobs[: len(tokens)])
    assert first.fingerprint == old
    assert (bits(second), second.fingerprint) == (after, new)


@pytest.mark.parametrize("place", each(RUNNING, in_drafter), **NAME)
def test_control_without_a_change(place):
    """Callbacks, drafts and modules that count have no effect."""
    (before, other), fingerprint = fresh(changes.number, False)
    outputs = place(model_for(changes.number), None)
    assert [bits(output) for output in outputs] == [before, other]
    assert {output.fingerprint for output in outputs} == {fingerprint}


def test_a_change_by_another_thread():
    """While one call runs, in which there is no code of the user's."""
    model, ended = tiny(), threading.Event()
    with engine_of(model) as engine:
        engine.generate([PROMPT], asking())  # what is to be proven is proven
        passes = len(engine.records)

        def change():
            while len(engine.records) < passes + AT and not ended.is_set():
                time.sleep(0.001)
            with torch.no_grad():
                model.lm_head.weight.mul_(2)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            params = SamplingParams(max_new_tokens=400, deterministic=True, ignore_eos=True)
            completion = engine.generate([PROMPT], params)[0].completions[0]
        finally:
            ended.set()
            thread.join()
    assert completion.finish_reason == "abort" and 0 < len(completion.token_ids) < 400
    assert "the weights changed while it was running" in completion.error


def halved(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight *= 0.5


@pytest.mark.parametrize("called", [False, True])
def test_weights_made_in_inference_mode(caplog, called):
    """They count no writes: their bits are compared."""

    def write(model):
        with torch.inference_mode():
            model.lm_head.weight.mul_(1.5)

    with torch.inference_mode():
        model, twin = tiny(), tiny()
    with engine_of(model) as engine:
        assert caplog.text.count("torch.inference_mode") == 1
        before, same = (engine.generate([PROMPT], asking())[0] for _ in range(2))
        assert bits(same) == bits(before) and same.fingerprint == before.fingerprint
        assert same.completions[0].stats.cached_prompt_tokens > 0
        params = () if called else (Once(model, write),)
        if called:
            write(model)
        first = asking(logits_processors=params)
        outputs = engine.generate([PROMPT, OTHER], [first, asking()])
    write(twin)
    expected, fingerprint = answers(twin)
    assert outputs[1].fingerprint == fingerprint != before.fingerprint
    assert bits(outputs[1]) == expected[1]
    if called:
        assert bits(outputs[0]) == expected[0] != bits(before)
    else:
        assert "the weights changed" in outputs[0].completions[0].error
    assert caplog.text.count("torch.inference_mode") == 2, "once for each engine"


@pytest.mark.parametrize("told", ["weights_changed", "verify_weights", "nobody"])
def test_writes_through_data(told):
    """They leave no trace: somebody has to say so, or every call has to digest."""
    model = tiny()
    with engine_of(model, verify_weights=told == "verify_weights") as engine:
        engine.generate([PROMPT, OTHER], asking())
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
        if told == "weights_changed":
            engine.weights_changed()
        outputs = engine.generate([PROMPT, OTHER], asking())
        found = [bits(output) for output in outputs], outputs[0].fingerprint
    # Control: with nobody told, pages of the old weights are used, and the check sees it.
    assert (found == answers(model)) == (told != "nobody")


@pytest.mark.parametrize("served", [False, True])
def test_writes_to_a_buffer_through_data(served):
    """Buffers count as weights do, also those that no checkpoint has: what was computed from them,
    for requests before or as the engine was made, is computed again."""
    model = tiny()
    before, old = answers(model)
    with engine_of(model, verify_weights=True) as engine:
        if served:
            first = engine.generate([PROMPT, OTHER], asking())
            assert ([bits(output) for output in first], first[0].fingerprint) == (before, old)
        model.model.rotary_emb.inv_freq.data.mul_(0.5)
        outputs = engine.generate([PROMPT, OTHER], asking())
        found = [bits(output) for output in outputs], outputs[0].fingerprint
        assert engine.fingerprint == found[1], "nothing has changed since"
    after, new = answers(model)
    assert found == (after, new)
    assert before != after and old != new, "the change matters"


def test_weights_that_lie_otherwise_have_another_fingerprint():
    """Products of a weight that lies column by column may have other bits."""
    model = tiny()
    with engine_of(model, linear="never") as engine:
        fingerprints = []
        for same in (torch.clone, lambda x: x.T.contiguous().T):
            fingerprints.append(engine.fingerprint)
            model.lm_head.weight.data = same(model.lm_head.weight.detach())
            engine.check_model()
        assert fingerprints[0] == fingerprints[1] != engine.fingerprint


@pytest.mark.parametrize("deterministic", [False, True])
def test_log_probabilities_of_a_prompt_are_those_of_one_model(deterministic):
    """Half of the prompt has run when the weights change; no token is there yet. A deterministic
    request of which something is committed ends, a plain one begins again."""
    prompt, params = PROMPT * 6, replace(asking(prompt_logprobs=True), deterministic=deterministic)
    changed = tiny()
    halved(changed)
    found = []
    for model in (tiny(), changed):
        with engine_of(model) as engine:
            found.append(engine.generate([prompt], params)[0])
    model = tiny()
    with engine_of(model) as engine:
        engine.add_request(prompt, params)
        assert engine.step() == []
        half = next(iter(engine.tracker.requests.values())).prompt_logprobs
        assert half[1] is not None and half[-1] is None
        halved(model)
        (output,) = drain(engine).values()
    before, after = found
    if deterministic:
        (completion,) = output.completions
        assert completion.finish_reason == "abort" and not completion.token_ids
        assert completion.error == "the weights changed while it was running"
    else:
        assert repr(output.prompt_logprobs) == repr(after.prompt_logprobs)
    # Control: the two models differ where the first half had been computed.
    assert before.prompt_logprobs[1] != after.prompt_logprobs[1]
