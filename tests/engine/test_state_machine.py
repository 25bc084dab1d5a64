"""One engine under random use, against solo runs by another: nothing shows, nothing is lost.

Control: the same machine with plain requests finds bits that differ.
"""

from collections import Counter
from functools import cache
from typing import ClassVar

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.at_random import use_at_random
from tests.support.cases import HYBRIDS, cost, drain, engine_of, model_of, text, whole
from tests.support.mixes import Liar, bits
from tests.support.pages import check_residents, indexed_kv
from tinyspec import Engine, SamplingParams, audit

MODELS = (
    *(("shape-sensitive", "fp32"), ("shape-sensitive", "bf16")),
    *(("as is", "bf16"), *((kind, "fp32") for kind in HYBRIDS)),
)
# The longest request needs 63 tokens.
PAGES = {8: 10, 16: 5}
DIFFERS = "not the bits of the request alone"
CAUSES = ("the pass raised RuntimeError: armed", "the weights changed while it was running")
COSTS = {"by rows": float, "flat": lambda bucket: 1.0, "steep": lambda bucket: bucket**1.5}
EVENTS = ("rollbacks", "preemptions", "cached_prompt_tokens")
STYLES = (
    {},
    {"stop_token_ids": tuple(range(0, 128, 9))},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.1, "seed": 8, "top_k": 12, "num_return_sequences": 2},
    {"num_return_sequences": 3},
    {"repetition_penalty": 1.2, "prompt_logprobs": True},
)


@cache
def oracle(model: tuple[str, str]) -> Engine:
    """Runs requests alone, in another model of the same weights; nothing cached."""
    return engine_of(model_of(*model), prefix_cache=False, overlap=False)


@cache
def truth(model: tuple[str, str], prompt: tuple[int, ...], params: SamplingParams):
    """What the request is alone."""
    return oracle(model).generate([list(prompt)], params)[0]


@st.composite
def requests(draw, deterministic: bool | None = None):
    """Prompts of two families, so that they share prefixes; a small set, so that they recur."""
    length = draw(st.sampled_from((1, 7, 8, 9, 16, 17, 32, 41)))
    prompt = text(41, seed=draw(st.integers(0, 1)))[:length] + draw(
        st.sampled_from(([], [5], [77, 78]))
    )
    params = SamplingParams(
        max_new_tokens=draw(st.sampled_from((1, 3, 9, 20))),
        deterministic=draw(st.sampled_from((True, True, False)))
        if deterministic is None
        else deterministic,
        logprobs=True,
        **draw(st.sampled_from(STYLES)),
    )
    return prompt, params


class OneEngine(RuleBasedStateMachine):
    """Requests by every entry point, aborts, failures and releases, in any order."""

    compares_plain = False
    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None
        self.open: dict[str, tuple] = {}
        self.streams: list[tuple] = []
        self.finished: list = []
        self.given_up: set[str] = set()

    @initialize(
        model=st.sampled_from(MODELS),
        page_size=st.sampled_from((8, 16)),
        prefix_cache=st.sampled_from((True, True, False)),
        max_rows=st.sampled_from((16, 24, 64)),
        max_sequences=st.sampled_from((1, 4, 8, 8)),
        draft_window=st.sampled_from((1, 4, 16)),
        verify=st.sampled_from(("auto", "auto", "padded", "always")),
        seconds=st.sampled_from(sorted(COSTS)),
        drafter=st.sampled_from((None, None, "ngram", "liar")),
    )
    def begin(self, model, page_size, seconds, drafter, **config):
        self.model = model
        model = model_of(*model)
        # A dict: numbers of a hook's own are settings, and another one is another model.
        self.fault = fault = {"armed": False}

        def fails_once(*_):
            if fault["armed"]:
                fault["armed"] = False
                raise RuntimeError("armed")

        model.model.layers[1].register_forward_pre_hook(fails_once)
        config["drafter"] = Liar(1) if drafter == "liar" else drafter
        self.engine = engine_of(model, page_size=page_size, num_pages=PAGES[page_size], **config)
        cost(self.engine, COSTS[seconds])
        self.engine.generate([[1]], SamplingParams(max_new_tokens=1, deterministic=True))
        self.kv: dict = {}
        self.forgotten: set[tuple] = set()
        if (prefix := self.engine.admission.prefix) is not None:
            self.watch(prefix)

    def watch(self, prefix):
        """Note which pages leave the index: between two looks one may leave and come back."""
        forget = prefix.forget

        def noted(page):
            self.forgotten.add((prefix.keys[page], page))
            forget(page)

        prefix.forget = prefix.pool.on_evict = noted

    def truth(self, prompt, params):
        return truth(self.model, tuple(prompt), params)

    def expect(self, request, output):
        """A finished request's output against the oracle's."""
        prompt, params = request
        assert output.prompt_token_ids == prompt and output.params.max_new_tokens
        for n, completion in enumerate(output.completions):
            aborted = completion.finish_reason == "abort"
            if aborted and output.request_id not in self.given_up:
                assert completion.error in CAUSES
            self.expect_tokens(request, n, completion.token_ids, completion.logprobs, not aborted)
        assert len(output.completions) == params.num_return_sequences
        if not (params.deterministic or self.compares_plain):
            return
        expected = self.truth(prompt, params)
        if not any(c.finish_reason == "abort" for c in output.completions):
            assert bits(output) == bits(expected), DIFFERS
            assert output.prompt_logprobs == expected.prompt_logprobs, DIFFERS
            if params.deterministic:
                self.finished.append(output)

    def expect_tokens(self, request, index, tokens, logprobs, whole):
        prompt, params = request
        assert len(tokens) == len(logprobs) <= params.max_new_tokens
        if params.deterministic or self.compares_plain:
            expected = self.truth(prompt, params).completions[index]
            end = None if whole else len(tokens)
            assert tokens == expected.token_ids[:end], DIFFERS
            assert logprobs == expected.logprobs[:end], DIFFERS

    def settle(self, outputs):
        for output in outputs:
            self.expect(self.open.pop(output.request_id), output)

    @rule(request=requests())
    def add(self, request):
        self.open[self.engine.add_request(*request)] = request

    @rule(asked=st.lists(requests(), min_size=2, max_size=5))
    def add_several(self, asked):
        for request in asked:
            self.add(request)

    @rule(count=st.sampled_from((1, 1, 3, 10)))
    def step(self, count):
        for _ in range(count):
            self.settle(self.engine.step())

    @rule(asked=st.lists(requests(), min_size=1, max_size=3))
    def generate(self, asked):
        outputs = self.engine.generate([p for p, _ in asked], [s for _, s in asked])
        for request, output in zip(asked, outputs, strict=True):
            self.expect(request, output)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        # It may have finished in a call of generate, whose steps nobody has asked for.
        if request_id in self.engine.tracker.requests:
            output = self.engine.abort(request_id)
            self.given_up.add(request_id)
            assert "abort" in {c.finish_reason for c in output.completions}
            self.settle([output])
        else:
            with pytest.raises(ValueError, match="request_id"):
                self.engine.abort(request_id)

    @rule(asked=st.lists(requests(), min_size=1, max_size=3))
    def open_stream(self, asked):
        stream = self.engine.stream([p for p, _ in asked], [s for _, s in asked])
        ids = [request.request_id for request in stream.requests]
        read = {
            (request_id, n): ([], [])
            for request_id, (_, params) in zip(ids, asked, strict=True)
            for n in range(params.num_return_sequences)
        }
        self.streams.append((stream, dict(zip(ids, asked, strict=True)), read))

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), count=st.sampled_from((1, 2, 7, 100)))
    def read_stream(self, data, count):
        place = data.draw(st.integers(0, len(self.streams) - 1))
        stream, asked, read = self.streams[place]
        for _ in range(count):
            event = next(stream, None)
            if event is None:
                del self.streams[place]
                return
            tokens, logprobs = read[event.request_id, event.index]
            tokens += event.token_ids
            logprobs += event.logprobs
            done = event.finish_reason not in (None, "abort")
            self.expect_tokens(asked[event.request_id], event.index, tokens, logprobs, done)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def close_stream(self, data):
        self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))[0].close()

    @rule(asked=st.lists(requests(deterministic=True), min_size=1, max_size=3))
    def score(self, asked):
        self.fault["armed"] = False  # score says so when a pass fails
        expected = [self.truth(prompt, params).completions[0] for prompt, params in asked]
        scores = self.engine.score(
            [p for p, _ in asked], [c.token_ids for c in expected], [s for _, s in asked]
        )
        assert scores == [c.logprobs for c in expected], DIFFERS

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def audit(self, data):
        self.fault["armed"] = False
        places = st.sampled_from(range(len(self.finished)))
        outputs = data.draw(st.lists(places, min_size=1, max_size=4))
        report = audit(self.engine, [self.finished[n] for n in outputs])
        assert report, str(report)

    @rule()
    def fail_next_pass(self):
        self.fault["armed"] = True

    @rule()
    def say_weights_changed(self):
        self.fault["armed"] = False
        self.engine.weights_changed()

    @rule()
    def release(self):
        if self.engine.tracker.requests:
            with pytest.raises(ValueError, match="release"):
                self.engine.release()
        else:
            self.engine.release()
            assert len(self.engine.admission.prefix or ()) == 0
            self.kv = {}

    @invariant()
    def pages_are_accounted_for(self):
        if self.engine is not None:
            check_residents(self.engine)
            now = indexed_kv(self.engine)
            for place in now.keys() & self.kv.keys():
                (_, canonical, _), _ = place
                # The KV of plain requests may have other bits when it is computed again.
                if canonical or place not in self.forgotten:
                    assert now[place] == self.kv[place], "an indexed page was written to"
            self.kv = now
            self.forgotten.clear()

    def teardown(self):
        if self.engine is None:
            return
        for stream, *_ in self.streams:
            stream.close()
        self.settle(drain(self.engine).values())
        assert not self.open
        assert whole(self.engine)
        stats = self.engine.stats()
        for event in EVENTS:
            self.reached[event] += getattr(stats, event)
        self.engine.close()


class OneEngineComparingPlain(OneEngine):
    """Holds plain requests to what they are alone."""

    compares_plain = True


def test_random_use():
    OneEngine.reached.clear()
    # What a seed draws depends on the modules that other tests have imported, too.
    for number in range(8):
        use_at_random(OneEngine, number, cases=2, steps=30)
        if all(OneEngine.reached[event] > 0 for event in EVENTS):
            break
    # Control: the runs did get to where something could go wrong.
    assert all(OneEngine.reached[event] > 0 for event in EVENTS), OneEngine.reached


@pytest.mark.slow("random use", 15, cases=50)
def test_much_random_use(case_seed):
    use_at_random(OneEngine, case_seed, cases=4, steps=60)


@pytest.mark.slow("random use", 9)
def test_control_plain_requests_differ_from_the_oracle():
    only_find = {"phases": (Phase.generate,), "report_multiple_bugs": False}
    with pytest.raises(AssertionError, match=DIFFERS):
        use_at_random(OneEngineComparingPlain, 0, cases=16, steps=30, **only_find)
