"""Requests as OpenAI's API has them: which fields are served, in which ranges, and what the engine
is asked for. Fields of SamplingParams have its names, with those of the API as aliases.

Whatever is no field here is refused. Knows no engine: what depends on the model is checked when the
request is added.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from openai.types import chat, responses, shared_params
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    ValidationError,
    model_validator,
)

from tinyspec.errors import refuse
from tinyspec.sampling_params import SamplingParams
from tinyspec.serve.schemas import laid_out

T = TypeVar("T")
# Completions that one request may ask for, of all its prompts.
MOST_COMPLETIONS = 1024
SAMPLING = {field.name for field in fields(SamplingParams)}
# A model is called as it pleases; pydantic keeps names that begin so for itself.
STRICT = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
# Of millions of bad elements the first is told: to gather them all takes a minute and gigabytes.
FastList = Annotated[list[T], Field(fail_fast=True)]
Objects = Annotated[list[T], Field(fail_fast=True, max_length=2**14)]
MOST_FIELDS = 1024
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(strict=False, ge=0, lt=2**31)]
StopString = Annotated[str, Field(max_length=1024)]
Bias = Annotated[float, Field(ge=-100, le=100)]
# OpenAI's seeds have a sign.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % 2**64)]


def known(data: Any, inner: tuple[str, ...] = ("function", "json_schema")) -> Any:
    """An object without null, which is as if a field were not there, and with one field more than
    any may have: of millions that are too many this one is enough. inner: objects in it that are
    treated alike."""
    if not isinstance(data, dict):
        return data
    given = ((name, value) for name, value in data.items() if value is not None)
    first = islice(given, MOST_FIELDS + 1)
    return {name: known(value, ()) if name in inner else value for name, value in first}


KNOWN = BeforeValidator(known)
Tool = Annotated[chat.ChatCompletionFunctionToolParam, KNOWN]
NamedTool = Annotated[chat.ChatCompletionNamedToolChoiceParam, KNOWN]
AllowedTools = Annotated[chat.ChatCompletionAllowedToolChoiceParam, KNOWN]
PlainFormat = shared_params.ResponseFormatText | shared_params.ResponseFormatJSONObject


def schema_of(given: Any) -> dict[str, Any] | None:
    """What a response_format wants the text to fit; None where it may be any."""
    if given["type"] == "text":
        return None
    return laid_out(given.get("json_schema", given).get("schema", {"type": "object"}))


ResponseFormat = Annotated[
    PlainFormat | shared_params.ResponseFormatJSONSchema, KNOWN, AfterValidator(schema_of)
]
TextFormat = Annotated[PlainFormat | responses.ResponseFormatTextJSONSchemaConfigParam, KNOWN]


class Strict(BaseModel):
    """An object with these fields alone."""

    model_config = STRICT
    prompt_field: ClassVar[str] = "prompt"

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        return known(data)

    def api_name(self, name: str) -> str:
        """What the API calls a field."""
        own = dict.fromkeys(("prompt", "messages", "content"), self.prompt_field)
        own |= {"grammar": "tools"}
        if "max_completion_tokens" in self.model_fields_set:
            own["max_new_tokens"] = "max_completion_tokens"
        name = own.get(name, name)
        field = type(self).model_fields.get(name)
        return str((field and field.alias) or name)


class StreamOptions(Strict):
    include_obfuscation: Literal[False] = False


class UsageOptions(StreamOptions):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: the counts so far with every chunk


class TextRequest(Strict):
    """What the endpoints for text share: what is OpenAI's, then what has no effect by definition,
    then vLLM's and tinyspec's own."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    seed: Seed | None = None

    metadata: Annotated[dict[str, str], Field(max_length=16), KNOWN] = {}
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] = "default"
    store: Literal[False] = False
    user: str | None = None

    deterministic: bool | None = None
    ignore_eos: bool = False
    min_new_tokens: int = Field(0, ge=0, alias="min_tokens")
    min_p: float = Field(0.0, ge=0, le=1)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    return_token_ids: bool = False
    stop_token_ids: FastList[TokenId] = []
    top_k: int = Field(0, ge=0)

    @property
    def completions(self) -> int:
        """How many there are of each prompt."""
        return getattr(self, "num_return_sequences", 1)

    def params(self, **given: Any) -> SamplingParams:
        """Its SamplingParams, with those that are ``given``. Raises ValueError."""
        if "stream_options" in self.model_fields_set and not self.stream:
            raise refuse("stream_options", "...", "none without stream=true")
        own = {name: value for name, value in self if name in SAMPLING}
        own = {name: value for name, value in own.items() if value is not None}
        return SamplingParams(**{"max_new_tokens": None, "include_stop_str": False} | own | given)


class TokenRequest(TextRequest):
    """What chat and completions share."""

    stream_options: UsageOptions = UsageOptions()
    num_return_sequences: int = Field(1, ge=1, le=128, alias="n")
    stop_strings: StopString | Annotated[FastList[StopString], Field(max_length=4)] = Field(
        [], alias="stop"
    )
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MOST_FIELDS), KNOWN] = {}


class CompletionRequest(TokenRequest):
    """Of ``/v1/completions``."""

    prompt: str | FastList[int] | FastList[str] | FastList[FastList[int]]
    max_new_tokens: int = Field(16, ge=1, alias="max_tokens")
    echo: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=5, alias="logprobs")

    def prompts(self) -> list[Any]:
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts: list[Any] = [self.prompt] if one else list(self.prompt)
        if not 0 < len(prompts) * self.completions <= MOST_COMPLETIONS:
            asked = f"{len(prompts)} prompts with n={self.completions}"
            raise refuse("prompt", asked, f"1 to {MOST_COMPLETIONS} completions")
        return prompts

    def params(self, **given: Any) -> SamplingParams:
        wanted = self.top_logprobs is not None
        return super().params(logprobs=wanted, prompt_logprobs=wanted and self.echo, **given)


class TextPart(Strict):
    """Part of a message; annotations, logprobs: of an answer of before."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class FunctionCall(Strict):
    name: str
    arguments: Json[dict[str, Any]]


class ToolCall(Strict):
    type: Literal["function"] = "function"
    id: str
    function: FunctionCall


class TextMessage(Strict):
    """One message of any prompt."""

    role: Literal["developer", "system", "user", "assistant"]
    content: str | Objects[TextPart] = ""

    def plain(self) -> dict[str, Any]:
        """As chat templates have it: they know no developer, and arguments as an object."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        others = self.model_dump(exclude_none=True, exclude={"type", "id", "status"})
        return others | {"role": role, "content": text}


class Message(TextMessage):
    """One message of a chat."""

    role: Literal["developer", "system", "user", "assistant", "tool"]  # type: ignore[assignment]
    name: str | None = None
    tool_calls: Objects[ToolCall] | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None


class ToolRequest(Strict):
    """What a prompt is made of that has messages and may have tools."""

    tools: Objects[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    def chat(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The prompt, as the engine takes it."""
        chat = {"messages": messages, "chat_template_kwargs": self.chat_template_kwargs}
        if self.tools and self.tool_choice != "none":
            chat["tools"] = self.tools
        return chat


class ChatRequest(TokenRequest, ToolRequest):
    """Of ``/v1/chat/completions``."""

    prompt_field = "messages"
    messages: Objects[Message] = Field(min_length=1)
    max_new_tokens: int | None = Field(None, ge=1, alias="max_tokens")
    max_completion_tokens: int | None = Field(None, ge=1)  # the same; clients may give both
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    json_schema: ResponseFormat | None = Field(None, alias="response_format")

    def prompts(self) -> list[Any]:
        return [self.chat([message.plain() for message in self.messages])]

    def params(self, **given: Any) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", self.top_logprobs, "0 without logprobs=true")
        given["max_new_tokens"] = most = self.max_completion_tokens or self.max_new_tokens
        if self.max_new_tokens not in (None, most):
            raise refuse("max_completion_tokens", most, f"max_tokens={self.max_new_tokens}")
        return super().params(**given)


class InputMessage(TextMessage):
    """A message among the input of ``/v1/responses``; id, status: of an answer of before."""

    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None


class ResponsesText(Strict):
    format: TextFormat = {"type": "text"}
    verbosity: Literal["medium"] = "medium"


class ResponsesRequest(TextRequest):
    """Of ``/v1/responses``: text alone."""

    prompt_field = "input"
    input: str | Objects[InputMessage]
    instructions: str | None = None
    max_new_tokens: int | None = Field(None, ge=1, alias="max_output_tokens")
    json_schema: ResponsesText = Field(ResponsesText(), alias="text")
    tools: list[Any] = Field([], max_length=0)
    tool_choice: Literal["auto"] = "auto"
    parallel_tool_calls: Literal[True] = True
    top_logprobs: Literal[0] = 0
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"

    def prompts(self) -> list[Any]:
        given, first = self.input, self.instructions
        told = [{"role": "system", "content": first}] if first is not None else []
        if isinstance(given, str):
            told.append({"role": "user", "content": given})
        else:
            told += [message.plain() for message in given]
        return [{"messages": told}]

    def params(self, **given: Any) -> SamplingParams:
        return super().params(json_schema=schema_of(self.json_schema.format), **given)


class Tokenize(ToolRequest):
    """Of ``/tokenize``: text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects[Message] = []

    def prompts(self) -> list[Any]:
        if (self.prompt is None) == (not self.messages):
            raise refuse("prompt", self.prompt, "text, or messages in its place")
        chat = self.chat([message.plain() for message in self.messages])
        return [chat if self.prompt is None else self.prompt]


class Detokenize(Strict):
    """Of ``/detokenize``."""

    model: str | None = None
    tokens: FastList[TokenId]


class Told(BaseModel):
    """What an answer says of one completion, with return_token_ids."""

    token_ids: FastList[Annotated[int, Field(strict=True, ge=0)]]


class AuditRequest(Strict):
    """Of ``/v1/audit``: a request with return_token_ids, as it was sent, and what was answered."""

    request: dict[str, Any]
    response: dict[str, Any]

    def told(self) -> list[list[int]]:
        """The tokens of all completions. Raises ValueError."""
        given = self.response.get("choices", [self.response])
        try:
            return [Told.model_validate(choice).token_ids for choice in given]
        except (TypeError, ValidationError):
            allowed = "token_ids of each choice, by a request with return_token_ids=true"
            raise refuse("response", given, allowed) from None
