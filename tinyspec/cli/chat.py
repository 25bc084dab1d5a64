"""``tinyspec chat``: a conversation on the terminal: a stream with a loop around it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyspec.cli import common
from tinyspec.errors import TinyspecError, refuse
from tinyspec.interrupts import between_steps
from tinyspec.outputs import RequestOutput
from tinyspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine

MAX_NEW_TOKENS = 512
SWITCH = {"": True, "on": True, "off": False}


def add_chat(parser: ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the first message, from the system")
    common.add_options(parser, *common.MODEL)
    common.add_sampling(
        parser, [name for name in common.SAMPLING if name != "num_return_sequences"]
    )


def chat(options: Namespace) -> int:
    """A conversation on the terminal.

    A line is a message; answers come as they are generated. A new one starts
    from the whole pages of the prefix cache (on a CPU 128 tokens each, on a
    GPU 64) that hold the conversation so far. /seed N, /deterministic
    [on|off], /save FILE (one output a line, for `tinyspec audit`), /clear,
    /help and /exit are commands. Ctrl-C ends an answer, and at the prompt the
    chat (exit status 130), Ctrl-D as well (0).

    example:
      tinyspec chat --model Qwen/Qwen3-0.6B --temperature 0.7 --seed 1 --deterministic
    """
    params = common.params_of({"max_new_tokens": MAX_NEW_TOKENS} | common.given(options))
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  # lines can be edited, and earlier ones called back
    with common.engine_of(options) as engine:
        talk = Chat(engine, params, options.system)
        if terminal:
            print(f"{type(engine.model).__name__} on {engine.model.device}; /help tells the rest")
        try:
            while not talk.take(input("> " if terminal else "")):
                pass
        except EOFError:
            pass
    return 0


class Chat:
    """A conversation with one engine. outputs: of every answer, as audit takes them.

    Raises ValueError for a model whose tokenizer has no chat template.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None):
        if not getattr(engine.tokenizer, "chat_template", None):
            name = type(engine.model).__name__
            raise refuse("model", name, "one whose tokenizer has a chat template")
        self.engine, self.params = engine, params
        self.outputs: list[RequestOutput] = []
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)

    def take(self, line: str) -> bool:
        """Answer a message or carry out a command; True for the command that ends the chat. What is
        wrong with either is said, and the conversation stays as it was."""
        name, _, rest = line.strip().partition(" ")
        try:
            if name.startswith("/") and name != "/exit":
                print(self._command(name, rest.strip()))
            elif name and name != "/exit":
                self._answer(line)
        except (ValueError, TinyspecError, OSError) as error:
            common.say(common.told(error))
        return name == "/exit"

    def _answer(self, line: str) -> None:
        """Stream the answer to a message; Ctrl-C ends it where it is."""
        from tinyspec.engine.prompts import to_token_ids
        from tinyspec.engine.results import output_of

        messages = [*self._messages, {"role": "user", "content": line}]
        ids = to_token_ids(messages, self.engine.tokenizer)
        (request,) = self.engine.prepare([ids], self._fitting(len(ids)))
        try:
            with between_steps(), self.engine.follow([request]) as events:
                for event in events:
                    print(event.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
        print()
        output = output_of(request, self.engine.tokenizer)
        (completion,) = output.completions
        if completion.error is not None:
            raise ValueError(f"the answer was aborted: {completion.error}")
        # The template puts what stands before an answer; a blank twice would not be its tokens.
        content = (completion.text or "").lstrip()
        self._messages = [*messages, {"role": "assistant", "content": content}]
        self.outputs.append(output)

    def _fitting(self, length: int) -> SamplingParams:
        """The parameters with as many tokens as a conversation of ``length`` leaves room for."""
        most = self.engine.config.max_model_len
        assert most is not None
        room = most - length
        if room < 1:
            allowed = f"fewer than max_model_len={most}; /clear begins another conversation"
            raise refuse("conversation", f"{most - room} tokens", allowed)
        count = min(room, self.params.most_new_tokens)
        least = min(count, self.params.min_new_tokens)
        return replace(self.params, max_new_tokens=count, min_new_tokens=least)

    def _command(self, name: str, value: str) -> str:
        """Carry out a command; what to print of it."""
        if name == "/help":
            return str(getdoc(chat))
        if name == "/seed":
            seed: Any = int(value) if value.isdecimal() else value
            self.params = replace(self.params, seed=seed)
            return f"seed {seed}"
        if name == "/deterministic":
            if value not in SWITCH:
                raise refuse("deterministic", value, "on or off")
            self.params = replace(self.params, deterministic=SWITCH[value])
            return f"deterministic {'on' if SWITCH[value] else 'off'}"
        if name == "/save":
            if not value:
                raise refuse("file", value, "the name of a file")
            with Path(value).open("x") as file:
                file.writelines(output.to_json() + "\n" for output in self.outputs)
            return f"{len(self.outputs)} answers in {value}"
        if name == "/clear":
            self._messages = list(self._system)
            self.outputs.clear()
            return "a new conversation"
        raise refuse("command", name, "/seed, /deterministic, /save, /clear, /help or /exit")
