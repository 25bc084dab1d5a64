"""The twin of the fused KV write: the bits of transformers' own RoPE, whichever way a model turns.

The kernel's tests say what the operation is; these, that the twin rounds where transformers does.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere
from transformers.models.ernie4_5.modeling_ernie4_5 import apply_rotary_pos_emb as ernie
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm
from transformers.models.helium.modeling_helium import apply_rotary_pos_emb as helium
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

from tests.support.tolerances import ANGLES_16, close
from tinyspec.kernels.twins.layers import fused_kv_write

ROWS, Q_HEADS, KV_HEADS = 33, 6, 2
# name: (transformers' function, interleaved, rotates in fp32, head size, rotated)
MODELS = {
    "llama": (llama, False, False, 48, 48),
    "glm": (glm, True, False, 64, 32),
    "helium": (helium, True, False, 80, 80),
    "cohere": (cohere, True, True, 64, 64),
    "ernie": (ernie, True, True, 128, 128),
}


def rotated(x, cos, sin, interleaved):
    """q and, by way of the cache, k after the twin."""
    q, k = x.split([Q_HEADS, KV_HEADS], dim=1)
    caches = [torch.zeros(3, 16, KV_HEADS, x.shape[-1], dtype=x.dtype) for _ in range(2)]
    slots = torch.arange(ROWS).flip(0)
    before = x.clone()
    out = fused_kv_write(q, k, k, cos, sin, *caches, slots, interleaved=interleaved)
    assert torch.equal(x, before)
    return torch.cat([out, caches[0].flatten(0, 1)[slots]], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_transformers(name, dtype):
    apply, interleaved, in_fp32, dim, rot = MODELS[name]
    x = torch.randn(ROWS, Q_HEADS + KV_HEADS, dim).to(dtype)
    angle = 3 * torch.randn(ROWS, rot // 2)
    by_pairs = angle.repeat_interleave(2, dim=-1)
    # What the model's rotary module hands over, rounded as it does: all but Ernie's in its dtype.
    own = torch.float32 if name == "ernie" else dtype
    handed = by_pairs if name == "cohere" else torch.cat([angle, angle], dim=-1)
    heads = x.transpose(0, 1)[None]
    q, k = heads.split([Q_HEADS, KV_HEADS], dim=1)
    given = [table.to(own)[None] for table in (handed.cos(), handed.sin())]
    expected = torch.cat(apply(q, k, *given), dim=1)[0].transpose(0, 1)

    angles = by_pairs if interleaved else handed
    cos, sin = (table.to(own) for table in (angles.cos(), angles.sin()))
    if in_fp32:
        cos, sin = cos.float(), sin.float()
    out = rotated(x, cos, sin, interleaved)
    assert out.dtype == dtype and torch.equal(out, expected)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_wider_angles_show(interleaved):
    """Control: rounded once or at every step are not the same bits."""
    x = torch.randn(ROWS, Q_HEADS + KV_HEADS, 64).bfloat16()
    cos, sin = torch.randn(2, ROWS, 64).bfloat16()
    narrow = rotated(x, cos, sin, interleaved)
    wide = rotated(x, cos.float(), sin.float(), interleaved)
    assert not torch.equal(narrow, wide)
    assert close(narrow.float(), wide.float(), ANGLES_16)
