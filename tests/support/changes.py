"""What code of the user's may change of a model that an engine serves: one function a kind.

Each takes the model and changes what its passes compute.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.tiny import tiny


class Tuner(nn.Module):
    """As peft's tuner layers: an adapter that can be switched without a parameter changing."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        self.adapters = nn.ModuleDict(
            {name: nn.Linear(base.in_features, base.out_features) for name in ("en", "fr")}
        )
        self.scaling = {"en": 1.0, "fr": 1.0}
        self.merged_adapters: list[str] = []
        self._active, self._disabled = ["en"], False

    @property
    def active_adapters(self) -> list[str]:
        return self._active

    @property
    def disable_adapters(self) -> bool:
        return self._disabled

    def merge(self) -> None:
        self.base_layer.weight.data += self.adapters["fr"].weight.detach() * 1e4

    def unmerge(self) -> None:
        self.base_layer.weight.data -= self.adapters["fr"].weight.detach() * 1e4

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        for name in [] if self._disabled else self._active:
            out = out + self.adapters[name](x) * self.scaling[name]
        return out


class Scaled(nn.Module):
    """A module of the user's, around another one; counts its calls."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.factor, self.calls = inner, 1.5, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * self.factor


class Halves:
    """A hook; counts its calls."""

    def __init__(self) -> None:
        self.factor, self.calls = 0.5, 0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * self.factor


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: nn.functional.silu(x) * factor


def llama() -> PreTrainedModel:
    """With every part that a change below needs."""
    model = tiny()
    generator = torch.random.get_rng_state()
    torch.manual_seed(1)
    first, second = (layer.mlp for layer in model.model.layers)
    first.down_proj = Tuner(first.down_proj)
    torch.random.set_rng_state(generator)
    second.up_proj = Scaled(second.up_proj)
    del second.act_fn
    second.act_fn = times(1.25)
    model.model.layers[1].post_attention_layernorm.register_forward_hook(Halves())
    return model.eval()


def gemma2() -> PreTrainedModel:
    return tiny("gemma2")


def parameter_written(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)


def fused_step(model: Any) -> None:
    """torch's version counters miss it."""
    weight = model.lm_head.weight
    weight.grad = weight.detach().clone()
    torch.optim.SGD([weight], lr=0.5, maximize=True, fused=True).step()
    weight.grad = None


def parameter_replaced(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.5)


def data_replaced(model: Any) -> None:
    """Twice: the allocator gives the second the first one's address again."""
    weight = model.model.norm.weight
    for _ in range(2):
        weight.data = weight.data * 1.5


def data_seen_otherwise(model: Any) -> None:
    """The same memory, transposed."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()


def number(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


def number_of_the_users(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.factor = 0.75


def function(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    del mlp.act_fn
    mlp.act_fn = torch.tanh


def enclosed_number(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = times(0.75)


def module(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def module_taken_out(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.up_proj = mlp.up_proj.inner


def hook(model: Any) -> None:
    model.model.norm.register_forward_hook(Halves())


def hook_removed(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm._forward_hooks.clear()


def number_of_a_hook(model: Any) -> None:
    (held,) = model.model.layers[1].post_attention_layernorm._forward_hooks.values()
    held.factor = 0.25


def own_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x, before=mlp.forward: before(x) * 0.5


def adapter(model: Any) -> None:
    model.model.layers[0].mlp.down_proj._active = ["fr"]


def adapter_merged_and_unmerged(model: Any) -> None:
    """Rounded twice, the weight is another one at the same place."""
    tuner = model.model.layers[0].mlp.down_proj
    tuner.merge()
    tuner.unmerge()


def adapter_rescaled(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.scaling["en"] = 0.5


def buffer_written(model: Any) -> None:
    with torch.no_grad():
        model.model.embed_tokens.embed_scale.mul_(1.5)


def buffer_replaced(model: Any) -> None:
    model.model.embed_tokens.embed_scale = torch.tensor(3.0)


def threads(model: Any) -> None:
    torch.set_num_threads(1)


Change = Callable[[Any], None]
OF_LLAMA: tuple[Change, ...] = (
    *(parameter_written, fused_step, parameter_replaced, data_replaced, data_seen_otherwise),
    *(number, number_of_the_users, function, enclosed_number, module, module_taken_out),
    *(hook, hook_removed, number_of_a_hook, own_forward, threads),
    *(adapter, adapter_merged_and_unmerged, adapter_rescaled),
)
OF_GEMMA2: tuple[Change, ...] = (buffer_written, buffer_replaced)
FOLLOWED: tuple[Change, ...] = (*OF_LLAMA, *OF_GEMMA2)


def model_for(change: Change) -> PreTrainedModel:
    """A new model that ``change`` can be made to; always with the same weights."""
    return llama() if change in OF_LLAMA else gemma2()
