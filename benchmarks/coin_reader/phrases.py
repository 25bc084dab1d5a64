"""A coin that people flip, told in many ways: the grammar that the bundled model is trained on.

A story is how the coin lies, clauses of who flips it or not with sentences between them that change
nothing, and a question. README.md writes the grammar down. English alone: no model and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from benchmarks.coin_reader.vocabulary import NAME, UNKNOWN

SIDES = ("heads", "tails")
MARKS, STOPS = (".", ",", ";", "!", "?", ":"), (".", "!")
NAMES = (
    *("Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi", "Ivan", "Judy"),
    *("Mallory", "Niaj", "Olivia", "Peggy", "Rupert", "Sybil", "Trent", "Victor"),
    NAME,  # any other
)
BEGINNINGS = (
    *("a coin's state is {}",) * 4,
    *("the coin's state is {}", "the state of the coin is {}", "the state of a coin is {}"),
    *("a coin is {}", "the coin is {}", "a coin is {} up", "the coin is {} up", "a coin shows {}"),
    *("the coin shows {}", "a coin starts as {}", "the coin starts as {}", "the coin starts on {}"),
    *("a coin starts {} up", "a coin lies {} up", "a coin lies on {}", "a coin is showing {}"),
    *("at first the coin is {}", "at first the coin shows {}", "the coin's state is initially {}"),
    *("initially a coin is {}", "initially the coin's state is {}", "a coin starts with {} up"),
)
FLIPS = (
    *("flips",) * 5,
    *("flips the coin",) * 3,
    *("flips it", "flips the coin again", "flips again", "flips it again", "flips the coin over"),
    *(
        "flips too",
        "also flips",
        "then flips",
        "then flips the coin",
        "flipped",
        "flipped the coin",
    ),
)
KEEPS = (
    *("does not flip", "doesn't flip", "does not flip the coin", "doesn't flip the coin") * 2,
    *("does not flip it", "doesn't flip it", "doesn't", "does not", "does not flip either"),
    *("then does not flip", "then doesn't flip it", "did not flip", "didn't flip the coin"),
)
# The words that tell which of both.
TELL = {"flips", "flipped", "not", "doesn't", "didn't"}
# Words before a clause: behind a full stop, behind a comma, and behind neither.
AFTER_STOP = (
    *("", "", "", "then", "then", "then ,", "next", "next ,", "and then", "after that"),
    *("after that ,", "first", "later", "finally", "finally ,", "afterwards"),
)
AFTER_COMMA = ("", "then", "then", "then", "and", "and then", "next", "after that", "and finally")
AFTER_NOTHING = ("then", "and", "and", "and then")
QUESTIONS = (
    *("what's the state", "what is the state") * 3,
    *("what's the coin's state", "what is the coin's state", "what's the state of the coin"),
    *("what is the state of the coin", "what's the final state", "what is the final state"),
    *("what's the coin's final state", "what's its state", "what is its state"),
    *("is the coin heads or tails", "is it heads or tails", "which side is up", "how does it lie"),
    *("what does the coin show", "what's the state at the end", "what is the state in the end"),
    *("what is the final state of the coin", "how does the coin lie", "what side is up"),
    *("what is the state of the coin at the end", "so what's the state"),
)
ASKED = (*("a :",) * 6, "answer :")
# Sentences that change nothing: a word or more of each list, some words unknown.
FILLERS = (
    ("the", "a", "one", "the old", "a small"),
    (
        "wind",
        "river",
        "bird",
        "cloud",
        "dog",
        "cat",
        "sun",
        "rain",
        "train",
        "girl",
        "man",
        "clock",
    ),
    ("moves", "rests", "sings", "waits", "sleeps", "falls", "runs", "is quiet", "is late", "stops"),
    ("", "over", "behind", "near", "in", "under", "by"),
    ("the hill", "the town", "a wood", "the bridge", "a house", "the sea", "the old tower", "it"),
)
_TEXTS = (
    *(*BEGINNINGS, *FLIPS, *KEEPS, *AFTER_STOP, *AFTER_COMMA, *QUESTIONS, *ASKED, "q now"),
    *(word for words in FILLERS for word in words),
)
_OPEN = {word for text in _TEXTS for word in text.split() if word[0].isalpha()} - {*SIDES}
# In both cases: a sentence may begin with any of them.
WORDS = (*SIDES, *sorted(_OPEN), *sorted(word[0].upper() + word[1:] for word in _OPEN))


@dataclass(frozen=True)
class Clause:
    """words: of the clause without what joins it to its neighbours. says: the state behind it, None
    for one that changes nothing. known: index of the first word from which that follows."""

    words: tuple[str, ...]
    says: str | None = None
    known: int = 0


def beginning(rng: Random, side: int) -> Clause:
    words = tuple(rng.choice(BEGINNINGS).format(SIDES[side]).split())
    return Clause(words, SIDES[side], words.index(SIDES[side]))


def step(rng: Random, who: str, flips: bool, side: int) -> Clause:
    """side: behind it. Now and then with a word that is not known."""
    words = [who, *rng.choice(FLIPS if flips else KEEPS).split()]
    if rng.random() < 0.06:
        words.insert(rng.randint(1, len(words)), UNKNOWN)
    known = next(n for n, word in enumerate(words) if word in TELL)
    return Clause(tuple(words), SIDES[side], known)


def filler(rng: Random) -> Clause:
    lists = FILLERS[: rng.choice((3, 5, 5, 5))]
    words = " ".join(rng.choice(words) for words in lists).split()
    if rng.random() < 0.15:  # somebody does something else
        words = [rng.choice(NAMES), *" ".join(rng.choice(words) for words in lists[2:]).split()]
    part = rng.choice((0.0, 0.0, 0.3, 1.0))
    return Clause(tuple(UNKNOWN if rng.random() < part / 2 else word for word in words))


def question(rng: Random) -> tuple[str, ...]:
    now = ("now",) if rng.random() < 0.2 else ()
    asked = _capital([*rng.choice(QUESTIONS).split(), *now, "?"])
    return (*asked, *_capital(rng.choice(ASKED).split()))


def told(rng: Random, clauses: list[Clause]) -> list[tuple[tuple[str, ...], int]]:
    """The clauses as they stand in one text: the words of each with what joins it to the one before
    and what ends it, and the index of its known word. The last ends with a full stop."""
    commas, loose = rng.choice((0.0, 0.3, 0.7, 1.0)), rng.choice((0.0, 0.0, 0.2))
    plain = rng.choice((0.0, 0.0, 1.0))
    found: list[tuple[tuple[str, ...], int]] = []
    before = "."
    asks = rng.random() < 0.06
    for number, clause in enumerate(clauses):
        first, last = number == 0, number == len(clauses) - 1
        open_end = clause.says is not None and not first and not last
        joins_next = open_end and clauses[number + 1].says is not None
        mark = "," if rng.random() < commas and not last else "."
        if rng.random() < 0.03:
            mark = {",": ";", ".": "!"}[mark]
        if joins_next and rng.random() < loose:
            mark = ""
        join = _joined(rng, before, plain) if clause.says is not None and not first else []
        words = [*join, *clause.words]
        if before in STOPS:
            words = _capital(words)
        if first and asks:
            words = ["Q", ":", *words]
            join = ["Q", ":"]
        found.append(((*words, *([mark] if mark else [])), len(join) + clause.known))
        before = mark
    return found


def _joined(rng: Random, before: str, plain: float) -> list[str]:
    ways = AFTER_STOP if before in STOPS else AFTER_COMMA if before else AFTER_NOTHING
    return [] if before and rng.random() < plain else rng.choice(ways).split()


def _capital(words: list[str]) -> list[str]:
    if not words[0][0].isalpha():
        return words
    return [words[0][0].upper() + words[0][1:], *words[1:]]
