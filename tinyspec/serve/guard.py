"""What stands before every endpoint: the key and bounds of bodies; and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from reprlib import repr as short
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from openai.types.shared import ErrorObject
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinyspec.errors import DeterminismError, QueueFull, TinyspecError
from tinyspec.serve.protocol import DEFAULTS

logger = logging.getLogger("tinyspec")
# As nginx logs a request whose client has gone.
CLIENT_GONE = 499
# Type and code by status, or by its first digit.
KINDS: dict[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    4: ("invalid_request_error", None),
    5: ("server_error", None),
}
# Status and code of values that are not allowed, where they are no bad requests.
NAMED = {"engine": (503, None), "model": (404, "model_not_found")}
# Paths that need no key.
OPEN = {"/", "/health", "/ping"}
# Codes by what pydantic calls a fault; others are those of a wrong type, or of a wrong value.
CODES = {"extra_forbidden": "unsupported_parameter", "literal_error": "unsupported_value"}
CODES |= {"missing": "missing_required_parameter", "json_invalid": "invalid_json"}
# Words of pydantic's that tell nothing to who asks, and what stands there instead.
WORDS = {r" or (instance|object) .*|^Value error, | after validation": "", "^Input": "it"}
WORDS |= {"dictionary": "object", "^Extra .*": "this field is not served"}
# How clients know a text that is too long.
TOO_LONG = "This model's maximum context length is {} tokens. "
CLOSE = {"Connection": "close"}
# Errors that are answered; those with a class of their own before the others.
HANDLED = (
    *(RequestValidationError, HTTPException, ClientDisconnect, ValueError),
    *(TinyspecError, TimeoutError, Exception),
)


class Failure(BaseModel):
    """What an error is answered with."""

    error: ErrorObject


class AsciiJSON(JSONResponse):
    """In ASCII, so that any string can be sent."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def place_of(fault: dict[str, Any], sent: Any) -> list[Any]:
    """Where in what was ``sent`` it is; pydantic's place names the types that were tried, too."""
    found = list[Any]()
    for part in fault["loc"]:
        inside = isinstance(sent, dict) and part in sent
        if inside or (isinstance(sent, list) and isinstance(part, int)):
            found, sent = [*found, part], sent[part]
    return [*found, fault["loc"][-1]] if fault["type"] == "missing" else found


def told(faults: Any, sent: Any) -> tuple[str, str | None, str]:
    """Message, param and code for what is wrong in what was ``sent``. Where a value may be one of
    several kinds it is what is wrong with the kind that its type names, or was read furthest."""
    kinds = [f for f in faults if f["type"] == "literal_error" and f["loc"][-1:] == ("type",)]
    others = {fault["loc"][:-1] for fault in kinds}

    def rank(fault: dict[str, Any]) -> Any:
        place, loc = place_of(fault, sent), fault["loc"]
        told, numbers = fault in kinds, [part for part in place if isinstance(part, int)]
        own = told or not any(loc[:end] in others for end in range(len(loc)))
        return own, len(place), not told, not fault["type"].endswith("_type"), numbers

    most = max(map(rank, faults))
    found = [fault for fault in faults if rank(fault) == most]
    kind, place = (first := found[0])["type"], [*map(str, place_of(first, sent))]
    param, shown = place[0] if place else None, short(first["input"])
    literal = all(each["type"] == "literal_error" for each in found)
    served = [each["ctx"]["expected"] for each in found if literal]
    if served or (
        kind == "extra_forbidden" and (served := [*map(str, DEFAULTS.get(str(param), ()))])
    ):
        place = place[: len(place) - (first in kinds)]
        text = f"{shown} is not served, {' or '.join(served)} is".replace("'", "")
    else:
        said = [each["msg"] for each in found]
        for words, instead in WORDS.items():
            said = [re.sub(words, instead, each) for each in said]
        text = " or ".join(dict.fromkeys(said)).replace(" or it should be ", " or ")
        text = f"{shown} is not allowed: {text}" if text.startswith("it should") else text
    code = CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return f"{'.'.join(place) or 'body'}: {text}", param, code


def failure(error: Exception, body: Any = None) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, what OpenAI's API would say, and headers. body: of the request, which may have names
    of its own for fields of SamplingParams, and be rendered to the prompt that is refused."""
    status, text, param, code, headers = 500, str(error), None, None, {}
    if isinstance(error, (RequestValidationError, ValidationError)):
        sent = getattr(error, "body", None) or getattr(body, "request", None)
        status, (text, param, code) = 400, told(error.errors(), sent)
    elif isinstance(error, HTTPException):
        status, text, headers = error.status_code, error.detail, dict(error.headers or {})
    elif isinstance(error, DeterminismError):
        status, param = 400, "deterministic"
    elif isinstance(error, QueueFull):
        status, headers = 429, {"Retry-After": "1"}
    elif isinstance(error, TimeoutError):
        status, text = 504, "the request took longer than this server allows"
    elif found := re.match(r"(\w+)[^=]*=.* is not allowed: ", text, re.DOTALL):
        param = found[1]
        status, code = NAMED.get(param, (400, "invalid_value"))
        if hasattr(body, "api_name"):
            param = body.api_name(param)
        rest, allowed = text[len(found[1]) :], text[found.end() :]
        text = param + (rest if param == found[1] else re.sub(r"^\[\d+\]", "", rest))
        if most := re.search(r"max_model_len=(\d+)", allowed):
            text, code = TOO_LONG.format(most[1]) + text, "context_length_exceeded"
    kind, usual = KINDS[status] if status in KINDS else KINDS[status // 100]
    said = {"message": text, "type": kind, "param": param, "code": code or usual}
    return status, said, headers


async def answer_error(http: Request, error: Exception) -> Response:
    """In OpenAI's shape."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    status, said, headers = failure(error, getattr(http.state, "body", None))
    given = http.headers.get("content-type", "")
    if isinstance(error, RequestValidationError) and "json" not in given:
        said["message"] = f"Content-Type: {given!r} is not served, application/json is"
    if status == 500:
        logger.error("a request failed", exc_info=error)
    return AsciiJSON({"error": said}, status, headers)


class Guard:
    """ASGI middleware: who may ask, how large a body may be, and how long it may take.

    api_key: what must be sent as bearer token, but to OPEN; None lets all in. bounds: of bodies in
    bytes, and in seconds until all of one is there.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, bounds: tuple[int, float]):
        self.app, (self.max_body, self.body_seconds) = app, bounds
        self._expected = None if api_key is None else f"bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        given = given[:7].lower() + given[7:]
        asks = scope["type"] == "http" and scope["path"] not in OPEN
        if asks and self._expected and not hmac.compare_digest(given, self._expected):
            refused = HTTPException(401, "the API key is missing or wrong")
            await (await answer_error(Request(scope), refused))(scope, receive, send)
        else:
            await self.app(scope, self._bounded(receive) if asks else receive, send)

    def _bounded(self, receive: Receive) -> Receive:
        left, more, until = self.max_body, True, time.monotonic() + self.body_seconds

        async def bounded() -> Message:
            nonlocal left, more
            if not more:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), until - time.monotonic())
            except asyncio.TimeoutError:
                raise HTTPException(408, "the body took too long", CLOSE) from None
            left -= len(message.get("body", b""))
            more = message.get("more_body", False)
            if left < 0:
                raise HTTPException(413, f"the body has over {self.max_body} bytes", CLOSE)
            return message

        return bounded
