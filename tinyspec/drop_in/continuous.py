"""``generate_batch`` and ``init_continuous_batching`` of a patched model.

transformers' context manager and the keeping of managers stand on these two and stay its own. Knows
how the methods get into the model, and not what they do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import transformers
from transformers import GenerationConfig, PreTrainedModel

from tinyspec.drop_in.access import KEPT_AS, Access
from tinyspec.drop_in.original import own_method
from tinyspec.model.exchange import ABSENT, Place


class Continuous:
    """Continuous batching of one patched model. ``places``: of its methods in the model."""

    def __init__(self, access: Access):
        self._access = access
        self._managers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.places = list(self._places())

    def _places(self) -> Iterator[Place]:
        model = self._access.model
        for function in (self.generate_batch, self.init_continuous_batching):
            name = function.__name__
            if hasattr(model, name):
                own = vars(model).get(name, ABSENT)
                yield Place(vars(model), name, own, _Method(model, name, function))

    def halt(self) -> None:
        """Let managers fail what they have left, after a step, and end."""
        for manager in list(self._managers):
            manager.halt("the model was unpatched")

    def close(self) -> None:
        """Take the methods out of the model, and a manager that was kept."""
        for place in self.places:
            place.take_out()
        model = self._access.model
        if (kept := vars(model).get(KEPT_AS)) in self._managers:
            Place(vars(model), KEPT_AS, ABSENT, kept).take_out()

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **settings: Any,
    ) -> dict[str, Any]:
        """A ``GenerationOutput`` of each prompt, by id, in the order of the prompts, with the
        tokens that ``generate`` gives the same rows.

        settings: as ``generate`` takes them, ``seed`` and ``deterministic`` included. Raises what
        ``generate`` raises, and NotImplementedError for what tinyspec does not serve.
        """
        batches = _batches()
        if persistent_manager:
            vars(self._access.model)[KEPT_AS] = self.init_continuous_batching(
                generation_config, continuous_batching_config
            )
        outputs: dict[str, Any] = batches.run(
            self._access,
            inputs,
            generation_config,
            continuous_batching_config,
            settings,
            record_timestamps,
            progress_bar,
        )
        return outputs

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """A manager, not started; the one that was kept, where there is one."""
        batches = _batches()
        kept = vars(self._access.model).get(KEPT_AS)
        if kept is not None and kept in self._managers:
            kept.configure(generation_config)
            return kept
        manager = batches.Manager(self._access, generation_config, continuous_batching_config)
        self._managers.add(manager)
        return manager


class _Method:
    """A method of ``model`` that tinyspec serves; copies of the model get its own back."""

    def __init__(self, model: PreTrainedModel, name: str, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self._model, self._name, self._function = model, name, function
        self._before = vars(model).get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return own_method, (self._model, self._name, self._before)


def _batches() -> Any:
    """The module that needs transformers' types. Raises RuntimeError where they are not there."""
    try:
        from tinyspec.drop_in import batches
    except ImportError as error:
        raise RuntimeError(
            f"continuous batching of transformers {transformers.__version__} is not what tinyspec "
            f"knows ({error}); call model.generate"
        ) from error
    return batches
