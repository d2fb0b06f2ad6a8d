"""Options: a dataclass becomes the command line of a script, with presets and one clear line for what is wrong.

    defaults < PRESETS[--config] < flags

    @dataclass
    class Config:
        config: str = option("small", "preset")
        steps: int = option(30, "optimizer steps", min=1)

    cfg = parse(Config, {"tiny": dict(steps=2), "small": {}}, argv, __doc__)

A number lies within its `min` and `max`; an unknown flag, preset or value is named, with what looks like it; `--help`
shows all values under the chosen preset. No torch, and no file is read.
"""

import argparse
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class BadInput(Exception):
    """The user can mend it. The message is one line: what is wrong, where, and what would be right."""


def closest(word: str, options: Iterable[str]) -> str:
    """The tail of an error message: `; did you mean X?` if one of `options` looks like `word`, else nothing."""
    match = difflib.get_close_matches(word, list(options), n=1)
    return f"; did you mean {match[0]}?" if match else ""


def option(default: Any, help: str, **limits: float) -> Any:
    """A field of a Config: default, help text and, for numbers, `min=` and `max=`."""
    return dataclasses.field(default=default, metadata={"help": help, **limits})


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise BadInput(message.removeprefix("argument "))


def parse(Config: type[T], presets: dict[str, dict], argv: list[str], description: str = "") -> T:
    """Make a `Config` (a dataclass) from its defaults < `presets[name]` (a dict) < the flags in `argv`.

    `steps: int = option(30, "optimizer steps", min=1)` is `--steps 30`; a bool `--x` / `--no-x`; a Literal a choice; a
    tuple or list `1,2,3`, each within min and max; `float | None` also takes `none`. `_` and `-` are one. `--config
    NAME` picks the preset, by default that of the field `config`, or `small`. BadInput for what is unknown, missing or
    of a wrong value; `--help` prints all options with their values under the chosen preset and exits 0.
    """
    fields, kinds = dataclasses.fields(Config), typing.get_type_hints(Config)
    flags = {f.name: "--" + f.name.replace("_", "-") for f in fields if f.name != "config"}
    values = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields}
    argv = [re.sub(r"^--[\w-]+", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
    look = {"usage": "%(prog)s [--option value ...]", "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser, first = (Parser(add_help=h, description=description, allow_abbrev=False, **look) for h in (True, False))
    if presets:
        names = " | ".join(presets)
        for each in (first, parser):  # the preset first: --help shows its values
            each.add_argument("--config", default=values.get("config", "small"), help=names, metavar="NAME")
        name = first.parse_known_args(argv)[0].config
        if name not in presets:
            raise BadInput(f"--config: '{name}' is not one of {names}{closest(name, presets)}")
        values |= presets[name]
    for f in (f for f in fields if f.name in flags):
        kind, default = kinds[f.name], values[f.name]
        how = {"type": partial(convert, kind=kind), "metavar": kind_name(kind)}
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else how
        text = f"{f.metadata.get('help', '')} ({'required' if default is MISSING else f'default {default}'})"
        how |= {"required": default is MISSING, "help": text.replace("%", "%%")}
        parser.add_argument(flags[f.name], default=argparse.SUPPRESS, **how)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        raise BadInput(f"unknown option {flag}{closest(flag, [*flags.values(), '--config']) or '; --help lists them'}")
    values |= vars(known)
    for f in fields:
        value, low, high = values[f.name], f.metadata.get("min", -math.inf), f.metadata.get("max", math.inf)
        for x in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(x, (int, float)) and not low <= x <= high:
                raise BadInput(f"{flags[f.name]}: {x} is not within {low} .. {high}")
    return Config(**{f.name: values[f.name] for f in fields})


def convert(text: str, kind: Any) -> Any:
    """One word of the command line as a value of the type `kind`."""
    outer, inner = typing.get_origin(kind), typing.get_args(kind)
    if outer is typing.Literal:
        choices = {str(choice): choice for choice in inner}
        if text not in choices:
            raise argparse.ArgumentTypeError(f"'{text}' is not one of {kind_name(kind)}{closest(text, choices)}")
        return choices[text]
    if outer in (typing.Union, types.UnionType):  # X | None
        return None if text == "none" else convert(text, next(k for k in inner if k is not type(None)))
    if outer in (tuple, list):
        values = outer(convert(part.strip(), inner[0]) for part in text.split(",") if part.strip())
        if outer is tuple and ... not in inner and len(values) != len(inner):
            raise argparse.ArgumentTypeError(f"'{text}' is not {len(inner)} values with commas between")
        return values
    with suppress(ValueError):
        value = kind(text)
        if kind is not float or math.isfinite(value):  # NaN and infinity are the right value of no option
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is not {kind_name(kind)}")


def kind_name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    return str(kind).removeprefix("typing.") if typing.get_args(kind) else kind.__name__
