"""Chat templates: a conversation as the text that a model was tuned on, and where the answers are in it.

Source: transformers 5, utils/chat_template_utils.py, for what templates may call, and which tokens are an answer's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from training.data.tokenizer import TEMPLATE, TOKENIZER_SETTINGS

ANSWERS = "assistant"  # the role whose messages a model learns
BEGIN, END = "\ufdd0", "\ufdd1"  # around an answer; Unicode reserves them for a program's own use
MARK = re.compile(f"[{BEGIN}{END}]")
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Message = Mapping[str, Any]  # "role", "content", and more that the template may use


class TextSpan(NamedTuple):
    """Characters of a text."""

    start: int
    stop: int


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`, in which templates write an answer."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


class ChatTemplate:
    """A template in Jinja's language, run in its sandbox, with the special tokens that it may name.

    Raises: ValueError with the path for a template that is not valid.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], path: Path):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self.path, self.special_tokens, self.known_roles = path, special_tokens, set[str]()
        self.marks_answers = bool(GENERATION.search(source))
        try:
            self.template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"{path}: not a chat template ({error}); get the file again") from None

    def text(self, messages: Sequence[Message], tools: Any = None, prompts: bool = False) -> str:
        """Return a conversation as text, with the beginning of an answer if it `prompts` for one.

        Raises: ValueError with the template's own words for messages that it refuses.
        """
        return MARK.sub("", self._render(messages, tools, prompts))

    def _render(self, messages: Sequence[Message], tools: Any, prompts: bool) -> str:
        try:
            return self.template.render(
                messages=messages, tools=tools, add_generation_prompt=prompts, **self.special_tokens
            )
        except Exception as error:  # what the template does may raise errors of many classes
            words = " ".join(str(error).split())
            raise ValueError(f"{self.path} refuses it ({words}); change the messages or the template") from None

    def answers(self, messages: Sequence[Message], tools: Any = None) -> tuple[str, list[TextSpan]]:
        """Return a conversation as text, and the spans of the answers.

        They are what the template marks by `{% generation %}`, or else each message of the assistant, without its
        beginning if that is prompted for, and with its end.

        Raises: ValueError if the template has no answers, does not know a role, or changes answers that others follow.
        """
        self._check_roles(messages, tools)
        if self.marks_answers:
            text, spans = unmarked(self._render(messages, tools, prompts=False))
        else:
            text = self.text(messages, tools)
            numbers = (number for number, message in enumerate(messages) if message["role"] == ANSWERS)
            spans = [self._turn(messages, number, text, tools) for number in numbers]
        if not any(span.stop > span.start for span in spans):
            raise ValueError(f"{self.path} has no answer in it: no assistant's message changes the text")
        return text, spans

    def _turn(self, messages: Sequence[Message], number: int, text: str, tools: Any) -> TextSpan:
        """Return the span that a message adds to the messages before it."""
        begin, turn = self.text(messages[:number], tools, prompts=True), self.text(messages[: number + 1], tools)
        if not turn.startswith(begin):
            begin = self.text(messages[:number], tools)
        if not (turn.startswith(begin) and text.startswith(turn)):
            raise ValueError(
                f"{self.path} changes message {number + 1} once others follow it: mark answers there by "
                "{% generation %}"
            )
        return TextSpan(len(begin), len(turn))

    def _check_roles(self, messages: Sequence[Message], tools: Any) -> None:
        """Refuse roles whose messages change nothing, once for each role."""
        for role in {message["role"] for message in messages if message["content"]} - self.known_roles:
            others = [message for message in messages if message["role"] != role]
            try:
                changes = self.text(others, tools) != self.text(messages, tools)
            except ValueError:  # as that of an alternation of roles, or of no messages
                changes = True
            if not changes:
                words = "has no answer in it" if role == ANSWERS else f"does not know the role {role!r}"
                raise ValueError(f"{self.path} {words}: no message of it changes the text; use another template")
            self.known_roles.add(role)


def refuse(words: str) -> None:
    raise TemplateError(words)


def unmarked(text: str) -> tuple[str, list[TextSpan]]:
    """Remove the marks of answers; return the text, and the spans that were marked.

    >>> unmarked(f"ab{BEGIN}cd{END}e")
    ('abcde', [TextSpan(start=2, stop=4)])
    """
    positions = [mark.start() - number for number, mark in enumerate(MARK.finditer(text))]
    return MARK.sub("", text), [TextSpan(*pair) for pair in zip(positions[::2], positions[1::2], strict=True)]


def load_template(folder: Path) -> ChatTemplate:
    """Read a folder's template and its special tokens, as transformers does.

    Raises: ValueError with the files' names if there is none.
    """
    settings, file = read_settings(folder / TOKENIZER_SETTINGS), folder / TEMPLATE
    special = {name: text_of(value) for name, value in settings.items() if name.endswith("_token")}
    tokens = {name: value for name, value in special.items() if value is not None}
    if file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), tokens, file)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 ({error.reason}); get the file again") from None
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, with names
        named = [each for each in source if isinstance(each, dict) and each.get("name") == "default"]
        source = named[0].get("template") if named else None
    if not isinstance(source, str):
        raise ValueError(
            f"{folder}: no chat template, which conversations need: add {TEMPLATE}, or chat_template to "
            f"{TOKENIZER_SETTINGS}"
        )
    return ChatTemplate(source, tokens, folder / TOKENIZER_SETTINGS)


def read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); get the file again") from None
    return settings if isinstance(settings, dict) else {}


def text_of(token: Any) -> str | None:
    """Return a special token, which may be an object with its text, or None for what is no token."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
