"""Requests as OpenAI's API has them: which fields are served, in which ranges, and what the engine
is asked for. Fields of SamplingParams have its names, with those of the API as aliases.

Whatever is no field here is refused. Knows no engine: what depends on the model is checked when the
request is added.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from openai.types import chat, shared_params
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
from tinyspec.sampling_params import STRUCTURES, SamplingParams
from tinyspec.serve.schemas import form_of, structured

T = TypeVar("T")
# Completions that one request may ask for, of all its prompts.
MOST_COMPLETIONS = 1024
SAMPLING = {field.name for field in fields(SamplingParams)}
# Fields that are none here, with values as if they were not there: what the documents of OpenAI and
# vLLM call their defaults.
TRUE = "skip_special_tokens spaces_between_special_tokens detokenize include_reasoning"
FALSE = "use_beam_search early_stopping return_tokens_as_token_ids echo"
EMPTY = "logits_processors functions annotations documents mm_processor_kwargs vllm_xargs"
DEFAULTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(TRUE.split(), (True,)) | dict.fromkeys(FALSE.split(), (False,)),
    **dict.fromkeys(EMPTY.split(), ([], {})) | {"best_of": (1,), "length_penalty": (1.0,)},
    **dict.fromkeys(("verbosity", "reasoning_effort"), ("medium",)) | {"suffix": ("",)},
    **{"function_call": ("auto", "none"), "reasoning": ({}, {"effort": "medium"})},
    **{"prompt_cache_retention": ("in_memory", "24h"), "modalities": (["text"],)},
}
# Fields that say what a text is to be like; the latter are what vLLM called these before.
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
FORMS = ("response_format", "structured_outputs", *GUIDED)
INNER = ("function", "json_schema", "reasoning", "structured_outputs")
# A model is called as it pleases; pydantic keeps names that begin so for itself.
STRICT = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
# Of millions of bad elements the first is told: to gather them all takes a minute and gigabytes.
FastList = Annotated[list[T], Field(fail_fast=True)]
Objects = Annotated[list[T], Field(fail_fast=True, max_length=2**14)]
MOST_FIELDS = 1024
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(max_length=1024)]
Bias = Annotated[float, Field(ge=-100, le=100)]
# OpenAI's seeds have a sign.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % 2**64)]


def known(data: Any, inner: tuple[str, ...] = INNER) -> Any:
    """An object without null and ``DEFAULTS``, which are as if a field were not there, and with one
    field more than any may have: of millions that are too many this one is enough. inner: objects
    in it that are treated alike."""
    if not isinstance(data, dict):
        return data
    none = DEFAULTS if inner else {}
    pairs = ((n, known(value, ()) if n in inner else value) for n, value in data.items())
    given = ((n, value) for n, value in pairs if value not in (None, *none.get(n, ())))
    return dict(islice(given, MOST_FIELDS + 1))


def not_zero(number: int) -> int:
    if not number:
        raise ValueError("0 is not allowed: tokens, or -1 for as many as fit")
    return number


KNOWN, NO_NULLS = BeforeValidator(known), BeforeValidator(lambda data: known(data, ()))
Tool = Annotated[chat.ChatCompletionFunctionToolParam, KNOWN]
NamedTool = Annotated[chat.ChatCompletionNamedToolChoiceParam, KNOWN]
AllowedTools = Annotated[chat.ChatCompletionAllowedToolChoiceParam, KNOWN]
PlainFormat = shared_params.ResponseFormatText | shared_params.ResponseFormatJSONObject


ResponseFormat = Annotated[
    PlainFormat | shared_params.ResponseFormatJSONSchema, KNOWN, AfterValidator(form_of)
]


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
        own |= {"grammar": "tools", "json_schema": "text", "bad_words_ids": "bad_words"}
        own |= {way: form for form in FORMS if form in self.model_fields_set for way in STRUCTURES}
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

    metadata: Annotated[dict[str, str], Field(max_length=16), NO_NULLS] = {}
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
    request_id: str | None = Field(None, min_length=1, max_length=256)
    return_token_ids: bool = False
    stop_token_ids: FastList[TokenId] = []
    structured_outputs: Annotated[dict[str, Any], AfterValidator(structured)] = {}
    guided_json: Annotated[Any, AfterValidator(lambda form: structured({"json": form}))] = {}
    guided_regex: Annotated[Any, AfterValidator(lambda form: structured({"regex": form}))] = {}
    guided_choice: Annotated[Any, AfterValidator(lambda form: structured({"choice": form}))] = {}
    guided_grammar: Annotated[Any, AfterValidator(lambda form: structured({"grammar": form}))] = {}
    top_k: Annotated[int, Field(ge=-1), AfterValidator(lambda k: max(k, 0))] = 0
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), AfterValidator(not_zero)] = 0
    allowed_token_ids: Annotated[FastList[TokenId], Field(min_length=1)] | None = None

    @property
    def form(self) -> dict[str, Any]:
        """The parameter that says what the text must be like; none where it may be any."""
        given = {name: form for name in FORMS if (form := getattr(self, name, None))}
        if len(given) > 1:
            raise refuse(max(given), "...", f"left out beside {min(given)}")
        return next(iter(given.values()), {})

    @property
    def completions(self) -> int:
        """How many there are of each prompt."""
        return getattr(self, "num_return_sequences", 1)

    def params(self, **given: Any) -> SamplingParams:
        """Its SamplingParams, with those that are ``given``. Raises ValueError."""
        if "stream_options" in self.model_fields_set and not self.stream:
            raise refuse("stream_options", "...", "none without stream=true")
        own = {name: value for name, value in self if name in SAMPLING}
        own = {name: value for name, value in own.items() if value is not None} | self.form
        if (tops := getattr(self, "prompt_tops", None)) is not None:
            if self.stream:
                raise refuse("prompt_tops", tops, "none with stream=true")
            given["prompt_logprobs"] = True
        return SamplingParams(**{"max_new_tokens": None, "include_stop_str": False} | own | given)


class TokenRequest(TextRequest):
    """What chat and completions share."""

    stream_options: UsageOptions = UsageOptions()
    num_return_sequences: int = Field(1, ge=1, le=128, alias="n")
    stop_strings: StopString | Annotated[FastList[StopString], Field(max_length=4)] = Field(
        [], alias="stop"
    )
    logit_bias: Annotated[
        dict[Annotated[TokenId, Field(strict=False)], Bias], Field(max_length=MOST_FIELDS), KNOWN
    ] = {}
    response_format: ResponseFormat | None = None
    bad_words: Annotated[FastList[StopString], Field(max_length=MOST_FIELDS)] = []
    include_stop_str: bool = Field(False, alias="include_stop_str_in_output")
    prompt_tops: int | None = Field(None, ge=0, le=20, alias="prompt_logprobs")


class CompletionRequest(TokenRequest):
    """Of ``/v1/completions``."""

    prompt: str | FastList[int] | FastList[str] | FastList[FastList[int]]
    max_new_tokens: int = Field(16, ge=0, alias="max_tokens")
    echo: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=5, alias="logprobs")
    add_special_tokens: Literal[True] = True

    def prompts(self) -> list[Any]:
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts: list[Any] = [self.prompt] if one else list(self.prompt)
        if not 0 < len(prompts) * self.completions <= MOST_COMPLETIONS:
            asked = f"{len(prompts)} prompts with n={self.completions}"
            raise refuse("prompt", asked, f"1 to {MOST_COMPLETIONS} completions")
        return prompts

    def params(self, **given: Any) -> SamplingParams:
        wanted, most = self.top_logprobs is not None, self.max_new_tokens
        if not (most or self.echo):
            raise refuse("max_new_tokens", most, "at least 1 without echo")
        given |= {"max_new_tokens": max(most, 1), "prompt_logprobs": wanted and self.echo}
        return super().params(logprobs=wanted, **given)


class TextPart(Strict):
    """Part of a message; annotations, logprobs: of an answer of before. parsed, here and in what
    follows: what OpenAI's client has made of it."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []
    parsed: Any = None


class FunctionCall(Strict):
    name: str
    arguments: Annotated[
        Json[dict[str, Any]], BeforeValidator(lambda text: "{}" if text == "" else text)
    ] = {}
    parsed_arguments: Any = Field(None, exclude=True)


class ToolCall(Strict):
    type: Literal["function"] = "function"
    id: str
    function: FunctionCall
    index: int | None = Field(None, exclude=True)  # of a chunk


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
    parsed: Any = Field(None, exclude=True)
    tool_calls: Objects[ToolCall] | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None


class ToolRequest(Strict):
    """What a prompt is made of that has messages and may have tools."""

    tools: Objects[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def chat(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The prompt, as the engine takes it."""
        goes_on, begins = self.continue_final_message, self.add_generation_prompt
        own = {"add_generation_prompt": not goes_on if begins is None else begins}
        own |= {"continue_final_message": goes_on, **self.chat_template_kwargs}
        chat = {"messages": messages, "chat_template_kwargs": own}
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
    add_special_tokens: Literal[False] = False

    def prompts(self) -> list[Any]:
        return [self.chat([message.plain() for message in self.messages])]

    def params(self, **given: Any) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", self.top_logprobs, "0 without logprobs=true")
        given["max_new_tokens"] = most = self.max_completion_tokens or self.max_new_tokens
        if self.max_new_tokens not in (None, most):
            raise refuse("max_completion_tokens", most, f"max_tokens={self.max_new_tokens}")
        return super().params(**given)


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
