"""The evaluation sets: held out, solvable, the same everywhere, and refused where they do not fit."""

import copy
import json
import random
import re
from functools import cache
from pathlib import Path

import pytest
import common
from tokenizers import Tokenizer

import eval as ev  # the room's name is that of a built-in function
from augment import augment
from chat import Codec
from options import BadInput
from data import base_words, general, make_sets
from data.make_sets import CHANGES, EXTRA_TOOLS, NOISE_LINES, SETS, Sets, make_row, make_rows, needed, stage, variant
from facts import score
from harness import Harness, assemble
from oracle import teach
from reword import SENTENCE, bank
from sim import Faults, World, make_task

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "data" / "sets"
H = Harness.load(ROOT / "data" / "harness")
WORLD, TRAIN = (World.load(ROOT / "data" / "world" / "zh.json", split) for split in ("test", "train"))
TOKENS = Codec(Tokenizer.from_file(str(ROOT / "data" / "base-small" / "tokenizer.json")))
AGENT = SETS[:4]
pytestmark = pytest.mark.usefixtures("at_the_root")


@cache
def first(name):
    return make_rows(name, 24, H, WORLD)


def rows(name, n=24):
    return copy.deepcopy(first(name)[:n])


@pytest.mark.parametrize("preset, names", [("tiny", SETS), ("small", ("T1", "T4"))])
def test_the_shipped_manifests_are_what_the_code_makes(preset, names, tmp_path):
    """If not: `python data/make_sets.py --config PRESET`. The first rows of small are those of tiny.

    The longest rollouts are those of the tokenizer that was there when they were made, and are told, not tested.
    """
    sets, size = Sets.load(SHIPPED / f"{preset}.json"), {"tiny": 8, "small": 500}[preset]
    assert list(sets.entries) == list(SETS) and {e["items"] for e in sets.entries.values()} == {size}
    for name in names:
        made = sets.rows(name, tmp_path)
        assert len(made) == size and make_sets.hash_of(make_sets.lines_of(made)) == sets.entries[name]["sha256"]
        assert sets.rows(name, tmp_path) == made and len(list(tmp_path.iterdir())) == names.index(name) + 1
    assert all(sets.entries[name]["oracle"] == 100 for name in AGENT)
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 10_000


def test_no_row_depends_on_how_many_there_are():
    """FAULTS 30."""
    for name in SETS:
        assert make_rows(name, 3, H, WORLD) == rows(name, 3)
    assert make_row("T2", 2, H, WORLD) == rows("T2", 3)[2] != make_row("T2", 2, H, WORLD, seed=1)


def test_t2_asks_the_questions_of_t1():
    asked = [[(r["seed"], r["danmaku"], r["context"]) for r in rows(name, 12)] for name in ("T1", "T2")]
    assert asked[0] == asked[1]
    assert {r["commit"] for r in rows("T1", 12)} == {H.commit}
    commits = {r["commit"] for r in rows("T2", 12)}
    assert len(commits) == 12 and H.commit not in commits


def test_every_item_can_be_answered_within_the_context():
    """The oracle gets all points on every kind of change, and its longest rollout fits into the default context."""
    seen = set()
    for name in AGENT:
        for row in rows(name):
            case = stage(row, H, WORLD)
            t = teach(case.harness, case.task, TOKENS, row["seed"], Faults(*row["faults"]), verbosity=2)
            got = score(case.harness, case.task, t)
            assert got["accuracy"] == got["effectiveness"] == 1, row
            assert len(t.ids) < ev.Config().context
            seen |= set(row["changes"])
    assert seen >= {*CHANGES["T3-tool"], *CHANGES["T3-prompt"], "skill_id", "skill_content", "tool", "prompt", "hook"}


def tool_variant(change, seed, task):
    return variant(H, "T3-tool", seed, [change], task)[0]


def test_each_tool_change_does_what_it_says_and_no_more():
    """FAULTS 53: a removed tool is mentioned nowhere; wider types take every argument that was right."""
    gone_asked = lost = 0
    for seed in range(12):
        task = make_task(WORLD, seed)
        named, described, renamed, wider, more, fewer = (
            tool_variant(c, seed, task) for c in ("names", "descriptions", "parameters", "types", "extra", "missing")
        )
        for h in (named, described, renamed, wider, more, fewer):
            assert h.commit != H.commit and all(re.match(r"- (tools|skills)[/ ]", line) for line in H.diff(h))
        assert not {t.name for t in named.tools} & {t.name for t in H.tools}
        assert {t.name for t in described.tools} == {t.name for t in H.tools}
        assert {t.description for t in described.tools}.isdisjoint(t.description for t in H.tools)
        assert renamed.tool("get_inventory").param_ids.keys() != {"link_id"}
        for t in wider.tools:
            values = {"integer": 3, "string": "退货"}
            right = {k: values[v["type"]] for k, v in H.tool(t.id).parameters["properties"].items()}
            assert not list(wider.validators[t.id].iter_errors(right))
            changed = t.parameters != H.tool(t.id).parameters
            assert changed == (bool(right) and t.id != "load_skill")
        added = [t for t in more.tools if H.tool(t.id) is None]
        assert 1 <= len(added) <= 3 and [t.id for t in more.tools if H.tool(t.id)] == [t.id for t in H.tools]
        [gone] = [t for t in H.tools if fewer.tool(t.id) is None]
        text = json.dumps([assemble(fewer, "", {}), [fewer.skill_text(s) for s in fewer.skills]], ensure_ascii=False)
        assert gone.id not in text and needed(task) <= {s.id for s in fewer.skills}
        asked = {make_sets.ROUTES[ask.kind][0] for ask in task.asks}
        gone_asked += gone.id in asked
        lost += bool(asked - {None})
    assert 0 < gone_asked < lost


def test_the_rates_of_faults_are_raised_where_the_row_says_so():
    made = rows("T3-tool")
    for row in made:
        assert row["faults"] == [
            make_sets.FAULT * (kind in row["changes"]) for kind in ("timeout", "malformed", "denied")
        ]
        assert row["intent"] != "small_talk" and 1 <= len(row["changes"]) <= 3
    assert 5 * max(vars(Faults()).values()) < make_sets.FAULT and sum(any(r["faults"]) for r in made) > 8
    assert not any(any(r["faults"]) for name in ("T1", "T2", "T3-prompt") for r in rows(name, 12))


def test_each_prompt_change_does_what_it_says_and_no_more():
    lines = {line for texts in NOISE_LINES.values() for line in texts}
    for seed in range(12):
        task = make_task(WORLD, seed)
        order, form, wording, limits, skills, noise = (
            variant(H, "T3-prompt", seed, [change], task)[0] for change in CHANGES["T3-prompt"]
        )
        for h in (order, form, wording, limits, skills, noise):
            assert h.commit != H.commit and h.hooks == H.hooks and h.fallback == H.fallback
            assert {(s.id, s.name, s.body) for s in H.skills} <= {(s.id, s.name, s.body) for s in h.skills}
            assert {(t.id, t.name) for t in h.tools} == {(t.id, t.name) for t in H.tools}
        assert (
            sorted("".join(order.blocks.values())) == sorted("".join(H.blocks.values())) and order.formats == H.formats
        )
        assert form.formats != H.formats or form.blocks != H.blocks
        assert wording.blocks != H.blocks and wording.system == H.system and wording.limits == H.limits
        assert limits.limits != H.limits and limits.blocks == H.blocks and limits.system == H.system
        assert 2 <= len(skills.skills) - len(H.skills) <= 4 and skills.blocks == H.blocks
        back = {k: "\n".join(x for x in v.split("\n") if x not in lines) for k, v in noise.blocks.items()}
        assert back == H.blocks and noise.copy(blocks=H.blocks).commit == H.commit


def vocabulary(h):
    """(names, texts) that h shows and the original does not; texts sentence by sentence."""
    things = (*h.skills, *h.tools)
    texts = [x.description for x in things] + [s.body for s in h.skills] + list(h.blocks.values())
    texts += [x.message for x in h.hooks] + list(h.formats.values())
    texts += [v["description"] for t in h.tools for v in t.parameters["properties"].values() if "description" in v]
    said = {s.strip(" -*·•+#。！？") for text in texts for line in text.split("\n") for s in SENTENCE.split(line)}
    return {x.name for x in things}, {s for s in said if s}


def test_nothing_of_a_variant_is_seen_in_training():
    """Names, descriptions, sentences, headings and formats of the sets occur in no variant of the train pool."""
    names, texts = vocabulary(H)
    trained = [vocabulary(augment(H, seed, pool="train", keep=set())[0]) for seed in range(80)]
    train_names, train_texts = (set.union(*parts) for parts in zip(*trained))
    assert len(train_names - names) > 300 and len(train_texts - texts) > 100
    for name in ("T2", "T3-tool", "T3-prompt"):
        shown = [vocabulary(stage(row, H, WORLD).harness) for row in rows(name)]
        for got, original, seen in zip(zip(*shown), (names, texts), (train_names, train_texts)):
            new = set().union(*got) - original
            assert len(new) > 10 and not new & seen, name


def test_what_only_the_sets_say_is_in_no_pool_of_training():
    pools = [
        (ROOT / "data" / "hsa" / file).read_text(encoding="utf-8") for file in ("zh.json", "en.json", "names.json")
    ]
    pools += [Path(base_words.__file__).read_text(encoding="utf-8"), (ROOT / "data/harness/tools.json").read_text()]
    said = [text for texts in EXTRA_TOOLS.values() for text, _ in texts] + sum(NOISE_LINES.values(), [])
    assert len(said) == len(set(said)) == 36
    assert not [text for text in said for pool in pools if text.strip("。.") in pool]
    parameters = bank("heldout").names["parameters"]
    assert not set(parameters) & set(bank("train").names["parameters"]) | set(parameters) & {
        "link_id",
        "topic",
        "skill",
    }


def test_products_and_facts_are_not_those_of_training():
    pools = ("prefix", "noun", "city", "faq", "promotion")
    seen = {word for key in pools for word in TRAIN.pool(key)} | {
        x for k in TRAIN["attribute"] for x in TRAIN.pool("attribute", k)
    }
    trained = {p + n for p in TRAIN.pool("prefix") for n in TRAIN.pool("noun")}
    for name in AGENT:
        for row in rows(name, 20):
            task = stage(row, H, WORLD).task
            assert row["split"] == "test" and row["context"] == task.context
            facts = [x for link in task.links for x in (link["city"], *link["attributes"].values(), *link["faq"])]
            assert not seen & {task.promotion, *facts}
            assert not [link["name"] for link in task.links for known in trained if known in link["name"]]


def test_t4_is_not_in_the_train_split():
    made = make_rows("T4", 300, H, WORLD)
    prompts = [row["prompt"] for row in made]
    trained = {general.sample(random.Random(seed), "train", "ifeval")["prompt"] for seed in range(3000)}
    assert len(set(prompts)) == 300 and not trained & set(prompts)
    train_topics = {w for row in general.TOPICS.values() for part in row.split("|")[::2] for w in part.split()}
    for row in made:
        ids = row["instruction_id_list"]
        assert ids and len(ids) == len(row["kwargs"])
        if "detectable_format:constrained_response" in ids:
            continue
        requests = [r for (_, split), rs in general.REQUEST.items() if split == "test" for r in rs]
        found = [
            m
            for r in requests
            if (m := re.search(re.escape(r).replace(r"\{x\}", r"([\w ]+?)(?=[。.，])"), row["prompt"]))
        ]
        assert found and not {m[1] for m in found} & train_topics, row["prompt"]


def test_a_set_of_another_harness_world_or_code_is_one_line(tmp_path, monkeypatch):
    row = rows("T2", 1)[0]
    other = H.copy(fallback="稍后回复大家。")
    for h, world in ((other, WORLD), (H, TRAIN)):
        with pytest.raises(BadInput, match="^T2/0: made of another harness, world or code; python data/make_sets.py"):
            stage(row, h, world)
    manifest = common.read_json(SHIPPED / "tiny.json")
    sets = Sets.load(SHIPPED / "tiny.json")
    sets.rows("T4", tmp_path)
    [file] = tmp_path.iterdir()
    file.write_text(file.read_text().replace("。", "！", 1))
    with pytest.raises(BadInput, match=r"T4-\w+\.jsonl is not the set of .*tiny.json \(hash \w+, not \w+\): remove it"):
        sets.rows("T4", tmp_path)
    file.unlink()
    monkeypatch.setattr(general, "REQUEST", {k: ["再说说{x}"] for k in general.REQUEST})
    with pytest.raises(BadInput, match="^T4, made now, is not the set of .*: the code has changed since"):
        sets.rows("T4", tmp_path)
    assert not list(tmp_path.iterdir())
    for change, message in (
        ({"harness_commit": "0" * 12}, "its sets are of harness 000000000000, but data/harness is"),
        ({"sets": 3}, "no 'sets' in it"),
    ):
        common.write_json(tmp_path / "m.json", manifest | change)
        with pytest.raises(BadInput, match=message):
            Sets.load(tmp_path / "m.json")
    with pytest.raises(BadInput, match="no set T9 in it; there are T1, T2"):
        sets.rows("T9")
    sets.entries["T1"] = {}
    with pytest.raises(BadInput, match="set T1 has no 'items' and 'sha256'"):
        sets.rows("T1")
    with pytest.raises(BadInput, match="--out: sets of another harness"):
        make_sets.main(["--config", "tiny", "--harness", "mine"])
