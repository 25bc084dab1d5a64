"""The clients that people have, as they are installed: each in a process of its own, against a
server whose model says what an agent's would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clients.scripts import CLIENTS
from tests.serve.test_tools import TEMPLATES
from tests.support.patience import PATIENCE
from tests.support.script import agent, saying
from tests.support.serving import MODEL, running, speaking
from tests.support.tokenizers import tokenizer_of
from tinyspec.serve.tools import HERMES

ROOT = Path(__file__).parents[2]
TEXT = "It is 21 degrees in Paris."
MODULES = {
    "openai": "openai",
    "openai responses": "openai",
    "openai-agents": "agents",
    "openai-agents, default": "agents",
    "pydantic-ai": "pydantic_ai",
    "pydantic-ai, responses": "pydantic_ai",
    "langchain": "langchain_openai",
    "llama-index": "llama_index.llms.openai_like",
    "litellm": "litellm",
    "instructor": "instructor",
    "inspect-ai": "inspect_ai",
    "dspy": "dspy",
}
EXPECTED = {"plain": TEXT, "streamed": TEXT, "seen": ["Paris"], "loop": TEXT, "formed": 21}


def there(module):
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "deterministic"])
def server(request):
    engine = speaking(tokenizer_of("special markup"), TEMPLATES["hermes"])
    with engine, running(engine, deterministic=request.param) as found:
        yield found


@pytest.mark.slow("clients", 20)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client(server, name, monkeypatch, tmp_path):
    if not there(MODULES[name]):
        pytest.skip(f"needs {MODULES[name]}")
    saying(
        server, monkeypatch, agent(HERMES, {"city": "Paris", "degrees": 21}, {"degrees": 21}, TEXT)
    )
    command = [sys.executable, "-m", "tests.clients.scripts", name, f"{server.url}/v1", MODEL]
    quiet = {"PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "-", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {k: v for k, v in found.items() if v is not None} == {
        k: v for k, v in EXPECTED.items() if found[k] is not None
    }
