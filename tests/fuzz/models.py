"""Small models that the fuzzer draws: types of the zoo, llamas of many shapes, adapters.

A ``ModelDraw`` alone says which weights a model has; knows nothing of requests or influences.
"""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.fuzz.changes import WIDE
from tests.support import zoo
from tests.support.cases import DTYPES
from tests.support.sensitive import RowByRowLinear, ShapeSensitiveLinear, replace_linears

# Tokens of every prompt are below this number, whatever the model.
VOCAB = 128
# The token whose embedding is not finite, where a draw says so; no other prompt has it.
POISON = 5
# Served model types, of both kinds of attention, with windows, softcaps, sinks, experts, MLA,
# convolutions, recurrent states.
ZOO = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox"),
    *("opt", "phi", "phi3", "olmo2", "granite", "cohere", "cohere2", "starcoder2", "stablelm"),
    *("nemotron", "smollm3", "glm4", "exaone4", "gpt_bigcode", "biogpt", "ministral", "helium"),
    *("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "gemma3n_text", "llama4_text", "olmoe"),
    *("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "olmo_hybrid", "mamba2", "bamba"),
    *("falcon_h1", "granitemoehybrid", "zamba2"),
)
# Every layer has a window: what lies further back is in no row's sight.
WINDOWED = ("mistral", "starcoder2", "phi3")
# Query heads, heads of keys and values, size of a head.
HEADS = ((4, 2, 16), (4, 4, 32), (8, 1, 32), (7, 7, 24), (6, 3, 64))
ODD = ((3, 1, 96), (9, 1, 128), (6, 2, 112), (15, 5, 80), (24, 8, 128), (5, 1, 64))
# Models that not every influence can be tried on.
SPECIAL = ("lora", "int8")
SHAPED = ("llama", "qwen3", "mistral", "gemma2", "olmo2")


# Bytes: where torch's own allocations begin.
ALIGNMENT = 64


class OneRowLinear(RowByRowLinear):
    """A single row is split elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() == 1 and self._splits_elsewhere():
            return self._split_at(x, self._cut(1))
        return super().forward(x)

    def _splits_elsewhere(self) -> bool:
        return True


class LayoutLinear(OneRowLinear):
    """A single row is split elsewhere where the weight does not lie as torch allocates it."""

    def _splits_elsewhere(self) -> bool:
        weight = self.weight
        return not weight.is_contiguous() or weight.data_ptr() % ALIGNMENT != 0


KINDS: dict[str, type[RowByRowLinear]] = {"one row": OneRowLinear, "layout": LayoutLinear}


def model_with(kind: str, seed: int) -> nn.Module:
    """A llama with linears of one of ``KINDS`` outside attention; all others keep every fact."""
    model = replace_linears(zoo.tiny("llama", seed), RowByRowLinear)
    named = [(n, m) for n, m in model.named_modules() if isinstance(m, RowByRowLinear)]
    for name, module in named:
        if any(word in name for word in WIDE):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, KINDS[kind](module))
    return model


@dataclass(frozen=True)
class ModelDraw:
    """kind: a type of the zoo; "shaped", a type and sizes of its own; "lora"; "int8", packed
    weights; "wide", sums so long that threads share them; "sensitive", linears whose bits depend on
    the row count; "one row" and "layout": linears whose single rows differ, always or by layout.
    flavour: what else is done to the weights."""

    kind: str
    dtype: str
    seed: int
    sizes: tuple[tuple[str, Any], ...] = ()
    flavour: str = ""


def draw_model(rng: random.Random, only: str = "", flavour: str = "") -> ModelDraw:
    """Any model; only: one of this kind ("lora", "windowed", "odd heads", "wide",
    "one row", "layout")."""
    dtype = rng.choice(("fp32", "fp32", "bf16", "bf16", "fp16"))
    if flavour == "denormal":  # oneDNN's 16-bit products have no denormal numbers anyway
        dtype = "fp32"
    seed = rng.randrange(1000)
    if only == "lora":
        return ModelDraw("lora", rng.choice(("fp32", "bf16")), seed, flavour=flavour)
    if only in KINDS:
        return ModelDraw(only, dtype, seed, flavour=flavour)
    if only == "windowed":
        if rng.random() < 0.3:
            return ModelDraw(rng.choice(WINDOWED), dtype, seed, flavour=flavour)
        # One layer: with more of them what leaks reaches all rows of a tile anyway.
        sizes = {**dict(_sizes(rng, HEADS)), "model_type": "mistral", "num_hidden_layers": 1}
        sizes["sliding_window"] = rng.choice((8, 16, 33))
        return ModelDraw("shaped", dtype, seed, tuple(sizes.items()), flavour)
    if only == "odd heads":
        return ModelDraw("shaped", rng.choice(("fp32", "fp16")), seed, _sizes(rng, ODD), flavour)
    way = rng.random()
    if only == "wide" or way > 0.96:
        return ModelDraw("wide", rng.choice(("fp32", "fp32", "fp16")), seed, flavour=flavour)
    if way < 0.05:
        return ModelDraw("lora", rng.choice(("fp32", "bf16")), seed, flavour=flavour)
    if way < 0.07:
        return ModelDraw("int8", rng.choice(("fp32", "bf16")), seed, flavour=flavour)
    if way < 0.14:
        return ModelDraw("sensitive", dtype, seed, flavour=flavour)
    if way < 0.45:
        return ModelDraw("shaped", dtype, seed, _sizes(rng, (*HEADS, *ODD)), flavour)
    return ModelDraw(rng.choice(ZOO), dtype, seed, flavour=flavour)


def _sizes(rng: random.Random, heads_of: Any) -> tuple[tuple[str, Any], ...]:
    kind = rng.choice(SHAPED)
    heads, groups, size = rng.choice(heads_of)
    layers = rng.choice((1, 2))
    # Some configs ask for a multiple of the heads; widths that are no multiple of 16 are refused.
    unit = heads * 16 // math.gcd(heads, 16)
    sizes = {
        "model_type": kind,
        "vocab_size": rng.choice((128, 160, 200)),
        "hidden_size": unit * -(-rng.choice((32, 64, 96)) // unit),
        "intermediate_size": rng.choice((64, 96, 192)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "tie_word_embeddings": rng.random() < 0.3,
    }
    if kind in ("mistral", "gemma2"):
        sizes["sliding_window"] = rng.choice((8, 16, 33))
    return tuple(sizes.items())


def _shaped(draw: ModelDraw) -> PreTrainedModel:
    sizes = dict(draw.sizes)
    config = AutoConfig.for_model(
        sizes.pop("model_type"),
        **sizes,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return _seeded(draw.seed, lambda: AutoModelForCausalLM.from_config(config)).eval()


def larger(kind: str, seed: int) -> PreTrainedModel:
    """A model with more tokens than any that is drawn."""
    config = zoo.config_of(kind)
    config.vocab_size = 512
    return _seeded(seed, lambda: AutoModelForCausalLM.from_config(config)).eval()


def _wide(draw: ModelDraw) -> PreTrainedModel:
    config = zoo.config_of("gpt2")
    config.n_layer, config.n_inner = 1, 2048
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    config.initializer_range = 0.1
    return _seeded(draw.seed, lambda: AutoModelForCausalLM.from_config(config)).eval()


def _seeded(seed: int, make: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def _lora(draw: ModelDraw) -> Any:
    """Two adapters: "default", drawn, and "other", whose B is zero until it is trained."""
    import peft

    model = zoo.tiny("llama", draw.seed).to(DTYPES[draw.dtype])
    targets = ["q_proj", "v_proj", "down_proj"]
    drawn = peft.LoraConfig(
        r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    other = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")

    def make() -> Any:
        wrapped = peft.get_peft_model(model, drawn)
        wrapped.add_adapter("other", other)
        return wrapped.eval()

    return _seeded(draw.seed, make)


def _int8(draw: ModelDraw) -> Any:
    """Linears with 8-bit weights, packed by torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = zoo.tiny("llama", draw.seed).to(DTYPES[draw.dtype])
    quantize_(model, Int8WeightOnlyConfig())
    return model


def _flavoured(model: PreTrainedModel, flavour: str) -> None:
    """denormal: logits so small that they are denormal numbers. poisoned: one token is NaN.
    inference: parameters count no versions."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        if flavour == "denormal":
            head.mul_(2.0**-70).mul_(2.0**-62)
        elif flavour == "poisoned":
            embedding[POISON] = torch.nan
    if flavour == "inference":
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    with torch.inference_mode():
                        value = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                    setattr(module, name, value)


@lru_cache(maxsize=64)
def pristine(draw: ModelDraw) -> Any:
    """The model of a draw, which nobody changes."""
    if draw.kind in SPECIAL:
        return _lora(draw) if draw.kind == "lora" else _int8(draw)
    if draw.kind == "shaped":
        model = _shaped(draw)
    elif draw.kind == "wide":
        model = _wide(draw)
    elif draw.kind in KINDS:
        model = model_with(draw.kind, draw.seed)
    elif draw.kind == "sensitive":
        model = replace_linears(zoo.tiny("llama", draw.seed), ShapeSensitiveLinear)
    else:
        model = zoo.tiny(draw.kind, draw.seed)
    return model.to(DTYPES[draw.dtype])


def fresh(draw: ModelDraw) -> Any:
    """A copy of the model of a draw."""
    model = copy.deepcopy(pristine(draw))
    if draw.flavour:
        _flavoured(model, draw.flavour)
    return model
