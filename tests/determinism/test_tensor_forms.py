"""Changes of tensors' forms that leave address and version as they are: seen by torch's guards, and
by lists where there are none.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tinyspec.determinism import tensor_forms
from tinyspec.determinism.tensor_forms import TensorForms, guards_tell


def transposed(tensor):
    tensor.data = tensor.data.t()


def asks_for_gradients(tensor):
    tensor.requires_grad_(not tensor.requires_grad)


def reshaped(tensor):
    with torch.no_grad():
        tensor.set_(tensor.detach().view(2, 8))


def longer(tensor):
    tensor.data = tensor.data.clone().resize_(5, 4)


def set_to_another(tensor):
    with torch.no_grad():
        tensor.set_(torch.zeros(4, 2))


def widened(tensor):
    tensor.data = tensor.data[:, ::2]


def written(tensor):
    with torch.no_grad():
        tensor.add_(1.0)


def replaced(tensor):
    tensor.data = tensor.data + 1.0


def to_half(tensor):
    tensor.data = tensor.data.half()


def of_another_type(tensor):
    tensor.__class__ = type("Own", (torch.Tensor,), {})


CHANGES = (transposed, asks_for_gradients, reshaped, longer, set_to_another, widened)
# Numbers are others, and where they are: not the form.
NO_CHANGES = (written, replaced)


def tensors(number):
    """A parameter of each: that asks for gradients, that does not, a buffer, a square one."""
    torch.manual_seed(0)
    kinds = [torch.randn(4, 4) for _ in range(number)]
    return [nn.Parameter(t, requires_grad=n % 2 == 0) if n % 3 else t for n, t in enumerate(kinds)]


@pytest.fixture(params=["guards", "lists"])
def way(request, monkeypatch):
    if request.param == "lists":
        monkeypatch.setattr(tensor_forms, "guards_tell", lambda: False)
    elif not guards_tell():
        pytest.skip("this torch has no guards that tell")
    return request.param


@pytest.mark.parametrize("change", [*CHANGES, *NO_CHANGES], ids=lambda f: f.__name__)
@pytest.mark.parametrize("place", range(5))
def test_a_change_is_seen(way, change, place):
    """Of any tensor, in a pass and outside, whichever of the two the first look was in."""
    for first in (False, True):
        held = tensors(5)
        with torch.inference_mode(first):
            forms = TensorForms(held)
        for after in (False, True):
            with torch.inference_mode(after):
                assert forms.same(), "control"
        change(held[place])
        for after in (False, True):
            with torch.inference_mode(after), torch.no_grad():
                assert forms.same() == (change in NO_CHANGES)


@pytest.mark.parametrize("change", [to_half, of_another_type], ids=lambda f: f.__name__)
def test_guards_see_more(change):
    """Which the lists leave to addresses: another dtype lies elsewhere."""
    if not guards_tell():
        pytest.skip("this torch has no guards that tell")
    held = [torch.zeros(4, 4) for _ in range(3)]
    forms = TensorForms(held)
    assert forms.same(), "control"
    change(held[1])
    assert not forms.same()


def test_an_address_is_no_form(way):
    """Transposed and back is what it was."""
    held = tensors(4)
    forms = TensorForms(held)
    transposed(held[2])
    assert not forms.same()
    transposed(held[2])
    assert forms.same()


@pytest.mark.parametrize(
    "guard",
    [
        lambda tensors: lambda *_: True,
        lambda tensors: lambda *_: False,
        lambda tensors: lambda *given: all(t.shape == (4, 4) for t in given),
        lambda tensors: [][0],
    ],
    ids=["says yes", "says no", "sees shapes", "raises"],
)
def test_guards_that_do_not_tell_are_not_used(guard, monkeypatch):
    """As those of another version of torch might be."""
    with monkeypatch.context() as patches:
        patches.setattr(tensor_forms, "_guard", guard)
        guards_tell.cache_clear()
        held = tensors(3)
        forms = TensorForms(held)
        assert not guards_tell() and forms.same()
        transposed(held[1])
        assert not forms.same()
    guards_tell.cache_clear()


def test_guards_of_this_version_tell():
    """Of 2.13, where it was tried; where it no longer holds, checks take longer."""
    if torch.__version__ < "2.14":
        assert guards_tell()
