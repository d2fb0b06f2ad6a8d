"""The live room: tasks, tool server, and an oracle that is right under any harness, whatever fails."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from options import BadInput
from common import seed_of
from data.random_harness import random_harness
from facts import REWARDS, says, score
from harness import Harness
from parts import LOAD_SKILL
from sim import COUPON, FAQ, INFO, INTENTS, NO_FAULTS, ROOM, ROUTES, SHIPPING, STOCK, Ask, Faults, Task, World
from sim import SHAPE, check_harness, make_task, met_fault, plain_topic, readable, same_call, wanted
from oracle import Oracle
from test_chat import HERMES, teach

ROOT = Path(__file__).parent.parent
TRAIN, TEST = (World.load(ROOT / "data" / "world" / "zh.json", split) for split in ("train", "test"))
H = Harness.load(ROOT / "data" / "harness")
ONE = dict.fromkeys(REWARDS, 1.0)
SOME = Faults(0.15, 0.1, 0.1)

LINKS = [
    {"link_id": n, "name": name, "price": price, "coupon": coupon, "list_price": price + coupon, "stock": stock}
    | {"attributes": {"颜色": color}, "faq": {"孕妇": n != 2}, "city": city, "hours": hours, "days": 7}
    for n, name, price, coupon, stock, color, city, hours in [
        (1, "清爽面膜", 89, 20, 50, "白色", "杭州", 24),
        (2, "轻薄雨伞", 35, 0, 0, "黑色", "义乌", 48),
        (3, "儿童牙刷X2", 120, 30, 61, "米色", "广州", 72),
    ]
]


def make(*asks: Ask, promotion="满199减20") -> Task:
    """A task by hand, over three known links."""
    context = {"links": [{k: x[k] for k in ("link_id", "name")} for x in LINKS], "current_link_id": 1, "history": []}
    context["signals"] = {"online": 777}
    return Task(0, "product", list(asks), ["问"] * len(asks), context, LINKS, promotion, TRAIN)


def taught(h, task, seed, faults=NO_FAULTS, **style):
    """(trajectory, rewards) of the oracle."""
    t = teach(h, task, HERMES, seed, faults, **style)
    return t, score(h, task, t)


def on(n, tool=INFO, **more):
    return (tool, {"link_id": n} | more)


PRICE = make(Ask("price", 1))

# ---------------------------------------------------------------------------------------------------------------------
# world and tasks


def test_same_seed_same_task():
    """FAULTS 30: a task is a pure function of world and seed, whatever was made before it."""

    def made(seeds):
        world = World.load(ROOT / "data" / "world" / "zh.json")
        return [vars(make_task(world, s)) | {"world": None} for s in seeds]

    first = made(range(50))
    random.seed(1)
    assert made(reversed(range(50))) == first[::-1]
    assert len({json.dumps(t["links"]) for t in first}) == 50


def test_intents_come_in_the_reports_shares():
    tasks = [make_task(TRAIN, s) for s in range(5000)]
    shares = Counter(t.intent for t in tasks)
    for intent, share in INTENTS.items():
        assert abs(shares[intent] / 5000 - share) < 0.02, intent
    assert {a.kind for t in tasks for a in t.asks} == set(ROUTES)
    assert {a.ref for t in tasks for a in t.asks} == {"number", "name", "current", "history"}
    assert 0.05 < sum(len(t.asks) == 2 for t in tasks) / 5000 < 0.15
    assert all(len(t.asks) == len(t.danmaku) and t.reply_skill and 4 <= len(t.links) <= 8 for t in tasks)


def test_tasks_can_be_told_from_what_is_shown():
    """The link that is asked about is named, on air, or in the history; merged comments want different calls."""
    for s in range(1500):
        t = make_task(TRAIN, s)
        for ask, text in zip(t.asks, t.danmaku, strict=True):
            if ask.ref == "current":
                assert ask.link in (None, t.context["current_link_id"])
            elif ask.ref == "history":
                assert f"{ask.link}号" in t.context["history"][-1]["text"]
            elif ask.link:
                assert (f"{ask.link}号" if ask.ref == "number" else t.link(ask.link)["name"]) in text
        if len(t.asks) == 2:
            a, b = ([c for c in ask.calls(ROUTES[ask.kind][0])] for ask in t.asks)
            assert not any(call in b for call in a)
        assert len({x["name"] for x in t.links}) == len(t.links)


def test_train_and_test_pools_are_disjoint():
    def pools(node):
        if isinstance(node, dict) and set(node) == {"train", "test"}:
            yield node
        elif isinstance(node, dict):
            for inner in node.values():
                yield from pools(inner)

    found = list(pools(TRAIN.data))
    assert len(found) >= 9
    for pool in found:
        assert pool["train"] and pool["test"] and not set(pool["train"]) & set(pool["test"])
    names = [{x["name"][:2] for s in range(200) for x in make_task(world, s).links} for world in (TRAIN, TEST)]
    assert not names[0] & names[1]


# ---------------------------------------------------------------------------------------------------------------------
# the tool server


def test_answers_are_the_world():
    room = make(Ask("price", 1)).open()
    assert json.loads(room.call(*on(1))) == {"name": "清爽面膜", "price": 89, "颜色": "白色"}
    assert json.loads(room.call(*on(1, STOCK))) == {"stock": 50}
    assert json.loads(room.call(*on(1, COUPON))) == {"list_price": 109, "coupon": 20, "price": 89}
    assert json.loads(room.call(*on(3, SHIPPING))) == {"city": "广州", "hours": 72}
    assert json.loads(room.call(*on(2, FAQ, topic="孕妇"))) == {"answer": "不可以"}
    assert json.loads(room.call(*on(2, FAQ, topic="退货"))) == {"days": 7}
    assert json.loads(room.call(ROOM, {})) == {"promotion": "满199减20", "online": 777}


@pytest.mark.parametrize(
    "arguments",
    [{}, {"link_id": 0}, {"link_id": 4}, {"link_id": "1"}, {"link_id": True}, {"link_id": [1]}, {"link_id": None}],
)
def test_a_wrong_link_is_an_answer(arguments):
    room = make(Ask("price", 1)).open()
    for tool in (INFO, STOCK, COUPON, SHIPPING, FAQ):
        assert json.loads(room.call(tool, arguments)) == {"error": "no_such_link"}
    for topic in ("火星", "", None, 3, ["孕妇"]):
        assert json.loads(room.call(*on(1, FAQ, topic=topic))) == {"error": "no_such_topic"}
    assert json.loads(room.call("no_such_tool", {"link_id": 1})) == {"error": "no_such_tool"}


def test_topics_of_returns_are_one_call():
    """退款 and 退换 are 退货: one answer, and one retry after a fault."""
    room = make(Ask("return", 1, "退货")).open(Faults(1, 0, 0))
    assert readable(room.call(*on(1, FAQ, topic="退款"))) is None
    assert json.loads(room.call(*on(1, FAQ, topic="退换"))) == {"days": 7}
    assert same_call(TRAIN, {"topic": "退款", "link_id": 1}) == same_call(TRAIN, {"link_id": 1, "topic": "退货"})
    assert plain_topic(TRAIN, "孕妇") == "孕妇" and same_call(TRAIN, {}) == "{}"


@pytest.mark.parametrize("path", [["say"], ["cheaper"], ["noun", "test"], ["think", "retry"], ["ask", "buy"]])
def test_a_world_that_lacks_something_says_what(tmp_path, path):
    data = json.loads((ROOT / "data" / "world" / "zh.json").read_text(encoding="utf-8"))
    node = data
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    for content in (data, []):
        (tmp_path / "w.json").write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(BadInput, match=r"w\.json: no '" + (path[-1] if content else "prefix")):
            World.load(tmp_path / "w.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["noun"].update(test=[]), "'noun' must have 'test', a list of 1 texts"),
        (lambda d: d["prefix"].update(train=[1, 2]), "'prefix' must have 'train', a list of 1 texts"),
        (lambda d: d.update(attribute=[1]), "'attribute' must be an object"),
        (lambda d: d["city"].update(train="杭州"), "'city' must have 'train'"),
        (lambda d: d["faq"].update(train=["孕妇", "孕妇", "儿童"]), "'faq' must have 'train', a list of 3"),
        (lambda d: d["attribute"]["颜色"].pop("test"), "attribute '颜色' must have 'test'"),
        (lambda d: [d[x].update(train=d[x]["train"][:2]) for x in ("prefix", "noun")], "train: 4 names"),
        (lambda d: [d["attribute"].pop(k) for k in [*d["attribute"]][1:]], "1 attributes"),
        (lambda d: d.update(spelled_number="["), "'\\[' is no regular expression"),
        (lambda d: d["synonym"].update({"(": "x"}), "'\\(' is no regular expression"),
        (lambda d: d["say"].update(attr="{value}是{key}"), "'say' needs 'attr', a text with {key} before {value}"),
        (lambda d: d["say"].update(price="现在¥{price}"), "'say' needs 'price', a text with {price} and a unit"),
    ],
)
def test_a_world_in_which_nothing_could_be_scored_is_refused(tmp_path, change, words):
    """Drawing names that differ from two would never end; scores read the world's own sentences."""
    data = json.loads((ROOT / "data" / "world" / "zh.json").read_text(encoding="utf-8"))
    change(data)
    (tmp_path / "w.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(BadInput, match=words):
        World.load(tmp_path / "w.json")


def test_a_harness_of_another_trade_is_refused():
    """Its teacher could only say that nothing can be checked, and be right."""
    check_harness(H)
    faq = replace(H.tool(FAQ), param_ids={"link_id": "link_id", "topic": "words"})
    for tools, what in (([faq], r"tool search_faq \(link_id, topic\)"), ([], "tool search_faq")):
        with pytest.raises(BadInput, match=f"need the {what}.*x-id"):
            check_harness(H.copy(tools=[*(t for t in H.tools if t.id != FAQ), *tools]))
    with pytest.raises(BadInput, match="need the skill small_talk"):
        check_harness(H.copy(skills=[s for s in H.skills if s.id != "small_talk"]))


def test_every_key_of_the_shipped_world_is_known():
    assert set(TRAIN.data) == {*SHAPE, "language"}
    assert all(set(TRAIN[key]) == set(inner) for key, inner in SHAPE.items() if inner)


def test_timeouts_and_malformed_answers_happen_once():
    for faults, kind in ((Faults(1, 0, 0), "timeout"), (Faults(0, 1, 0), "malformed")):
        room = make(Ask("price", 1)).open(faults)
        first, second = room.call(*on(1)), room.call(*on(1))
        assert readable(first) is None and readable(second)["price"] == 89
        assert ("timeout" in first) == (kind == "timeout")
        assert readable(room.call(*on(2))) is None  # other arguments are another call
        if kind == "malformed":
            with pytest.raises(ValueError):
                json.loads(first)


def test_denied_stays_denied():
    room = make(Ask("price", 1)).open(Faults(0, 0, 1))
    assert {room.call(*on(n)) for n in (1, 1, 2, 1)} == {'{"error": "permission_denied"}'}


def test_faults_come_at_their_rates_and_by_the_seed():
    count = Counter()
    for s in range(3000):
        room, twin = (make(Ask("price", 1)).open(Faults(0.04, 0.03, 0.03), s) for _ in range(2))
        text = room.call(*on(1))
        twin.call(*on(2))  # another order of calls
        assert twin.call(*on(1)) == text
        count[
            "denied"
            if "denied" in text
            else "timeout"
            if "timeout" in text
            else "ok"
            if readable(text)
            else "malformed"
        ] += 1
    for kind, share in (("timeout", 0.04), ("malformed", 0.03), ("denied", 0.03)):
        assert abs(count[kind] / 3000 - share) < 0.012, count


def test_rooms_share_nothing():
    """FAULTS 29."""
    task = make(Ask("price", 1))
    a, b = task.open(Faults(1, 0, 0)), task.open(Faults(1, 0, 0))
    assert "timeout" in a.call(*on(1)) and "timeout" in b.call(*on(1))
    a.context["links"].clear()
    a.answer(*on(1))["price"] = 1
    a.context["signals"]["online"] = 0
    assert b.context["links"] and task.context["links"] and task.open().context == b.context
    assert json.loads(b.call(*on(1)))["price"] == 89


# ---------------------------------------------------------------------------------------------------------------------
# the oracle


@pytest.mark.parametrize("world", [TRAIN, TEST], ids=["train", "test"])
@pytest.mark.parametrize("kind", ["original", "random"])
def test_the_oracle_is_right(world, kind):
    """All four rewards are 1 under any harness, with faults, slips and every verbosity."""
    retries = lost = 0
    for s in range(250):
        h = H if kind == "original" else random_harness(H, random.Random(seed_of("sim", s)))
        t, rewards = taught(h, make_task(world, s), s, SOME, verbosity=s % 3, slip=0.2)
        assert rewards == ONE and t.stop_reason == "reply", (s, rewards, t.reply)
        retries += sum(e["event"] == "hook" and e["verdict"] == "deny" for e in t.events)
        lost += "查不到" in t.reply
        assert met_fault(t) or "查不到" not in t.reply
    assert retries > 20 and lost > 10


def test_without_faults_the_oracle_needs_no_excuse():
    for s in range(300):
        t, rewards = taught(H, make_task(TRAIN, s), s, NO_FAULTS)
        assert rewards == ONE and "查不到" not in t.reply and not met_fault(t)


def test_verbosity_is_length():
    """More of it, more reasoning tokens and the same rewards: what reinforcement learning can shorten."""
    think = [sum(sum(teach(H, make_task(TRAIN, s), HERMES, s, verbosity=v).think) for s in range(60)) for v in range(3)]
    assert think[0] < 0.7 * think[1] and think[1] < 0.8 * think[2]


def test_a_careless_oracle_is_truthful_and_half_of_use():
    """It reads the room as well as ever; what it forgets are the rules of the skill, and the asks after the first."""
    for s in range(200):
        task = make_task(TRAIN, s)
        t, rewards = taught(H, task, s, NO_FAULTS, careless=1.0)
        assert rewards == ONE | {"effectiveness": 0.5}, (s, t.reply, rewards)
        rules = H.skill(task.reply_skill).rules
        assert not any(str(rules[key]) in t.reply for key in ("closing", "must_say") if key in rules)


@pytest.mark.parametrize("gone", [INFO, STOCK, COUPON, SHIPPING, FAQ, ROOM])
def test_the_oracle_lives_with_a_missing_tool(gone):
    """A tool that the harness has not is like one that is denied: the other one, or an honest word."""
    h = H.copy(tools=[t for t in H.tools if t.id != gone])
    for s in range(150):
        t, rewards = taught(h, make_task(TRAIN, s), s, SOME)
        assert rewards == ONE, (s, t.reply, rewards)


def test_the_oracle_lives_with_a_missing_skill():
    for skill in H.skills:
        h = H.copy(
            skills=[s for s in H.skills if s.id != skill.id], hooks=[x for x in H.hooks if x.check != "skill_loaded"]
        )
        for s in range(40):
            assert taught(h, make_task(TRAIN, s), s, SOME)[1] == ONE


def test_wanted_is_what_the_templates_say():
    for s in range(300):
        task = make_task(TRAIN, s)
        for ask in task.asks:
            key, values, pieces = wanted(task, ask)
            text = TRAIN["say"][key].format(**values)
            assert pieces and all(says(text, piece) for piece in pieces)


def test_the_oracle_says_what_it_reads():
    """A name in the oracle's call is the shown one, of tools and of parameters."""
    h = random_harness(H, random.Random(3))
    oracle = Oracle(h, PRICE, random.Random(0))
    [call, load] = oracle.say([{"role": "user", "content": "问"}]).calls
    info = h.tool(INFO)
    assert call.name == info.name and set(call.arguments) == {k for k, v in info.param_ids.items() if v == "link_id"}
    assert load.name == h.tool(LOAD_SKILL).name and list(load.arguments.values()) == [h.skill("item_qa").name]
