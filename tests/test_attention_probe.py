"""Attention of a row alone and in its prompt: head sizes, softcaps, and a probe that tells."""

from dataclasses import replace

import pytest
import torch

from tests.support.tiny import tiny
from tinyspec import Engine
from tinyspec.determinism.probes.attention import probe_attention, probe_rows
from tinyspec.kernels import backend as kernels
from tinyspec.kernels.twins import attention_tiles, paged_attention
from tinyspec.model.attention_calls import LayerShape
from tinyspec.model.linears import cpu_has

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def probe(dtype, dim, softcap=0.0, heads=(8, 2)):
    shape = LayerShape(*heads, dim, softcap)
    return probe_rows(kernels.load("torch"), shape, dtype, torch.device("cpu"))


@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("dim", [16, 40, 72, 80, 112, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_alone_and_in_their_prompt(dtype, dim, softcap):
    found = probe(dtype, dim, softcap)
    assert found.checked > 1000
    assert found, str(found)


@pytest.mark.skipif(not cpu_has("amx_bf16"), reason="where few and many rows differ")
@pytest.mark.parametrize("dim", [80, 112, 144])
def test_control_head_sizes_as_they_are(dim, monkeypatch):
    monkeypatch.setattr(attention_tiles, "HEAD_UNIT", 1)
    assert not probe(torch.bfloat16, dim)


@pytest.mark.skipif(not cpu_has("GenuineIntel"), reason="where few and many rows differ")
@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float32, 0.0), (torch.bfloat16, 50.0)])
def test_control_few_rows_of_a_wide_head(dtype, softcap, monkeypatch):
    monkeypatch.setattr(paged_attention, "_least_rows", lambda q, softcap: 4)
    assert not probe(dtype, 256, softcap, heads=(8, 1))


def test_an_engine_probes_with_its_softcap(monkeypatch):
    with Engine(tiny("gemma2", torch.bfloat16)) as engine:
        softcap = engine.model.config.attn_logit_softcapping
        assert softcap
        assert {layer.softcap for layer in engine._runner.layers} == {softcap}
        assert all(probe_attention(engine._runner))
        runner = engine._runner
        runner.kernels = replace(
            runner.kernels,
            paged_attention=lambda q, *_, softcap, **__: q * (1 + (len(q) == 1) * (softcap > 0)),
        )
        assert not any(probe_attention(engine._runner))
