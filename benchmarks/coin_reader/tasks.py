"""State tracking in words, made by code: a coin that is flipped, and letters that are set.

An example is sentences, some of which change a state; the thought behind such a sentence is the new
state in words. Half a dozen lines of English, no model and no tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.coin_reader.vocabulary import END

NAMES = ("Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi")
SIDES = ("heads", "tails")
LETTERS = ("a", "b", "c")
# Sums are taken modulo this.
MODULUS = 5
# Sentences that change nothing: one of each list.
FILLERS = (
    ("The", "A", "One"),
    ("wind", "river", "bird", "cloud"),
    ("moves", "rests", "sings"),
    ("over", "behind", "near"),
    ("the",),
    ("hill", "town", "wood", "bridge"),
    (".",),
)
# One in so many sequences of operations is kept for tests.
HELD_OUT = 5


@dataclass(frozen=True)
class Sentence:
    """words; thought: the state behind them, None where they change nothing."""

    words: tuple[str, ...]
    thought: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Example:
    """sentences, the last a question that ends in "A :"; answer: words, END among them."""

    sentences: tuple[Sentence, ...]
    answer: tuple[str, ...]

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
        """Of every whole chunk: the states behind the sentences that end in it, and END."""
        found: list[list[str]] = [[] for _ in range(len(self.prompt) // chunk_size)]
        end = 0
        for sentence in self.sentences:
            end += len(sentence.words)
            chunk = (end - 1) // chunk_size
            if sentence.thought is not None and chunk < len(found):
                found[chunk].extend(sentence.thought)
        return [[*words, END] for words in found]


@dataclass(frozen=True)
class Task:
    """make(rng, operations): first sentences, a sentence for each operation, the last ones, and the
    answer; words: all that occur. longest: words of the longest thought of a chunk of 8, END
    included."""

    name: str
    words: tuple[str, ...]
    longest: int
    make: Callable[
        [Random, int], tuple[list[Sentence], list[Sentence], list[Sentence], tuple[str, ...]]
    ]

    def example(
        self, rng: Random, operations: int, held_out: bool = False, filler: float = 0.0
    ) -> Example:
        """held_out: sequences of operations that training never sees. filler: part of the sentences
        between first and last that change nothing."""
        while True:
            first, middle, last, answer = self.make(rng, operations)
            if _is_held_out(middle) == held_out:
                break
        if filler:
            count = round(operations * filler / (1 - filler))
            middle = _mixed(rng, middle, [Sentence(_filler(rng)) for _ in range(count)])
        return Example((*first, *middle, *last), (*answer, END))


def _filler(rng: Random) -> tuple[str, ...]:
    return tuple(rng.choice(words) for words in FILLERS)


def _mixed(rng: Random, first: list[Sentence], second: list[Sentence]) -> list[Sentence]:
    """Both, each in its own order."""
    places = set(rng.sample(range(len(first) + len(second)), len(first)))
    ones, others = iter(first), iter(second)
    total = len(first) + len(second)
    return [next(ones) if place in places else next(others) for place in range(total)]


def _is_held_out(operations: list[Sentence]) -> bool:
    """By a digest, so that it is the same in every process."""
    text = " ".join(word for sentence in operations for word in sentence.words)
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT == 0


def _parity(rng: Random, operations: int) -> tuple[list, list, list, tuple[str, ...]]:
    side = rng.randrange(2)
    first = [Sentence(("A", "coin's", "state", "is", SIDES[side], "."), (SIDES[side],))]
    middle = []
    for _ in range(operations):
        flips = rng.random() < 0.5
        side ^= flips
        verb = ("flips",) if flips else ("doesn't", "flip")
        words = (rng.choice(NAMES), *verb, "the", "coin", ".")
        middle.append(Sentence(words, (SIDES[side],)))
    last = [Sentence(("What's", "the", "state", "?")), Sentence(("A", ":"))]
    return first, middle, last, (SIDES[side],)


def _variables(rng: Random, operations: int) -> tuple[list, list, list, tuple[str, ...]]:
    values = [rng.randrange(MODULUS) for _ in LETTERS]

    def state() -> tuple[str, ...]:
        return tuple(map(str, values))

    first = [Sentence((*LETTERS, "are", *state(), "."), state())]
    middle = []
    for _ in range(operations):
        target, source = rng.randrange(len(LETTERS)), rng.randrange(len(LETTERS))
        more = rng.randrange(MODULUS)
        values[target] = (values[source] + more) % MODULUS
        words = ("now", "set", LETTERS[target], "to", LETTERS[source], "plus", str(more), ".")
        middle.append(Sentence(words, state()))
    asked = rng.randrange(len(LETTERS))
    last = [Sentence(("What", "is", LETTERS[asked], "?")), Sentence(("A", ":"))]
    return first, middle, last, (str(values[asked]),)


def _words(*more: str) -> tuple[str, ...]:
    return (".", "?", ":", *more, *(word for words in FILLERS for word in words))


TASKS = {
    "parity": Task(
        "parity",
        _words(
            *("A", "coin's", "state", "is", *SIDES, *NAMES),
            *("flips", "doesn't", "flip", "the", "coin", "What's"),
        ),
        4,
        _parity,
    ),
    "variables": Task(
        "variables",
        _words(
            *(
                *LETTERS,
                *map(str, range(MODULUS)),
                "are",
                "now",
                "set",
                "to",
                "plus",
                "What",
                "is",
                "A",
            )
        ),
        8,
        _variables,
    ),
}
