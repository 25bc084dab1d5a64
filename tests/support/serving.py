"""A server on loopback, in a thread, over the bundled model, and clients of it."""

import asyncio
import json
import time
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

import httpx
import openai
import uvicorn
from transformers import LlamaForCausalLM

from tests.support.patience import PATIENCE
from tinyspec import AsyncEngine, Engine, EngineConfig
from tinyspec.cli.serve import KEEP_ALIVE
from tinyspec.serve.app import BOUNDS, Server, create_app
from tinyspec.tools.demo import BUNDLED

MODEL = "storyteller"
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

START = "{% for message in messages %}{{ message['role'] }}: "
CONTENT = "{{ message['content'] }}{% for call in message.tool_calls %}{{ call.function.name }}"
CONTENT += "({{ call.function.arguments.items() | list }}){% endfor %}\n{% endfor %}"
# Chat templates of tools in two formats, and one of a model that thinks.
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}" + START + CONTENT,
    "llama": '{% if tools %}{{ tools | tojson }} "parameters": {% endif %}' + START + CONTENT,
}
THINKING = TEMPLATES["hermes"] + "{% if false %}</think>{% endif %}"


@dataclass
class Served:
    """A running server. engine: under it. thread: its event loop's."""

    url: str
    engine: Engine
    settings: uvicorn.Config
    thread: Thread

    def client(self, kind=openai.OpenAI, **given):
        return kind(base_url=f"{self.url}/v1", max_retries=0, **{"api_key": "none"} | given)

    def post(self, path, **body):
        return self.post_raw(path, {"model": MODEL, **body})

    def post_raw(self, path, body):
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE)

    def settled(self):
        """Wait until nothing is unfinished; fails where something hangs."""
        wait_until(lambda: not self.engine.tracker.requests)


def events(response):
    """What a stream sent, but for its end."""
    data = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in data]


def wait_until(done):
    until = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < until
        time.sleep(0.005)


@contextmanager
def running(engine, limits=None, model=MODEL, api_key=None, bounds=BOUNDS, origins=(), **settings):
    shared = AsyncEngine(engine, **limits or {})
    app = create_app(Server(shared, model, **settings), api_key, bounds, origins)
    kept = {"timeout_keep_alive": KEEP_ALIVE}
    config = uvicorn.Config(app, port=0, http="h11", log_level="error", **kept)
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", engine, config, thread)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        asyncio.run(shared.close())
        assert not thread.is_alive()


@contextmanager
def storyteller(**config):
    with Engine.from_pretrained(BUNDLED, device="cpu", config=EngineConfig(**config)) as engine:
        yield engine


def speaking(tokenizer, template):
    """An engine of the bundled model with another tokenizer, which has this chat template."""
    tokenizer.chat_template = template
    model = LlamaForCausalLM.from_pretrained(BUNDLED)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return Engine(model, tokenizer, EngineConfig(num_pages=64))
