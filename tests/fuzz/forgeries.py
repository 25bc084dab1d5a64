"""Forged outputs: an honest one with something changed, and a judge of what it then says.

What was changed may be true all the same (the seed of a greedy request), so the judge runs the
request that the output states, alone, and compares. It shares no code with ``tinyspec.audit``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import struct
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from tinyspec import Completion, Engine, RequestOutput, SamplingParams

Data = dict[str, Any]
Change = Callable[[Any, random.Random], Any]
TRIES = 300


class DoesNotFitError(Exception):
    """The output has nothing that this kind of forgery could change."""


def _swap(values: list[Any], rng: random.Random) -> list[Any]:
    one, other = rng.randrange(len(values)), rng.randrange(len(values))
    values[one], values[other] = values[other], values[one]
    return values


def _fp32_neighbour(value: float, rng: random.Random) -> float:
    (bits,) = struct.unpack("i", struct.pack("f", value))
    return float(struct.unpack("f", struct.pack("i", bits + rng.choice((-1, 1))))[0])


def _as_bool(value: int, rng: random.Random) -> bool:
    if value not in (0, 1):
        raise DoesNotFitError
    return bool(value)


# Values of another type in JSON.
OTHER_TYPES: dict[str, Change] = {
    "text": lambda v, rng: rng.choice((str(v), json.dumps(v), "", "Once")),
    "list": lambda v, _: [v],
    "no list": lambda v, _: [],
    "null": lambda v, _: None,
    "number": lambda v, _: -1.0,
    "bool": lambda v, _: False,
}
# Changes of a value, by its type in JSON.
CHANGES: dict[type, dict[str, Change]] = {
    int: {
        "one more": lambda v, _: v + 1,
        "one less": lambda v, _: v - 1,
        "negative": lambda v, _: -v - 1,
        "huge": lambda v, _: v + 10**30,
        "beyond the vocabulary": lambda v, _: v + 10**4,
        "float": lambda v, _: float(v),
        "same bool": _as_bool,
    },
    float: {
        "one ulp": lambda v, rng: math.nextafter(v, rng.choice((-math.inf, math.inf))),
        "one fp32 ulp": _fp32_neighbour,
        "other sign": lambda v, _: -v,
        "nan": lambda v, _: math.nan,
        "inf": lambda v, rng: rng.choice((-math.inf, math.inf)),
        "rounded": lambda v, _: round(v, 4),
        "int": lambda v, _: int(v),
    },
    str: {
        "shorter": lambda v, _: v[:-1],
        "longer": lambda v, rng: v + rng.choice(" .a\x00\N{COMBINING ACUTE ACCENT}"),
        "other case": lambda v, _: v.swapcase(),
        "stripped": lambda v, _: v.strip(),
        "other": lambda v, rng: rng.choice(("stop", "length", "abort", "eos", "Length")),
    },
    list: {
        "last left out": lambda v, _: v[:-1],
        "first left out": lambda v, _: v[1:],
        "last twice": lambda v, _: v + v[-1:],
        "one put in": lambda v, rng: [*v[: (n := rng.randrange(len(v)))], v[n], *v[n:]],
        "reversed": lambda v, _: v[::-1],
        "two exchanged": _swap,
        "object": lambda v, _: dict(enumerate(v)),
    },
    bool: {"negated": lambda v, _: not v},
    type(None): {"long list": lambda v, _: [-1.0] * 8},
}


def _pick(*values: Any) -> Callable[[Any, Data, random.Random], Any]:
    return lambda value, data, rng: rng.choice(values)


def _negated(value: bool, data: Data, rng: random.Random) -> bool:
    return not value


def _token(value: Any, data: Data, rng: random.Random) -> list[int]:
    """Tokens that are in the output, or are not."""
    tokens = rng.choice(data["completions"])["token_ids"] or [0]
    return rng.choice(([], [rng.choice(tokens)], [tokens[-1]], [rng.randrange(100)], [10**6]))


def _piece(value: Any, data: Data, rng: random.Random) -> list[str]:
    text = rng.choice(data["completions"])["text"] or "a"
    start = rng.randrange(len(text))
    return rng.choice(([], [text[start : start + 3]], ["\N{SNOWMAN}"]))


# Changes of parameters: value, output, random numbers -> value.
PARAMS: dict[str, Callable[[Any, Data, random.Random], Any]] = {
    "seed": lambda v, _, rng: rng.choice((None, (v or 0) + 1, rng.randrange(2**64))),
    "temperature": lambda v, _, rng: rng.choice((0.0, 0.7, 1, v * 2, math.nextafter(v, 9.0))),
    "top_k": _pick(None, 0, 1, 2, 5, 10**6),
    "top_p": _pick(None, 0.0, 0.5, 0.9, 1.0, 1),
    "min_p": _pick(None, 0.0, 0.05, 0.3),
    "repetition_penalty": _pick(1.0, 1, 1.1, 2.0),
    "frequency_penalty": _pick(0.0, 0, 0.5),
    "presence_penalty": _pick(0.0, 0, -0.5),
    "logit_bias": lambda v, data, rng: {str(t): rng.choice((0, 3.5)) for t in _token(v, data, rng)},
    "allowed_token_ids": lambda v, data, rng: rng.choice(((), [5], _token(v, data, rng))),
    "bad_words_ids": lambda v, data, rng: rng.choice((None, [], [_token(v, data, rng) or [5]])),
    "regex": _pick(None, "[a-z ]*", "(a"),
    "max_new_tokens": lambda v, _, rng: rng.choice((v - 1, v + 1, v + 3, 10**6)),
    "min_new_tokens": lambda v, _, rng: rng.choice((0, 1, 2, 4, v + 1)),
    "stop_token_ids": _token,
    "eos_token_id": lambda v, data, rng: rng.choice((None, [], _token(v, data, rng))),
    "stop_strings": _piece,
    "num_return_sequences": lambda v, _, rng: rng.choice((1, v + 1, v - 1)),
    "logprobs": _negated,
    "prompt_logprobs": _negated,
    "ignore_eos": _negated,
    "include_stop_str": _negated,
    "deterministic": _negated,
    "top_logprobs": lambda v, _, rng: rng.choice((0, 1, v + 1, v - 1, 10**4)),
    "logprobs_mode": _pick("raw", "processed"),
}


def _change_value(data: Data, field: str, rng: random.Random) -> str:
    """Change a list or anything in it; of a completion's field in one of the completions."""
    holder = data if field in data else rng.choice(data["completions"])
    key: Any = field
    what = "whole"
    while isinstance(holder[key], list) and holder[key] and rng.random() < 0.75:
        holder, key = holder[key], rng.randrange(len(holder[key]))
        what = "value"
        if isinstance(holder[key], dict):
            raise DoesNotFitError
    value = holder[key]
    if isinstance(value, list) and not value:
        raise DoesNotFitError
    how, change = rng.choice([*(CHANGES[type(value)] | OTHER_TYPES).items()])
    holder[key] = change(value, rng)
    return f"{field}: {what} {how}"


def _change_params(data: Data, rng: random.Random) -> str:
    field = rng.choice(list(PARAMS))
    data["params"][field] = PARAMS[field](data["params"][field], data, rng)
    return f"params: {field}"


def _change_nothing_compared(data: Data, rng: random.Random) -> str:
    """Fields that are no functions of the request."""
    if rng.random() < 0.5:
        data["request_id"] = rng.choice(("request-0", "", 7, None))
        return "unverified: request_id"
    stats = rng.choice(data["completions"])["stats"]
    stats[rng.choice(list(stats))] += 1
    return "unverified: stats"


def _cut(completion: Data, count: int, reason: str, tokenizer: Any) -> None:
    """Leave ``count`` tokens and what belongs to them."""
    for field in ("token_ids", "logprobs", "top_logprobs"):
        if completion[field] is not None:
            completion[field] = completion[field][:count]
    if tokenizer is not None:
        completion["text"] = tokenizer.decode(completion["token_ids"], skip_special_tokens=True)
    completion["finish_reason"] = reason
    if reason != "stop":
        completion["stop_reason"] = None


def _change_parts(data: Data, rng: random.Random) -> str:
    """Parts of the fingerprint: a value, a name, or all of them."""
    parts = data["fingerprint_parts"]
    name = rng.choice(list(parts))
    how = rng.choice(("value", "left out", "renamed", "null", "all left out"))
    if how == "value":
        value = parts[name]
        change = rng.choice([*(CHANGES[type(value)] | OTHER_TYPES).values()])
        parts[name] = change(value, rng)
    elif how == "all left out":
        data["fingerprint_parts"] = None
    else:
        value = parts.pop(name)
        if how != "left out":
            parts[f"{name}." if how == "renamed" else name] = value if how == "renamed" else None
    return f"fingerprint_parts: {how}"


def _shorten(data: Data, rng: random.Random, tokenizer: Any) -> str:
    """All completions, as if fewer tokens had been asked for."""
    count = rng.randint(1, max(1, data["params"]["max_new_tokens"] - 1))
    data["params"]["max_new_tokens"] = count
    for completion in data["completions"]:
        if len(completion["token_ids"]) > count:
            _cut(completion, count, "length", tokenizer)
    return "consistent: shorter"


def _abort(data: Data, rng: random.Random, tokenizer: Any) -> str:
    completion = rng.choice(data["completions"])
    count = len(completion["token_ids"])
    _cut(completion, rng.randint(0, count), "abort", tokenizer)
    completion["error"] = rng.choice((None, None, "out of memory"))
    return "consistent: aborted"


def _other_token(data: Data, rng: random.Random, tokenizer: Any) -> str:
    """With the text that belongs to it."""
    completion = rng.choice(data["completions"])
    tokens = completion["token_ids"]
    tokens[rng.randrange(len(tokens))] = rng.randrange(100)
    _cut(completion, len(tokens), completion["finish_reason"], tokenizer)
    return "consistent: other token"


def _ask_for_less(data: Data, rng: random.Random, tokenizer: Any) -> str:
    """Log-probabilities left out that the parameters then do not ask for; one completion less."""
    params = data["params"]
    what = rng.choice(("logprobs", "top_logprobs", "fewer", "prompt_logprobs", "completions"))
    if what == "fewer":
        if params["top_logprobs"] < 2:
            raise DoesNotFitError
        params["top_logprobs"] -= 1
        for completion in data["completions"]:
            completion["top_logprobs"] = [row[:-1] for row in completion["top_logprobs"]]
    elif what == "completions":
        if params["num_return_sequences"] < 2:
            raise DoesNotFitError
        params["num_return_sequences"] -= 1
        data["completions"].pop(rng.choice((0, -1)))
    else:
        params[what] = 0 if what == "top_logprobs" else False
        for holder in (data, *data["completions"]):
            if what in holder:
                holder[what] = None
    return f"consistent: without {what}"


def _in_memory(output: RequestOutput, rng: random.Random) -> tuple[str, RequestOutput]:
    """Types that JSON does not have."""
    first = output.completions[0]
    changes: dict[str, Callable[[], Any]] = {
        "token_ids numpy": lambda: [*first.token_ids[:-1], np.int64(first.token_ids[-1])],
        "token_ids tuple": lambda: tuple(first.token_ids),
        "logprobs numpy": lambda: list(map(np.float64, first.logprobs or [])),
        "logprobs fp32": lambda: list(map(np.float32, first.logprobs or [])),
        "top_logprobs lists": lambda: [list(map(list, row)) for row in first.top_logprobs or []],
        "prompt_token_ids numpy": lambda: [np.int64(t) for t in output.prompt_token_ids],
        "prompt_token_ids tuple": lambda: tuple(output.prompt_token_ids),
        "params dict": lambda: output.params.to_dict(),
        "completions tuple": lambda: tuple(output.completions),
    }
    name = rng.choice(list(changes))
    field, value = name.split()[0], changes[name]()
    if hasattr(first, field):
        value = [replace(first, **{field: value}), *output.completions[1:]]
        field = "completions"
    return f"memory: {name}", replace(copy.deepcopy(output), **{field: value})


FIELDS = (
    *("token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "text", "finish_reason"),
    *("error", "stop_reason", "completions", "prompt_token_ids", "fingerprint"),
)
PARTS = "fingerprint_parts"
CONSISTENT = (_shorten, _abort, _other_token, _ask_for_less)
KINDS = (*FIELDS, PARTS, "params", "consistent", "memory", "unverified")


def forge(
    output: RequestOutput,
    rng: random.Random,
    tokenizer: Any = None,
    kinds: Collection[str] = KINDS,
) -> tuple[str, RequestOutput]:
    """What was changed, "kind: how", and a copy of ``output`` in which it is.

    tokenizer: makes the text of consistent forgeries. kinds: to draw from, or beginnings of names
    ("params: seed"). The parameters must hold no functions, which JSON does not keep. Raises
    DoesNotFitError if the output has nothing that the kind drawn could change.
    """
    line = output.to_json()
    wanted = rng.choice(list(kinds))
    for _ in range(TRIES):
        data = json.loads(line)
        try:
            name, forged = _forge_one(output, data, wanted.partition(":")[0], rng, tokenizer)
        except (DoesNotFitError, ValueError, TypeError, LookupError):
            continue  # nothing to change, or no output any more: parameters that are refused
        if name.startswith(wanted):
            return name, forged
    raise DoesNotFitError(wanted)


def _forge_one(
    output: RequestOutput, data: Data, kind: str, rng: random.Random, tokenizer: Any
) -> tuple[str, RequestOutput]:
    """``data``: the output's, which is changed."""
    assert kind in KINDS
    if kind == "memory":
        return _in_memory(output, rng)
    if kind == "params":
        name = _change_params(data, rng)
    elif kind == PARTS:
        name = _change_parts(data, rng)
    elif kind == "unverified":
        name = _change_nothing_compared(data, rng)
    elif kind == "consistent":
        name = rng.choice(CONSISTENT)(data, rng, tokenizer)
    else:
        name = _change_value(data, kind, rng)
    return name, RequestOutput.from_json(json.dumps(data))


def is_true(engine: Engine, output: RequestOutput, known: dict[str, Any]) -> bool:
    """Whether an output is what the idle ``engine`` gives for the request that it states, alone.

    known: runs by request, which further calls with the same engine then need not repeat.
    """
    params, parts = output.params, output.fingerprint_parts
    if not isinstance(params, SamplingParams) or not params.deterministic:
        return False
    own = engine.ready().tokenizer_parts(params)
    if not params.needs_tokenizer and "tokenizer" not in (parts or {}):
        own = None
    digests = [engine.contract.fingerprint.with_tokenizer(own).digest]
    if parts is not None:
        text = json.dumps(parts, sort_keys=True)
        digests.append(hashlib.sha256(text.encode()).hexdigest()[:32])
    if {spelled(digest) for digest in digests} != {spelled(output.fingerprint)}:
        return False
    request = spelled([output.prompt_token_ids, params.to_dict()])
    if request not in known:
        known[request] = None  # refused
        with suppress(ValueError, TypeError):
            known[request] = engine.generate([output.prompt_token_ids], params)[0]
    solo = known[request]
    if solo is None or spelled(_of_request(output)) != spelled(_of_request(solo)):
        return False
    if type(output.completions) is not list or len(output.completions) != len(solo.completions):
        return False
    return all(map(_are_the_same, output.completions, solo.completions))


def _of_request(output: RequestOutput) -> list[Any]:
    return [output.prompt_token_ids, output.params.to_dict(), output.prompt_logprobs]


def _are_the_same(stated: Completion, own: Completion) -> bool:
    if stated.stop_reason is None:  # it says nothing
        own = replace(own, stop_reason=None)
    return spelled(_of_completion(stated)) == spelled(_of_completion(own))


def _of_completion(c: Completion) -> list[Any]:
    ends = [c.finish_reason, c.error, c.stop_reason]
    return [c.token_ids, c.text, c.logprobs, c.top_logprobs, *ends]


def spelled(value: Any) -> str:
    """Types and values as text."""
    if isinstance(value, dict):
        value = [type(value), *value.items()]
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(spelled, value))})"
    return f"{type(value).__name__} {value!r}"
