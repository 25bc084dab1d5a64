"""A black-box test of determinism: one request alone and in crowds, at any server of OpenAI's API.

Knows nothing of the server but its address. What it refuses is noted and left out. Its report is
for a reader of one minute; numbers with a point stay the digits that were sent.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import count, product
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from tinyspec.errors import LONGEST, refuse
from tinyspec.tools.diff import first_place
from tinyspec.tools.terminal import table

# huggingface-hub brings one of them, by its version; what is used here is the same in both.
httpx: Any = import_module("httpx2" if find_spec("httpx2") else "httpx")
Body = dict[str, Any]

# A request that the server is too busy for is sent again, after so many seconds each time.
BUSY, WAITS = (429, 503), (1, 2, 4, None)
# Statuses that say nothing of one field of a request.
OF_ALL = (401, 403, 404, 405, *BUSY)
SEED, OTHER_SEEDS = 20, (21, 22, 23)
LARGEST = 1024
# Staggered requests arrive within twice the time of one alone, or within so many seconds.
LONGEST_ARRIVAL = 5.0
# In a crowd of other requests, one of so many is the request in question.
SHARE = 2
# Words before a question, more than a page of a prefix cache; at most those of another request.
PREFIX, LONGEST_PROMPT = 24, 120
QUESTION = "Tell a story about all of these."
WORDS = "amber basket candle dragon engine forest garden hammer island jacket kettle ladder"

SAME, OTHER, SHARED = "of the same request", "with others", "with others of one prefix"
# What a crowd asks, and how. Any two settings of how occur together.
CROWDS = (
    (SAME, "at once, warm prefix, whole"),
    (SAME, "staggered, cold prefix, streamed"),
    (OTHER, "at once, cold prefix, streamed"),
    (OTHER, "staggered, warm prefix, whole"),
    (SHARED, "at once, warm prefix, streamed"),
    (SHARED, "staggered, cold prefix, whole"),
)
# Of one: is it the same again, and streamed?
ALONE = [(1, CROWDS[0])] * 3 + [(1, CROWDS[1])]
# Where servers put text: completions, chat, and two names for reasoning.
TEXTS = ("text", "content", "reasoning", "reasoning_content")
COMPARED = ("text", "token_ids", "logprobs", "finish_reason")
# Characters of a text that are shown from a difference on; of a list it is one value.
FOLLOWING = 24
# Characters of an error by which failures are counted.
KIND = 60


@dataclass
class Answer:
    """text: all that was generated. token_ids, logprobs: empty where the server gave none; a
    log-probability is a token's text and the digits. error: why there is no answer. refused:
    whether that is about the request, so that another one may be answered."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    fingerprint: str | None = None
    error: str | None = None
    refused: bool = False

    @classmethod
    def of(cls, texts: Iterable[str]) -> Answer:
        """The answer in the JSON of a response, or in that of all chunks of a stream.

        Raises ValueError, TypeError, LookupError or AttributeError for what is none."""
        answer, parts = cls(), dict.fromkeys(TEXTS, "")
        for text in texts:
            chunk = json.loads(text, parse_float=str)
            if chunk.get("error"):
                return cls(error=f"error in an answer: {chunk['error']}", refused=True)
            answer.fingerprint = chunk.get("system_fingerprint") or answer.fingerprint
            for choice in chunk["choices"]:
                message = choice.get("message") or choice.get("delta") or choice
                for name in TEXTS:
                    parts[name] += message.get(name) or ""
                answer.token_ids += choice.get("token_ids") or []
                answer.logprobs += _logprobs(choice.get("logprobs") or {})
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.text = "".join(parts.values())
        return answer if answer.finish_reason else cls(error="an answer without an end")


def _logprobs(choice: dict[str, Any]) -> list[tuple[str, str]]:
    """In the form of chat, or in that of completions."""
    if choice.get("content"):
        return [(token["token"], str(token["logprob"])) for token in choice["content"]]
    digits = map(str, choice.get("token_logprobs") or [])
    return list(zip(choice.get("tokens") or [], digits, strict=True))


def difference(alone: Answer, other: Answer) -> str | None:
    """Where the texts of a request's answer alone and of another one differ first, and whatever
    else both have, with what follows there; None where all is equal."""
    found = []
    for name in COMPARED:
        first, second = getattr(alone, name), getattr(other, name)
        if first != second and (name == "text" or (first and second)):
            place = first_place(list(first), list(second)) or 0
            end = place + (FOLLOWING if isinstance(first, str) else 1)
            rest = (one[place:end] for one in (first, second))
            found.append("{}[{}]: {!r} -> {!r}".format(name, place, *rest))
    return "\n  ".join(found) or None


@dataclass
class Report:
    """rows: what is varied -> mode (endpoint and decoding) -> numbers of answers: "compared" with
    that of the request alone, "equal" to it. differences: with request and answers. controls:
    whether answers differed that must. notes: what was left out, and why. given (fields of
    answers), fingerprints, failures: in how many answers. complete: whether it came to the end."""

    url: str
    model: str | None
    rows: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    differences: list[dict[str, Any]] = field(default_factory=list)
    controls: dict[str, bool] = field(default_factory=dict)
    given: Counter[str] = field(default_factory=Counter)
    fingerprints: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    def count(self, answers: Sequence[Answer]) -> None:
        """Add what all answers have, whatever they are compared with."""
        for answer in answers:
            self.given.update(name for name in COMPARED if getattr(answer, name))
            self.fingerprints.update([answer.fingerprint] if answer.fingerprint else [])
            self.failures.update([answer.error[:KIND]] if answer.error else [])

    def compare(
        self, place: tuple[str, str, str], request: Any, alone: Answer, others: Sequence[Answer]
    ) -> None:
        """Add answers to a request, against its answer alone. place: mode, what was varied, how."""
        cell = self.rows.setdefault(place[1], {}).setdefault(place[0], Counter())
        answered = [] if alone.error else [other for other in others if not other.error]
        for other in answered:
            found = difference(alone, other)
            cell.update(compared=1, equal=found is None)
            if found is not None:
                both = {"alone": vars(alone), "other": vars(other)}
                self.differences.append({"place": place, "found": found, "request": request} | both)

    @property
    def verdict(self) -> tuple[int, str]:
        """The exit status, and why. Answers that are equal prove nothing where not all was tried,
        or where all answers are the same."""
        cells = [cell["compared"] for row in self.rows.values() for cell in row.values()]
        same = [name for name, differ in self.controls.items() if not differ]
        if found := self.differences:
            texts = sum(one["alone"]["text"] != one["other"]["text"] for one in found)
            return 1, f"DIFFERENT: {len(found)} answers are not those alone, {texts} in their text"
        if not (self.complete and cells and all(cells)):
            return 2, "NOT TRIED: not all requests could be compared"
        if same:
            return 2, f"CONTROL FAILED: no other answer to {'; '.join(same)}"
        return 0, "EQUAL: every answer is the one that the request has alone"

    def __str__(self) -> str:
        modes = list(dict.fromkeys(mode for row in self.rows.values() for mode in row))
        rows = [["equal to alone", *modes]]
        for varied, row in self.rows.items():
            cells = [row.get(mode, Counter()) for mode in modes]
            rows.append([varied, *(f"{cell['equal']} of {cell['compared']}" for cell in cells)])
        lines = [f"{self.url}, model {self.model}", *table(rows, right=range(1, len(modes) + 1))]
        for name in ("given", "fingerprints", "failures"):
            counts = (f"{key} ({number})" for key, number in getattr(self, name).items())
            lines.append(f"{name}: {', '.join(counts) or 'none'}")
        differ = sum(self.controls.values())
        lines.append(f"controls: {differ} of {len(self.controls)} have other answers, as they must")
        lines += [f"note: {note}" for note in self.notes]
        firsts = {found["place"][0]: found for found in reversed(self.differences)}
        lines += [f"{', '.join(one['place'])}: {one['found']}" for one in firsts.values()][::-1]
        return "\n".join([*lines, self.verdict[1]])

    def to_json(self) -> str:
        """All of it, in one line."""
        return json.dumps({"verdict": self.verdict, **vars(self)})


def asked(body: Body, text: str, **fields: Any) -> Body:
    """A body with ``text`` as its prompt, and other values of those fields that it has."""
    new = {"prompt": text, "messages": [{"role": "user", "content": text}], **fields}
    return body | {name: value for name, value in new.items() if name in body}


@dataclass
class Probe:
    """Asks a server, and writes what it finds into ``report``.

    url: with the path of the API; /v1 if there is none. model: by default the first that is listed.
    endpoints: "chat", "completions". crowds: numbers of requests at a time, up to 1,024.
    timeout: seconds for one request, however often it is sent. extra_body: fields of every request.
    """

    url: str
    model: str | None = None
    endpoints: Sequence[str] = ("chat", "completions")
    crowds: Sequence[int] = (4, 16, 64)
    max_tokens: int = 32
    timeout: float = 60.0
    api_key: str | None = None
    extra_body: Body = field(default_factory=dict)

    def __post_init__(self) -> None:
        for size in self.crowds:
            if not 2 <= size <= LARGEST:
                raise refuse("crowds", size, f"from 2 to {LARGEST} requests")
        self.random = random.Random()
        self.report = Report(self.url, self.model)
        base = self.url if urlsplit(self.url).path.strip("/") else f"{self.url.rstrip('/')}/v1"
        # A connection for each request: the server ends none while it is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        options = {"headers": headers, "timeout": self.timeout, "limits": limits}
        self._http = httpx.AsyncClient(base_url=base, **options)

    async def run(self) -> None:
        """All of it. If it is cancelled the report has what was found.

        Raises ValueError where no model is listed, and httpx's errors if there is no server."""
        async with self._http:
            if self.model is None:
                response = await self._http.get("models")
                response.raise_for_status()
                if not (models := response.json()["data"]):
                    raise refuse("model", None, "a name, as the server lists none")
                self.report.model = models[0]["id"]
            for endpoint in self.endpoints:
                body = await self._taken(endpoint)
                if "temperature" in body:
                    greedy = {name: body[name] for name in body if name != "seed"}
                    await self._try(f"{endpoint}, greedy", greedy | {"temperature": 0})
                if "seed" in body:
                    await self._try(f"{endpoint}, seeded", body)
        self.report.complete = True

    async def _taken(self, endpoint: str) -> Body:
        """A body with all fields that the server takes there."""
        chat = endpoint == "chat"
        body = asked({"model": self.report.model, "messages" if chat else "prompt": ""}, QUESTION)
        fields = {
            "max_tokens": self.max_tokens,
            "max_completion_tokens": self.max_tokens,
            "temperature": 1,
            "seed": SEED,
            "logprobs": True if chat else 1,
            "return_token_ids": True,
            "stream": True,
        }
        for name, value in fields.items():
            if name == "max_completion_tokens" and "max_tokens" in body:
                continue
            answer = await self._ask(body | {name: value})
            if answer.error is None:
                body[name] = value
                continue
            self.report.notes.append(f"{endpoint}, {name}: {answer.error}")
            if not answer.refused or name == "max_completion_tokens":
                return {}
        return asked(body, QUESTION, stream=False)

    async def _try(self, mode: str, body: Body) -> None:
        """Controls, then new requests alone and in crowds, until nothing is answered any more."""
        began, text = time.monotonic(), self._words(PREFIX)
        (alone,) = await self._crowd([asked(body, text)])
        spread = min(2 * (time.monotonic() - began), LONGEST_ARRIVAL)
        controls = {"prompt": [asked(body, self._words(PREFIX))]}
        if "seed" in body:
            controls["seed"] = [asked(body, text, seed=seed) for seed in OTHER_SEEDS]
        for name, bodies in controls.items():
            others = await self._crowd(bodies)
            differ = [difference(alone, other) for other in others if not other.error]
            self.report.controls[f"{mode}, another {name}"] = any(differ)
        plan = [*ALONE, *product(self.crowds, CROWDS)]
        for size, (kind, how) in tqdm(plan, mode, leave=False, disable=None):
            # Its beginning was never sent before.
            prefix = self._words(PREFIX)
            request = asked(body, f"{prefix}. {QUESTION}")
            places = range(size) if kind == SAME else range(1, size, SHARE)
            bodies = [
                request if n in places else self._filler(body, prefix if kind == SHARED else "")
                for n in range(size)
            ]
            if "streamed" in how and "stream" in body:
                bodies = [one | {"stream": True} for one in bodies]
            before = await self._crowd([request]) if "warm" in how else []
            answers = await self._crowd(bodies, spread / size if "staggered" in how else 0.0)
            (alone,) = before or await self._crowd([request])
            found = [answers[n] for n in places]
            self.report.compare((mode, f"{size} {kind}", how), request, alone, found)
            if all(answer.error for answer in answers):
                self.report.notes.append(f"{mode}: given up where nothing was answered")
                return

    def _words(self, number: int) -> str:
        return " ".join(self.random.choices(WORDS.split(), k=number))

    def _filler(self, body: Body, prefix: str) -> Body:
        """Another request, of any length, greedy or not."""
        length, seed = self.random.randint(1, LONGEST_PROMPT), self.random.randrange(1 << 31)
        return asked(body, f"{prefix} {self._words(length)}", seed=seed, temperature=length % 2)

    async def _crowd(self, bodies: Sequence[Body], gap: float = 0.0) -> list[Answer]:
        """Answers in the order of ``bodies``, which are sent ``gap`` seconds apart."""

        async def later(number: int, body: Body) -> Answer:
            await asyncio.sleep(number * gap)
            return await self._ask(body)

        answers = await asyncio.gather(*map(later, count(), bodies))
        self.report.count(answers)
        return answers

    async def _ask(self, body: Body) -> Answer:
        """Any failure is an answer with an error."""
        try:
            return await asyncio.wait_for(self._sent(body | self.extra_body), self.timeout)
        except asyncio.TimeoutError:
            return Answer(error=f"no answer in {self.timeout:g} s")
        except httpx.HTTPError as error:
            return Answer(error=repr(error))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return Answer(error=f"not of OpenAI's API: {error!r}", refused=True)

    async def _sent(self, body: Body) -> Answer:
        path = "chat/completions" if "messages" in body else "completions"
        for wait in WAITS:
            response = await self._http.post(path, json=body)
            if response.status_code not in BUSY or wait is None:
                break
            self.report.failures[f"HTTP {response.status_code}, sent again"] += 1
            await asyncio.sleep(wait)
        if response.status_code != 200:
            error = f"HTTP {response.status_code}: {' '.join(response.text.split())}"[:LONGEST]
            return Answer(error=error, refused=response.status_code not in OF_ALL)
        lines = response.text.split("\n")
        events = [line[5:].strip() for line in lines if line.startswith("data:")]
        return Answer.of(event for event in events or [response.text] if event != "[DONE]")
