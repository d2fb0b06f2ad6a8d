"""A dataclass becomes a command line: presets, flags, every kind of value, and one clear line for what is wrong."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from options import BadInput, option, parse


@dataclass
class Config:
    config: str = "small"
    out: str = option("", "run directory")
    resume: bool = option(False, "continue")
    steps: int = option(30, "optimizer steps, 10% of them warm", min=1)
    lr: float = option(1e-3, "learning rate", min=0, max=1)
    kl: Literal["reverse", "forward", "jsd"] = option("reverse", "direction")
    weights: tuple[float, ...] = option((1.0, 2.0), "loss weights", max=99)
    clip: tuple[float, float] = option((0.1, 0.2), "lo,hi", min=0)
    names: list[str] = field(default_factory=lambda: ["a"])
    deadline: float | None = option(None, "seconds")
    think_cap: bool = option(True, "limit reasoning")


PRESETS = {"tiny": {"steps": 2, "lr": 0.5}, "small": {}, "qwen36": {"steps": 200}}


def test_defaults_yield_to_the_preset_and_the_preset_to_flags():
    assert parse(Config, PRESETS, []) == Config()
    assert parse(Config, PRESETS, ["--config", "tiny"]) == Config(config="tiny", steps=2, lr=0.5)
    assert parse(Config, PRESETS, ["--steps", "7", "--config=tiny"]) == Config(config="tiny", steps=7, lr=0.5)


def test_every_kind_of_value():
    argv = "--kl jsd --weights 1,2.5,3 --clip 0,1 --names x,y --deadline 3 --no-think-cap --resume --lr 1e-4".split()
    assert parse(Config, PRESETS, argv) == Config(
        kl="jsd", weights=(1, 2.5, 3), clip=(0, 1), names=["x", "y"], deadline=3, think_cap=False, resume=True, lr=1e-4
    )
    assert parse(Config, PRESETS, ["--deadline", "none", "--weights=-1,-1e-3"]).weights == (-1, -1e-3)
    assert parse(Config, PRESETS, ["--no-think_cap"]) == parse(Config, PRESETS, ["--no-think-cap"])
    assert parse(Config, PRESETS, ["--out", "a_b"]).out == "a_b"  # only the flag's own underscores are dashes
    assert parse(Config, PRESETS, []).names is not parse(Config, PRESETS, []).names


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--stpes", "3"], "unknown option --stpes; did you mean --steps?"),
        (["--step", "3"], "unknown option --step; did you mean --steps?"),  # never an abbreviation
        (["--zzz"], "unknown option --zzz; --help lists them"),
        (["stray"], "unknown option stray; --help lists them"),
        (["--config", "smal"], "--config: 'smal' is not one of tiny | small | qwen36; did you mean small?"),
        (["--kl", "revers"], "--kl: 'revers' is not one of reverse|forward|jsd; did you mean reverse?"),
        (["--steps", "many"], "--steps: 'many' is not int"),
        (["--steps", "2.5"], "--steps: '2.5' is not int"),
        (["--steps", "0"], "--steps: 0 is not within 1 .. inf"),
        (["--lr", "nan"], "--lr: 'nan' is not float"),
        (["--lr", "inf"], "--lr: 'inf' is not float"),
        (["--weights", "1,-inf"], "--weights: '-inf' is not float"),
        (["--lr", "2"], "--lr: 2.0 is not within 0 .. 1"),
        (["--weights", "1,x"], "--weights: 'x' is not float"),
        (["--weights", "1,100"], "--weights: 100.0 is not within -inf .. 99"),
        (["--clip", "0.1"], "--clip: '0.1' is not 2 values with commas between"),
        (["--clip", "0.1,-1"], "--clip: -1.0 is not within 0 .. inf"),
        (["--steps"], "--steps: expected one argument"),
        (["--config"], "--config: expected one argument"),
    ],
)
def test_bad_options_are_named(argv, message):
    with pytest.raises(BadInput) as error:
        parse(Config, PRESETS, argv)
    assert str(error.value) == message


def test_a_config_without_presets_and_with_a_required_option():
    @dataclass
    class Plain:
        model: str
        n: int = 1

    assert parse(Plain, {}, ["--model", "m"]) == Plain("m")
    with pytest.raises(BadInput, match="required: --model"):
        parse(Plain, {}, [])
    with pytest.raises(BadInput, match="unknown option --config"):
        parse(Plain, {}, ["--model", "m", "--config", "small"])


def test_help_shows_text_and_the_values_of_the_preset(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(Config, PRESETS, ["--help", "--config", "tiny"], "What it is, at 100%.\n\n    how to run it\n")
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "What it is, at 100%.\n\n    how to run it\n" in out
    assert "optimizer steps, 10% of them warm (default 2)" in out and "reverse|forward|jsd" in out
