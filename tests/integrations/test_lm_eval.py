"""lm-eval, by its ``HFLM`` on a patched model and by ``--model tinyspec``: scores that no batch
size, order or way to the engine changes."""

import json
import random
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.drop_in import patched
from tests.support.serving import MODEL, running
from tinyspec import Engine
from tinyspec.tools.demo import BUNDLED

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tinyspec.integrations.lm_eval import TinyspecLM

pytestmark = pytest.mark.filterwarnings("ignore")

ANIMALS = ("fox", "dog", "bee", "turtle", "small grey mouse", "bird", "cat", "frog")
ENDS = (" was happy.", " went home and slept until the next morning.", " ran")
BATCHES = (1, 7, 32)
# Tokens before the last one: the longest texts have several windows.
MAX_LENGTH = 64
DOCS = [
    {
        "id": n,
        "told": f"One {'very ' * n}dark day a {animal} woke up. The {animal}",
        "ends": list(ENDS),
        "label": n % len(ENDS),
    }
    for n, animal in enumerate(ANIMALS)
]
SHUFFLED = random.Random(0).sample(DOCS, len(DOCS))
UNTIL = {"until": ["."], "max_gen_toks": 12}


def task_of(kind, target, *metrics, **more):
    told = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{told}}"}
    metric_list = [{"metric": name} for name in metrics]
    told |= {"output_type": kind, "doc_to_target": target, "metric_list": metric_list}
    return told | more


CHOICE = {"doc_to_choice": "{{ends}}", "target_delimiter": ""}
TASKS = {
    "choice": task_of("multiple_choice", "{{label}}", "acc", "acc_norm", **CHOICE),
    "answer": task_of("generate_until", " was happy", "exact_match", generation_kwargs=UNTIL),
    "text": task_of(
        "loglikelihood_rolling",
        "{{told}}{{ends | join}}",
        *("word_perplexity", "bits_per_byte"),
        doc_to_text="",
    ),
}


def loaded(dtype):
    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=dtype)


def lm_of(kind, model, **settings):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    return kind(pretrained=model, tokenizer=tokenizer, **settings)


def likelihoods(lm, order=None, ends=ENDS):
    """(log-likelihood, whether it is the greedy continuation) of each document with each end."""
    pairs = [(doc["told"], end) for doc in DOCS for end in ends]
    order = order or range(len(pairs))
    asked = [Instance("loglikelihood", {}, pairs[n], n) for n in order]
    found = dict(zip(order, lm.loglikelihood(asked, disable_tqdm=True), strict=True))
    return [found[n] for n in range(len(pairs))]


def answers(lm, **settings):
    given = {**UNTIL, **settings}
    asked = [Instance("generate_until", {}, (doc["told"], given), doc["id"]) for doc in DOCS]
    return lm.generate_until(asked, disable_tqdm=True)


class AddedExactly(HFLM):
    """Adds log-probabilities in float64, as the harness's API models do; HFLM itself in float32."""

    def _select_cont_toks(self, logits, **lengths):
        return super()._select_cont_toks(logits, **lengths).double()


@pytest.mark.parametrize("mixed", [None, "bfloat16"], ids=["own", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_hflm_in_float32(dtype, mixed):
    """On canonical passes, in every batch size and order; one token's without more ado. Control:
    HFLM's own softmax_dtype."""
    model, one = loaded(dtype), (" was", " the", " and")
    settings = {"max_length": MAX_LENGTH, "mixed_precision_dtype": mixed, "batch_size": 7}
    ours = lm_of(TinyspecLM, model, **settings)
    texts = [Instance("loglikelihood_rolling", {}, (DOCS[n]["told"] * 5,), n) for n in (0, 7)]
    found = likelihoods(ours), ours.loglikelihood_rolling(texts), answers(ours)
    assert any(greedy for _, greedy in likelihoods(ours, ends=one))
    with patched(model, None, deterministic=True, forward=True):
        in_float32 = {**settings, "softmax_dtype": "float32"}
        exact, hflm = (lm_of(kind, model, **in_float32) for kind in (AddedExactly, HFLM))
        assert found == (likelihoods(exact), exact.loglikelihood_rolling(texts), answers(exact))
        order = random.Random(0).sample(range(len(found[0])), len(found[0]))
        for size in BATCHES:
            exact.batch_size_per_gpu = size
            assert (likelihoods(exact, order), answers(exact)) == (found[0], found[2])
        assert likelihoods(hflm, ends=one) == likelihoods(ours, ends=one)
        for (value, greedy), expected in zip(likelihoods(hflm), found[0], strict=True):
            assert (pytest.approx(value, rel=1e-6), greedy) == expected
        other = likelihoods(lm_of(HFLM, model, **settings), ends=one)
        in_bfloat16 = dtype == torch.bfloat16 or mixed is not None
        assert (other != likelihoods(ours, ends=one)) == in_bfloat16
        exact.think_end_token = ours.think_end_token = 319  # " was", behind which answers go on
        assert answers(exact) == answers(ours) != found[2]


@pytest.fixture
def tasks(tmp_path):
    """A function that writes the three tasks about some documents, and returns the folder."""

    def written(name, docs):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
        data = {"data_files": {"test": str(folder / "docs.jsonl")}, "cache_dir": str(folder)}
        for task, settings in TASKS.items():
            whole = {"task": task, "dataset_kwargs": data, **settings}
            (folder / f"{task}.yaml").write_text(json.dumps(whole))
        return folder

    return written


def evaluated(lm, folder, batch_size=1):
    """Scores of the three tasks, and what was said of each document."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    given = {"tasks": list(TASKS), "task_manager": manager, "batch_size": batch_size}
    found = lm_eval.simple_evaluate(model=lm, bootstrap_iters=0, **given)
    scores = {task: found["results"][task] for task in TASKS}
    each = {(t, s["doc"]["id"]): s["filtered_resps"] for t in TASKS for s in found["samples"][t]}
    return scores, each


def test_tasks_have_one_score(tasks):
    """Twice, shuffled, few and many at a time, over HTTP. Control: HFLM's by batch size."""
    pytest.importorskip("tenacity", reason="local-completions needs lm-eval[api]")
    folder, shuffled = tasks("in order", DOCS), tasks("shuffled", SHUFFLED)
    model, length = loaded(torch.bfloat16), {"max_length": MAX_LENGTH}
    many = lm_of(TinyspecLM, model, **length)
    first = evaluated(many, folder, batch_size=32)
    assert len(first[1]) == len(TASKS) * len(DOCS)
    assert evaluated(many, folder) == evaluated(many, shuffled) == first
    few = lm_of(TinyspecLM, model, max_sequences=1, prefix_cache=False, **length)
    assert evaluated(few, shuffled) == first
    engine = Engine(loaded(torch.bfloat16), AutoTokenizer.from_pretrained(BUNDLED))
    with engine, running(engine, deterministic=True) as server:
        asked = {"model": MODEL, "base_url": f"{server.url}/v1/completions"}
        # Of which it takes off one for a token that it does not use, and one more for windows.
        served = {**asked, "tokenizer": str(BUNDLED), "max_length": MAX_LENGTH + 2}
        for size in (1, 4):
            api = lm_eval.api.registry.get_model("local-completions")(**served, batch_size=size)
            assert evaluated(api, shuffled) == first
    plain = [lm_of(HFLM, model, batch_size=size, **length) for size in BATCHES]
    assert len({repr(evaluated(lm, folder)) for lm in plain}) > 1


def test_the_command_line(tasks, tmp_path):
    """The harness's own, in a fresh process; results name the fingerprint."""
    folder = tasks("in order", DOCS)
    ours = TinyspecLM(str(BUNDLED), dtype="bfloat16", device="cpu")
    model = f"pretrained={BUNDLED},dtype=bfloat16,max_sequences=2"
    command = [sys.executable, "-m", "tinyspec.integrations.lm_eval", "run", "--device", "cpu"]
    command += ["--model", "tinyspec"]
    command += ["--model_args", model, "--include_path", folder, "--output_path", tmp_path / "out"]
    subprocess.run([*command, "--tasks", *TASKS], check=True)
    (results,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(results.read_text())
    expected = evaluated(ours, folder)[0]
    for task in TASKS:
        for name in {name for name in expected[task] if "stderr" not in name}:
            assert found["results"][task][name] == expected[task][name]
    assert len(found["config"]["fingerprint"]) == len(ours.engine.fingerprint)


def test_sampled_answers():
    """They hang on the harness's seed, their text and how often that was asked before."""
    lm = lm_of(TinyspecLM, loaded(torch.float32))
    given = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 8}
    asked = [(doc["told"], given) for doc in DOCS for _ in range(2)]

    def found(seed, pairs):
        torch.manual_seed(seed)
        requests = [Instance("generate_until", {}, pair, 0) for pair in pairs]
        told = lm.generate_until(requests, disable_tqdm=True)
        return {(text, answer) for (text, _), answer in zip(pairs, told, strict=True)}

    first = found(3, asked)
    assert len(first) == len(asked)
    assert found(3, random.Random(0).sample(asked, len(asked))) == first > found(3, asked[4:6])
    assert first.isdisjoint(found(4, asked))


def test_refused_by_name():
    model = loaded(torch.float32)
    for field, value in (("softmax_dtype", "bfloat16"), ("max_sequences", 0)):
        with pytest.raises(ValueError, match=field):
            lm_of(TinyspecLM, model, **{field: value})
    lm = lm_of(TinyspecLM, model, max_length=MAX_LENGTH)
    for field, value in (("num_beams", 2), ("max_gen_toks", MAX_LENGTH)):
        with pytest.raises(ValueError, match=field):
            answers(lm, **{field: value})
