"""Replayed passes have the bits of eager ones: by graphs of a CPU, which call captured work again.

Controls: graphs that replay the lengths, tokens or page tables of their capture are found.
"""

import random
from dataclasses import replace

import pytest
import torch

from tests.engine.test_overlap import REQUESTS as EVERY_KIND
from tests.support.budget import first
from tests.support.cases import bits_of, cost, greedy, run, text, whole
from tests.support.drop_in import patched
from tests.support.graphs import StandIn, with_graphs
from tests.support.mixes import crowd
from tests.support.sensitive import RowByRowLinear, ShapeSensitiveLinear, replace_linears
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.determinism import model_state
from tinyspec.model.torch_state import stream_of
from tinyspec.runner import batch, graphs
from tinyspec.runner.batch import PassShape
from tinyspec.runner.graphs import PassGraphs
from tinyspec.scheduler.buckets import Buckets

CONFIG = EngineConfig(
    reference_rows=8, page_size=8, max_rows=16, max_sequences=8, max_model_len=128, backend="triton"
)
REQUESTS = [*EVERY_KIND[1:], (text(9, seed=5), SamplingParams(max_new_tokens=25, logprobs=True))]
TWO = [(text(9), greedy(7)), (text(4, seed=1), greedy(9, temperature=0.9, seed=4))]
LASTS = pytest.mark.slow("crosses", 2)
LIBRARIES = model_state.LIBRARIES  # ``with_graphs`` adds the tests


@pytest.fixture(autouse=True)
def early(monkeypatch):
    monkeypatch.setattr(graphs, "EAGER_PASSES", 1)


def eager(requests, **settings):
    """Their bits by an engine that captures nothing, with the same fingerprint."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(graphs, "EAGER_PASSES", 10**9)
        return served(requests, **settings)


def served(requests=REQUESTS, use=run, **settings):
    """Their bits by a new engine."""
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    with Engine(model, config=replace(CONFIG, **settings)) as engine:
        cost(engine)
        outputs = use(engine, requests)
        assert not any(c.error for output in outputs for c in output.completions)
        found = bits_of(outputs)
        assert whole(engine)
        return found


def same_bits(monkeypatch, requests, **asked):
    log = with_graphs(monkeypatch)
    expected = eager(requests, **asked)
    assert log.captures == 0
    assert served(requests, **asked) == expected
    assert 1 < log.captures < log.replays
    assert all(len(addresses) == 1 for addresses in log.results.values())


def test_same_bits_of_two(monkeypatch):
    same_bits(monkeypatch, TWO)


def test_room_is_made(monkeypatch):
    """All are dropped where a further one would have no room for its logits."""
    log, kept = with_graphs(monkeypatch), []
    expected = eager(TWO)
    monkeypatch.setattr(graphs, "MOST_BYTES", 0)

    def noted(engine, requests):
        outputs = run(engine, requests)
        kept.append(len(engine.runner.graphs))
        return outputs

    assert served(TWO, use=noted) == expected
    assert log.captures > 1 >= kept[0]


@pytest.mark.slow("crosses", 8)
@pytest.mark.parametrize("verify", ["auto", "padded", "always"])
@pytest.mark.parametrize("pages", [{}, {"num_pages": 24}], ids=["ample", "tight"])
@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlap"])
def test_same_bits(verify, pages, overlap, late_device, monkeypatch):
    requests = [*REQUESTS, *crowd(random.Random(3), 4)]
    same_bits(monkeypatch, requests, verify=verify, overlap=overlap, **pages)


SECTIONS = ("tokens", "positions", "slots", "lengths")


@pytest.mark.parametrize("section", first(1, SECTIONS, 2))
def test_control_stale_inputs(section, monkeypatch):
    """Each part of a pass as it was when its graph was first replayed."""
    kept, engines = {}, []

    def stale(graph):
        runner = engines[0].runner
        shape = next(s for s, c in runner.graphs._captured.items() if c.graph is graph)
        rows, lengths, _ = batch._parts(runner.memory._memory, shape)
        part = lengths if section == "lengths" else rows[SECTIONS.index(section)]
        part.copy_(kept.setdefault(shape, part.clone()))

    def noted(engine, requests):
        engines[:] = [engine]
        return run(engine, requests)

    with_graphs(monkeypatch, stale)
    expected = eager(TWO)
    with pytest.raises(AssertionError):
        assert served(TWO, use=noted) == expected


@LASTS
@pytest.mark.parametrize("blind", [False, True])
def test_never_at_stale_addresses(blind, monkeypatch):
    """Memory is swapped behind the engine's back. Control: without addresses graphs would go on."""
    log, whole_run, known = with_graphs(monkeypatch), PassGraphs.run, []

    def without(self, shape, canonical, addresses, forward):
        return whole_run(self, shape, canonical, (), forward)

    if blind:
        monkeypatch.setattr(PassGraphs, "run", without)

    def use(engine, requests):
        expected = bits_of(run(engine, requests))
        known.append({*log.results})
        engine.admission.forget_pages()
        engine.runner._cache = None
        log.results.clear()
        assert bits_of(run(engine, requests)) == expected
        known.append({*log.results})
        return run(engine, requests)

    served(TWO, use=use)
    assert bool(known[0] & known[1]) == blind


@LASTS
def test_code_of_the_user_is_not_left_out(monkeypatch):
    """Passes run eagerly while there are hooks."""
    log = with_graphs(monkeypatch)
    monkeypatch.setattr(model_state, "LIBRARIES", LIBRARIES)
    calls = []
    with Engine(tiny(), config=CONFIG) as engine:
        run(engine, TWO)
        replays = log.replays
        assert replays > 0
        handle = engine.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
        run(engine, TWO)
        assert log.replays == replays and len(calls) >= 9
        handle.remove()
        run(engine, TWO)
        assert log.replays > replays


@LASTS
def test_a_capture_that_fails(monkeypatch, caplog):
    """Is not tried again; the pass runs eagerly."""
    log = with_graphs(monkeypatch)
    expected = eager(TWO)

    def fail(self, work):
        log.captures += 1
        raise RuntimeError("no graph today")

    monkeypatch.setattr(StandIn, "capture", fail)
    assert served(TWO) == expected
    assert log.captures == 2 and log.replays == 0  # canonical passes and others
    assert "no graph today" in caplog.text


def test_canonical_passes_have_graphs_of_their_own(monkeypatch):
    """Though all else of their shape is another's: linears may run in tiles there."""
    log = with_graphs(monkeypatch)
    passes = PassGraphs(stream_of(torch.device("cpu")), on=True)

    def logits(canonical):
        with passes.looking(canonical):
            pass
        shape = PassShape(bucket=8, segments=8, logit_rows=8, canonical=canonical)
        return passes.run(shape, canonical, (), lambda: torch.full((8,), float(canonical)))

    settled = []
    for canonical in (False, True) * 4:
        assert logits(canonical).eq(canonical).all()
        settled.append(passes.settled)
    assert len(passes) == 2 and log.replays == 6
    assert settled == [False] * 4 + [True] * 4  # one is eager, one is captured
    passes.clear(canonical=True)  # other tiles: fast passes go on
    for canonical, goes_on in ((False, True), (True, False)):
        assert logits(canonical).eq(canonical).all() and passes.settled == goes_on


@pytest.mark.parametrize("apart", [False, True])
def test_passes_that_run_the_same_way_share_a_graph(apart, monkeypatch):
    """Fast ones in buckets whose canonical passes have no way of their own. Control: where those
    have one, each kind is captured by itself."""
    log, found, captures = with_graphs(monkeypatch), [], 0
    if apart:
        monkeypatch.setattr(Buckets, "is_canonical", lambda *_: False)
    model = replace_linears(tiny(), RowByRowLinear)
    with Engine(model, config=replace(CONFIG, verify="padded", prefix_cache=False)) as engine:
        for deterministic in (True, True, False, False):
            params = SamplingParams(max_new_tokens=5, deterministic=deterministic)
            found.append(bits_of(engine.generate([text(8), text(8, seed=1)], params)))
            if deterministic:
                captures = log.captures
    assert found == found[:1] * 4 and captures > 1
    assert (log.captures > captures) == apart


def test_graphs_outlive_a_call_of_generate(monkeypatch):
    log = with_graphs(monkeypatch)
    with patched(tiny(), CONFIG) as model:

        def ask():
            return model.generate(torch.tensor([text(9)]), max_new_tokens=12, do_sample=False)

        answers = [ask(), ask()]
        captures, replays = log.captures, log.replays
        assert torch.equal(*answers) and torch.equal(ask(), answers[0])
        assert log.captures == captures > 1 and log.replays > replays
        model.generate.release()  # their memory goes with that of the pages
        assert torch.equal(ask(), answers[0]) and log.captures > captures


@pytest.mark.parametrize(("device", "backend"), [("cpu", "torch"), ("cpu", "triton")])
def test_refused_where_there_are_none(device, backend):
    config = EngineConfig(cuda_graphs=True, backend=backend)
    with pytest.raises(ValueError, match="cuda_graphs"):
        config.resolve(device_type=device, model_positions=64)
    assert not EngineConfig().resolve(device_type=device, model_positions=64).cuda_graphs
    assert EngineConfig().resolve(device_type="cuda", model_positions=64).cuda_graphs
