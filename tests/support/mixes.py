"""Random mixes: needles that ask for determinism among crowds of everything else."""

import random
from dataclasses import replace

from tests.support.tiny import VOCAB
from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams

NEEDLE_STYLES = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.3, "seed": 7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "seed": 11, "min_p": 0.05, "num_return_sequences": 3},
    {"repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.1, "stop_token_ids": (3, 90)},
)


class Liar:
    """A drafter that is often wrong, sometimes right, sometimes silent."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)

    def propose(self, sequences, n):
        lengths = [self._rng.choice((0, 1, self._rng.randint(0, n), n)) for _ in sequences]
        return [[self._rng.randrange(VOCAB) for _ in range(k)] for k in lengths]


class HalfLiar:
    """Knows the true continuations and gets each token wrong with some probability."""

    def __init__(self, truths: list[list[int]], seed: int, wrong: float = 0.15):
        self._truths = truths
        self._rng = random.Random(seed)
        self._wrong = wrong

    def propose(self, sequences, n):
        return [self._continue(list(sequence), n) for sequence in sequences]

    def _continue(self, tokens: list[int], n: int) -> list[int]:
        for truth in self._truths:
            if truth[: len(tokens)] == tokens:
                tail = truth[len(tokens) : len(tokens) + n]
                return [
                    self._rng.randrange(VOCAB) if self._rng.random() < self._wrong else t
                    for t in tail
                ]
        return []


def needles(seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Deterministic requests of every style, prompts of 1 to 150 tokens."""
    rng = random.Random(seed)
    found = []
    for n, style in enumerate(NEEDLE_STYLES):
        prompt = [rng.randrange(VOCAB) for _ in range((1, 9, 40, 150, 33, 64)[n])]
        params = SamplingParams(
            max_new_tokens=(14, 22, 10, 9, 40, 17)[n], deterministic=True, logprobs=True, **style
        )
        found.append((prompt, params))
    return found


def crowd(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Neighbours of mixed kind: plain and deterministic, greedy and sampled, long and short."""
    found = []
    for _ in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 30, rng.randint(1, 120))))]
        params = SamplingParams(
            max_new_tokens=rng.randint(1, 30),
            deterministic=rng.random() < 0.4,
            temperature=rng.choice((0.0, 0.7, 1.5)),
            top_k=rng.choice((None, 5)),
            seed=rng.randrange(1000),
            logprobs=rng.random() < 0.5,
            num_return_sequences=rng.choice((1, 1, 2)),
        )
        found.append((prompt, params))
    return found


def random_config(rng: random.Random, reference_rows: int, drafter: object) -> EngineConfig:
    """Anything that must not change a bit, chosen at random."""
    page_size = rng.choice((8, 16, 32, 64, 128, 256))
    tight = rng.random() < 0.4
    return EngineConfig(
        reference_rows=reference_rows,
        max_rows=rng.choice((reference_rows, 64, 200)),
        max_sequences=rng.choice((1, 4, 64)),
        page_size=page_size,
        # The longest request of a mix needs 160 tokens; tight pools preempt.
        num_pages=max(2, -(-180 // page_size) + rng.randint(0, 3))
        if tight
        else 4096 // page_size * 8,
        draft_window=rng.choice((1, 2, 3, 7, 16, 40, 64)),
        drafter=drafter,
        verify=rng.choice(("auto", "always", "padded", "auto")),
    )


def bits(output: RequestOutput) -> list[tuple[list[int], list[float] | None, str | None]]:
    """Everything of an output that the contract covers."""
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in output.completions]


def run_through(
    engine: Engine, rng: random.Random, requests: list[tuple[list[int], SamplingParams]]
) -> list[RequestOutput]:
    """Run requests by a random entry point: all at once, or added between steps."""
    prompts, params = [p for p, _ in requests], [s for _, s in requests]
    if rng.random() < 0.4:
        return engine.generate(prompts, params)
    ids, done = [], {}
    for prompt, wanted in requests:
        ids.append(engine.add_request(prompt, wanted))
        for _ in range(rng.choice((0, 0, 1, 3))):
            done |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step()}
    return [done[request_id] for request_id in ids]


def solo(engine: Engine, request: tuple[list[int], SamplingParams]) -> RequestOutput:
    """The request alone."""
    return engine.generate([request[0]], request[1])[0]


def plain(params: SamplingParams) -> SamplingParams:
    """The same request without the flag."""
    return replace(params, deterministic=False)
