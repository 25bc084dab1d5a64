"""``tinyspec.token_logprobs``: the bits of generation, the gradient of the formula."""

import numpy as np
import pytest
import torch

from tests.support.drop_in import PAD
from tests.support.tiny import VOCAB, prompts, tiny
from tests.support.tolerances import FORMULA, close
from tinyspec import Engine, EngineConfig, SamplingParams, patch, token_logprobs
from tinyspec.kernels import backend as kernels
from tinyspec.runner import token_logprobs as module
from tinyspec.runner.sampler import SampleBatch, Sampler

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "one": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}
settings = pytest.mark.parametrize("asked", SETTINGS.values(), ids=SETTINGS)
CONFIG = EngineConfig(reference_rows=16, max_rows=32, page_size=16)
PATHS = [
    (torch.float32, "cpu"),
    (torch.bfloat16, "cpu"),
    pytest.param(torch.bfloat16, "cuda", marks=pytest.mark.gpu),
]
PROMPT = prompts(3, 20)[2]


@pytest.mark.parametrize(("dtype", "device"), PATHS)
def test_bits_of_generation(dtype, device):
    """By the logits that a patched model returns for the same request."""
    model, more = tiny(dtype=dtype).to(device), {"seed": 3, "max_new_tokens": 8}
    params = [
        SamplingParams(deterministic=True, logprobs=True, **asked, **more)
        for asked in SETTINGS.values()
    ]
    with Engine(model, config=CONFIG) as engine:
        outputs = engine.generate([PROMPT] * len(params), params)
    patch(model, CONFIG)
    for asked, output in zip(SETTINGS.values(), outputs, strict=True):
        (completion,) = output.completions
        given = {"top_k": 0, "top_p": 1.0, "min_p": None, "do_sample": True, **asked, **more}
        if not asked["temperature"]:
            given["do_sample"] = False
            del given["temperature"]
        kept = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": PAD}
        found = model.generate([PROMPT], deterministic=True, **given, **kept)
        assert found.sequences[0, len(PROMPT) :].tolist() == completion.token_ids
        logits, ids = torch.cat(found.logits).to(dtype), torch.tensor(completion.token_ids)
        own = token_logprobs(logits, ids, **asked)
        assert own.dtype == torch.float32 and own.tolist() == completion.logprobs


def test_bits_of_the_triton_kernels_in_16_bits(monkeypatch):
    """Rows that filters change are read in fp32, the others as they are."""
    monkeypatch.setattr(EngineConfig, "backend_on", lambda *of: "triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = (torch.randn(3, 101) * 3).half().to(device)
    places, sampler = np.arange(len(logits)), Sampler(kernels.load("triton"))
    for asked in SETTINGS.values():
        filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | asked
        columns = {name: np.full(len(logits), value) for name, value in filters.items()}
        batch = SampleBatch(places, key=places, position=places, logprobs=True, **columns)
        sampled = sampler.sample(logits, batch)
        found = token_logprobs(logits, sampled.tokens, **asked)
        assert torch.equal(found, sampled.logprobs)


def test_control_other_formulas_have_other_bits():
    """What trainers use: the difference to logsumexp, and a softmax in 16 bits."""
    logits, ids = torch.randn(64, 1000), torch.arange(64)
    found = token_logprobs(logits, ids)
    assert not torch.equal(found, logits[ids, ids] - logits.logsumexp(-1))
    half = logits.bfloat16()
    assert not torch.equal(token_logprobs(half, ids), torch.log_softmax(half, -1)[ids, ids].float())


def in_double(logits, ids, kept, temperature):
    """Log-probabilities and kept mass by torch, in fp64."""
    scaled = logits.double() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    mass = torch.log_softmax(scaled, -1).masked_fill(~kept, -torch.inf).logsumexp(-1)
    filtered = torch.log_softmax(scaled.masked_fill(~kept, -torch.inf), -1)
    return filtered.gather(1, ids[:, None])[:, 0], mass


@settings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient(asked, dtype, monkeypatch):
    """Of both results, by parts of three rows; a token that is not kept has none."""
    monkeypatch.setattr(module, "PART", 3 * VOCAB)
    torch.manual_seed(0)
    logits = (torch.randn(10, VOCAB) * 3).to(dtype).requires_grad_()
    temperature = torch.full((10,), asked["temperature"])
    temperature[4] = 0.0
    with torch.no_grad():
        every = logits.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(10)
        heat = temperature.repeat_interleave(VOCAB)
        kept = token_logprobs(*every, **{**asked, "temperature": heat}).view(10, VOCAB) > -torch.inf
    assert kept[4].all()
    ids, given = logits.argmax(-1), {**asked, "temperature": temperature}
    weights = torch.randn(2, 10)
    found = token_logprobs(logits, ids, return_kept_mass=True, **given)
    (gradient,) = torch.autograd.grad(found, logits, list(weights))
    expected = in_double(logits, ids, kept, temperature)
    (exact,) = torch.autograd.grad(expected, logits, list(weights.double()))
    assert gradient.dtype == dtype and gradient.shape == logits.shape
    assert torch.allclose(gradient.double(), exact.double(), torch.finfo(dtype).eps, 1e-6)
    for one, other in zip(found, expected, strict=True):
        assert close(one.double(), other, FORMULA)
    if kept.all():
        assert not found[1].any()
        return
    assert (found[1] <= 0).all() and not found[1][4]
    row = next(n for n in range(10) if not kept[n].all())
    out = token_logprobs(logits[row], kept[row].long().argmin(), **asked)
    assert out == -torch.inf
    assert not torch.autograd.grad(out, logits)[0].any()


def test_rows_do_not_depend_on_shape_strides_or_modes():
    """Any shape, slices, the caller's modes, autocast and default device; NaN stays in its row."""
    torch.manual_seed(0)
    batch, ids = torch.randn(3, 5, 100, requires_grad=True), torch.randint(100, (3, 5))
    asked = {"temperature": torch.tensor([[0.5], [0.0], [2.0]]), "top_k": 50, "top_p": 0.9}
    expected = token_logprobs(batch, ids, **asked)
    first, last = batch[0, 0], batch[:, 1:]
    assert torch.equal(token_logprobs(first, ids[0, 0], 0.5, 50, 0.9), expected[0, 0])
    assert torch.equal(token_logprobs(last, ids[:, 1:], **asked), expected[:, 1:])
    for mode in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
    ):
        with mode:
            assert torch.equal(token_logprobs(batch, ids, **asked), expected)
    compiled = torch.compile(lambda x: token_logprobs(x, ids, **asked), backend="eager")
    assert torch.equal(compiled(batch), expected)
    torch.autograd.grad(token_logprobs(last, ids[:, 1:], **asked).clamp(min=-9).sum(), batch)
    assert token_logprobs(torch.zeros(0, 100), torch.zeros(0, dtype=torch.long)).shape == (0,)
    spoilt = batch.detach().clone()
    spoilt[1, 2, 3] = torch.nan
    found = token_logprobs(spoilt, ids, **asked)
    assert found[1, 2].isnan()
    found[1, 2] = expected[1, 2]
    assert torch.equal(found, expected)


REFUSED = [
    ({"ids": [1, 9]}, r"ids=9 is not allowed: token ids in \[0, 9\)$"),
    ({"ids": [1, -100]}, r"ids=-100 is not allowed: .*labels to ignore"),
    ({"ids": [1.0, 2.0]}, r"ids.dtype=torch.float32 .*integers"),
    ({"ids": [[1, 2]]}, r"ids.shape=\[1, 2\] .*\[2\]"),
    ({"temperature": -1.0}, r"temperature=-1.0 is not allowed: 0 \(greedy\)"),
    ({"temperature": torch.tensor([1.0, torch.nan])}, r"temperature=tensor\(\[1., nan\]\)"),
    ({"temperature": torch.ones(3)}, r"temperature=.*broadcast to \[2\]"),
    ({"top_k": -1}, "top_k=-1"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"min_p": -0.1}, "min_p=-0.1"),
    ({"logits": torch.tensor(1.0)}, r"logits='torch.float32 \[\]' .*\[..., V\]"),
    ({"logits": torch.zeros(2, 9).double()}, "logits='torch.float64"),
]


def test_what_is_refused():
    for wrong, message in REFUSED:
        with pytest.raises(ValueError, match=f"^{message}"):
            token_logprobs(**{"logits": torch.zeros(2, 9), "ids": [1, 2], **wrong})


def test_temperatures_are_those_of_requests():
    taken = {0: True, 1e-6: True, np.float32(1e-6): True, 3.4e38: True}
    for value, expected in {**taken, 1e-50: False, 9e-7: False, 1e39: False}.items():
        for ask in (
            lambda value: SamplingParams(temperature=value),
            lambda value: token_logprobs(torch.zeros(2, 9), [1, 2], value),
            lambda value: token_logprobs(torch.zeros(2, 9), [1, 2], np.float64(value)),
        ):
            if expected:
                ask(value)
                continue
            with pytest.raises(ValueError, match=r"^temperature=.*1e-6 to 3.4e38"):
                ask(value)
