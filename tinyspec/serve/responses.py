"""What ``/v1/responses`` answers: one message, and the events by which it grows.

An answer that is not streamed is what the events would have built.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from tinyspec.outputs import StreamEvent
from tinyspec.serve.replies import Reply, sse

# What of the request its response does not repeat, and what all responses here have.
NOT_REPEATED = {"input", "stream", "stream_options"}
NOTHING = dict.fromkeys(("max_tool_calls", "previous_response_id", "reasoning"))
ALWAYS = {**NOTHING, "parallel_tool_calls": True, "tool_choice": "auto", "top_logprobs": 0}
THOUGHT = {"output_tokens_details": {"reasoning_tokens": 0}}


class ResponsesReply(Reply):
    kind, prefix = "response", "resp"
    counted = ("input", "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._text, self._tokens, self._number = "", list[int](), 0
        self._status, self._message = "in_progress", f"msg_{self.reply_id}"
        self._error: dict[str, Any] | None = None

    def _event(self, name: str, **data: Any) -> str:
        data = {"type": f"response.{name}", "sequence_number": self._number, **data}
        self._number += 1
        return f"event: {data['type']}\n{sse(data)}"

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _item(self, content: list[Any]) -> dict[str, Any]:
        about = {"type": "message", "role": "assistant", "id": self._message}
        return {**about, "status": self._status, "content": content}

    def _response(self) -> dict[str, Any]:
        """The response as it is now."""
        ended = self._status in ("completed", "incomplete")
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        ids = {"token_ids": self._tokens, "prompt_token_ids": self.prompts[0]}
        return {
            **ALWAYS,
            **self.body.model_dump(exclude=NOT_REPEATED, by_alias=True),
            **(ids if self.body.return_token_ids else {}),
            **self._head(self.kind),
            "error": self._error,
            "created_at": self.created,
            "completed_at": int(time.time()) if ended else None,
            "status": self._status,
            "incomplete_details": cut,
            "output": [self._item([self._part])] if ended else [],
            "usage": {**self.usage, **THOUGHT} if ended else None,
        }

    def whole(self, events: Iterable[StreamEvent]) -> dict[str, Any]:
        for event in events:
            for _ in self.chunks(event):
                pass
        return self._response()

    def chunks(self, event: StreamEvent) -> Iterator[str]:
        choice, place = self.note(event), {"output_index": 0}
        part = {**place, "content_index": 0, "item_id": self._message}
        if not choice.begun:
            choice.begun = True
            yield self._event("created", response=self._response())
            yield self._event("in_progress", response=self._response())
            yield self._event("output_item.added", **place, item=self._item([]))
            yield self._event("content_part.added", **part, part=self._part)
        self._tokens += event.token_ids
        if event.text:
            self._text += event.text
            yield self._event("output_text.delta", **part, delta=event.text, logprobs=[])
        if event.finish_reason is not None:
            self._status = "completed" if event.finish_reason == "stop" else "incomplete"
            yield self._event("output_text.done", **part, text=self._text, logprobs=[])
            yield self._event("content_part.done", **part, part=self._part)
            yield self._event("output_item.done", **place, item=self._item([self._part]))

    def end(self) -> Iterator[str]:
        yield self._event(self._status, response=self._response())
        yield "data: [DONE]\n\n"

    def failed(self, error: dict[str, Any]) -> str:
        self._status, self._error = "failed", {**error, "code": "server_error"}
        return self._event("failed", response=self._response())
