"""Requests of OpenAI's ``/v1/responses``: messages, calls and what came of them, as a chat. Knows
no response of before.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from openai.types import responses
from pydantic import AfterValidator, BeforeValidator, Field

from tinyspec.errors import refuse
from tinyspec.serve import protocol
from tinyspec.serve.protocol import Objects, Strict
from tinyspec.serve.schemas import form_of

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


class CallOutput(Item, protocol.TextMessage):
    type: Literal["function_call_output"]
    role: Literal["tool"] = "tool"  # type: ignore[assignment]
    content: str | Objects[protocol.TextPart] = Field(alias="output")
    tool_call_id: str = Field(alias="call_id")


def nested(tool: Any) -> Any:
    """A tool, or the choice of one, as chats have it."""
    own = ((name, tool[name]) for name in tool if name not in ("type", "defer_loading"))
    return {"type": tool.get("type"), "function": dict(own)} if isinstance(tool, dict) else tool


NESTED = BeforeValidator(nested)
Choice = Annotated[Literal["none", "auto", "required"] | protocol.NamedTool, NESTED]


class ResponsesText(Strict):
    format: Annotated[protocol.PlainFormat | Schema, protocol.KNOWN] = PLAIN
    verbosity: Literal["medium"] = "medium"


class ResponsesRequest(protocol.TextRequest, protocol.ToolRequest):
    """Its messages, calls and their outputs are a chat."""

    prompt_field = "input"
    input: str | Objects[InputMessage | InputCall | CallOutput]
    instructions: str | None = None
    max_new_tokens: int | None = Field(None, ge=1, alias="max_output_tokens")
    text: ResponsesText = ResponsesText()
    tools: Objects[Annotated[protocol.Tool, NESTED]] = Field([])
    tool_choice: Choice = "auto"
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
            if "tool_calls" in message and told and told[-1]["role"] == "assistant":
                told[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            else:
                told.append(message)
        return [self.chat(told)]
