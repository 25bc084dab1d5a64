"""The requests whose bits `compare_bits.py` stores: models, prompts, parameters, which run
beside which. Uses the public API only, so that it runs on any version.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tinyspec
from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams

Entry = dict[str, Any]
VOCAB = 384
PAGE = 16
# Wide enough that the order of a sum changes its bits.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 416,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "intermediate_size": 160, "num_experts_per_tok": 2}
_GPT2 = {"n_embd": 192, "n_layer": 2, "n_head": 6, "n_positions": 512, "vocab_size": VOCAB}
_ENDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# Attention of every sort: grouped heads, norms of q and k, windows, softcaps, sinks, learned
# positions, partial and interleaved rotation; dense layers and experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 24},
    "qwen3": {**_GROUPED, "head_dim": 64},
    "gemma2": {**_GROUPED, "head_dim": 32, "sliding_window": 24},
    "gpt2": {**_GPT2, **_ENDS, "initializer_range": 0.15},
    "gpt_neox": _COMMON,
    "phi": _GROUPED,
    "cohere": {**_GROUPED, "logit_scale": 0.5},
    "mixtral": {**_EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 96, "head_dim": 32},
    "gpt_oss": {
        **_EXPERTS,
        "num_local_experts": 4,
        "head_dim": 32,
        "sliding_window": 24,
        "rope_parameters": _ROPE,
    },
}
DTYPES = ("float32", "bfloat16")
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 129, 150)
SHARED = 40  # leading tokens that every second longer prompt begins with
# Parameters of the requests of a crowd, in turns.
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1, "min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_logprobs": 3, "logprobs_mode": "raw"},
    {"prompt_logprobs": True, "top_logprobs": 2},
    {"temperature": 1.0, "stop_token_ids": tuple(range(0, VOCAB, 12)), "min_new_tokens": 3},
    {"stop_token_ids": tuple(range(5, VOCAB, 16))},
)


class HalfTrueDrafter:
    """Proposes the known continuation, with every third token replaced by another."""

    def __init__(self, outputs: Iterable[RequestOutput]):
        self._texts = [[*o.prompt_token_ids, *o.completions[0].token_ids] for o in outputs]

    def propose(self, sequences: list[Sequence[int]], n: int) -> list[list[int]]:
        return [self._one(list(sequence))[:n] for sequence in sequences]

    def _one(self, tokens: list[int]) -> list[int]:
        for text in self._texts:
            if text[: len(tokens)] == tokens:
                rest = enumerate(text[len(tokens) :])
                return [(t + 1) % VOCAB if place % 3 == 2 else t for place, t in rest]
        return [(7 * tokens[-1] + 3) % VOCAB] * 4


def assistant_of(model: PreTrainedModel) -> PreTrainedModel:
    """The same with other weights, which is right now and then."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight += (0.1 * weight.float().std(correction=0) * noise).to(weight.dtype)
    return other


class Writer:
    """Serves one model's requests and collects the results.

    entries: as they are stored. seen: sums that show that the cases do what their names say.
    """

    def __init__(self, family: str, dtype: str):
        self.label = f"{family} {dtype}"
        self.model = make_model(family, dtype)
        self.entries: list[Entry] = []
        self.seen: Counter[str] = Counter()
        rng = random.Random(f"prompts of {family}")
        self._rng = rng
        shared = self.tokens(SHARED)
        self.prompts = [
            [*shared, *self.tokens(length - SHARED)]
            if length > SHARED and number % 2
            else self.tokens(length)
            for number, length in enumerate(LENGTHS)
        ]
        self.params = [
            SamplingParams(
                max_new_tokens=8 + 5 * (number % 4),
                seed=1000 + number,
                logprobs=True,
                **ASKED[number % len(ASKED)],
            )
            for number in range(len(LENGTHS))
        ]

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(count)]

    def add(self, section: str, outputs: Iterable[RequestOutput], first: int = 0) -> None:
        """Store every completion of ``outputs``."""
        for number, output in enumerate(outputs, first):
            kind = "deterministic" if output.params.deterministic else "plain"
            for index, completion in enumerate(output.completions):
                if completion.error is not None:
                    raise RuntimeError(f"{self.label} {section}: {completion.error}")
                top = [pair for row in completion.top_logprobs or [] for pair in row]
                asked = [p for p in output.prompt_logprobs or [] if p is not None]
                self._store(
                    f"{kind}: {section}",
                    f"{number}.{index}",
                    completion.token_ids,
                    map(bits, completion.logprobs or []),
                    [*(f"{token}:{bits(p)}" for token, p in top), *map(bits, asked)],
                    completion.finish_reason,
                )
                for name in ("cached_prompt_tokens", "accepted", "rolled_back"):
                    self.seen[f"{kind} {name}"] += getattr(completion.stats, name)

    def _store(
        self,
        section: str,
        name: str,
        tokens: list[int],
        logprobs: Iterable[str],
        others: Iterable[str],
        finish: str | None,
    ) -> None:
        self.entries.append(
            {
                "section": section,
                "name": f"{self.label} {name}",
                "deterministic": section.startswith("deterministic"),
                "tokens": tokens,
                "logprobs": list(logprobs),
                "others": list(others),
                "finish": finish,
            }
        )

    def plain(self) -> None:
        """Plain requests in engines that serve nothing else: which pass holds which rows does not
        depend on measured costs then."""
        with Engine(self.model, config=EngineConfig(page_size=PAGE)) as engine:
            outputs = engine.generate(self.prompts, self.params)
            self.add("crowd", outputs)
            self.add("second turns", engine.generate(*self.turns(outputs)))
            self.add(
                "alone", [engine.generate([self.prompts[n]], self.params[n])[0] for n in (3, 9)]
            )
            self.add("n = 3", engine.generate([self.prompts[8]], self.three(False)))
        with Engine(self.model, config=EngineConfig(page_size=PAGE, drafter="ngram")) as engine:
            self.add("ngram drafter", engine.generate(*self.repetitive(False)))
        self.drop_in(deterministic=False)

    def deterministic(self) -> None:
        """The same prompts and others, deterministic, beside plain ones that are not stored."""
        asked = [replace(params, deterministic=True) for params in self.params]
        others = [self.tokens(length) for length in (5, 70, 40)]
        beside = [SamplingParams(max_new_tokens=20, temperature=n / 2, seed=n) for n in range(3)]
        with Engine(self.model, config=EngineConfig(page_size=PAGE)) as engine:
            outputs = engine.generate([*self.prompts, *others], [*asked, *beside])
            outputs = outputs[: len(asked)]
            self.add("crowd", outputs)
            again = engine.generate(*self.turns(outputs))
            self.add("second turns", again)
            alone = [engine.generate([self.prompts[n]], asked[n])[0] for n in range(0, 12, 3)]
            self.add("alone", alone)
            self.add("n = 3", engine.generate([self.prompts[8], others[1]], self.three(True)))
            self.scores(engine, outputs)
            self.audited(engine, [*outputs, *again])
        self.same_bits(outputs[0:12:3], alone)
        always = EngineConfig(page_size=PAGE, verify="always")
        with Engine(self.model, config=always) as engine:
            verified = engine.generate(self.prompts[4:10], asked[4:10])
        self.add("verify always", verified, first=4)
        self.same_bits(outputs[4:10], verified)
        always = EngineConfig(page_size=PAGE, verify="always", drafter="ngram")
        with Engine(self.model, config=always) as engine:
            self.add("verify always, ngram drafter", engine.generate(*self.repetitive(True)))
        drafter = HalfTrueDrafter(outputs)
        with Engine(self.model, config=EngineConfig(page_size=PAGE, drafter=drafter)) as engine:
            drafted = engine.generate(self.prompts[2:8], asked[2:8])
        self.add("half-true drafter", drafted, first=2)
        self.same_bits(outputs[2:8], drafted)
        assisted = EngineConfig(page_size=PAGE, verify="always", drafter=assistant_of(self.model))
        with Engine(self.model, config=assisted) as engine:
            self.same_bits(outputs, engine.generate(self.prompts, asked))
            self.seen["deterministic accepted of an assistant"] += engine.stats().accepted
        with Engine(self.model, config=EngineConfig(linear="always", max_rows=256)) as engine:
            self.add("linear kernel, large pages", engine.generate(self.prompts[6:11], asked[6:11]))
        self.drop_in(deterministic=True)

    def turns(self, outputs: list[RequestOutput]) -> tuple[list[list[int]], list[SamplingParams]]:
        """The longest four of a crowd's conversations with one more message each."""
        prompts = [
            [*o.prompt_token_ids, *o.completions[0].token_ids, *random_tokens(number, 11)]
            for number, o in enumerate(outputs[-4:])
        ]
        params = [replace(o.params, prompt_logprobs=False, max_new_tokens=9) for o in outputs[-4:]]
        return prompts, params

    @staticmethod
    def three(deterministic: bool) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=10,
            temperature=0.9,
            seed=77,
            num_return_sequences=3,
            logprobs=True,
            deterministic=deterministic,
        )

    @staticmethod
    def repetitive(deterministic: bool) -> tuple[list[list[int]], list[SamplingParams]]:
        """Prompts in which n-grams repeat, for an n-gram drafter."""
        prompts = [random_tokens(50 + n, 6 + n) * 5 for n in range(4)]
        params = [
            SamplingParams(
                max_new_tokens=16,
                temperature=0.4 * (n % 2),
                seed=n,
                logprobs=True,
                deterministic=deterministic,
            )
            for n in range(4)
        ]
        return prompts, params

    def scores(self, engine: Engine, outputs: list[RequestOutput]) -> None:
        """Continuations that the engine chose itself, and others."""
        prompts = [output.prompt_token_ids for output in outputs[4:7]]
        given = [outputs[4].completions[0].token_ids, random_tokens(90, 20), random_tokens(91, 3)]
        found = engine.score(prompts, given)
        for number, (tokens, logprobs) in enumerate(zip(given, found, strict=True)):
            self._store(
                "deterministic: score", str(number), tokens, map(bits, logprobs), (), "length"
            )

    def audited(self, engine: Engine, outputs: list[RequestOutput]) -> None:
        report = tinyspec.audit(engine, outputs)
        if not report:
            raise RuntimeError(f"{self.label}: audit\n{report}")
        self.seen["audited"] += len(report.entries)

    def drop_in(self, deterministic: bool) -> None:
        """``model.generate`` of a patched model: a greedy batch, then a sampled one. In place of
        log-probabilities: the scores of the tokens chosen, and checksums of the logits."""
        tinyspec.patch(self.model, EngineConfig(page_size=PAGE))
        kind = "deterministic" if deterministic else "plain"
        try:
            for name, asked in (
                ("greedy", {"do_sample": False}),
                ("sampled", {"do_sample": True, "top_k": 40, "top_p": 0.95, "seed": [1, 2, 3, 4]}),
            ):
                found: Any = self.model.generate(
                    [self.prompts[n] for n in (1, 5, 7, 10)],
                    max_new_tokens=10,
                    return_dict_in_generate=True,
                    output_scores=True,
                    output_logits=True,
                    pad_token_id=0,
                    deterministic=deterministic,
                    **asked,
                )
                new = found.sequences[:, -len(found.scores) :]
                for row, tokens in enumerate(new.tolist()):
                    chosen = [float(s[row, t]) for s, t in zip(found.scores, tokens, strict=True)]
                    sums = [f"{zlib.crc32(raw(logits[row])):08x}" for logits in found.logits]
                    where = f"{kind}: patched generate", f"{name} {row}"
                    self._store(*where, tokens, map(bits, chosen), sums, None)
        finally:
            tinyspec.unpatch(self.model)

    def same_bits(self, ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
        """The package's promise, checked before anything is stored."""
        for a, b in zip(ours, theirs, strict=True):
            x, y = a.completions[0], b.completions[0]
            if x.token_ids != y.token_ids or repr(x.logprobs) != repr(y.logprobs):
                raise RuntimeError(f"{self.label}: one request gave two results")
            self.seen["compared within the file"] += 1


def make_model(family: str, dtype: str) -> PreTrainedModel:
    """A tiny model with random weights, the same for the same arguments."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model: Any = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = None
    return model.to(getattr(torch, dtype)).eval()


def random_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(f"tokens {seed}")
    return [rng.randrange(VOCAB) for _ in range(count)]


def bits(value: float) -> str:
    """A float as text that keeps every bit of a finite one."""
    return float(value).hex()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().float().contiguous().numpy().tobytes()


def write_requests() -> tuple[list[Entry], dict[str, int]]:
    """All entries, and the sums that show that the cases do what their names say."""
    entries: list[Entry] = []
    seen: Counter[str] = Counter()
    for family in FAMILIES:
        for dtype in DTYPES:
            writer = Writer(family, dtype)
            writer.plain()
            writer.deterministic()
            entries += writer.entries
            seen += writer.seen
    for name in ("cached_prompt_tokens", "accepted", "rolled_back"):
        if not seen[f"deterministic {name}"]:
            raise RuntimeError(f"no deterministic request had any {name}")
    return entries, dict(sorted(seen.items()))
