"""``model(...)`` in canonical passes: the logits of generation, in training and evaluation.

Takes transformers' arguments apart into sequences, and gives back what the model's own forward
gives. Knows no requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tinyspec.config import EngineConfig
from tinyspec.drop_in.served import says_nothing
from tinyspec.engine.engine import Engine
from tinyspec.errors import DeterminismError, refuse, unsupported
from tinyspec.model.served_model import named
from tinyspec.model.torch_settings import moved, moves
from tinyspec.model.wrappers import Method, autocast_of, unwrap
from tinyspec.runner.differentiable import passes, run_passes

# Of what is called: a block that has the engine for a call of it now.
EngineOf = Callable[[Any], AbstractContextManager[Engine]]
# What a loss function is given besides logits and labels.
OF_LOSS = ("num_items_in_batch", "shift_labels", "ignore_index")
SERVED = {"input_ids", "attention_mask", "position_ids", "labels", "logits_to_keep", "return_dict"}
SERVED |= set(OF_LOSS)
# What is served of calls that are no model's own.
ELSEWHERE = {"fused_lm_head": "TRL's: call tinyspec.integrations.trl.patch_trainer(trainer)"}
# Of a forward during which others move torch's settings.
TRIES = 10
# Settings of a config that ask for what no canonical pass gives.
ASKED = ("output_hidden_states", "output_attentions", "output_router_logits")
# In the names of attributes that are the part of values that training leaves out, or a noise.
AT_RANDOM = ("drop", "jitter", "noise")

# Whether the model's own ``generate`` runs, which calls the model's own forward.
_generates = ContextVar("generates", default=False)


@contextmanager
def plain_forwards() -> Iterator[None]:
    """Around a model's own ``generate``, whose steps are no canonical forwards."""
    token = _generates.set(True)
    try:
        yield
    finally:
        _generates.reset(token)


@contextmanager
def canonical(
    model: PreTrainedModel, config: EngineConfig | None = None
) -> Iterator[PreTrainedModel]:
    """A block in which ``model(...)`` gives for every token the logits that ``generate`` and
    ``Engine.score`` compute with ``deterministic=True``, bit for bit, whatever else is in the batch
    and however it is padded; with gradients, in training or evaluation.

    model: as for an Engine; in a wrapper (PEFT's, DDP's call it) the model inside. config: of the
    engine whose bits these are (None: that of a patched model, else ``EngineConfig()``). A block
    makes an engine unless the model is patched: enter it once, around a loop, or call
    ``patch(model, forward=True)``.

    Arguments are ``input_ids`` [B, L], ``attention_mask`` [B, L] (padding on either side),
    ``position_ids`` (counted from the mask where there are none; several sequences in a row begin
    where they are 0), ``labels``, ``logits_to_keep``, ``use_cache=False``. Logits of padding are 0.
    What cannot be had is refused by name before anything runs: ValueError, UnsupportedModelError,
    DeterminismError. Under autocast the bits are those of ``generate`` under it; a block that makes
    an engine keeps the precision that calls have where it begins, and refuses another one. The
    backward may run after the block. A backbone that is called by itself
    (``model.model(...)``) runs as it always does.
    """
    inside = unwrap(model)
    patched: Any = vars(inside).get("generate")
    with ExitStack() as stack:
        if config is None and hasattr(patched, "serving"):
            engine_of = patched.serving
        else:
            made = stack.enter_context(Engine(model, config=config, grows=True))
            engine_of = partial(_for_call, made)
        methods: list[Method] = [PatchedForward(inside, engine_of)]
        if patched is None:
            generate: Any = inside.generate
            methods.append(Method(inside, "generate", plain_forwards()(generate)))
        for method in methods:
            method.put_in()
            stack.callback(method.take_out)
        yield model


@contextmanager
def _for_call(engine: Engine, called: PreTrainedModel) -> Iterator[Engine]:
    """``engine``, for a call in the precision in which it serves."""
    now = autocast_of(called, called.device.type)
    if now != engine.autocast:
        raise refuse("autocast", now, f"{engine.autocast}, in which the engine serves")
    yield engine


class PatchedForward(Method):
    """``model.forward`` by an engine's canonical passes."""

    def __init__(self, model: PreTrainedModel, engine_of: EngineOf):
        # Not to be traced where the model is called through torch.compile's wrapper.
        super().__init__(model, "forward", torch.compiler.disable(self.serve))
        self._engine_of = engine_of
        self._signature = inspect.signature(self.original)
        self._in_fp32 = _in_fp32(inspect.unwrap(self.original, stop=_in_fp32))

    def take_out(self) -> None:
        super().take_out()
        self._served = self.original  # for wrappers that were put over this

    def serve(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model's own forward: logits [B, K, V], and a loss with labels."""
        if _generates.get():
            return self.original(*args, **kwargs)
        given = self._signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        self._refuse(given)
        labels, keep = given.get("labels"), given.get("logits_to_keep", 0)
        with self._engine_of(self._model) as engine:
            if engine.config.kv_dtype == "fp8_e4m3":
                raise refuse("kv_dtype", "fp8_e4m3", "another one in a canonical forward")
            sequences, there = sequences_of(given, engine.config.max_model_len or 0)
            places, wanted = kept_rows(there, keep)
            layers = self._checkpointed(engine) if torch.is_grad_enabled() else []
            found, output = forward(engine, sequences, wanted, layers)
        kept = places.ravel()
        if not np.array_equal(kept, np.arange(len(found))):  # with padding, or in another order
            padded = torch.cat((found, found.new_zeros(1, found.shape[1])))
            found = padded.index_select(0, torch.as_tensor(kept, device=found.device))
        logits = found.view(*places.shape, found.shape[1])
        loss = None
        if labels is not None:
            more = {name: given[name] for name in OF_LOSS if name in given}
            size = self._model.config.get_text_config().vocab_size
            loss = self._model.loss_function(logits=logits, labels=labels, vocab_size=size, **more)
        logits = logits.float() if self._in_fp32 else logits
        made = type(output)(loss=loss, logits=logits)
        as_dict = given.get("return_dict")
        as_dict = self._model.config.return_dict if as_dict is None else as_dict
        return made if as_dict else made.to_tuple()

    def _refuse(self, given: dict[str, Any]) -> None:
        """Raise for what a canonical forward does not do."""
        model = self._model
        for name, value in given.items():
            silent = name in SERVED or value is None or value is False
            if not (silent or says_nothing(model, name, value)):
                allowed = ELSEWHERE.get(name, "None in a canonical forward")
                raise refuse(name, _described(value), allowed)
        labels, own = given.get("labels"), inspect.unwrap(type(model).forward)
        if labels is not None and "loss_function" not in own.__code__.co_names:
            allowed = f"None: {type(model).__name__} has a loss of its own"
            raise refuse("labels", _described(labels), allowed)
        for name in ASKED:
            if getattr(model.config.get_text_config(), name, False):
                raise refuse(f"config.{name}", True, "False in a canonical forward")
        for name, module in model.named_modules():
            if module.training and (chance := _at_random(module)) is not None:
                at = ".".join(filter(None, (name, chance)))
                reason = f"in training {at} leaves out values at random, or changes them"
                raise unsupported(model, f"{reason}: set it to 0, or call model.eval()")
            backward = module._backward_hooks or module._backward_pre_hooks
            if name and backward and torch.is_grad_enabled():
                reason = f"{name} has backward hooks, which no canonical pass runs"
                raise unsupported(model, f"{reason}: register them on its parameters")

    def _checkpointed(self, engine: Engine) -> list[nn.Module]:
        """The layers of the engine's copy that gradient checkpointing is on for."""
        return [
            engine.served.model.get_submodule(name)
            for name, module in named(self._model)
            if isinstance(module, GradientCheckpointingLayer)
            if module.training and module.gradient_checkpointing
        ]


def forward(
    engine: Engine,
    sequences: Sequence[Sequence[int]],
    wanted: list[int],
    layers: Sequence[nn.Module] = (),
) -> tuple[Tensor, Any]:
    """As ``run_passes``, of an engine. With gradients where the caller records them, also when the
    engine is closed by then. Raises as ``Engine.generate``."""
    with engine.driver.turn("forward"):
        engine.tracker.check_model()
        with engine.contract.proving.pausing():
            engine.contract.ensure()
            if engine.config.verify != "always":
                planned = passes(sum(map(len, sequences)), engine.runner.buckets.sizes)
                engine.contract.prove_more({bucket for bucket, *_ in planned})
        setting, exclusive = None, partial(_exclusive, engine)
        for _ in range(TRIES):
            with engine.runner.torch_state(gradients=True):
                settings = moves()
                found = run_passes(engine.runner, sequences, wanted, exclusive, layers)
                setting = moved(settings)
            if setting is None:
                break
        if setting is not None or engine.contract.changed():
            what = "the model" if setting is None else f"torch's {setting}"
            raise DeterminismError(f"{what} changed during a canonical forward: call it again")
        return found


@contextmanager
def _exclusive(engine: Engine) -> Iterator[None]:
    """A block that runs the model outside of the engine's passes."""
    with engine.driver.turn("forward"), engine.runner.torch_state(gradients=True):
        yield


def _in_fp32(forward: Any) -> bool:
    """Whether it is what accelerate puts around a forward under autocast, to get fp32 of it."""
    return type(forward).__name__ == "ConvertOutputsToFp32"


def _at_random(module: nn.Module) -> str | None:
    """The attribute by which a module in training changes its results at random."""
    if "Dropout" in type(module).__name__ and (chance := getattr(module, "p", None)) is not None:
        return "p" if chance > 0 else None
    for name, held in vars(module).items():
        values = held.values() if isinstance(held, dict) else (held,)  # PEFT's are by adapter
        chances = [value for value in values if isinstance(value, float) and value > 0]
        if chances and any(part in name for part in AT_RANDOM):
            return name
    return None


def sequences_of(
    given: dict[str, Any], longest: int
) -> tuple[list[list[int]], np.ndarray[Any, Any]]:
    """The sequences of token ids in the arguments of a forward of B rows and L columns, and where
    [B, L] their tokens are, one after the other. Raises ValueError naming an argument."""
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        raise refuse("input_ids", _described(ids), "a tensor [B, L] of token ids")
    there = np.ones(ids.shape, bool)
    if given.get("attention_mask") is not None:
        there = _numbers(given, "attention_mask", ids.shape).astype(bool)
    if not there.any():
        raise refuse("attention_mask", "all 0", "at least one token")
    positions = there.cumsum(1) - 1
    if given.get("position_ids") is not None:
        positions = _numbers(given, "position_ids", ids.shape, (1, ids.shape[1]))
        positions = np.broadcast_to(positions, ids.shape)
    (row, column), at = there.nonzero(), positions[there]
    begins = np.flatnonzero((at == 0) | (np.diff(row, prepend=-1) > 0))
    counted = np.arange(len(at)) - np.repeat(begins, np.diff(begins, append=len(at)))
    if (wrong := np.flatnonzero(at != counted)).size:
        n = wrong[0]
        allowed = f"{counted[n]}: positions count from 0 in each sequence"
        raise refuse(f"position_ids[{row[n]}, {column[n]}]", int(at[n]), allowed)
    parts = np.split(ids.cpu().numpy()[there], begins[1:])
    if (length := max(map(len, parts))) > longest:
        raise refuse("a sequence's length", length, f"at most {longest} tokens")
    return [part.tolist() for part in parts], there


def kept_rows(
    there: np.ndarray[Any, Any], keep: int | Tensor
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """For ``logits_to_keep``: of each row and kept column [B, K] which of the logits is its own (of
    padding those behind the last), and which rows of all sequences these are."""
    every = columns = np.arange(there.shape[1])
    columns = columns[-keep:] if isinstance(keep, int) else columns[keep.cpu().numpy()]
    asked = there & np.isin(every, columns)
    number = np.where(asked, asked.cumsum().reshape(asked.shape) - 1, asked.sum())
    return number[:, columns], np.flatnonzero(asked[there]).tolist()


def _numbers(given: dict[str, Any], name: str, *shapes: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Those of a tensor that has one of the ``shapes``."""
    tensor = given[name]
    if not isinstance(tensor, Tensor) or tensor.shape not in shapes:
        raise refuse(name, _described(tensor), f"a tensor {list(shapes[0])}, or None")
    return tensor.cpu().numpy()


def _described(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
