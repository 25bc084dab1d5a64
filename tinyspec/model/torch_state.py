"""torch's state during every pass, whatever the caller has set; the caller's comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident, local
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.utils import _python_dispatch as dispatch

from tinyspec.errors import DeterminismError
from tinyspec.model import openmp
from tinyspec.model.device_stream import DeviceStream, stream_of
from tinyspec.model.torch_settings import pin_again, pinned

_C: Any = torch._C


def refuse_unpinnable(device_type: str) -> None:
    """Raise DeterminismError for what changes bits and cannot be pinned: TunableOp, which chooses
    GEMM kernels by timing, hooks that the user has set on all modules of the process, and OpenMP
    running fewer threads than a CPU's libraries count on."""
    if device_type == "cpu" and (why := openmp.shortage()) is not None:
        raise DeterminismError(why)
    if torch.cuda.is_available() and torch.cuda.tunable.is_enabled():
        raise DeterminismError(
            "TunableOp chooses GEMM kernels by timing; switch it off (torch.cuda.tunable.enable"
            "(False)) to use deterministic=True"
        )
    if found := global_hooks():
        names = ", ".join(getattr(hook, "__qualname__", type(hook).__qualname__) for hook in found)
        raise DeterminismError(
            f"{names}: a forward hook on all modules of the process (torch.nn.modules.module."
            "register_module_forward_hook) may change what they compute, and no digest covers it; "
            "remove it to use deterministic=True"
        )


def global_hooks() -> tuple[object, ...]:
    """Forward and forward-pre hooks on all modules of the process."""
    return (*hooks._global_forward_hooks.values(), *hooks._global_forward_pre_hooks.values())


class _Modes(local):
    """The caller's modes, set aside while a pass runs in its thread: those of ``torch.overrides``
    (``torch.set_default_device`` is one) and of ``torch.utils._python_dispatch``."""

    aside: tuple[list[Any], list[Any]] | None = None
    # Of the device whose settings are pinned in this thread; None while none are.
    stream: DeviceStream | None = None

    def any_on(self) -> bool:
        """Whether any mode is on now."""
        return bool(_C._len_torch_function_stack() or _C._len_torch_dispatch_stack())

    def take_off(self) -> None:
        """Set all modes aside; the innermost first."""
        functions = [_C._pop_torch_function_stack() for _ in range(_C._len_torch_function_stack())]
        dispatches = [dispatch._pop_mode() for _ in range(_C._len_torch_dispatch_stack())]
        self.aside = functions, dispatches

    def put_on(self) -> None:
        """Turn on again what was set aside."""
        functions, dispatches = self.aside or ([], [])
        for mode in reversed(functions):
            _C._push_on_torch_function_stack(mode)
        for mode in reversed(dispatches):
            dispatch._push_mode(mode)
        self.aside = None


_modes = _Modes()


@contextmanager
def callers_modes(thread: int | None = None) -> Iterator[None]:
    """For code of the user that a step calls: with the modes that the step has set aside. Settings
    and the stream that it changes are set again, for the rest of the step.

    thread: whose code it is; in any other one an exit or an interrupt that it raises is an error.
    """
    if _modes.aside is None:
        yield
        return
    _modes.put_on()
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or thread in (None, get_ident()):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    finally:
        _modes.take_off()
        if _modes.stream is not None:
            pin_again(_modes.stream.device.type)
            _modes.stream.again()


class TorchState:
    """No gradients, no modes, the settings of ``torch_settings`` and the stream of
    ``device_stream``, on one device."""

    def __init__(self, device: torch.device):
        self.stream = stream_of(device)
        self._kind = self.stream.device.type
        self._thread: int | None = None

    @property
    def entered_here(self) -> bool:
        """Whether the state has begun in this thread."""
        return self._thread == get_ident()

    def __call__(self, again: bool = True) -> AbstractContextManager[None]:
        """The state while the block runs. A block within a block of the same thread only sets again
        what was changed in between; without ``again`` nothing was."""
        if not self.entered_here:
            return self._begun()
        return self._set_again() if again else nullcontext()

    @contextmanager
    def _set_again(self) -> Iterator[None]:
        pin_again(self._kind)
        self.stream.again()
        with without_modes() if _modes.any_on() else nullcontext():
            yield

    @contextmanager
    def _begun(self) -> Iterator[None]:
        with pinned(self._kind), self.stream(), torch.inference_mode(), without_modes():
            outer = _modes.stream
            try:
                self._thread, _modes.stream = get_ident(), self.stream
                yield
            finally:
                self._thread, _modes.stream = None, outer


@contextmanager
def without_modes() -> Iterator[None]:
    """No modes and no transforms of ``torch.func`` around the operators of the block."""
    transformed = _C._are_functorch_transforms_active()
    with _C._DisableFuncTorch() if transformed else nullcontext():
        outer = _modes.aside
        _modes.take_off()
        try:
            yield
        finally:
            _modes.put_on()
            _modes.aside = outer
