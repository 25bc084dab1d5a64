"""Outputs forged at random: audit approves those that are true, and no other.

Control: without one of its comparisons audit approves forgeries of that class within 50 of them.
"""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fuzz import forgeries
from tests.fuzz.forgeries import KINDS, PARTS
from tests.support.cases import REFERENCE, greedy, model_of, run, text
from tests.support.mixes import crowd
from tinyspec import Engine, EngineConfig, audit
from tinyspec.tools import audit as audit_module
from tinyspec.tools import diff as diff_module
from tinyspec.tools.demo import BUNDLED

EVERYTHING = {"prompt_logprobs": True, "top_logprobs": 2}
BATCH = 10


def asked(prompts):
    """Requests whose outputs state everything, or almost nothing."""
    styles = (
        (8, EVERYTHING),
        (7, {"temperature": 1.2, "seed": 4, "num_return_sequences": 2, **EVERYTHING}),
        (6, {"temperature": 1.0, "seed": 6, "top_k": 1, "top_logprobs": 1}),
        (9, {"temperature": 1.5, "seed": 7, "top_p": 0.9, "num_return_sequences": 3}),
        (6, {"logprobs": False}),
        (12, {"temperature": 1.3, "seed": 8, "stop_token_ids": tuple(range(0, 100, 4))}),
        (7, {"repetition_penalty": 1.3, "logprobs_mode": "raw", "prompt_logprobs": True}),
    )
    return [(p, greedy(n, **style)) for p, (n, style) in zip(prompts, styles, strict=True)]


@dataclass
class Bench:
    """Honest outputs of one engine, which audits; an engine of its own judges."""

    audits: Engine
    judges: Engine
    outputs: list
    known: dict = field(default_factory=dict)

    @property
    def tokenizer(self):
        return self.audits.tokenizer

    def wrong(self, rng, count, kinds=KINDS, tally=None, enough=None):
        """Forge ``count`` outputs; those on which audit and judge do not agree. enough: stop after
        so many."""
        found = []
        for _ in range(0, count, BATCH):
            honest = rng.choice(self.outputs)
            batch = [self.forged(rng, kinds) for _ in range(BATCH)]
            expected = [forgeries.is_true(self.judges, forged, self.known) for _, forged in batch]
            approved = self.approved(honest, [forged for _, forged in batch])
            for (name, _), true, said in zip(batch, expected, approved, strict=True):
                if tally is not None:
                    tally[name.partition(":")[0], true] += 1
                if said != true:
                    found.append(f"{name}: approved is {said}, not {true}")
            if enough is not None and len(found) >= enough:
                break
        return found

    def forged(self, rng, kinds):
        """A name and an output, of any that can be forged so; with all kinds some are forged twice.
        What JSON does not have comes last."""
        while True:
            with suppress(forgeries.DoesNotFitError):
                name, forged = forgeries.forge(rng.choice(self.outputs), rng, self.tokenizer, kinds)
                if kinds is KINDS and not name.startswith("memory") and rng.random() < 0.25:
                    again, forged = forgeries.forge(forged, rng, self.tokenizer, kinds)
                    name = f"{name} + {again}"
                return name, forged

    def approved(self, honest, outputs):
        """Whether audit approves each output; what it raised instead, if it did."""
        outputs = [replace(output, request_id=f"forged-{n}") for n, output in enumerate(outputs)]
        try:
            report = audit(self.audits, [honest, *outputs])
        except Exception as error:
            return [f"raised {type(error).__name__}: {error}"] * len(outputs)
        verdicts = {}
        for entry in report.entries:
            verdicts.setdefault(entry.request_id, set()).add(entry.verdict)
        if verdicts.pop(honest.request_id) != {"same"}:
            return ["an honest output was not approved"] * len(outputs)
        approved = [verdicts[output.request_id] == {"same"} for output in outputs]
        assert bool(report) == all(approved)
        return approved


@pytest.fixture(scope="module")
def benches():
    """A random model without a tokenizer, and the bundled one with its own."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    words = "Once upon a time there was a little dog. Tom and Ann went to the park."
    stories = [words[n : n + 30 - 3 * n] for n in range(7)]
    benches = []
    for prompts, make in (
        ([text(n, seed=n) for n in (9, 4, 17, 1, 6, 12, 8)], lambda: (model_of("as is"), None)),
        (stories, lambda: (AutoModelForCausalLM.from_pretrained(BUNDLED), tokenizer)),
    ):
        config = {"reference_rows": REFERENCE, "max_rows": 64}
        audits = Engine(*make(), EngineConfig(page_size=8, draft_window=5, **config))
        judges = Engine(*make(), EngineConfig(prefix_cache=False, **config))
        requests = asked(prompts)
        if tokenizer is audits.tokenizer:
            requests.append((stories[0], greedy(20, stop_strings=(" a", "."))))
        others = [] if audits.tokenizer else crowd(random.Random(1), 5)
        outputs = run(audits, [*requests, *others])[: len(requests)]
        assert audit(audits, outputs), str(audit(audits, outputs))
        assert audits.fingerprint == judges.fingerprint
        benches.append(Bench(audits, judges, outputs))
    yield benches
    for bench in benches:
        bench.audits.close()
        bench.judges.close()


def test_audit_agrees_with_the_judge(benches):
    rng, tally = random.Random(3), Counter()
    wrong = [found for bench in benches for found in bench.wrong(rng, 40, tally=tally)]
    assert not wrong, "\n".join(wrong)
    assert {true for _, true in tally} == {True, False}
    honest = benches[0].outputs[0]
    others = [replace(honest, params=honest.params.to_dict())]
    assert benches[0].approved(honest, others) == [False]


@pytest.mark.slow("random use", 20, cases=10)
def test_many_forgeries(benches, case_seed):
    rng, tally = random.Random(case_seed), Counter()
    wrong = [found for bench in benches for found in bench.wrong(rng, 100, tally=tally)]
    print(f"{sum(tally.values())} forgeries: {dict(sorted(tally.items()))}")
    assert not wrong, "\n".join(wrong)
    assert {kind for kind, _ in tally} == set(KINDS)


# The log-probability of a certain token is 0, which -0.0 differs from in its bits alone.
SIGNS = ("logprobs: value other sign", "top_logprobs: value other sign")


def without(field):
    """The comparison of audit, in which this field never differs."""
    return lambda *given: {**diff_module.compare(*given), field: None}


# What takes a comparison of audit back, and the class of forgeries that it is for.
FIELDS = ("text", "finish_reason", "error", "stop_reason", "prompt_logprobs", "top_logprobs")
TAKEN_BACK = {
    "every bit": (diff_module, "identical", lambda found, own: found == own, SIGNS),
    **{name: (audit_module, "compare", without(name), (name,)) for name in (*FIELDS, "logprobs")},
    "form": (audit_module, "_malformed", lambda *_: (), ("completions", "params", "memory")),
    "obstacles": (audit_module, "_obstacles", lambda *_: iter(()), ("fingerprint", PARTS)),
    "tokens replayed": (audit_module, "_replayable", lambda output: output, ("token_ids",)),
}


@pytest.mark.parametrize("name", TAKEN_BACK)
def test_control_without_a_comparison(benches, monkeypatch, name):
    """Forgeries of its class are approved, honest outputs are not, or audit raises."""
    module, function, instead, kinds = TAKEN_BACK[name]
    rng = random.Random(5)
    monkeypatch.setattr(module, function, instead)
    for bench in benches:
        wrong = bench.wrong(rng, 50, kinds, enough=1)
        assert wrong, f"not one of 50 forgeries: {kinds} without {function}"
