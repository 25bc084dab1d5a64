"""Changes of a model that an engine serves, or is about to, for the table of influences.

Each takes a scene: what is changed is chosen among the names of the model as it was drawn, by the
scene's generator, so that the same change can be made to another copy of it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tests.fuzz.influences import Scene

# Numbers of modules and configs that a forward in eval mode does not read, or not after loading.
_IDLE = ("dropout", "drop", "pdrop", "initializer", "aux_loss", "jitter", "noise", "init_", "_std")
_ACTIVATIONS = ("act_fn", "act", "activation_fn", "activation")
# Numbers of a config that forwards may read from it; modules take multipliers when they are made.
_CONFIG = ("softcap", "logit", "scal")
# Matrices outside attention.
WIDE = ("mlp", "fc", "ffn", "feed_forward", "experts")
_EPSILONS = ("variance_epsilon", "eps")


def _place(model: nn.Module, name: str) -> tuple[Any, str]:
    """The module that holds the parameter or attribute of this name, and its name there."""
    parent, _, own = name.rpartition(".")
    return model.get_submodule(parent), own


def _choose(scene: Scene, names: list[str]) -> tuple[Any, str]:
    return _place(scene.model, scene.rng.choice(names))


def _parameter(scene: Scene) -> tuple[Any, str, nn.Parameter]:
    """Any parameter, its module and its name there."""
    names = [name for name, p in scene.pristine.named_parameters() if p.numel() > 1]
    module, name = _choose(scene, names)
    return module, name, getattr(module, name)


def _matrices(scene: Scene) -> list[str]:
    return [name for name, p in scene.pristine.named_parameters() if p.dim() == 2]


def _scaled(x: Tensor) -> Tensor:
    """Other weights of the same size."""
    return x.flip(0) * 1.25


def write_parameter(scene: Scene) -> None:
    """Write a parameter in place, as an optimizer does."""
    *_, parameter = _parameter(scene)
    with torch.no_grad():
        parameter.copy_(_scaled(parameter))


def write_inference(scene: Scene) -> None:
    """Write in place to a parameter that counts no versions."""
    with torch.inference_mode():
        write_parameter(scene)


def replace_parameter(scene: Scene) -> None:
    """Put another parameter in the place of one."""
    module, name, parameter = _parameter(scene)
    setattr(module, name, nn.Parameter(_scaled(parameter.detach()), requires_grad=False))


def replace_data(scene: Scene) -> None:
    """Let a parameter hold other memory."""
    *_, parameter = _parameter(scene)
    parameter.data = _scaled(parameter.detach())


def write_data(scene: Scene) -> None:
    """Write through ``.data``, of which torch keeps no record."""
    *_, parameter = _parameter(scene)
    parameter.data.copy_(_scaled(parameter.detach()))


def load_weights(scene: Scene) -> None:
    """Load the weights of another model, into the parameters or in their place."""
    others = {name: _scaled(p) if p.dim() == 2 else p for name, p in _state(scene).items()}
    scene.model.load_state_dict(others, assign=scene.rng.random() < 0.3)


def _state(scene: Scene) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in scene.pristine.state_dict().items()}


def load_own_weights(scene: Scene) -> None:
    """Load the weights that the model was drawn with."""
    scene.model.load_state_dict(_state(scene))


def wide(model: nn.Module) -> list[Tensor]:
    """Matrices outside attention; with those inside wiped out a model would not be served."""
    named = model.named_parameters()
    return [p for name, p in named if p.dim() == 2 and any(word in name for word in WIDE)]


def zeros(model: nn.Module) -> None:
    """Matrices of zeros: linears give the same whatever the order of their sums."""
    with torch.no_grad():
        for parameter in wide(model):
            parameter.zero_()


def identities(model: nn.Module) -> None:
    """Matrices of the identity: sums of one product."""
    for parameter in wide(model):
        nn.init.eye_(parameter)


def misalign(scene: Scene) -> None:
    """Move every matrix to memory that begins at another place of a cache line."""
    offset = scene.rng.choice((1, 2, 4, 8, 12))
    for parameter in scene.model.parameters():
        if parameter.dim() == 2:
            memory = parameter.detach().new_empty(parameter.numel() + offset)
            value = memory[offset:].view(parameter.shape)
            parameter.data = value.copy_(parameter.detach())


def transpose_memory(scene: Scene) -> None:
    """The same matrices, column by column in memory."""
    for parameter in scene.model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.detach().T.contiguous().T


def buffers(model: nn.Module) -> list[str]:
    return [n for n, b in model.named_buffers() if b.is_floating_point() and b.numel()]


def write_buffer(scene: Scene) -> None:
    """Write a buffer in place."""
    module, name = _choose(scene, buffers(scene.pristine))
    with torch.no_grad():
        getattr(module, name).mul_(0.75)


def replace_buffer(scene: Scene) -> None:
    """Put another tensor in the place of a buffer."""
    module, name = _choose(scene, buffers(scene.pristine))
    setattr(module, name, getattr(module, name).detach() * 0.75)


def _attributes(model: nn.Module, wanted: tuple[str, ...]) -> list[str]:
    return [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key in wanted
        if key in vars(module) or key in module._modules
    ]


def epsilons(model: nn.Module) -> list[str]:
    return [n for n in _attributes(model, _EPSILONS) if isinstance(_value(model, n), float)]


def _value(model: nn.Module, name: str) -> Any:
    module, own = _place(model, name)
    return getattr(module, own)


def epsilon(scene: Scene) -> None:
    """Give a norm another epsilon, large enough to be seen."""
    module, name = _choose(scene, epsilons(scene.pristine))
    setattr(module, name, 0.125)


def _read(name: str) -> bool:
    return not name.startswith("_") and not any(word in name for word in _IDLE)


def numbers(model: nn.Module) -> list[str]:
    return [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, float) and key not in ("p", *_EPSILONS) and _read(key)
    ]


def number(scene: Scene) -> None:
    """Give a module another number: a scale, a softcap."""
    name = scene.rng.choice(numbers(scene.pristine))
    module, own = _place(scene.model, name)
    setattr(module, own, _value(scene.pristine, name) * 1.5)


def config_numbers(model: Any) -> list[str]:
    """But for those that a module has under the same name."""
    config = model.config.get_text_config(decoder=True)
    taken = {name for module in model.modules() for name in vars(module)}
    return [
        key
        for key, value in config.to_dict().items()
        if isinstance(value, float) and hasattr(config, key) and key not in taken
        if any(word in key for word in _CONFIG)
    ]


def config_number(scene: Scene) -> None:
    """Edit a number of the config: softcaps and scales are read from it in every forward."""
    name = scene.rng.choice(config_numbers(scene.pristine))
    config = scene.model.config.get_text_config(decoder=True)
    setattr(config, name, getattr(config, name) * 1.5)


def activations(model: nn.Module) -> list[str]:
    return _attributes(model, _ACTIVATIONS)


def activation(scene: Scene) -> None:
    """Give a layer another activation."""
    module, name = _choose(scene, activations(scene.pristine))
    setattr(module, name, nn.Softsign())


def replace_module(scene: Scene) -> None:
    """Put another module of the same kind in the place of one with a matrix."""
    name = scene.rng.choice([name.rpartition(".")[0] for name in _matrices(scene)])
    # Not of the module in service: a copy of that may hold what an engine has bound to it.
    other = copy.deepcopy(_value(scene.pristine, name))
    parent, name = _place(scene.model, name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(_scaled(parameter))
    setattr(parent, name, other)


def _with_autocast(scene: Scene, module: Any) -> None:
    forward = module.forward
    # Of fp16 and bf16 torch makes fp32, which an fp16 layer does not take.
    half = torch.float16 if scene.pristine.dtype == torch.float16 else torch.bfloat16

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=half):
            return forward(*args, **kwargs)

    module.forward = wrapped


def autocast_forward(scene: Scene) -> None:
    """Let the model's forward turn autocast on, as accelerate's mixed precision does."""
    _with_autocast(scene, scene.model)


def autocast_layer(scene: Scene) -> None:
    """Let one module with linears turn autocast on."""
    names = [n for n, m in scene.pristine.named_modules() if n.endswith((".mlp", ".ffn"))]
    module = scene.model.get_submodule(scene.rng.choice(names)) if names else scene.model
    _with_autocast(scene, module)


def disable_adapters(scene: Scene) -> None:
    scene.model.base_model.disable_adapter_layers()


def scale_adapter(scene: Scene) -> None:
    for module in scene.model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
