"""What stands before every endpoint: the key and bounds of bodies; and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
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
OPEN = {"/", "/health"}
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


def failure(error: Exception, body: Any = None) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, what OpenAI's API would say, and headers. body: of the request, which may have names
    of its own for fields of SamplingParams."""
    status, text, param, code, headers = 500, str(error), None, None, {}
    if isinstance(error, (RequestValidationError, ValidationError)):
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part != "body"]
        status, text = 400, f"{'.'.join(place) or 'body'}: {first['msg']}"
        param = place[0] if place else None
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
        status, code = NAMED.get(param, (400, None))
        if hasattr(body, "api_name"):
            param = body.api_name(param)
        text = param + text[len(found[1]) :]
    kind, usual = KINDS[status] if status in KINDS else KINDS[status // 100]
    said = {"message": text, "type": kind, "param": param, "code": code or usual}
    return status, said, headers


async def answer_error(http: Request, error: Exception) -> Response:
    """In OpenAI's shape."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    status, said, headers = failure(error, getattr(http.state, "body", None))
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
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
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
