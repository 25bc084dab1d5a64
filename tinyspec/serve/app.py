"""The HTTP application: from a request's body to the engine, and from its outputs to an answer.

Knows no socket and no process: ``tinyspec serve`` runs it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from copy import deepcopy
from itertools import zip_longest
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tinyspec.engine.async_engine import AsyncEngine, checked_timeout
from tinyspec.engine.prompts import to_token_ids
from tinyspec.errors import refuse
from tinyspec.model.supported import vocab_size
from tinyspec.outputs import Completion, RequestOutput, StreamEvent
from tinyspec.runner.processors import GAVE_UP
from tinyspec.sampling_params import SamplingParams
from tinyspec.serve.guard import HANDLED, AsciiJSON, Failure, Guard, answer_error, failure
from tinyspec.serve.metrics import Metrics
from tinyspec.serve.protocol import (
    AuditRequest,
    ChatRequest,
    CompletionRequest,
    Detokenize,
    ResponsesRequest,
    Tokenize,
)
from tinyspec.serve.replies import ChatReply, CompletionReply, Reply, ResponsesReply, events_of
from tinyspec.serve.tools import wanted_calls

# Characters of prompts that are read where they arrive, in at most two milliseconds.
SHORT = 2**12
# What a response has that is no function of the request.
NEVER = {"id", "call_id", "created", "created_at", "completed_at"}
NEVER |= {"prompt_tokens_details", "input_tokens_details"}
REPLIES: dict[Any, type[Reply]] = {
    ChatRequest: ChatReply,
    CompletionRequest: CompletionReply,
    ResponsesRequest: ResponsesReply,
}

# What the OpenAPI document says of answers besides JSON with status 200.
Described = dict[int | str, dict[str, Any]]
FAILURES: Described = {"4XX": {"model": Failure}, "5XX": {"model": Failure}}
STREAMS: Described = {200: {"content": {"text/event-stream": {}}}}
PAGE: Described = {200: {"content": {"text/plain": {}}}}


def characters(prompt: Any) -> int:
    """Of a text or the messages of a chat; how many tokens, of token ids."""
    if isinstance(prompt, dict):
        return sum(len(message["content"]) for message in prompt["messages"])
    return len(prompt)


def first_difference(said: Any, found: Any, place: str = "") -> str | None:
    """Where two values differ first, and how; null is as if it were not there."""
    if isinstance(said, dict) and isinstance(found, dict):
        names = [name for name in {**said, **found} if name not in NEVER]
        pairs = [(said.get(n), found.get(n), f"{place}.{n}".lstrip(".")) for n in names]
    elif isinstance(said, list) and isinstance(found, list):
        both = enumerate(zip_longest(said, found))
        pairs = [(*values, f"{place}[{number}]") for number, values in both]
    else:
        return None if said == found else f"{place}: {said!r:.80} -> {found!r:.80}"
    return next(filter(None, (first_difference(*pair) for pair in pairs)), None)


class EventStreamResponse(StreamingResponse):
    """Ends the engine's part as soon as the client's ends."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Any) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


async def while_connected(http: Request, work: Awaitable[Any]) -> Any:
    """What ``work`` gives; it is cancelled when the client goes away. Raises ClientDisconnect."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


class Server:
    """Answers requests by one AsyncEngine.

    model: the name it goes by. deterministic: whether requests that do not say are. timeout:
    seconds that a request may take, or None.
    """

    def __init__(self, engine: AsyncEngine, model: str, deterministic: bool, timeout: float | None):
        self.engine, self.model = engine, model
        self.deterministic, self.timeout = deterministic, checked_timeout(timeout)
        if engine.engine.tokenizer is None:
            raise refuse("model", model, "one with a tokenizer")
        most: int = engine.engine.config.max_model_len  # type: ignore[assignment]
        fits = engine.engine.pool.num_pages * engine.engine.pool.page_size
        if most > fits:  # by default an answer is as long as that
            raise refuse("max_model_len", most, f"at most {fits} tokens, what the page pool holds")
        # Its own, and one in a thread for long texts, which hold up neither passes nor streams, nor
        # short texts; and a text of more characters than so many tokens can have is not read.
        self.tokenizer, self._other = (deepcopy(engine.engine.tokenizer) for _ in range(2))
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._most_characters = most * max(map(len, self.tokenizer.get_vocab()))
        self.metrics = Metrics(engine, model)
        self.fingerprint = engine.engine.fingerprint
        self.card = {"id": model, "object": "model", "created": int(time.time())}
        self.card |= {"owned_by": "tinyspec", "max_model_len": most}

    def check_model(self, name: str | None) -> None:
        """Raises ValueError for another model than the one that is served."""
        if name not in (None, self.model):
            raise refuse("model", name, self.model)

    async def by_tokenizer(self, work: Callable[[Any], Any], size: int) -> Any:
        """What ``work`` makes of a tokenizer, which takes as long as texts of this ``size`` do."""
        if size <= SHORT:
            return work(self.tokenizer)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._other)

    async def token_ids(self, body: Any) -> list[list[int]]:
        """Of the prompts of a request. Raises ValueError."""
        prompts = body.prompts()
        sizes = [characters(prompt) for prompt in prompts]
        if max(sizes) > self._most_characters:
            allowed = f"at most {self._most_characters}: max_model_len of the longest tokens"
            raise refuse("prompt", f"{max(sizes)} characters", allowed)
        return await self.by_tokenizer(
            lambda tokenizer: [to_token_ids(prompt, tokenizer) for prompt in prompts], sum(sizes)
        )

    async def tokenize(self, body: Tokenize) -> dict[str, Any]:
        """Token ids of a text or of messages, as a request with them has them."""
        self.check_model(body.model)
        (tokens,) = await self.token_ids(body)
        most = self.card["max_model_len"]
        return {"tokens": tokens, "count": len(tokens), "max_model_len": most}

    async def detokenize(self, body: Detokenize) -> dict[str, Any]:
        """The text of token ids."""
        self.check_model(body.model)
        most = vocab_size(self.engine.engine.model)
        if any(token >= most for token in body.tokens):
            raise refuse("tokens", max(body.tokens), f"below {most}")
        text = await self.by_tokenizer(lambda t: t.decode(body.tokens), len(body.tokens))
        return {"prompt": text}

    async def prepared(self, body: Any, seed: int | None = None) -> tuple[Reply, SamplingParams]:
        """What the answer begins with, and the parameters; ``seed`` in place of one that is drawn.
        Raises ValueError."""
        self.check_model(body.model)
        calls, given = wanted_calls(body, self.tokenizer)
        wanted = body.deterministic
        given["deterministic"] = self.deterministic if wanted is None else wanted
        if not body.temperature or body.seed is not None:
            seed = None
        else:  # as large as any client can read
            given["seed"] = seed = secrets.randbits(53) if seed is None else seed
        params = body.params(**given)
        prompts = await self.token_ids(body)
        about = (body, prompts, self.tokenizer.decode, self.fingerprint, calls, seed)
        reply = REPLIES[type(body)](*about)
        if params.prompt_logprobs and params.top_logprobs:
            reply.prompt_tops = await self._tops(body, prompts)
        return reply, params

    def _how(self, body: Any, began: float) -> dict[str, Any]:
        """Its priority, and what is left of its time."""
        left = self.timeout and max(began + self.timeout - time.monotonic(), 1e-3)
        return {"priority": body.priority, "timeout": left}

    async def _tops(self, body: Any, prompts: list[list[int]]) -> list[Any]:
        """Of each prompt, the likeliest tokens in place of each of its tokens but the first."""
        texts, how = [p for p in prompts if len(p) > 1], self._how(body, time.monotonic())
        given = [text[:1] for text in texts], [text[1:] for text in texts]
        params = SamplingParams(top_logprobs=body.top_logprobs)
        outputs = iter(await self.engine.scored(*given, params, **how) if texts else [])
        found = [next(outputs).completions[0] if len(p) > 1 else None for p in prompts]
        return [(completion and completion.top_logprobs) or [] for completion in found]

    async def answer(self, body: Any, http: Request) -> Response:
        """What one request for text gets. Raises ClientDisconnect, and what the engine raises."""
        http.state.body = body
        response: Response = await while_connected(http, self._answered(body))
        return response

    async def _answered(self, body: Any) -> Response:
        began = time.monotonic()
        reply, params = await asyncio.wait_for(self.prepared(body), self.timeout)
        given = reply.prompts, params
        if body.stream:
            events = self.engine.stream(*given, **self._how(body, began))
            first = await anext(events)
            return EventStreamResponse(self._sent(reply, first, events, began))
        found = events_of(await self.engine.generate(*given, **self._how(body, began)))
        for event in found:
            self._note(event)
        self.metrics.answered(began, reply.prompts)
        return AsciiJSON(reply.whole(found))

    async def audit(self, body: AuditRequest, http: Request) -> dict[str, Any]:
        """Whether this engine gives a response again: it is replayed along its own tokens, in a few
        canonical passes, and rendered as it was; whatever it says is compared, but for ids, times
        and cached tokens. Raises ClientDisconnect, and what the engine raises.

        The verdict: "same", "differs", or "not comparable" for a request that was plain or another
        engine's, and the reason.
        """
        work = asyncio.wait_for(self._audited(body), self.timeout)
        verdict: dict[str, Any] = await while_connected(http, work)
        return verdict

    async def _audited(self, body: AuditRequest) -> dict[str, Any]:
        said = body.response
        kind = said.get("object")
        asked = next((model for model, reply in REPLIES.items() if reply.kind == kind), None)
        if asked is None:
            raise refuse("response", kind, "an object that an endpoint for text answers")
        request = asked.model_validate(body.request)
        reply, params = await self.prepared(request, said.get("seed"))
        outputs = self._told(said, reply, params)
        verdict, reason = "not comparable", "the request was not deterministic"
        if params.deterministic:
            again = reply.whole(events_of(await self.engine.replay(outputs, request.priority)))
            reason = first_difference(said, again) or ""
            verdict = "differs" if reason else "same"
            if (own := again["system_fingerprint"]) != (theirs := said.get("system_fingerprint")):
                verdict, reason = "not comparable", f"system_fingerprint: {theirs} -> {own}"
        found = {"verdict": verdict, "reason": reason or None, "model": request.model}
        return {"object": "audit", **found}

    def _told(
        self, response: dict[str, Any], reply: Reply, params: SamplingParams
    ) -> list[RequestOutput]:
        """The outputs that a response was made of. Raises ValueError for one without the token ids
        of each completion."""
        count, most = params.num_return_sequences, vocab_size(self.engine.engine.model)
        choices = response.get("choices", [response])
        choices = choices if isinstance(choices, list) else [choices]
        given = [one.get("token_ids") if isinstance(one, dict) else None for one in choices]
        for tokens in given:
            if not isinstance(tokens, list) or not all(
                type(token) is int and 0 <= token < most for token in tokens
            ):
                allowed = "token_ids, by a request with return_token_ids=true"
                raise refuse("response", tokens, allowed)
        if len(given) != len(reply.prompts) * count:
            raise refuse("response", f"{len(given)} choices", f"{len(reply.prompts) * count}")
        return [
            RequestOutput("", prompt, params, [Completion(tokens) for tokens in own])
            for prompt, *own in zip(reply.prompts, *[iter(given)] * count, strict=True)
        ]

    def _note(self, event: StreamEvent) -> None:
        """Count an event. Raises HTTPException where the engine could not go on, ValueError where
        the grammar could not."""
        self.metrics.note(event)
        if event.finish_reason == "abort":
            error = event.error or "aborted"
            if error.startswith(GAVE_UP):
                raise refuse("json_schema", "...", f"what a text can follow ({error})")
            raise HTTPException(500, error)

    async def _sent(
        self,
        reply: Reply,
        event: StreamEvent | None,
        events: AsyncIterator[StreamEvent],
        began: float,
    ) -> AsyncIterator[str]:
        last, seconds = began, self.metrics.first_token
        try:
            async with aclosing(events):  # type: ignore[type-var]
                while event is not None:
                    now = time.monotonic()
                    seconds.observe((now - last) / max(len(event.token_ids), 1))
                    last, seconds = now, self.metrics.between_tokens
                    self._note(event)
                    for chunk in reply.chunks(event):
                        yield chunk
                    event = await anext(events, None)
            for chunk in reply.end():
                yield chunk
            self.metrics.answered(began, reply.prompts)
        except Exception as error:
            yield reply.failed(failure(error, reply.body)[1])


def create_app(
    engine: AsyncEngine,
    model: str,
    *,
    deterministic: bool = False,
    api_key: str | None = None,
    timeout: float | None = None,
    max_body: int = 8 * 2**20,
    body_seconds: float = 60.0,
) -> FastAPI:
    """The application for one engine.

    model: the name it goes by. deterministic: whether requests that do not say are. api_key: what
    clients must send as bearer token. timeout: seconds that a request may take. max_body: bytes of
    a body, which must be there after ``body_seconds``. Raises ValueError naming what is not
    allowed, also for an engine without a tokenizer.
    """
    server = Server(engine, model, deterministic, timeout)
    app = FastAPI(title="tinyspec", default_response_class=AsciiJSON, responses=FAILURES)
    app.add_middleware(Guard, api_key=api_key, max_body=max_body, body_seconds=body_seconds)
    for kind in HANDLED:
        app.add_exception_handler(kind, answer_error)

    @app.post("/v1/chat/completions", responses=STREAMS)
    async def chat(body: ChatRequest, http: Request) -> Response:
        return await server.answer(body, http)

    @app.post("/v1/completions", responses=STREAMS)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        return await server.answer(body, http)

    @app.post("/v1/responses", responses=STREAMS)
    async def responses(body: ResponsesRequest, http: Request) -> Response:
        return await server.answer(body, http)

    app.post("/v1/audit")(server.audit)
    app.post("/tokenize")(server.tokenize)
    app.post("/detokenize")(server.detokenize)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return server.card

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        return Response(status_code=200 if engine.alive else 503)

    @app.get("/metrics", response_class=Response, responses=PAGE)
    async def metrics() -> Response:
        return Response(server.metrics.page(), media_type="text/plain; version=0.0.4")

    return app
