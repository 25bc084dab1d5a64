"""OpenAI's ``/v1/responses``: requests, whose messages, calls and what came of them are a chat, and
replies. Knows no response of before.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from openai.types import responses
from pydantic import AfterValidator, BeforeValidator, Field

from tinyspec.errors import refuse
from tinyspec.outputs import StreamEvent
from tinyspec.serve import protocol
from tinyspec.serve.protocol import FORMS, Objects, Strict
from tinyspec.serve.replies import Reply, sse
from tinyspec.serve.schemas import form_of

# What of the request its response does not repeat as it is, and what all responses here have.
NOT_REPEATED = {"input", "stream", "stream_options", "tools", "tool_choice", *FORMS}
NOTHING = dict.fromkeys(("max_tool_calls", "previous_response_id", "reasoning"))
UNKNOWN = dict.fromkeys(("parameters", "strict"))
# What items of a response have besides their text, and the part that this is.
ITEMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reasoning": ({"summary": []}, {"type": "reasoning_text", "text": ""}),
    "message": (
        {"role": "assistant"},
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
}
PLAIN: Any = {"type": "text"}
Schema = responses.ResponseFormatTextJSONSchemaConfigParam


class Item(Strict):
    """Of the input; id, status: of an answer of before."""

    id: str | None = None
    status: str | None = None


class InputMessage(Item, protocol.TextMessage):
    type: Literal["message"] = "message"


class InputCall(Item, protocol.FunctionCall):
    type: Literal["function_call"]
    call_id: str

    def plain(self) -> dict[str, Any]:
        """A message as chat templates have it."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"type": "function", "id": self.call_id, "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class ThoughtPart(Strict):
    type: Literal["reasoning_text"]
    text: str


class InputThought(Item):
    type: Literal["reasoning"]
    summary: list[Any] = Field([])
    content: Objects[ThoughtPart] = Field([])

    def plain(self) -> dict[str, Any]:
        """A message as chat templates have it."""
        thought = "".join(part.text for part in self.content)
        return {"role": "assistant", "content": "", "reasoning_content": thought}


class CallOutput(Item, protocol.TextMessage):
    type: Literal["function_call_output"]
    role: Literal["tool"] = "tool"  # type: ignore[assignment]
    content: str | Objects[protocol.TextPart] = Field(alias="output")
    tool_call_id: str = Field(alias="call_id")


def nested(tool: Any) -> Any:
    """A tool, or the choice of one, as chats have it."""
    if not isinstance(tool, dict):
        return tool
    own = {name: tool[name] for name in tool if name not in ("type", "defer_loading")}
    inner = "allowed_tools" if (kind := tool.get("type")) == "allowed_tools" else "function"
    return {"type": kind, inner: own}


NESTED = BeforeValidator(nested)
Chosen = Literal["none", "auto", "required"] | protocol.NamedTool | protocol.AllowedTools


class ResponsesText(Strict):
    format: Annotated[protocol.PlainFormat | Schema, protocol.KNOWN] = PLAIN
    verbosity: Literal["medium"] = "medium"


class ResponsesRequest(protocol.TextRequest, protocol.ToolRequest):
    """Its messages, calls and their outputs are a chat."""

    prompt_field = "input"
    input: str | Objects[InputMessage | InputCall | CallOutput | InputThought]
    instructions: str | None = None
    max_new_tokens: int | None = Field(None, ge=1, alias="max_output_tokens")
    text: ResponsesText = ResponsesText()
    tools: Objects[Annotated[protocol.Tool, NESTED]] = Field([])
    tool_choice: Annotated[Chosen, NESTED] = "auto"
    include: Objects[responses.ResponseIncludable] = Field([])  # nothing here has any of these
    store: Annotated[bool, AfterValidator(lambda _: False)] = False  # type: ignore[assignment]
    top_logprobs: Literal[0] = 0
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"

    @property
    def response_format(self) -> dict[str, Any]:
        return form_of(self.text.format)

    def prompts(self) -> list[Any]:
        first, given = self.instructions, self.input
        if "message.output_text.logprobs" in self.include:
            raise refuse("include", self.include, "what a response without log-probabilities has")
        told: list[dict[str, Any]] = [{"role": "system", "content": first}] if first else []
        if isinstance(given, str):
            given = [InputMessage(role="user", content=given)]
        for message in (item.plain() for item in given):
            last = told[-1] if told and told[-1]["role"] == message["role"] == "assistant" else {}
            if "tool_calls" in message and last:
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
            elif last.keys() == {"role", "content", "reasoning_content"} and not last["content"]:
                last |= message
            else:
                told.append(message)
        return [self.chat(told)]


def flat(tool: Any) -> Any:
    """A tool, or the choice of one, as responses have it."""
    return tool if isinstance(tool, str) else {"type": tool["type"], **tool[tool["type"]]}


def _logprobs(part: dict[str, Any]) -> dict[str, Any]:
    """What events of a part say of its log-probabilities: a message's that there are none."""
    return {"logprobs": part["logprobs"]} if "logprobs" in part else {}


class ResponsesReply(Reply):
    """Of ``/v1/responses``: thoughts and messages as they come, a message where there is no other
    item, then the calls; and the events by which they grow. An answer that is not streamed is what
    these would have built."""

    kind, prefix = "response", "resp"
    counted = ("input_tokens", "output_tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tokens, self._number, self._thought = list[int](), 0, 0
        self._output = list[dict[str, Any]]()
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None

    def _event(self, name: str, **data: Any) -> str:
        data = {"type": f"response.{name}", "sequence_number": self._number, **data}
        self._number += 1
        return f"event: {data['type']}\n{sse(data)}"

    def _response(self) -> dict[str, Any]:
        """The response as it is now."""
        ended = self._status in ("completed", "incomplete")
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        ids = {"token_ids": self._tokens, "prompt_token_ids": self.prompts[0]}
        details = {"output_tokens_details": {"reasoning_tokens": self._thought}}
        return {
            **NOTHING,
            **self.body.model_dump(exclude=NOT_REPEATED, by_alias=True),
            "tools": [{**UNKNOWN, **flat(tool)} for tool in self.body.tools],
            "tool_choice": flat(self.body.tool_choice),
            **(ids if self.body.return_token_ids else {}),
            **self._head(self.kind),
            "error": self._error,
            "created_at": self.created,
            "completed_at": int(time.time()) if ended else None,
            "status": self._status,
            "incomplete_details": cut,
            "output": self._output * ended,
            "usage": {**self.usage, **details} if ended else None,
        }

    def whole(self, events: Iterable[StreamEvent]) -> dict[str, Any]:
        for event in events:
            for _ in self.chunks(event):
                pass
        return self._response()

    def _of_last(self, name: str, **data: Any) -> str:
        """An event of the last item's text, or of its arguments."""
        item, place = self._output[-1], {"output_index": len(self._output) - 1}
        part = {} if item["type"] == "function_call" else {"content_index": 0}
        return self._event(name, item_id=item["id"], **place, **part, **data)

    def _opened(self, item: dict[str, Any]) -> str:
        self._output.append(item)
        return self._event("output_item.added", output_index=len(self._output) - 1, item=item)

    def _closed(self, status: str) -> Iterator[str]:
        """The end of the last item, if it is under way."""
        if not self._output or (item := self._output[-1])["status"] != "in_progress":
            return
        item["status"] = status
        if item["type"] == "function_call":
            yield self._of_last("function_call_arguments.done", arguments=item["arguments"])
        else:
            (part,) = item["content"]
            yield self._of_last(f"{part['type']}.done", text=part["text"], **_logprobs(part))
            yield self._of_last("content_part.done", part=part)
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _grown(self, kind: str, text: str) -> Iterator[str]:
        """An item's text, of a new one where the last is of another ``kind``."""
        own, part = ITEMS[kind]
        if not self._output or self._output[-1]["type"] != kind:
            yield from self._closed("completed")
            about = {"id": f"{kind}_{len(self._output)}_{self.reply_id}", "status": "in_progress"}
            yield self._opened({"type": kind, **about, **own, "content": []})
            self._output[-1]["content"].append({**part})
            yield self._of_last("content_part.added", part=part)
        if text:
            self._output[-1]["content"][0]["text"] += text
            yield self._of_last(f"{part['type']}.delta", delta=text, **_logprobs(part))

    def chunks(self, event: StreamEvent) -> Iterator[str]:
        choice, _ = self.note(event)
        thought, text, calls = choice.text.told(event)
        self._thought = choice.text.thought_tokens
        if not choice.begun:
            choice.begun = True
            yield self._event("created", response=self._response())
            yield self._event("in_progress", response=self._response())
        self._tokens += event.token_ids
        for kind, more in (("reasoning", thought), ("message", text)):
            if more:
                yield from self._grown(kind, more)
        if not event.finish_reason:
            return
        if not (calls or any(item["type"] == "message" for item in self._output)):
            yield from self._grown("message", "")
        status = "completed" if event.finish_reason == "stop" else "incomplete"
        for call in calls:
            yield from self._closed("completed")
            item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"]}
            item |= {"name": call["function"]["name"], "arguments": "", "status": "in_progress"}
            yield self._opened(item)
            item["arguments"] = text = call["function"]["arguments"]
            yield self._of_last("function_call_arguments.delta", delta=text)
        yield from self._closed(status)
        self._status = status

    def end(self) -> Iterator[str]:
        yield self._event(self._status, response=self._response())
        yield "data: [DONE]\n\n"

    def failed(self, error: dict[str, Any]) -> str:
        self._status, self._error = "failed", {**error, "code": "server_error"}
        return self._event("failed", response=self._response())
