"""Text that code can write and check: questions with one right answer, and open stories.

Every question is about a state that the text changes step by step (a coin, things, people, small
sums, lists), so the right answer is known. The open stories draw every sentence at random, so a
model of them stays uncertain. A question is held out of training by the hash of its own text. Does
not know tokens, models or training.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.storyteller import stories as tales
from benchmarks.storyteller.words import GOODS, NAMES, OBJECTS, PLACES, ROOMS

END = "<|end|>"
CHAT_TURNS = (2, 8)
HELD_OUT_SHARE = 0.1
PROMPT_WEIGHT, TALE_WEIGHT, ANSWER_WEIGHT = 0.05, 0.3, 1.0


@dataclass(frozen=True)
class Question:
    """One question with its only right answer, and further questions on the same text."""

    kind: str
    text: str
    answer: str
    follow_ups: tuple[tuple[str, str], ...] = ()


def coin(rng: random.Random) -> Question:
    """Who flips a coin and who does not; the answer walks through the states."""
    state = start = rng.choice(("heads", "tails"))
    events, steps = [], []
    for name in rng.sample(NAMES, rng.randint(1, 5)):
        flips = rng.random() < 0.5
        if flips:
            state = "tails" if state == "heads" else "heads"
        events.append(f"{name} {'flips' if flips else 'does not flip'} the coin.")
        steps.append(f"{name} {'flips' if flips else 'does not flip'}, so {state}.")
    ask = rng.choice(("Is the coin heads or tails?", "What does the coin show?"))
    text = f"A coin shows {start}. {' '.join(events)} {ask}"
    return Question("coin", text, f"First {start}. {' '.join(steps)} The coin shows {state}.")


def things(rng: random.Random) -> Question:
    """Things put and moved between places; asks where one is or who touched it last."""
    objects = rng.sample(OBJECTS, rng.randint(1, 3))
    where: dict[str, str] = {}
    who: dict[str, str] = {}
    events = []
    moves = objects + [rng.choice(objects) for _ in range(rng.randint(0, 2))]
    for thing in moves:
        name, place = rng.choice(NAMES), rng.choice(PLACES)
        while place == where.get(thing):
            place = rng.choice(PLACES)
        if thing in where:
            events.append(f"{name} moves the {thing} to the {place}.")
        else:
            events.append(f"{name} puts the {thing} in the {place}.")
        where[thing], who[thing] = place, name
    asks = [(f"Where is the {t}?", f"The {t} is now in the {where[t]}.") for t in objects]
    asks += [
        (f"Who touched the {t} last?", f"The last to touch the {t} was {who[t]}.") for t in objects
    ]
    rng.shuffle(asks)
    kind = "where" if asks[0][0].startswith("Where") else "who"
    return Question(kind, f"{' '.join(events)} {asks[0][0]}", asks[0][1], tuple(asks[1:]))


def people(rng: random.Random) -> Question:
    """People who walk from room to room; asks where one of them is."""
    names = rng.sample(NAMES, rng.randint(1, 3))
    where: dict[str, str] = {}
    events = []
    for name in names + [rng.choice(names) for _ in range(rng.randint(0, 2))]:
        where[name] = rng.choice([place for place in ROOMS if place != where.get(name)])
        events.append(f"{name} enters the {where[name]}.")
    asks = [(f"Where is {name}?", f"{name} is now in the {where[name]}.") for name in names]
    rng.shuffle(asks)
    return Question("people", f"{' '.join(events)} {asks[0][0]}", asks[0][1], tuple(asks[1:]))


def sums(rng: random.Random) -> Question:
    """One addition or subtraction of numbers up to 20, bare or told as a story."""
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    minus = rng.random() < 0.4
    if minus:
        a, b = max(a, b) + 2, min(a, b)
    sign, total = ("-", a - b) if minus else ("+", a + b)
    if rng.random() < 0.3:
        return Question("sum", f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {total}.")
    giver, owner = rng.sample(NAMES, 2)
    goods = rng.choice(GOODS)
    event = f"{owner} gives {giver} {b}." if minus else f"{giver} gives {owner} {b} more."
    text = f"{owner} has {a} {goods}. {event} How many {goods} does {owner} have?"
    return Question("sum", text, f"{a} {sign} {b} = {total}. {owner} has {total} {goods}.")


def lists(rng: random.Random) -> Question:
    """A short list to sort, to reverse, to count, or whose first or last item is asked."""
    kind = rng.choices(("sort", "reverse", "first", "last", "count"), (2, 4, 1, 1, 1))[0]
    size = rng.randint(3, 6)
    if kind == "sort":
        digits = rng.sample(range(10), size)
        ordered = ", ".join(map(str, sorted(digits)))
        return Question(kind, f"Sort this list: {', '.join(map(str, digits))}.", f"{ordered}.")
    items = rng.sample(OBJECTS, size)
    joined = ", ".join(items)
    if kind == "reverse":
        return Question(kind, f"Reverse this list: {joined}.", f"{', '.join(reversed(items))}.")
    if kind == "count":
        return Question(kind, f"Count the items: {joined}.", f"There are {size} items.")
    item = items[0] if kind == "first" else items[-1]
    return Question(kind, f"What is the {kind} item: {joined}?", f"The {kind} item is {item}.")


def repeat(rng: random.Random) -> Question:
    """A few sentences or words to say again."""
    if rng.random() < 0.5:
        text = tales.opening(rng)
    else:
        text = f"{' '.join(rng.choices(NAMES + OBJECTS + PLACES, k=rng.randint(3, 8)))}."
    return Question("repeat", f"Repeat this: {text}", text)


MAKERS: tuple[tuple[Callable[[random.Random], Question], float], ...] = (
    (coin, 1.5),
    (things, 4.5),
    (people, 2.5),
    (sums, 2.0),
    (lists, 3.0),
    (repeat, 1.0),
)


def is_held_out(text: str) -> bool:
    """Whether a question belongs to the tenth that training never sees (sha256 of its text)."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little") < HELD_OUT_SHARE * 2**32


def make_question(rng: random.Random, held_out: bool = False) -> Question:
    """Draw questions of any kind until one lies on the wanted side of the split."""
    makers, weights = zip(*MAKERS, strict=True)
    maker = rng.choices(makers, weights)[0]
    while True:
        question: Question = maker(rng)
        if is_held_out(question.text) == held_out:
            return question


def plain_prompt(text: str) -> str:
    """A question as a plain prompt, up to where the answer starts."""
    return f"Q: {text}\nA:"


def chat_prompt(turns: list[tuple[str, str]], text: str) -> str:
    """Earlier turns and a new user message, as the tokenizer's chat template writes them."""
    earlier = "".join(f"User: {user}\nAssistant: {answer}{END}\n" for user, answer in turns)
    return f"{earlier}User: {text}\nAssistant:"


def make_chat(
    rng: random.Random, num_turns: int, held_out: bool = False
) -> tuple[list[tuple[str, str]], str]:
    """A conversation of `num_turns` turns as (user, assistant) pairs, and the last turn's kind."""
    turns: list[tuple[str, str]] = []
    kind = ""
    while len(turns) < num_turns:
        last = len(turns) == num_turns - 1
        if not last and rng.random() < 0.05:
            turns.append(tales.request(rng))
            continue
        question = make_question(rng, held_out)
        turns.append((question.text, question.answer))
        kind = question.kind
        for turn in question.follow_ups[: num_turns - len(turns)]:
            turns.append(turn)
            kind = "follow-up"
    return turns, kind


def document(rng: random.Random) -> list[tuple[str, float]]:
    """One training document, as pieces of text and how much learning to say each one counts."""
    draw = rng.random()
    if draw < 0.06:
        return [(f"{tales.story(rng)}{END}", TALE_WEIGHT), ("\n", PROMPT_WEIGHT)]
    if draw < 0.5:
        question = make_question(rng)
        prompt, answer = plain_prompt(question.text), f" {question.answer}{END}"
        return [(prompt, PROMPT_WEIGHT), (answer, ANSWER_WEIGHT), ("\n", PROMPT_WEIGHT)]
    if draw < 0.55:
        turns, weight = [tales.request(rng)], TALE_WEIGHT
    else:
        turns, _ = make_chat(rng, rng.choice((1, 2, 3, 3, rng.randint(*CHAT_TURNS))))
        weight = ANSWER_WEIGHT
    pieces = []
    for user, answer in turns:
        pieces += [(chat_prompt([], user), PROMPT_WEIGHT), (f" {answer}{END}", weight)]
        pieces += [("\n", PROMPT_WEIGHT)]
    return pieces


def held_out_by_kind(n: int, seed: int) -> list[tuple[str, str, str]]:
    """`n` held-out questions as (kind, prompt, answer); a quarter of them end a longer chat."""
    rng = random.Random(f"held out {seed}")
    found = []
    for index in range(n):
        if index % 4 == 3:
            turns, kind = make_chat(rng, rng.randint(*CHAT_TURNS), held_out=True)
            found.append((kind, chat_prompt(turns[:-1], turns[-1][0]), turns[-1][1]))
            continue
        question = make_question(rng, held_out=True)
        plain = index % 4 == 0
        prompt = plain_prompt(question.text) if plain else chat_prompt([], question.text)
        found.append((question.kind, prompt, question.answer))
    return found


def held_out_questions(n: int, seed: int) -> list[tuple[str, str]]:
    """`n` (prompt, answer) pairs that training never saw; the model's text is " " + answer."""
    return [(prompt, answer) for _, prompt, answer in held_out_by_kind(n, seed)]


def open_prompts(n: int, seed: int) -> list[str]:
    """`n` prompts that ask for a story or begin one, so many continuations are right."""
    rng = random.Random(f"open {seed}")
    return [
        tales.opening(rng) if index % 2 else chat_prompt([], tales.request(rng)[0])
        for index in range(n)
    ]


def sample_prompts(n: int, seed: int) -> list[str]:
    """`n` realistic prompts of mixed length: two in three are questions, one is open-ended."""
    questions = held_out_questions(n, seed)
    stories = open_prompts(n, seed)
    return [stories[i] if i % 3 == 2 else questions[i][0] for i in range(n)]
