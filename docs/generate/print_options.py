"""Run a program, and where it would print its help, print its parser's description and options as JSON."""

import argparse
import json
import runpy
import sys
from typing import Any

ADD_PARSER = argparse._SubParsersAction.add_parser


def print_options(parser: argparse.ArgumentParser, file: Any = None) -> None:
    formatter = parser._get_formatter()
    options = [option(action, formatter) for action in parser._actions if action.help != argparse.SUPPRESS]
    print(json.dumps({"description": parser.description or "", "options": options}))


def option(action: argparse.Action, formatter: argparse.HelpFormatter) -> dict[str, Any]:
    """Return an option's flags, none for a positional argument; its values; the words for one; and its help."""
    choices = [*map(str, action.choices or ())] if action.metavar is None else []
    action.metavar = words = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    return {
        "flags": action.option_strings,
        "choices": choices,
        "values": "" if action.nargs == 0 else formatter._format_args(action, words).strip(),
        "help": formatter._expand_help(action) if action.help else "",
    }


def add_described(actions: Any, name: str, **settings: Any) -> argparse.ArgumentParser:
    """Add an action's parser, whose help in the list of actions describes it."""
    return ADD_PARSER(actions, name, **{"description": settings.get("help"), **settings})


def run(words: list[str]) -> None:
    """Run a program, as `["-m", "training"]`; all later parsers of this process print so, too."""
    argparse.ArgumentParser.print_help = print_options  # type: ignore[method-assign]
    argparse._SubParsersAction.add_parser = add_described  # type: ignore[method-assign, assignment]
    sys.argv = [*(words[1:] if words[0] == "-m" else words), "--help"]
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
