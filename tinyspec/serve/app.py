"""The HTTP application: from a request's body to the engine, and from its outputs to an answer.

Knows no socket and no process: ``tinyspec serve`` runs it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, wraps
from importlib import metadata
from itertools import chain, zip_longest
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tinyspec.engine.async_engine import AsyncEngine, checked_timeout
from tinyspec.engine.prompts import continuation_ids, to_token_ids
from tinyspec.errors import refuse
from tinyspec.model.supported import vocab_size
from tinyspec.outputs import Completion, RequestOutput, StreamEvent
from tinyspec.runner.processors import GAVE_UP, NONE_LEFT
from tinyspec.sampling_params import SamplingParams
from tinyspec.serve import protocol, replies, responses
from tinyspec.serve.guard import HANDLED, AsciiJSON, Failure, Guard, answer_error, failure
from tinyspec.serve.metrics import Metrics
from tinyspec.serve.page import last_verifies, page
from tinyspec.serve.reading import wanted_calls

# Bytes of a body, and seconds until all of it must be there.
BOUNDS = 8 * 2**20, 60.0
# Characters of prompts that are read where they arrive, in at most two milliseconds.
SHORT = 2**12
# What a response has that is no function of the request.
NEVER = {"id", "call_id", "created", "created_at", "completed_at"}
NEVER |= {"prompt_tokens_details", "input_tokens_details", "completion_tokens_details"}
# Endpoints for text: what they are asked, and how they answer.
REPLIES: dict[Any, type[replies.Reply]] = {
    protocol.ChatRequest: replies.ChatReply,
    protocol.CompletionRequest: replies.CompletionReply,
    responses.ResponsesRequest: responses.ResponsesReply,
}
# What the OpenAPI document says of answers besides JSON with status 200.
Described = dict[int | str, dict[str, Any]]
FAILURES: Described = {"4XX": {"model": Failure}, "5XX": {"model": Failure}}
STREAMS: Described = {200: {"content": {"text/event-stream": {}}}}
PAGE: Described = {200: {"content": {"text/plain": {}}}}


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


def while_connected(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """An endpoint that is cancelled when the client goes away, or after the server's timeout.
    It also raises ClientDisconnect and TimeoutError, and what the engine raises."""

    async def gone(http: Request) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    @wraps(answer)
    async def connected(self: Server, body: Any, http: Request) -> Any:
        http.state.body = body
        tasks = [asyncio.ensure_future(work) for work in (answer(self, body, http), gone(http))]
        try:
            await asyncio.wait(tasks, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                return tasks[0].result()
            raise ClientDisconnect if tasks[1].done() else TimeoutError
        finally:
            for task in tasks:
                task.cancel()

    return connected


@dataclass(eq=False)
class Server:
    """Answers requests by one AsyncEngine.

    model: the name it goes by. base: that of its model, where it is an adapter's. deterministic:
    whether requests that do not say are. timeout: seconds that a request may take, or None. Raises
    ValueError naming what is not allowed, also for an engine without a tokenizer.
    """

    engine: AsyncEngine
    model: str
    deterministic: bool = False
    timeout: float | None = None
    base: str | None = None

    def __post_init__(self) -> None:
        self.timeout, engine = checked_timeout(self.timeout), self.engine.engine
        if engine.tokenizer is None:
            raise refuse("model", self.model, "one with a tokenizer")
        most: int = engine.config.max_model_len  # type: ignore[assignment]
        fits = engine.pool.num_pages * engine.pool.page_size
        if most > fits:  # by default an answer is as long as that
            raise refuse("max_model_len", most, f"at most {fits} tokens, what the page pool holds")
        # Its own, and one in a thread for long texts, which hold up neither passes nor streams, nor
        # short texts; and a text of more characters than so many tokens can have is not read.
        self.tokenizer, self._other = (deepcopy(engine.tokenizer) for _ in range(2))
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._most_characters = most * max(map(len, self.tokenizer.get_vocab()))
        self.metrics = Metrics(self.engine, self.model)
        self.fingerprint = engine.fingerprint
        # Ids of the latest replies, and of their first requests in the engine.
        self.latest: deque[tuple[str, str]] = deque(maxlen=1000)
        self.card: dict[str, Any] = {"id": self.model, "object": "model", "owned_by": "tinyspec"}
        self.card |= {"created": int(time.time()), "max_model_len": most}
        self.card |= {"root": self.model, "parent": self.base, "permission": []}

    def check_model(self, name: str | None) -> None:
        """Raises ValueError for another model than the one that is served."""
        if name not in (None, self.model):
            raise refuse("model", name, self.model)

    def check_tokens(self, field: str, tokens: Iterable[int]) -> None:
        """Raises ValueError for a token that the model has not."""
        if (last := max(tokens, default=0)) >= (most := vocab_size(self.engine.engine.model)):
            raise refuse(field, last, f"tokens below {most}")

    async def by_tokenizer(self, work: Callable[[Any], Any], size: int) -> Any:
        """What ``work`` makes of a tokenizer, which takes as long as texts of this ``size`` do."""
        if size <= SHORT:
            return work(self.tokenizer)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._other)

    async def token_ids(self, body: Any) -> list[list[int]]:
        """Of the prompts of a request. Raises ValueError."""
        prompts = body.prompts()
        # Characters of a text, or of the messages of a chat; how many tokens, of token ids.
        chats = [p["messages"] if isinstance(p, dict) else [{"content": p}] for p in prompts]
        sizes = [sum(len(message["content"]) for message in chat) for chat in chats]
        if max(sizes) > self._most_characters:
            allowed = (
                f"at most {self._most_characters} (max_model_len={self.card['max_model_len']})"
            )
            raise refuse("prompt", f"{max(sizes)} characters", allowed)
        return await self.by_tokenizer(lambda t: [to_token_ids(p, t) for p in prompts], sum(sizes))

    async def tokenize(self, body: protocol.Tokenize) -> dict[str, Any]:
        """Token ids of a text or of messages, as a request with them has them."""
        self.check_model(body.model)
        (tokens,) = await self.token_ids(body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.card["max_model_len"]}

    async def detokenize(self, body: protocol.Detokenize) -> dict[str, Any]:
        """The text of token ids."""
        self.check_model(body.model)
        self.check_tokens("tokens", body.tokens)
        text = await self.by_tokenizer(lambda t: t.decode(body.tokens), len(body.tokens))
        return {"prompt": text}

    async def prepared(
        self, body: Any, seed: int | None = None
    ) -> tuple[replies.Reply, SamplingParams]:
        """What the answer begins with, and the parameters; ``seed`` in place of one that is drawn.
        Raises ValueError."""
        began, echo = time.monotonic(), getattr(body, "echo", False)
        self.check_model(body.model)
        prompts, most = await self.token_ids(body), body.truncate_prompt_tokens
        if most == -1:  # what leaves room for the answer
            wanted = getattr(body, "max_completion_tokens", None) or body.max_new_tokens
            most = max(1, self.card["max_model_len"] - (wanted or 1))
        prompts = [ids[-most:] if most else ids for ids in prompts]
        read, given = wanted_calls(body, self.tokenizer, prompts)
        wanted = body.deterministic
        given["deterministic"] = self.deterministic if wanted is None else wanted
        if not body.temperature or body.seed is not None:
            seed = None
        else:  # as large as any client can read
            given["seed"] = seed = secrets.randbits(53) if seed is None else seed
        if words := getattr(body, "bad_words", ()):  # at the beginning of a text, and behind others
            texts = {text: None for word in words for text in (word, f" {word.lstrip()}")}
            given["bad_words_ids"] = [continuation_ids(text, self.tokenizer) for text in texts]
        params = body.params(**given)
        about = (body, prompts, self.tokenizer, self.fingerprint)
        reply = REPLIES[type(body)](*about, partial(read, params=params), seed, began)
        asked = max(getattr(body, "prompt_tops", None) or 0, params.top_logprobs * echo)
        if params.prompt_logprobs and asked:
            # The likeliest tokens in place of each but the first, which the others continue.
            long = [p for p in prompts if p[1:]]
            tops = SamplingParams(top_logprobs=asked)
            halves = [p[:1] for p in long], [p[1:] for p in long]
            scored = await self.engine.scored(*halves, tops, body.priority) if long else []
            found = (output.completions[0].top_logprobs or None for output in scored)
            reply.prompt_tops = [next(found) if p[1:] else None for p in prompts]
        return reply, params

    @while_connected
    async def answer(self, body: Any, http: Request) -> Response:
        """What one request for text gets."""
        reply, params = await self.prepared(body)
        given = reply.prompts, params, body.priority
        if body.stream:
            left = self.timeout and max(reply.began + self.timeout - time.monotonic(), 1e-3)
            events = self.engine.stream(*given, left)
            first = await anext(events)
            self.latest.append((reply.reply_id, first.request_id))
            return EventStreamResponse(self._sent(reply, first, events))
        found = replies.events_of(await self.engine.generate(*given))
        self.latest.append((reply.reply_id, found[0].request_id))
        for event in found:
            self._note(event)
        self.metrics.answered(reply.began, reply.prompts, reply.body.completions)
        return AsciiJSON(reply.whole(found))

    @while_connected
    async def audit(self, body: protocol.AuditRequest, http: Request) -> dict[str, Any]:
        """Whether this engine gives a response again: it is replayed along its own tokens, in a few
        canonical passes, and rendered as it was; whatever it says is compared, but for ids,
        times, cached tokens and drafts.

        The verdict: "same", "differs", or "not comparable" for a request that was plain or another
        engine's, and the reason.
        """
        said = body.response
        asked = next((m for m, reply in REPLIES.items() if reply.kind == said.get("object")), None)
        if asked is None:
            raise refuse("response", said.get("object"), "what an endpoint for text answers")
        http.state.body = request = asked.model_validate(body.request)
        reply, params = await self.prepared(request, said.get("seed"))
        told, count = body.told(), params.num_return_sequences
        self.check_tokens("response", chain(*told))
        if len(told) != len(reply.prompts) * count:
            raise refuse("response", f"{len(told)} choices", f"{len(reply.prompts) * count}")
        outputs = [
            RequestOutput("", prompt, params, [Completion(tokens) for tokens in own])
            for prompt, *own in zip(reply.prompts, *[iter(told)] * count, strict=True)
        ]
        verdict, reason = "not comparable", "the request was not deterministic"
        if params.deterministic:
            replayed = await self.engine.replay(outputs, request.priority)
            again = reply.whole(replies.events_of(replayed))
            reason = first_difference(said, again) or ""
            other = again["system_fingerprint"] != said.get("system_fingerprint")
            verdict = "not comparable" if other else "differs" if reason else "same"
        about = {"object": "audit", "model": request.model}
        return {**about, "verdict": verdict, "reason": reason or None}

    async def verifies(self, reply_id: str) -> list[dict[str, Any]]:
        """The last verify of an answer whose id is known to who asked for it, and its last with a
        rollback, for the page to draw."""
        engine, request_id = self.engine.engine, dict(self.latest).get(reply_id)
        if not engine.config.trace:
            raise HTTPException(404, "this server keeps no trace: start it with --trace")
        return last_verifies(engine.trace, request_id) if request_id else []

    def _note(self, event: StreamEvent) -> None:
        """Count an event. Raises HTTPException where the engine could not go on, ValueError where
        the grammar could not."""
        self.metrics.note(event)
        if event.finish_reason == "abort":
            error = event.error or "aborted"
            if error.startswith(GAVE_UP):
                raise refuse("json_schema", "...", f"what a text can follow ({error})")
            raise HTTPException(400 if error == NONE_LEFT else 500, error)

    async def _sent(
        self, reply: replies.Reply, first: StreamEvent, events: Any
    ) -> AsyncIterator[str]:
        event: StreamEvent | None = first
        last, seconds = reply.began, self.metrics.first_token
        self.metrics.prefill.observe(time.monotonic() - last - first.queue_seconds)
        try:
            async with aclosing(events):
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
            self.metrics.answered(reply.began, reply.prompts, reply.body.completions)
        except Exception as error:
            yield reply.failed(failure(error, reply.body)[1])


def create_app(
    server: Server, api_key: str | None = None, bounds: Any = BOUNDS, origins: Any = ()
) -> FastAPI:
    """The application for one server. api_key, bounds: as ``Guard`` has them. origins: of pages
    that may ask in a browser, or "*"."""
    own = metadata.version("tinyspec")
    app = FastAPI(
        title="tinyspec", version=own, default_response_class=AsciiJSON, responses=FAILURES
    )
    app.add_middleware(Guard, api_key=api_key, bounds=bounds)
    if origins:
        every: Any = {"allow_methods": ["*"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_origins=origins, **every)
    engine = server.engine.engine
    facts = {"key": api_key, "chat": engine.tokenizer.chat_template, "trace": engine.config.trace}
    shown = page(facts)
    app.add_route("/", lambda _: shown, include_in_schema=False)
    app.get("/v1/verifies/{reply_id}")(server.verifies)
    for kind in HANDLED:
        app.add_exception_handler(kind, answer_error)

    @app.post("/v1/chat/completions", responses=STREAMS)
    async def chat(body: protocol.ChatRequest, http: Request) -> Response:
        return await server.answer(body, http)

    @app.post("/v1/completions", responses=STREAMS)
    async def completions(body: protocol.CompletionRequest, http: Request) -> Response:
        return await server.answer(body, http)

    @app.post("/v1/responses", responses=STREAMS)
    async def response(body: responses.ResponsesRequest, http: Request) -> Response:
        return await server.answer(body, http)

    for name in ("/v1/audit", "/tokenize", "/detokenize"):
        app.post(name)(getattr(server, name.rpartition("/")[2]))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return server.card

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        return Response(status_code=200 if server.engine.alive else 503)

    app.head("/health", include_in_schema=False)(health)
    app.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)(health)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": own}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": len(server.engine.engine.tracker.requests) + server.engine.waiting}

    @app.get("/metrics", response_class=Response, responses=PAGE)
    async def metrics() -> Response:
        return Response(server.metrics.page(), media_type="text/plain; version=0.0.4")

    return app
