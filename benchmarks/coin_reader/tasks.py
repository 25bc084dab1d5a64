"""State tracking in words, made by code: a coin that is flipped, and letters that are set.

An example is sentences, some of which tell a state; the thought is that state in words, in the
chunk of the first word from which it follows. No model and no tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from benchmarks.coin_reader import phrases
from benchmarks.coin_reader.phrases import SIDES
from benchmarks.coin_reader.vocabulary import END

T = TypeVar("T")
LETTERS = ("a", "b", "c")
# Sums are taken modulo this.
MODULUS = 5
# One in so many sequences of operations is kept for tests. Shorter ones than this are in both.
HELD_OUT, SHARED = 5, 3
# Part of the examples whose sentences that change nothing stand together.
LONG_RUNS = 0.3


@dataclass(frozen=True)
class Sentence:
    """words; thought: the state behind them, None where they change nothing. known: index of the
    first word from which that follows, the last one if negative."""

    words: tuple[str, ...]
    thought: tuple[str, ...] | None = None
    known: int = -1


@dataclass(frozen=True)
class Example:
    """sentences, the last a question that ends in "A :"; answer: words, END among them.
    operations: what they are, in whatever words."""

    sentences: tuple[Sentence, ...]
    answer: tuple[str, ...]
    operations: tuple[Hashable, ...]

    @property
    def prompt(self) -> list[str]:
        return [word for sentence in self.sentences for word in sentence.words]

    @property
    def steps(self) -> tuple[str, ...]:
        """What the shortest chain of thought writes before the answer: every state."""
        return tuple(word for s in self.sentences for word in s.thought or ())

    @property
    def retold(self) -> tuple[str, ...]:
        """What a chain of thought in sentences writes: each that changes a state, and the state."""
        changing = [sentence for sentence in self.sentences if sentence.thought is not None]
        return tuple(word for s in changing for word in (*s.words, *(s.thought or ())))

    def thoughts(self, chunk_size: int) -> list[list[str]]:
        """Of every whole chunk: the states that begin to follow in it, and END."""
        found: list[list[str]] = [[] for _ in range(len(self.prompt) // chunk_size)]
        start = 0
        for sentence in self.sentences:
            chunk = (start + sentence.known % len(sentence.words)) // chunk_size
            start += len(sentence.words)
            if sentence.thought is not None and chunk < len(found):
                found[chunk].extend(sentence.thought)
        return [[*words, END] for words in found]


@dataclass(frozen=True)
class Task:
    """make(rng, operations, filler): a story of so many, and that part of the sentences between
    first and last changes nothing; words: all that occur. longest: words of the longest thought of
    a chunk, END included."""

    name: str
    words: tuple[str, ...]
    longest: int
    make: Callable[[Random, int, float], Example]

    def example(
        self, rng: Random, operations: int, held_out: bool = False, filler: float = 0.0
    ) -> Example:
        """held_out: sequences of operations that training never sees."""
        while True:
            made = self.make(rng, operations, filler)
            if operations < SHARED or is_held_out(made.operations) == held_out:
                return made


def is_held_out(operations: Sequence[Hashable]) -> bool:
    """By a digest, so that it is the same in every process."""
    return hashlib.sha256(repr(tuple(operations)).encode()).digest()[0] % HELD_OUT == 0


def _mixed(rng: Random, first: list[T], filler: float, make: Callable[[Random], T]) -> list[T]:
    """``first`` in its order, and others between: evenly, or now and then in two long runs."""
    count = round(max(len(first), 1) * filler / (1 - filler))
    if rng.random() < LONG_RUNS:
        ends = sorted(rng.choices(range(len(first) + 1), k=2))
        cut = rng.randint(0, count)
        runs = [[make(rng) for _ in range(n)] for n in (cut, count - cut)]
        return [*first[: ends[0]], *runs[0], *first[ends[0] : ends[1]], *runs[1], *first[ends[1] :]]
    total = len(first) + count
    places = set(rng.sample(range(total), len(first)))
    ones = iter(first)
    return [next(ones) if place in places else make(rng) for place in range(total)]


def _filler(rng: Random) -> Sentence:
    return Sentence((*phrases.filler(rng).words, "."))


def _flips(rng: Random, operations: int) -> tuple[int, list[tuple[str, bool]]]:
    """How the coin lies at first, and who flips it or not; few people or many."""
    people = rng.sample(phrases.NAMES, rng.randint(1, len(phrases.NAMES)))
    flips = [(rng.choice(people), rng.random() < 0.5) for _ in range(operations)]
    return rng.randrange(2), flips


def _coin(rng: Random, operations: int, filler: float) -> Example:
    side, flips = _flips(rng, operations)
    first, middle = phrases.beginning(rng, side), []
    for who, flipped in flips:
        side ^= flipped
        middle.append(phrases.step(rng, who, flipped, side))
    clauses = [first, *_mixed(rng, middle, filler, phrases.filler)]
    if filler and rng.random() < 0.1:
        clauses.insert(0, phrases.filler(rng))
    texts = phrases.told(rng, clauses)
    sentences = [
        Sentence(words, None if clause.says is None else (clause.says,), known)
        for clause, (words, known) in zip(clauses, texts, strict=True)
    ]
    question = Sentence(phrases.question(rng))
    return Example((*sentences, question), (SIDES[side], ".", END), tuple(flips))


def _parity(rng: Random, operations: int, filler: float) -> Example:
    side, flips = _flips(rng, operations)
    first = Sentence(("A", "coin's", "state", "is", SIDES[side], "."), (SIDES[side],), 4)
    middle = []
    for who, flipped in flips:
        side ^= flipped
        verb = ("flips",) if flipped else ("doesn't", "flip")
        middle.append(Sentence((who, *verb, "the", "coin", "."), (SIDES[side],), 1))
    last = [Sentence(("What's", "the", "state", "?")), Sentence(("A", ":"))]
    middle = _mixed(rng, middle, filler, _filler)
    return Example((first, *middle, *last), (SIDES[side], ".", END), tuple(flips))


def _variables(rng: Random, operations: int, filler: float) -> Example:
    values = [rng.randrange(MODULUS) for _ in LETTERS]

    def state() -> tuple[str, ...]:
        return tuple(map(str, values))

    first = Sentence((*LETTERS, "are", *state(), "."), state(), -2)
    middle = []
    for _ in range(operations):
        target, source = rng.randrange(len(LETTERS)), rng.randrange(len(LETTERS))
        more = rng.randrange(MODULUS)
        values[target] = (values[source] + more) % MODULUS
        words = ("now", "set", LETTERS[target], "to", LETTERS[source], "plus", str(more), ".")
        middle.append(Sentence(words, state(), -2))
    asked = rng.randrange(len(LETTERS))
    last = [Sentence(("What", "is", LETTERS[asked], "?")), Sentence(("A", ":"))]
    done = tuple(sentence.words for sentence in middle)
    sentences = (first, *_mixed(rng, middle, filler, _filler), *last)
    return Example(sentences, (str(values[asked]), END), done)


_COIN_WORDS = (*phrases.MARKS, *phrases.WORDS, *phrases.NAMES)
_LETTER_WORDS = (*LETTERS, *map(str, range(MODULUS)), "are", "now", "set", "to", "plus", "What")
TASKS = {
    "coin": Task("coin", _COIN_WORDS, 4, _coin),
    "parity": Task("parity", _COIN_WORDS, 4, _parity),
    "variables": Task("variables", (*_COIN_WORDS, *_LETTER_WORDS), 8, _variables),
}
