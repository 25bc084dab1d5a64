"""EleutherAI's lm-evaluation-harness over an engine: scores that no batch, order or neighbour
changes. ``python -m tinyspec.integrations.lm_eval`` is the harness's own command line, with
``--model tinyspec``; importing this module registers that name.

Loading, tokens, windows and chat templates are those of the harness's ``HFLM``. Knows no task.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import fields
from hashlib import sha256
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from tinyspec.config import EngineConfig
from tinyspec.engine.engine import Engine
from tinyspec.engine.results import scores_of
from tinyspec.errors import refuse
from tinyspec.outputs import Completion
from tinyspec.sampling_params import SamplingParams

# Fields of EngineConfig that arguments of the model may set; ``backend`` is one of HFLM's.
CONFIG = {field.name for field in fields(EngineConfig)} - {"backend"}


@register_model("tinyspec")
class TinyspecLM(HFLM):
    """``HFLM`` whose scores and answers come from an Engine, deterministic ones.

    pretrained: a name, a folder or a loaded model. deterministic: of answers; log-likelihoods
    always are. given: arguments of HFLM, and fields of EngineConfig but ``backend``. batch_size is
    taken and changes nothing: all requests are handed over at once; ``max_sequences`` bounds how
    many run. max_length: one less than the engine's ``max_model_len`` at most.

    Log-softmax is taken in float32, whatever the model's dtype, and the log-probabilities of a
    continuation are added in float64: exact for tokens, so no order of adding changes a digit.
    Another ``softmax_dtype`` raises ValueError, as does what EngineConfig and Engine refuse.
    """

    def __init__(self, pretrained: Any, *, deterministic: bool = True, **given: Any):
        config = EngineConfig(**{name: given.pop(name) for name in CONFIG & given.keys()})
        super().__init__(pretrained, **{"softmax_dtype": "float32", **given})
        if self.softmax_dtype != torch.float32:
            raise refuse("softmax_dtype", self.softmax_dtype, "float32")
        self.deterministic = deterministic
        dtype = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            self.engine = Engine(self.model, self.tokenizer, config)

    @property
    def batch_size(self) -> int:
        """All there are: the engine makes its own batches."""
        return sys.maxsize

    @property
    def max_length(self) -> int:
        """Most tokens before the last one."""
        assert self.engine.config.max_model_len
        own: int = super().max_length
        return min(own, self.engine.config.max_model_len - 1)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside results."""
        return {**super().get_model_info(), "fingerprint": self.engine.fingerprint}

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding says it) of each (texts, context, continuation);
        of windows, which have no texts, the latter is False."""
        engine, most = self.engine, self.max_length + 1
        whole = [(context + continuation)[-most:] for _, context, continuation in requests]
        targets = [continuation for *_, continuation in requests]
        prompts = [ids[: -len(target)] for ids, target in zip(whole, targets, strict=True)]
        tops = [int(texts is not None) for texts, *_ in requests]
        given = prompts, targets, [SamplingParams(top_logprobs=top) for top in tops]
        outputs = engine.outputs("score", lambda inputs: inputs.scored(*given), not disable_tqdm)
        totals = [sum(logprobs) for logprobs in scores_of(outputs)]
        return list(zip(totals, [_is_greedy(o.completions[0]) for o in outputs], strict=True))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each; sampled ones have seeds by the harness's ``--seed``, text and
        settings, and how often both were asked before."""
        prompts, params = [], []
        asked: Counter[Any] = Counter()
        for context, given in (request.args for request in requests):
            settings: dict[str, Any] = {**normalize_gen_kwargs(given, self.max_gen_toks)}
            tokens, until = settings.pop("max_gen_toks"), settings.pop("until")
            del settings["do_sample"]  # the temperature tells
            if settings.get("num_beams") == 1:
                del settings["num_beams"]
            if (room := self.max_length - tokens) < 1:
                raise refuse("max_gen_toks", tokens, f"less than max_length={self.max_length}")
            ids = self.tok_encode(context, left_truncate_len=room)
            prompts.append(ids or [self.prefix_token_id])
            same = context, str(given)
            key = f"{torch.initial_seed()} {asked[same]} {same}".encode()
            asked[same] += 1
            params.append(
                SamplingParams(
                    max_new_tokens=tokens,
                    stop_strings=[stop for stop in until if stop],
                    stop_token_ids=self.eot_token_id,
                    deterministic=self.deterministic,
                    **{"seed": int.from_bytes(sha256(key).digest()[:8], "big"), **settings},
                )
            )
        outputs = self.engine.generate(prompts, params, progress=not disable_tqdm)
        scores_of(outputs)  # raises for one that was aborted
        return [self._answer(output.completions[0], output.params) for output in outputs]

    def _answer(self, completion: Completion, params: SamplingParams) -> str:
        """Its text behind thoughts and before a stop string, as HFLM cuts it."""
        ids, text, end = completion.token_ids, completion.text, self.think_end_token
        if isinstance(end, int):
            behind = ids[len(ids) - ids[::-1].index(end) :] if end in ids else ids
            text = self.tok_decode(behind).lstrip()
        named = end if isinstance(end, str) else None
        answer: str = postprocess_generated_text(text or "", list(params.stop_strings), named)
        return answer


def _is_greedy(completion: Completion) -> bool:
    """Whether each token is the best of its place."""
    tops = completion.top_logprobs or []
    return [top[0][0] for top in tops] == completion.token_ids


if __name__ == "__main__":
    cli_evaluate()
