"""The engine on a CUDA device: Triton kernels, the contract, parity. Needs a GPU."""

import random
from dataclasses import replace

import pytest
import torch

from tests.support import walk, zoo
from tests.support.cases import bits_of, one_by_one, run
from tests.support.mixes import crowd, needles, plain, random_config, run_through
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import FAMILIES, hf_greedy, prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams, patch, unpatch
from tinyspec.model.supported import SERVED
from tinyspec.runner.graphs import EAGER_PASSES, CudaGraph

pytestmark = pytest.mark.gpu
REFERENCE = 32
SIZES = (0, 1, 3, 9, 20, 60)
CONFIG = EngineConfig(reference_rows=REFERENCE, num_pages=4096)
TABLE = walk.places()
KINDS = sorted(SERVED & set(zoo.BUILT))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family):
    model = tiny(family).cuda()
    expected = [hf_greedy(model, prompt, 30) for prompt in prompts(8)]
    with Engine(model, config=CONFIG) as engine:
        outputs = engine.generate(prompts(8), SamplingParams(max_new_tokens=30))
    assert [output.completions[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_in_a_crowd(family, dtype):
    model = tiny(family, dtype).cuda()
    with Engine(model, config=CONFIG) as engine:
        alone = one_by_one(engine, needles())
        outputs = run(engine, [*needles(), *crowd(random.Random(1), 20)])
    assert bits_of(outputs[: len(alone)]) == alone


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_random_mixes(dtype):
    model = tiny("llama", dtype).cuda()
    with Engine(model, config=CONFIG) as engine:
        alone = one_by_one(engine, needles())
    for seed in range(20):
        rng = random.Random(seed)
        chosen = rng.sample(range(len(needles())), 2)
        order = [needles()[n] for n in chosen] + crowd(rng, rng.randint(0, 20))
        with Engine(model, config=random_config(rng, REFERENCE, None)) as engine:
            outputs = run_through(engine, rng, order)
        assert bits_of(outputs[:2]) == [alone[n] for n in chosen]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replays_have_the_bits_of_eager_passes(dtype):
    """Crowds of all sizes, each often enough that its passes are captured."""
    model = tiny("llama", dtype).cuda()
    found, count = [], len(needles())
    for graphs in (False, True):
        with Engine(model, config=replace(CONFIG, cuda_graphs=graphs)) as engine:
            engine.warm_up()
            mixes = [needles() + crowd(random.Random(n), size) for n, size in enumerate(SIZES)]
            mixes *= EAGER_PASSES + 1
            found.append([bits_of(run(engine, mix)[:count]) for mix in mixes])
            assert bool(len(engine.runner.graphs)) is graphs
    assert found[0] == found[1]


def test_a_capture_that_fails(monkeypatch):
    """Passes go on eagerly with the same bits, and so does the next engine, with graphs."""
    capture = CudaGraph.capture
    asked = [needles() + crowd(random.Random(2), 9)] * (EAGER_PASSES + 2)

    def served():
        with Engine(tiny(dtype=torch.bfloat16).cuda(), config=CONFIG) as engine:
            found = [bits_of(run(engine, mix)[: len(needles())]) for mix in asked]
            graphs = engine.runner.graphs
            return found, len(graphs), [why for why in graphs.refusals.values() if why]

    def waiting(graph, work):
        def forward():
            result = work()
            torch.cuda.synchronize()  # which no stream may do that is captured
            return result

        return capture(graph, forward)

    monkeypatch.setattr(CudaGraph, "capture", waiting)
    eager, graphs, refusals = served()
    assert not graphs and len(refusals) == 2 and all("during capture" in why for why in refusals)
    monkeypatch.setattr(CudaGraph, "capture", capture)
    captured, graphs, refusals = served()
    assert eager == captured and graphs and not refusals
    assert torch.randn(9, device="cuda").isfinite().all()


def test_control_plain_requests_differ():
    model = replace_linears(tiny().cuda(), ShapeSensitiveLinear)
    prompt, params = needles()[1]
    request = (prompt, plain(params))
    with Engine(model, config=CONFIG) as engine:
        alone = one_by_one(engine, [request])
        among = run(engine, [request, *crowd(random.Random(0), 9)])
    assert bits_of(among[:1]) != alone


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_drop_in(device):
    """Inputs on either device; a pool that grows, the model is unpatched between calls."""
    model = tiny().cuda()
    ids = torch.randint(3, 100, (2, 6), generator=torch.Generator().manual_seed(0)).to(device)
    before = model(ids.cuda()).logits
    expected = [model.generate(row[None].cuda(), max_new_tokens=20)[0] for row in ids]
    patch(model, EngineConfig(reference_rows=REFERENCE))
    for copies in (1, 8):
        found = model.generate(ids.repeat(copies, 1), max_new_tokens=20)
        assert found.device == ids.device
        assert torch.equal(found[-2:].cpu(), torch.stack(expected).cpu())
    asked = {"max_new_tokens": 20, "do_sample": True, "deterministic": True}
    alone = model.generate(ids[:1], seed=[3], **asked)
    among = model.generate(ids.repeat(4, 1), seed=[3, *range(10, 17)], **asked)
    assert torch.equal(among[:1], alone)
    assert torch.equal(model(ids.cuda()).logits, before)
    unpatch(model)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_bits_of_a_family(kind):
    """Greedy tokens in fp32 as transformers' own, bits in bf16 alone and in batches."""
    model = zoo.tiny(kind).cuda()
    assert walk.wrong_tokens(model, 40) == []
    assert walk.contract_of(model.bfloat16(), 40) in walk.allowed(TABLE[kind][1])


@pytest.mark.parametrize("kind", KINDS)
def test_canonical_forward_of_a_family(kind):
    assert walk.forward_of(zoo.tiny(kind).cuda()) in walk.allowed(TABLE[kind][2])
