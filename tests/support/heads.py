"""Checkpoints with heads for multi-token prediction, as published ones have them."""

import torch
from safetensors.torch import load_file, save_file

from tinyspec.drafts.mtp import _of_one_layer

# As their checkpoints name a head's parts: under a further layer, or under mtp.
LAYERS = ("deepseek_v3", "glm4_moe")
KINDS = (*LAYERS, "mellum", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}


def with_head(model, folder, **given):
    """The model as it is loaded from ``folder``, where its checkpoint has a head: random, or of the
    ``given`` parts and a layer that is the model's own last one."""
    kind, depth = type(model), model.config.num_hidden_layers
    one = kind(_of_one_layer(model.config)).to(model.dtype)
    if given:
        one.model.layers[0].load_state_dict(model.model.layers[-1].state_dict())
        one.model.norm.load_state_dict(model.model.norm.state_dict())
    width = model.config.hidden_size
    shapes = {"enorm": (width,), "hnorm": (width,), "eh_proj": (width, 2 * width)}
    parts = {name: given.get(name, 0.1 * torch.randn(shape)) for name, shape in shapes.items()}
    model.save_pretrained(folder)
    one.save_pretrained(folder / "head")
    as_layer = model.config.model_type in LAYERS
    prefix, norm = f"model.layers.{depth}.", f"model.layers.{depth}.shared_head.norm."
    if not as_layer:
        prefix, norm = "mtp.layers.0.", "mtp.norm."
    kept = load_file(folder / "model.safetensors")
    for name, tensor in load_file(folder / "head" / "model.safetensors").items():
        own = name.replace("model.layers.0.", prefix).replace("model.norm.", norm)
        kept |= {own: tensor} if own != name else {}
    for name, tensor in parts.items():
        own = f"{prefix}{name}" if as_layer else f"mtp.{NAMES[name]}"
        kept[f"{own}.weight"] = tensor.to(model.dtype)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return kind.from_pretrained(folder).eval()
