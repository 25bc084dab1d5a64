"""What clients do, each by its own library: a plain chat, a stream, a loop with a tool, and an
answer of a form. ``python -m tests.clients.scripts NAME URL MODEL`` prints what came, as JSON.

Run by ``test_clients.py`` in a process of its own; none imports the package.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

QUESTION = "How is the weather in Paris?"


def openai_sdk(url, model):
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        degrees: int

    class get_weather(BaseModel):
        city: str

    client = openai.OpenAI(base_url=url, api_key="-")
    asked = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    plain = client.chat.completions.create(**asked).choices[0].message.content
    stream = client.chat.completions.create(**asked, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    tools = [openai.pydantic_function_tool(get_weather)]
    turn = client.chat.completions.parse(**asked, tools=tools).choices[0].message
    (call,) = turn.tool_calls
    seen = [call.function.parsed_arguments.city]
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    history = [*asked["messages"], turn, result]
    loop = client.chat.completions.create(**asked | {"messages": history}, tools=tools)
    formed = client.chat.completions.parse(**asked, response_format=Answer).choices[0].message
    return plain, streamed, seen, loop.choices[0].message.content, formed.parsed.degrees


def openai_responses(url, model):
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        degrees: int

    client = openai.OpenAI(base_url=url, api_key="-")
    asked = {"model": model, "input": QUESTION}
    plain = client.responses.create(**asked).output_text
    events = client.responses.create(**asked, stream=True)
    streamed = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "name": "get_weather", "strict": True}
    tool["parameters"] = {**city, "additionalProperties": False}
    turn = client.responses.create(**asked, tools=[tool])
    (call,) = [item for item in turn.output if item.type == "function_call"]
    seen = [json.loads(call.arguments)["city"]]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    given = [{"role": "user", "content": QUESTION}, *turn.output, result]
    loop = client.responses.create(**asked | {"input": given}, tools=[tool]).output_text
    formed = client.responses.parse(**asked, text_format=Answer).output_parsed.degrees
    return plain, streamed, seen, loop, formed


def _openai_agents(url, model, kind):
    import agents
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        degrees: int

    agents.set_tracing_disabled(True)
    client, seen = openai.AsyncOpenAI(base_url=url, api_key="-"), []
    made = getattr(agents, kind)(model=model, openai_client=client)

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        seen.append(city)
        return "21"

    async def all_of_it():
        agent = agents.Agent(name="a", model=made)
        plain = (await agents.Runner.run(agent, QUESTION)).final_output
        run, streamed = agents.Runner.run_streamed(agent, QUESTION), ""
        async for event in run.stream_events():
            if getattr(getattr(event, "data", None), "type", "") == "response.output_text.delta":
                streamed += event.data.delta
        agent = agents.Agent(name="a", model=made, tools=[get_weather])
        loop = (await agents.Runner.run(agent, QUESTION)).final_output
        agent = agents.Agent(name="a", model=made, output_type=Answer)
        formed = (await agents.Runner.run(agent, QUESTION)).final_output.degrees
        return plain, streamed, seen, loop, formed

    return asyncio.run(all_of_it())


def openai_agents(url, model):
    return _openai_agents(url, model, "OpenAIChatCompletionsModel")


def openai_agents_default(url, model):
    return _openai_agents(url, model, "OpenAIResponsesModel")


def _pydantic_ai(url, model, kind):
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput, models
    from pydantic_ai.providers.openai import OpenAIProvider

    class Answer(BaseModel):
        degrees: int

    __import__("pydantic_ai.models.openai")
    provider, seen = OpenAIProvider(base_url=url, api_key="-"), []
    made = getattr(models.openai, kind)(model, provider=provider)
    agent = Agent(made)
    plain = agent.run_sync(QUESTION).output

    async def stream():
        async with agent.run_stream(QUESTION) as run:
            return "".join([piece async for piece in run.stream_text(delta=True)])

    streamed, agent = asyncio.run(stream()), Agent(made)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        seen.append(city)
        return "21"

    loop = agent.run_sync(QUESTION).output
    formed = Agent(made, output_type=NativeOutput(Answer)).run_sync(QUESTION).output.degrees
    return plain, streamed, seen, loop, formed


def pydantic_ai(url, model):
    return _pydantic_ai(url, model, "OpenAIChatModel")


def pydantic_ai_responses(url, model):
    return _pydantic_ai(url, model, "OpenAIResponsesModel")


def langchain(url, model):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Answer(BaseModel):
        degrees: int

    seen = []

    @tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        seen.append(city)
        return "21"

    chat = ChatOpenAI(base_url=url, api_key="-", model=model)
    plain = chat.invoke(QUESTION).content
    streamed = "".join(piece.content for piece in chat.stream(QUESTION))
    bound = chat.bind_tools([get_weather], strict=True, parallel_tool_calls=False)
    turn = bound.invoke(QUESTION)
    (call,) = turn.tool_calls
    result = get_weather.invoke({**call, "type": "tool_call"})
    loop = bound.invoke([("user", QUESTION), turn, result]).content
    formed = chat.with_structured_output(Answer).invoke(QUESTION).degrees
    return plain, streamed, seen, loop, formed


def llama_index(url, model):
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    class Answer(BaseModel):
        degrees: int

    seen = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        seen.append(city)
        return "21"

    given = {"api_base": url, "api_key": "-", "model": model, "is_chat_model": True}
    llm = OpenAILike(**given, is_function_calling_model=True)
    asked = [ChatMessage(role="user", content=QUESTION)]
    plain = llm.chat(asked).message.content
    streamed = "".join(piece.delta or "" for piece in llm.stream_chat(asked))

    async def agent():
        return str(await FunctionAgent(tools=[get_weather], llm=llm).run(user_msg=QUESTION))

    loop = asyncio.run(agent())
    schema = {
        "name": "Answer",
        "schema": {**Answer.model_json_schema(), "additionalProperties": False},
    }
    form = {"type": "json_schema", "json_schema": schema}
    formed = json.loads(llm.chat(asked, response_format=form).message.content)["degrees"]
    return plain, streamed, seen, loop, formed


def litellm(url, model):
    import litellm
    from pydantic import BaseModel

    class Answer(BaseModel):
        degrees: int

    asked = {"model": f"openai/{model}", "api_base": url, "api_key": "-"}
    asked["messages"] = [{"role": "user", "content": QUESTION}]
    plain = litellm.completion(**asked).choices[0].message.content
    pieces = litellm.completion(**asked, stream=True)
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "parameters": {**city, "additionalProperties": False}}
    tools = [{"type": "function", "function": {**function, "strict": True}}]
    turn = litellm.completion(**asked, tools=tools).choices[0].message
    (call,) = turn.tool_calls
    seen = [json.loads(call.function.arguments)["city"]]
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    history = [*asked["messages"], turn.model_dump(), result]
    loop = litellm.completion(**asked | {"messages": history}, tools=tools)
    formed = litellm.completion(**asked, response_format=Answer).choices[0].message.content
    text = loop.choices[0].message.content
    try:  # a prompt that is too long, and a model that is not there, by their classes
        litellm.completion(**asked | {"messages": [{"role": "user", "content": "a " * 9000}]})
        raise AssertionError("no error")
    except litellm.ContextWindowExceededError:
        pass
    try:
        litellm.completion(**asked | {"model": "openai/other"})
        raise AssertionError("no error")
    except litellm.NotFoundError:
        pass
    return plain, streamed, seen, text, json.loads(formed)["degrees"]


def instructor(url, model):
    import instructor
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        degrees: int

    client = openai.OpenAI(base_url=url, api_key="-")
    asked = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    plain = client.chat.completions.create(**asked).choices[0].message.content
    found = []
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        made = instructor.from_openai(client, mode=mode)
        found.append(made.create(**asked, response_model=Answer, max_retries=0))
    (degrees,) = {each.degrees for each in found}
    return plain, None, None, None, degrees


def inspect(url, model):
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    seen = []

    @tool
    def get_weather():
        async def execute(city: str):
            """The weather of a city.

            Args:
                city: Its name.
            """
            seen.append(city)
            return "21"

        return execute

    os.environ["INSPECT_DISPLAY"] = "none"
    made = get_model(f"openai/{model}", base_url=url, api_key="-", responses_api=False)

    def said(*solvers):
        (log,) = eval(
            Task(
                dataset=[Sample(input=QUESTION, target="x")],
                solver=[*solvers, generate()],
                scorer=includes(),
                config=GenerateConfig(max_tokens=100),
            ),
            model=made,
            log_dir="logs",
            display="none",
        )
        assert log.status == "success", log.error
        return log.samples[0].output.completion

    plain = said()
    return plain, None, seen, said(use_tools(get_weather())), None


def dspy(url, model):
    import dspy

    lm = dspy.LM(f"openai/{model}", api_base=url, api_key="-", cache=False)
    plain = lm(QUESTION)[0]
    return plain if isinstance(plain, str) else plain["text"], None, None, None, None


CLIENTS = {
    "openai": openai_sdk,
    "openai responses": openai_responses,
    "openai-agents": openai_agents,
    "openai-agents, default": openai_agents_default,
    "pydantic-ai": pydantic_ai,
    "pydantic-ai, responses": pydantic_ai_responses,
    "langchain": langchain,
    "llama-index": llama_index,
    "litellm": litellm,
    "instructor": instructor,
    "inspect-ai": inspect,
    "dspy": dspy,
}

if __name__ == "__main__":
    name, url, model = sys.argv[1:]
    names = ("plain", "streamed", "seen", "loop", "formed")
    print(json.dumps(dict(zip(names, CLIENTS[name](url, model), strict=True))))
