"""Doctor: what breaks a bucket is found and named, wherever it hides, and what is sound is not.

Models compute row by row, so that every bucket is canonical on any hardware, but for what a test
breaks on purpose.
"""

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig

from tests.support import sensitive
from tests.support.cases import bits_of, drain
from tests.support.mixes import bits
from tests.support.patience import PATIENCE
from tests.support.sensitive import RowByRowLinear, ShapeSensitiveLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams, doctor
from tinyspec.cli.main import main

REFERENCE = 8
SIZES = [2, 4, 8, 12, 16, 20]
DRAFTS = ["draft and verify"] * 3
CONFIG = EngineConfig(reference_rows=REFERENCE, max_rows=20)
pytestmark = pytest.mark.usefixtures("home")
DETERMINISTIC = SamplingParams(max_new_tokens=12, deterministic=True, logprobs=True)


def sound():
    """Its linears see one row at a time; everything else is torch's own, at even widths."""
    return replace_linears(tiny(), RowByRowLinear)


class Nudges(nn.Module):
    """Around any module: at 8 rows one bit of the sixth is another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, **given):
        out = self.inner(x, **given).clone()
        if x.shape[1] == 8:
            out[0, 5] = torch.nextafter(out[0, 5], torch.tensor(torch.inf))
        return out


def test_sound_model():
    report = doctor(sound(), CONFIG)
    assert report and report.problems == ()
    assert [fact.rows for fact in report.facts.buckets] == SIZES == report.facts.canonical
    assert report.facts.reference == REFERENCE and report.facts.kernel_linears == ()
    assert not any(fact.broken_by for fact in report.facts.buckets)
    assert all(fact.seconds > 0 for fact in report.facts.buckets)
    assert report.plans == dict.fromkeys(SIZES, "direct")
    assert report.model == "LlamaForCausalLM" and report.dtype == "float32"
    assert len(report.fingerprint) == 32


PLANS = {
    "auto": ["padded to 8 or drafts"] * 2 + ["direct", *DRAFTS],
    "always": ["draft and verify"] * 3 + DRAFTS,
}


@pytest.mark.parametrize("verify", PLANS)
def test_shape_sensitive_linears(verify):
    """The reference bucket is canonical whatever the others are; the table says what breaks them,
    and how requests decode."""
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    report = doctor(model, dataclasses.replace(CONFIG, verify=verify))
    assert report and report.facts.canonical == [REFERENCE]
    assert report.plans == dict(zip(SIZES, PLANS[verify], strict=True))
    lines = str(report).splitlines()
    (header,) = [n for n, line in enumerate(lines) if line.split()[:2] == ["bucket", "canonical"]]
    rows = [line.split() for line in lines[header + 1 : header + 1 + len(SIZES)]]
    for row, fact in zip(rows, report.facts.buckets, strict=True):
        canonical = fact.rows == REFERENCE
        assert row[:2] == (["*8", "yes"] if canonical else [str(fact.rows), "no"])
        names = {name.rpartition(".")[2] for name in fact.broken_by}
        assert names >= {"q_proj", "down_proj", "lm_head"} or (canonical and not names)
        assert canonical or "q_proj," in row
    assert float(rows[2][2]) == pytest.approx(report.facts.buckets[2].seconds * 1e3, abs=0.01)
    assert "1 of 6 buckets are canonical" in str(report) and report.fingerprint in str(report)


LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        (f"{LAYER}.mlp.down_proj", sensitive.PositionSensitiveLinear, f"{LAYER}.mlp.down_proj"),
        (f"{LAYER}.mlp", Nudges, f"{LAYER}.mlp: as a whole"),
        (LAYER, Nudges, "model"),
    ],
)
def test_what_breaks_the_reference_bucket_is_named(name, kind, found):
    """A module without attention inside is found by itself, a whole layer in the model's passes."""
    model = sound()
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, kind(model.get_submodule(name)))
    report = doctor(model, CONFIG)
    assert not report and report.problems[0].startswith(f"{found}: at 8 rows")
    assert report.facts.canonical == [] and report.facts.unsound[0].name == found
    assert report.fingerprint is None and report.plans == {}
    with Engine(model, config=CONFIG) as engine, pytest.raises(DeterminismError, match=found):
        engine.generate([[1, 2]], DETERMINISTIC)


def test_a_rare_difference_of_attention(no_results_on_disk):
    """That only the many rows of a doctor show: the engine refuses from then on."""
    with Engine(tiny(), config=CONFIG) as engine:
        engine.generate([[1, 2]], DETERMINISTIC)
        context = engine.served.context
        whole = context.kernels.paged_attention

        def other(q, *args, **kwargs):
            out = whole(q, *args, **kwargs)
            return out * (1 + 2e-7) if len(q) == 1 else out

        context.kernels = dataclasses.replace(context.kernels, paged_attention=other)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tinyspec.tools.doctor.MANY_ROWS", 10_000)
            report = doctor(engine)
        assert not report and "try another dtype" in report.problems[0]
        assert "reference_rows=" not in report.problems[0]
        (kind,) = report.facts.attention
        assert report.facts.canonical == [] and kind.differing and kind.checked >= 10_000
        assert f"{kind.checked} rows alone and in a prompt, {kind.differing} differ" in str(report)
        with pytest.raises(DeterminismError, match="attention"):
            engine.generate([[1, 2]], DETERMINISTIC)


def test_an_unsupported_model_is_reported():
    config = BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64)
    report = doctor(AutoModelForCausalLM.from_config(config))
    assert not report and report.facts is None
    assert "BloomForCausalLM is not supported" in str(report) and "cannot" in str(report)


def test_an_engine_keeps_its_pool_and_its_requests():
    with Engine(tiny(), config=CONFIG) as engine:
        alone = engine.generate(prompts(4), DETERMINISTIC)
        ids = [engine.add_request(prompt, DETERMINISTIC) for prompt in prompts(4)]
        for _ in range(3):
            engine.step()
        report = doctor(engine)
        assert report and report.fingerprint == engine.fingerprint
        with pytest.raises(ValueError, match="unfinished"):
            doctor(engine, fresh=True)
        done = drain(engine)
        assert bits_of([done[i] for i in ids]) == bits_of(alone)
        cache = engine.runner.cache
        # As integers: what no request has touched yet may hold any bits, NaN included.
        pools = [pool.view(torch.int32) for pool in (*cache.k, *cache.v)]
        before = [pool.clone() for pool in pools]
        assert doctor(engine, fresh=True).facts.canonical == report.facts.canonical
        assert engine.runner.cache is cache and all(map(torch.equal, before, pools))
        assert bits_of(engine.generate(prompts(4), DETERMINISTIC)) == bits_of(alone)


def test_requests_of_other_threads_wait(monkeypatch):
    """A pass between those of a probe would be taken for one of them."""
    with ThreadPoolExecutor(1) as pool, Engine(tiny(), config=CONFIG) as engine:
        given = [[1, 2, 3]], SamplingParams(logprobs=True)
        (expected,) = engine.generate(*given)
        futures = []

        def probes(*_):
            futures.append(pool.submit(engine.generate, *given))
            while not (engine.driver.wanted or futures[0].done()):
                time.sleep(0.001)
            assert not futures[0].done()
            raise DeterminismError("enough")

        monkeypatch.setattr(engine.contract, "probe", probes)
        assert doctor(engine).problems == ("enough",)
        assert bits(futures[0].result(PATIENCE)[0]) == bits(expected)


def test_bad_arguments():
    model, small = tiny(), EngineConfig(reference_rows=4, max_rows=4)
    with Engine(model, config=small) as engine:
        with pytest.raises(ValueError, match="config"):
            doctor(engine, small)
        assert doctor(model, small), "another engine serves the same model"
    with pytest.raises(ValueError, match="open"):
        doctor(engine)


def test_command_line(capsys):
    arguments = ["doctor", "--reference-rows", "8", "--max-rows", "12"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "*8" in table and "deterministic=True can be served" in table
    assert main([*arguments, "--json", "--fresh", "--kv-dtype", "fp8_e4m3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["reference"] == 8 and found["kv_dtype"] == "fp8_e4m3"
    assert main(["doctor", "--reference-rows", "8", "--max-rows", "4"]) == 2
    assert "max_rows=4" in capsys.readouterr().err
