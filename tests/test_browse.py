"""The commands of harness.py: what they print, and what they refuse."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from browse import main
from harness import Harness
from options import BadInput
from sim import make_task
from test_chat import HERMES, teach
from test_harness import SHIPPED, WORLD

ROOT = Path(__file__).parent.parent


def test_trace_shows_the_worst_first_and_names_a_torn_line(tmp_path, capsys):
    t = teach(Harness.load(SHIPPED), make_task(WORLD, 0), HERMES, 0)
    path = tmp_path / "t.jsonl"
    rows = [json.dumps(replace(t, seed=i, rewards={"tool": r}).to_dict()) for i, r in enumerate((1.0, None, 0.5))]
    path.write_text("\n".join([*rows, ""]), encoding="utf-8")
    main(["trace", str(path), "--count", "2"])
    out = capsys.readouterr().out
    assert out.index("== seed 2 ") < out.index("== seed 0 ") and "== seed 1 " not in out  # unscored: last
    assert f"reply   {t.reply}" in out
    for bad in (rows[0][:50], "[]", "3", '{"when": 1}', '{"ids": [1]}'):
        path.write_text("\n".join([rows[0], bad]), encoding="utf-8")
        with pytest.raises(BadInput, match=r"t\.jsonl:2: not a stored rollout"):
            main(["trace", str(path)])
    for bad in ({"events": [{}]}, {"rewards": {"tool": "x"}}, {"events": [{"event": "reply", "text": 1}]}):
        path.write_text(json.dumps(t.to_dict() | bad), encoding="utf-8")
        with pytest.raises(BadInput, match=r"t\.jsonl: not stored rollouts"):
            main(["trace", str(path)])


@pytest.mark.parametrize("argv", [[], ["shw"], ["trace"], ["trace", "--count"], ["show", "--no-such"], ["--seed", "3"]])
def test_wrong_commands_are_one_line(argv):
    with pytest.raises(BadInput):
        main(argv)


def test_help_and_show(capsys):
    for word in ("-h", "--help"):
        with pytest.raises(SystemExit) as end:
            main([word])
        assert end.value.code == 0 and "--greedy" in capsys.readouterr().out
    main(["show", "--harness", str(SHIPPED), "--world", str(ROOT / "data" / "world" / "zh.json")])
    assert "[system]" in capsys.readouterr().out


def test_chat_answers_what_is_typed_and_remembers_it(model_dir, monkeypatch, capsys):
    typed = iter(["3号多少钱", "包邮吗", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    world = str(ROOT / "data" / "world" / "zh.json")
    main(["chat", "--harness", str(SHIPPED), "--world", world, "--model", str(model_dir), "--seed", "3"])
    out = capsys.readouterr().out
    assert "an empty line ends" in out
    assert out.index("弹幕    '3号多少钱'") < out.index("reply   ") < out.index("弹幕    '包邮吗'")
    assert out.count("reply   ") == 2
