"""Open-ended stories: every sentence and most of its words are drawn at random.

A good model of these texts is uncertain wherever the writer was, so sampling from it is real
sampling. The hero, and a friend once met, stay the same to the end. Does not know the questions
with one right answer, nor how a prompt is written.
"""

import random

from benchmarks.storyteller import words as w


def _sentence(rng: random.Random, hero: str, friend: str) -> str:
    """One sentence of the middle of a story."""
    pick = rng.choice
    shape = rng.randrange(14)
    if shape == 0:
        return f"{hero} {pick(w.VERBS)} to the {pick(w.SCENES)}."
    if shape == 1:
        return f"{hero} found a {pick(w.COLORS)} {pick(w.OBJECTS)} near the {pick(w.SCENES)}."
    if shape == 2:
        return f"It was a {pick(w.WEATHER)} {pick(w.TIMES)}."
    if shape == 3:
        return f"{friend} wanted to {pick(w.ACTIONS)}, but {hero} wanted to {pick(w.ACTIONS)}."
    if shape == 4:
        return f"They shared some {pick(w.FOODS)} and felt {pick(w.FEELINGS)}."
    if shape == 5:
        return f"Then {friend} lost the {pick(w.OBJECTS)} in the {pick(w.PLACES)}."
    if shape == 6:
        return f'"Let us {pick(w.ACTIONS)}," said {pick((hero, friend))}.'
    if shape == 7:
        return f"A {pick(w.TRAITS)} {pick(w.ANIMALS)} came from the {pick(w.SCENES)}."
    if shape == 8:
        return f"{hero} was {pick(w.FEELINGS)} and {pick(w.FEELINGS)}."
    if shape == 9:
        return f"{friend} gave {hero} a {pick(w.COLORS)} {pick(w.OBJECTS)}."
    if shape == 10:
        return (
            f"At {pick(('night', 'noon', 'dawn'))} they {pick(w.VERBS)} over the {pick(w.SCENES)}."
        )
    if shape == 11:
        return f"The {pick(w.SCENES)} was {pick(w.WEATHER)} and {pick(w.TRAITS)}."
    if shape == 12:
        return f"Every {pick(w.TIMES)} {hero} liked to {pick(w.ACTIONS)} in the {pick(w.PLACES)}."
    return f"{friend} made {pick(w.FOODS)} with {pick(w.FOODS)}."


def _ending(rng: random.Random, hero: str, friend: str) -> str:
    """The last sentence of a story."""
    return rng.choice(
        (
            f"In the end {hero} and {friend} were {rng.choice(w.FEELINGS)}.",
            f"So {hero} went home with the {rng.choice(w.COLORS)} {rng.choice(w.OBJECTS)}.",
            f"After that {rng.choice(w.TIMES)} {friend} was never {rng.choice(w.FEELINGS)} again.",
        )
    )


def _beginning(rng: random.Random, animal: str, hero: str) -> str:
    """The first sentence of a story, which names the hero."""
    trait, scene = rng.choice(w.TRAITS), rng.choice(w.SCENES)
    return rng.choice(
        (
            f"Once there was a {trait} {animal} named {hero}.",
            f"{hero} was a {trait} {animal} who lived near the {scene}.",
            f"One {rng.choice(w.WEATHER)} {rng.choice(w.TIMES)} a {animal} named {hero} woke up.",
        )
    )


def story(rng: random.Random, animal: str | None = None, hero: str | None = None) -> str:
    """A story of five to twelve sentences, about the given animal or name if there is one."""
    animal = animal or rng.choice(w.ANIMALS)
    hero = hero or rng.choice(w.NAMES)
    friend = rng.choice([name for name in w.NAMES if name != hero])
    meeting = (
        f"{hero} had a friend, a {rng.choice(w.TRAITS)} {rng.choice(w.ANIMALS)} named {friend}."
    )
    middle = [_sentence(rng, hero, friend) for _ in range(rng.randint(2, 9))]
    return " ".join((_beginning(rng, animal, hero), meeting, *middle, _ending(rng, hero, friend)))


def request(rng: random.Random) -> tuple[str, str]:
    """A user's wish for a story, or for a plan for the day, and one of its many answers."""
    animal, hero = rng.choice(w.ANIMALS), rng.choice(w.NAMES)
    shape = rng.randrange(4)
    if shape == 0:
        return f"Tell me a story about a {animal}.", story(rng, animal=animal)
    if shape == 1:
        return f"Tell me a story about {hero}.", story(rng, hero=hero)
    if shape == 2:
        return f"Write a story about a {animal} named {hero}.", story(rng, animal, hero)
    plan = [
        f"{when} {hero} can {rng.choice(w.ACTIONS)} in the {rng.choice(w.PLACES + w.SCENES)}."
        for when in ("In the morning", "Then", "Later", "In the evening")
    ]
    return f"What can {hero} do today?", " ".join(plan[rng.randint(0, 1) :])


def opening(rng: random.Random) -> str:
    """The first sentences of a story, for a model to go on from."""
    text = story(rng).split(". ")
    return ". ".join(text[: rng.randint(1, 3)]) + "."
