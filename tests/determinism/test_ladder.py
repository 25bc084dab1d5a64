"""Which buckets are proven, and when: that changes speed, never a bit."""

import logging
import random
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.support.budget import first
from tests.support.cases import bits_of, one_by_one, run
from tests.support.loading import everything, unlike
from tests.support.mixes import bits, crowd, needles
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams, doctor
from tinyspec.determinism import attention_probe, ladder, model_probe, proof
from tinyspec.determinism.ladder import PROOF_PASSES, Ladder, proof_seconds
from tinyspec.determinism.results import BucketResult, ProbeResults, Unsound
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.scheduler.buckets import Buckets

CONFIG = EngineConfig(reference_rows=8, max_rows=16)
SIZES = [2, 4, 8, 12, 16]
DETERMINISTIC = SamplingParams(max_new_tokens=12, deterministic=True, logprobs=True)
pytestmark = pytest.mark.usefixtures("proven_on_demand", "no_results_on_disk")


def on_demand(monkeypatch):
    """As soon as a pass would have used them."""
    monkeypatch.setattr(ladder, "EVERY", 1)


def at_random(monkeypatch):
    """Any bucket after any pass."""
    rng = random.Random(0)

    def chosen(self, results, *_):
        unknown = [rows for rows in self._buckets.sizes if rows not in results.sizes]
        return rng.choice([*unknown, None])

    monkeypatch.setattr(Ladder, "next", chosen)


def never(monkeypatch):
    monkeypatch.setattr(Ladder, "next", lambda *_: None)


def served(model, requests, config=CONFIG):
    """Bits of ``requests`` together, and what the engine knows afterwards."""
    with Engine(model, config=config) as engine:
        return bits_of(run(engine, requests)), engine.contract.results


def reference_bits(model, requests):
    """Each alone, by the reference bucket."""
    with Engine(model, config=replace(CONFIG, verify="always")) as engine:
        return one_by_one(engine, requests)


# The same bits


PACES = [on_demand, at_random, never]
SEVERAL = replace(DETERMINISTIC, num_return_sequences=2, temperature=0.8, seed=3)
NEEDLES = [*needles()[:4], (prompts(1)[0], SEVERAL)]


@pytest.mark.parametrize("how", first(2, PACES, 2), ids=lambda how: how.__name__)
def test_the_same_bits_whenever_buckets_are_proven(how, monkeypatch):
    model = tiny(dtype=torch.bfloat16)
    expected = reference_bits(model, NEEDLES)
    how(monkeypatch)
    found, results = served(model, [*NEEDLES, *crowd(random.Random(0), 6)])
    assert found[: len(NEEDLES)] == expected
    assert (results.sizes == [8]) == (how is never)


def test_control_a_false_fact(monkeypatch):
    """A bucket that is declared canonical and is not."""
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    requests = [(prompt, DETERMINISTIC) for prompt in prompts(3)]
    expected = reference_bits(model, requests)
    on_demand(monkeypatch)
    assert served(model, requests)[0] == expected

    def false(prober, results, rows):
        return results.with_bucket(BucketResult(rows, True, (), 0.001))

    monkeypatch.setattr(proof, "prove_bucket", false)
    changed = replace(CONFIG, max_rows=12)  # other facts on disk
    found, results = served(model, requests, changed)
    assert len(results.canonical) > 1 and found != expected


# What comes when


def test_what_a_first_token_waits_for(monkeypatch):
    """Fewer than 20 passes of the reference bucket, in products: passes end to end, and the linears
    by themselves."""
    model, products, rows = tiny(dtype=torch.bfloat16), [], []
    whole, forward = nn.Module.__call__, ModelRunner.forward

    def counted(module, *args, **kwargs):
        if hasattr(module, "out_features"):
            products.append(args[0].numel() * module.out_features)
        return whole(module, *args, **kwargs)

    def passes(runner, batch, *others):
        rows.append(len(batch.input_ids))
        return forward(runner, batch, *others)

    monkeypatch.setattr(nn.Module, "__call__", counted)
    monkeypatch.setattr(ModelRunner, "forward", passes)
    with Engine(model, config=EngineConfig()) as engine:
        reference = engine.config.reference_rows
        linears = [m for m in model.modules() if hasattr(m, "out_features")]
        one = sum(m.in_features * m.out_features for m in linears) * reference
        del products[:], rows[:]
        engine.contract.ensure()
        assert engine.contract.results.sizes == [reference]
        # 28 layers have the kinds of linears of 2: what is proven by itself counts 14 times as much
        # here as in a model of that size.
        assert 5 * one < sum(products) < 20 * one
        assert {*rows} == {reference} and len(rows) < 12


def test_a_proof_waits_until_it_is_repaid(monkeypatch):
    """10 rows cost 2 in a pass of 32, which is canonical, and 1.5 in one of 16. A bucket whose
    proof failed is not tried again."""
    monkeypatch.setattr(ladder, "proof_seconds", lambda results, *_: results.buckets[-1].proof)
    buckets = Buckets(1024, 32, (2, 4, 16, 32, 64, 1024))
    buckets.learn([32], {rows: 1 + rows / 32 for rows in buckets.sizes})

    def first_proof(rows, seconds=2.0, most=1000, failed=()):
        """The pass after which a bucket is proven, and which."""
        known = Ladder(buckets)
        known.failed.update(failed)
        results = ProbeResults(32, (BucketResult(32, True, (), 2.0, proof=seconds),))
        for number in range(1, most):
            buckets.window(rows, 0, 0, 0.9)
            if (found := known.next(results, 0.9)) is not None:
                return number, found
        return None

    near = ladder.EVERY
    for seconds in (2.0, 20.0):
        assert first_proof(10, seconds) == (pytest.approx(seconds / 0.5, abs=near), 16)
    assert first_proof(3) == (pytest.approx(2.0 / 0.875, abs=near), 4)
    assert first_proof(32) is None and first_proof(10, failed=[16]) is None


def test_what_a_proof_takes_is_told_by_passes_and_other_proofs():
    """The first one takes a second look at the reference, too; by its own proof, which also finds
    what others go by, none was ever repaid."""
    buckets = Buckets(64, 32, (16, 32, 64))
    buckets.learn([32], {16: 1.0, 32: 2.0, 64: 4.0})
    results = ProbeResults(32, (BucketResult(32, True, (), 2.0, proof=1000.0),))
    assert proof_seconds(results, buckets, 64) == 4 * PROOF_PASSES + 1000
    results = replace(results, confirmed=True)
    assert proof_seconds(results, buckets, 64) == 4 * PROOF_PASSES
    results = results.with_bucket(BucketResult(16, True, (), 1.0, proof=PROOF_PASSES + 7.0))
    assert proof_seconds(results, buckets, 64) == 4 * PROOF_PASSES + 7


def test_what_shows_most_is_looked_for_once_while_modules_stay(monkeypatch, no_results_on_disk):
    """In the two proofs of a warm-up once, and anew after a module is another."""
    never(monkeypatch)
    looked, look = [], proof.sensitive_pool
    monkeypatch.setattr(proof, "sensitive_pool", lambda *x: looked.append(x) or look(*x))
    model, found = tiny(), []
    with Engine(model, config=CONFIG) as engine:
        for act in (nn.ReLU(), nn.SiLU()):
            for layer in model.model.layers:
                layer.mlp.act_fn = act
            engine.generate(prompts(1), DETERMINISTIC)
            found.append(len(looked))
            engine.warm_up()
            found.append(len(looked))
    assert 0 < found[0] == found[1] and found[2] == found[3] == 2 * found[0]


def test_warm_up_and_a_doctor_prove_the_rest(monkeypatch):
    never(monkeypatch)
    monkeypatch.setattr("tinyspec.determinism.contract.MANY_ROWS", 1)
    found = []
    for all_of_it in (Engine.warm_up, doctor):
        with Engine(tiny(), config=replace(CONFIG, max_rows=15 + len(found))) as engine:
            engine.generate(prompts(1), DETERMINISTIC)
            assert engine.contract.results.sizes == [8]
            all_of_it(engine)
            results = engine.contract.results
            found.append((len(results.sizes), results.canonical[:-1], results.tiles))
            engine.add_request(prompts(1)[0], DETERMINISTIC)
            with pytest.raises(ValueError, match="unfinished"):
                engine.warm_up()
    assert found[0] == found[1] and found[0][0] == len(SIZES)
    with Engine(tiny(), config=CONFIG) as engine:
        engine.contract.ensure()
        assert engine.contract.results.sizes == SIZES, "from disk"


# No trace


def test_a_proof_leaves_no_trace(monkeypatch):
    model, random_state, stats = tiny(dtype=torch.bfloat16), torch.get_rng_state(), []
    before, versions = everything(model), [p._version for p in model.parameters()]
    for how in (never, on_demand):
        how(monkeypatch)
        with Engine(model, config=replace(CONFIG, verify="padded")) as engine:
            engine.generate(prompts(1), DETERMINISTIC)
            assert not engine.contract.changed()
            stats.append((engine.stats().committed, len(engine.records)))
    assert stats[0] == stats[1]
    assert unlike(before, everything(model)) == []
    assert [p._version for p in model.parameters()] == versions
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("error", first(2, [RuntimeError, KeyboardInterrupt, MemoryError], 2))
def test_a_proof_that_fails(error, monkeypatch, caplog):
    """Requests go on after an error; an interrupt is the caller's, and the engine works on."""
    on_demand(monkeypatch)
    model = tiny()
    before = everything(model)
    requests = [(prompt, DETERMINISTIC) for prompt in prompts(2)]
    expected = reference_bits(model, requests)
    with Engine(model, config=CONFIG) as engine:
        with monkeypatch.context() as patches:
            patches.setattr(proof, "prove_bucket", Mock(side_effect=error("no")))
            if error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    run(engine, requests)
            else:
                with caplog.at_level(logging.WARNING, "tinyspec"):
                    assert bits_of(run(engine, requests)) == expected
                assert "could not be probed" in caplog.text
        assert bits_of(run(engine, requests)) == expected
    assert unlike(before, everything(model)) == []


def test_an_interrupt_takes_effect_between_the_passes_of_a_proof(monkeypatch):
    """Scratch weights are out again by then."""
    model = tiny()
    before = [p.clone() for p in model.parameters()]
    interrupted = Mock(side_effect=[None] * 19 + [KeyboardInterrupt])
    with Engine(model, config=CONFIG) as engine:
        engine.contract.ensure()
        with monkeypatch.context() as patches:
            for module in (attention_probe, model_probe, proof):
                patches.setattr(module, "flush", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.warm_up()
        assert interrupted.call_count == 20
        assert all(map(torch.equal, before, model.parameters()))
        assert engine.generate(prompts(1), DETERMINISTIC)


def test_a_reference_bucket_that_turns_out_unsound(monkeypatch):
    """Deterministic requests end with the reason, plain ones go on, others are refused."""
    wrong, plain = "in other passes", SamplingParams(max_new_tokens=12)
    broken = [Unsound("attention", wrong, "try another dtype")]
    with Engine(tiny(), config=CONFIG) as engine:
        alone = bits(engine.generate(prompts(1), plain)[0])
        engine.contract.ensure()
        on_demand(monkeypatch)
        monkeypatch.setattr(proof.Prober, "differs", lambda *_: broken)
        outputs = engine.generate(prompts(1) * 2, [DETERMINISTIC, plain])
        ends = [o.completions[0].finish_reason for o in outputs]
        assert ends == ["abort", "length"] and wrong in outputs[0].completions[0].error
        assert bits(outputs[1])[1:] == alone[1:]
        with pytest.raises(DeterminismError, match=wrong):
            engine.generate(prompts(1), DETERMINISTIC)
        assert engine.generate(prompts(1), plain)[0].completions[0].finish_reason == "length"
