"""``tinyspec chat``: a conversation on the terminal: a stream with a loop around it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from typing import TYPE_CHECKING

from tinyspec.cli import common
from tinyspec.errors import TinyspecError, refuse
from tinyspec.interrupts import between_steps
from tinyspec.outputs import StreamEvent
from tinyspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine


def add_chat(parser: ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the first message, from the system")
    common.add_options(parser, *common.MODEL, "drafter")
    common.add_sampling(
        parser, [name for name in common.SAMPLING if name != "num_return_sequences"]
    )


def chat(options: Namespace) -> int:
    """A conversation on the terminal.

    A line is a message; answers come as they are generated. A new one starts
    from the whole pages of the prefix cache (on a CPU 128 tokens each, on a
    GPU 64) that hold the conversation so far; it is as long as the model goes
    on, or --max-new-tokens. /clear begins another conversation, /exit and
    Ctrl-D end the chat. Ctrl-C ends an answer, and at the prompt the chat (exit
    status 130).

    example:
      tinyspec chat --model Qwen/Qwen3-0.6B --temperature 0.7 --seed 1 --deterministic
    """
    params = common.params_of({"max_new_tokens": None} | common.given(options))
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  # lines can be edited, and earlier ones called back
    with common.engine_of(options) as engine, suppress(EOFError):
        talk = Chat(engine, params, options.system)
        if terminal:
            print(f"{type(engine.model).__name__} on {engine.model.device}")
        while (line := input("> " if terminal else "")).strip() != "/exit":
            try:
                if line.strip():
                    talk.take(line)
            except (ValueError, TinyspecError) as error:
                common.say(f"{common.told(error)} (/clear begins another conversation)")
    return 0


class Chat:
    """A conversation with one engine.

    Raises ValueError for a model whose tokenizer has no chat template.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None):
        if not getattr(engine.tokenizer, "chat_template", None):
            name = type(engine.model).__name__
            raise refuse("model", name, "one whose tokenizer has a chat template")
        self.engine, self.params = engine, params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)

    def take(self, line: str) -> list[StreamEvent]:
        """Stream the answer to a message, which Ctrl-C ends where it is, and return its events; or
        begin again. Raises ValueError and TinyspecError; the conversation then stays as it was."""
        told: list[StreamEvent] = []
        if line.strip() == "/clear":
            self._messages = list(self._system)
            return told
        messages = [*self._messages, {"role": "user", "content": line}]
        stream = self.engine.stream([messages], self.params)
        with suppress(KeyboardInterrupt), between_steps(), stream as events:
            for event in events:
                told.append(event)
                print(event.text, end="", flush=True)
        print()
        if told and told[-1].error is not None:
            raise ValueError(f"the answer was aborted: {told[-1].error}")
        # The template puts what stands before an answer; a blank twice would not be its tokens.
        content = "".join(event.text or "" for event in told).lstrip()
        self._messages = [*messages, {"role": "assistant", "content": content}]
        return told
