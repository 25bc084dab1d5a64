"""What ``/v1/responses`` answers: items of output, and the events by which they grow.

An answer that is not streamed is what the events would have built.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from tinyspec.outputs import StreamEvent
from tinyspec.serve.replies import Reply, logprobs_of, sse

# What of the request its response repeats.
REPEATED = {
    *("background", "frequency_penalty", "instructions", "metadata", "parallel_tool_calls"),
    *("presence_penalty", "prompt_cache_key", "safety_identifier", "service_tier", "store"),
    *("temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user"),
}
NOTHING = dict.fromkeys(("error", "max_tool_calls", "previous_response_id", "reasoning"))


class ResponsesReply(Reply):
    kind, prefix = "response", "resp"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._output: list[dict[str, Any]] = []
        self._tokens: list[int] = []
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not told yet
        self._status, self._number = "in_progress", 0

    def _event(self, name: str, **data: Any) -> str:
        data = {"type": f"response.{name}", "sequence_number": self._number, **data}
        self._number += 1
        return f"event: {data['type']}\n{sse(data)}"

    def _resource(self) -> dict[str, Any]:
        """The response as it is now."""
        ended, usage = self._status != "in_progress", self.usage
        cached, seed = usage["prompt_tokens_details"], self.seed
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        ids = {"token_ids": self._tokens, "prompt_token_ids": self.prompts[0]}
        return {
            **NOTHING,
            **self.body.model_dump(include=REPEATED),
            "id": self.reply_id,
            "object": self.kind,
            "created_at": self.created,
            "completed_at": int(time.time()) if ended else None,
            "status": self._status,
            "incomplete_details": cut,
            "model": self.body.model,
            "max_output_tokens": self.body.max_new_tokens,
            "output": self._output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": cached,
                "output_tokens": self.generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
            if ended
            else None,
            "system_fingerprint": self.fingerprint,
            **({} if seed is None else {"seed": seed}),
            **(ids if self.body.return_token_ids else {}),
        }

    def whole(self, events: Iterable[StreamEvent]) -> dict[str, Any]:
        for event in events:
            for _ in self.chunks(event):
                pass
        return self._resource()

    def chunks(self, event: StreamEvent) -> Iterator[str]:
        choice, last = self.note(event), event.finish_reason is not None
        if not choice.begun:
            choice.begun = True
            yield self._event("created", response=self._resource())
            yield self._event("in_progress", response=self._resource())
        self._tokens += event.token_ids
        if self.body.include:
            self._logprobs += logprobs_of(event, self.text_of)
        content, calls = choice.text.push(event.text or "", last)
        if content or (last and not calls and not self._output):
            yield from self._text(content)
        if last and self._output:
            yield from self._end_of_text()
        for call in calls:
            yield from self._call(call)
        if last:
            self._status = "completed" if event.finish_reason == "stop" else "incomplete"

    def end(self) -> Iterator[str]:
        yield self._event(self._status, response=self._resource())
        yield "data: [DONE]\n\n"

    def _item(self, prefix: str, **fields: Any) -> dict[str, Any]:
        """A new item of output."""
        item_id = f"{prefix}_{uuid.uuid4().hex}"
        self._output.append({"id": item_id, "status": "in_progress", **fields})
        return self._output[-1]

    def _of(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._output) - 1}

    def _text(self, content: str) -> Iterator[str]:
        if not self._output:
            item = self._item("msg", type="message", role="assistant", content=[])
            yield self._event("output_item.added", output_index=0, item=item)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._event("content_part.added", **self._of(item), content_index=0, part=part)
            item["content"].append(part)
        item, new = self._output[0], self._logprobs
        part, self._logprobs = item["content"][0], []
        part["text"] += content
        part["logprobs"] += new
        delta = {"content_index": 0, "delta": content, "logprobs": new}
        yield self._event("output_text.delta", **self._of(item), **delta)

    def _end_of_text(self) -> Iterator[str]:
        item, index = self._output[0], {"content_index": 0}
        part = item["content"][0]
        part["logprobs"] += self._logprobs
        item["status"], told = "completed", {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._event("output_text.done", **self._of(item), **index, **told)
        yield self._event("content_part.done", **self._of(item), **index, part=part)
        yield self._event("output_item.done", output_index=0, item=item)

    def _call(self, call: dict[str, Any]) -> Iterator[str]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        named = {"type": "function_call", "call_id": call["id"], "name": name}
        item, place = self._item("fc", **named, arguments=""), len(self._output) - 1
        yield self._event("output_item.added", output_index=place, item=item)
        kind = "function_call_arguments"
        yield self._event(f"{kind}.delta", **self._of(item), delta=arguments)
        yield self._event(f"{kind}.done", **self._of(item), name=name, arguments=arguments)
        item |= {"arguments": arguments, "status": "completed"}
        yield self._event("output_item.done", output_index=place, item=item)
