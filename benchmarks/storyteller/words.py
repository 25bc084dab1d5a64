"""The words that the bundled model's stories are made of.

Plain tuples, so that a reader sees the model's whole world at once. Does not know how the words are
put together; `stories.py` does.
"""


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _split(
    "Ana Ben Carla David Emma Finn Grace Hugo Iris Jack Kira Leo Mia Noah Olga Paul "
    "Rosa Sam Tara Umar Vera Will Yara Zoe"
)
OBJECTS = _split(
    "ball cup hat key book coin shoe lamp spoon ring kite doll drum map pen box rope bell "
    "apple plate"
)
ROOMS = _split("kitchen garden attic barn cellar garage office library hall bedroom tent car")
PLACES = ROOMS + _split("drawer basket bag closet")
GOODS = _split("apples books coins cards pears stones shells cookies")

ANIMALS = _split("fox cat dog rabbit crow bear mouse frog duck horse turtle dragon wolf bee")
TRAITS = _split(
    "small big brave shy clever lazy happy sad quiet loud kind curious sleepy hungry proud gentle"
)
COLORS = _split("red blue green yellow white black brown golden silver gray")
SCENES = _split("forest river mountain village meadow lake castle bridge beach cave market tower")
TIMES = _split("morning evening night day winter summer spring autumn")
WEATHER = _split("sunny rainy windy cold warm snowy cloudy bright dark stormy")
FEELINGS = _split("happy tired afraid surprised proud calm hungry lonely excited sorry")
VERBS = _split("ran walked flew swam jumped danced climbed crept hurried wandered")
ACTIONS = _split("sing dance swim read paint cook sleep run climb dream build wait listen laugh")
FOODS = _split("bread soup cake honey cheese rice berries tea fish pie")
