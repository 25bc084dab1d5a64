"""torch's state during every pass, whatever the caller has set; the caller's comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock, RLock, get_ident, local
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as hooks
from torch.utils import _python_dispatch as dispatch

from tinyspec.errors import DeterminismError
from tinyspec.model import openmp
from tinyspec.model.torch_settings import pin_again, pinned

# Types of devices whose work is queued on streams.
WITH_STREAMS = ("cuda",)
_streams: dict[torch.device, DeviceStream] = {}
_making = Lock()


class _Callers(local):
    """The stream that was current in this thread before the block that it is in."""

    stream: Any = None


class DeviceStream:
    """The stream of one device; ``stream_of`` makes one for each.

    queues: whether the device has streams.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.queues = device.type in WITH_STREAMS
        self._callers = _Callers()
        self.own: Any = torch.cuda.Stream(device) if self.queues else None
        # Held where a thread begins or ends its block, and throughout ``alone``.
        self._entering = RLock()
        self._threads_inside = 0

    def __call__(self) -> AbstractContextManager[object]:
        """Work of the block runs on this stream: after what the caller's current stream has been
        given so far, and before what that is given afterwards."""
        return self._block() if self.queues else nullcontext()

    @contextmanager
    def _block(self) -> Iterator[None]:
        caller, own = torch.cuda.current_stream(self.device), self.own
        with torch.cuda.device(self.device), torch.cuda.stream(own):
            if caller == own:  # within another block
                yield
                return
            outer = self._callers.stream
            with self._entering:
                self._threads_inside += 1
            try:
                own.wait_stream(caller)
                self._callers.stream = caller
                yield
            finally:
                self._callers.stream = outer
                caller.wait_stream(own)
                with self._entering:
                    self._threads_inside -= 1

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Within a block: whether no other thread is in one of its own. If so none begins one
        before this ends: whatever it handed over would be captured with the work of this thread."""
        with self._entering if self.queues else nullcontext():
            if alone := not self.queues or self._threads_inside == 1:
                yield True
        if not alone:
            yield False

    def again(self) -> None:
        """Within a block, after code of the user's that may have made another stream current."""
        if self.queues and (now := torch.cuda.current_stream(self.device)) != self.own:
            self.own.wait_stream(now)
            torch.cuda.set_stream(self.own)

    def hand_out(self, *tensors: Tensor | None) -> None:
        """Within a block: the caller gets ``tensors``. Once it drops one, its memory is not used
        again before the caller's stream has done what it was given until then."""
        for tensor in tensors:
            if tensor is not None and self.queues and self._callers.stream is not None:
                tensor.record_stream(self._callers.stream)

    def take(self, tensor: Tensor) -> None:
        """Within a block: work reads ``tensor``, which is the caller's."""
        if self.queues and tensor.device.type in WITH_STREAMS:
            tensor.record_stream(self.own)

    def give_back(self) -> None:
        """Memory that was freed goes back to the device: torch's allocator keeps it for the stream
        that used it, and gives it to others only when there is no more."""
        if self.queues:
            torch.cuda.empty_cache()


def stream_of(device: torch.device) -> DeviceStream:
    """One for all engines of a device: memory that one has freed, the next can have."""
    with _making:
        if device not in _streams:
            _streams[device] = DeviceStream(device)
        return _streams[device]


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
    if _modes.stream is not None:
        pin_again(_modes.stream.device.type)  # what others have moved until here
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
            pin_again(_modes.stream.device.type, own=True)
            _modes.stream.again()


class Autocast(NamedTuple):
    """torch's autocast in the forward of a model: products and attention in ``dtype``, whatever the
    weights are in; None: it is off.

    Its cache is off: passes do not know when weights change. What is no part of the forward, such
    as sampling, runs without it.
    """

    dtype: torch.dtype | None = None
    device_type: str = "cpu"

    def on(self) -> AbstractContextManager[object]:
        """Around the forward of a model or of a module."""
        return self._block(dtype=self.dtype, cache_enabled=False)

    def off(self) -> AbstractContextManager[object]:
        """Within ``on``, around what takes tensors as they are."""
        return self._block(enabled=False)

    def _block(self, **given: Any) -> AbstractContextManager[object]:
        return nullcontext() if self.dtype is None else torch.autocast(self.device_type, **given)

    def cast(self, *tensors: Any) -> list[Any]:
        """Tensors, or None, as an operator gets them that autocast knows."""
        return [x if x is None or self.dtype is None else x.to(self.dtype) for x in tensors]

    def casting(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """``kernel`` as an operator that autocast knows."""
        return kernel if self.dtype is None else lambda *given: kernel(*self.cast(*given))


NO_AUTOCAST = Autocast()


class TorchState:
    """No gradients (or the caller's mode of them), no modes, the settings of ``torch_settings``, on
    the stream of a device."""

    def __init__(self, device: torch.device):
        self.stream = stream_of(device)
        self._kind = self.stream.device.type
        self._thread: int | None = None

    def __call__(self, gradients: bool = False) -> AbstractContextManager[None]:
        """The state while the block runs. A block within a block of the same thread only sets again
        what was changed in between. gradients: recorded where the
        caller records them."""
        if self._thread != get_ident():  # it has not begun in this thread
            return self._begun(gradients)
        return self._set_again()

    @contextmanager
    def _set_again(self) -> Iterator[None]:
        pin_again(self._kind)
        self.stream.again()
        on = _C._len_torch_function_stack() or _C._len_torch_dispatch_stack()
        with without_modes() if on else nullcontext():
            yield

    @contextmanager
    def _begun(self, gradients: bool) -> Iterator[None]:
        recorded = nullcontext() if gradients else torch.inference_mode()
        with pinned(self._kind), self.stream(), recorded, without_modes():
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
