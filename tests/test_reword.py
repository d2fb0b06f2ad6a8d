"""Other words: the pools and their halves, what a rewrite may not lose, a language model as rewriter."""

import itertools
import json
import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest

import augment as hsa
from augment import augment
from parts import RULES, Skill
import reword
from reword import POOLS, Endpoint, bank, new_format, some_of, unfaithful
from options import BadInput
from harness import FORMATS, Harness
from data import names as base_names
from data import base_words
from data.layouts import bare
from data import random_harness as base
from test_augment import ALWAYS, H, ROOT, only

# ---------------------------------------------------------------------------------------------------------------------
# pools


def leaves(node, path=()):
    """(path, train, heldout) of each pool in a file."""
    if isinstance(node, dict) and set(node) == set(POOLS):
        yield path, node["train"], node["heldout"]
    elif isinstance(node, dict):
        for key, inner in node.items():
            yield from leaves(inner, (*path, key))


POOL_FILES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "data/hsa").glob("*.json")}


@pytest.mark.parametrize("file", POOL_FILES)
def test_train_and_heldout_have_nothing_in_common(file):
    """Not in one pool, and no wording anywhere in the one half that is anywhere in the other."""
    found, halves = list(leaves(POOL_FILES[file])), {"train": set(), "heldout": set()}
    assert len(found) > 20
    for path, train, heldout in found:
        assert train and heldout and not set(map(str, train)) & (set(map(str, heldout)) - {"{x}"}), path
        assert file == "names" or len(set(map(str, train))) >= len(train) - 1, path  # {x} alone is there twice
        if path[0] == "phrases":
            assert path[1] not in (*train, *heldout)
        for pool, half in zip(POOLS, (train, heldout)):
            halves[pool] |= set(map(str, half)) - {"{x}"}
    assert not halves["train"] & halves["heldout"]


def outcome(pool: str, h: Harness, seeds: range) -> tuple[set[str], set[str]]:
    """(names, other texts) that a pool gave."""
    made, texts = set(), set()
    for seed in seeds:
        for e in augment(h, seed, ALWAYS, pool)[1]:
            if e["change"] == "rename":
                made.add(e["to"])
            elif e["change"] in ("describe", "message", "correction") and isinstance(e["to"], str):
                texts.add(e["to"])
            elif e["change"] == "noise":
                made.add(e["to"]["name"])
                texts |= {e["to"]["description"], e["to"]["body"]}
    return made, texts


def test_what_train_and_heldout_give_has_nothing_in_common():
    """Names (by parts), descriptions, messages, noise: over many seeds no outcome of the one is one of the other."""
    old = {x.message for x in H.hooks} | {x.description for x in (*H.skills, *H.tools)}
    (names, texts), (other_names, other_texts) = (outcome(pool, H, range(50)) for pool in POOLS)
    assert len(names) > 300 and len(texts) > 100
    assert not names & other_names and not texts & other_texts and not (texts | other_texts) & (old - {"{detail}"})
    parts = [set(re.findall(r"[a-z]+", " ".join(x).lower())) for x in (names, other_names)]
    han = [set(re.findall(r"[\u4e00-\u9fff]", " ".join(x))) for x in (names, other_names)]
    assert len(parts[0]) > 100 and len(han[0]) > 20 and not parts[0] & parts[1] and not han[0] & han[1]


def test_most_names_of_the_train_half_are_made_anew():
    """And none of them is one of the held-out half, whose names are all listed."""
    listed, rng = POOL_FILES["names"], random.Random(0)
    for key in reword.MADE:
        train, heldout = ([x for _ in range(400) for x in some_of(bank(p).names, key, 3, rng)] for p in POOLS)
        assert set(heldout) <= set(listed[key]["heldout"]) and not set(train) & set(listed[key]["heldout"])
        known = sum(word in listed[key]["train"] for word in train) / len(train)
        most = 0.65 if key in ("codes", "pinyin") else 0.4  # of these a part of all that can be made is listed too
        assert 0.2 < known < most, (key, known)


@pytest.mark.parametrize("lang", ["zh", "en"])
@pytest.mark.parametrize("key", list(FORMATS))
def test_most_layouts_of_the_train_half_are_made_anew(key, lang):
    """Each shows all of its line; none is, but for a bullet, one of the held-out half, whose layouts are all listed."""
    listed, rng = POOL_FILES[lang]["formats"][key], random.Random(0)
    train, heldout = ([new_format(bank(p).words[lang], key, lang, rng) for _ in range(2000)] for p in POOLS)
    assert set(heldout) == set(listed["heldout"]) and not {*map(bare, train)} & {*map(bare, heldout)}
    assert 0.2 < sum(x in listed["train"] for x in train) / len(train) < 0.4
    assert len(set(train)) > 3 * len(listed["train"])
    fields = sorted(hsa.PLACEHOLDER.findall(FORMATS[key]))
    assert all(sorted(hsa.PLACEHOLDER.findall(x)) == fields for x in train)
    assert lang == "zh" or not any(reword.language(hsa.PLACEHOLDER.sub("", x)) == "zh" for x in train)


def words_of(names: dict, pool: str) -> set[str]:
    meant = {word for halves in names["meaning"].values() for word in halves[pool]}
    return meant.union(*(names[kind][pool] for kind in ("words", "codes", "parameters")))


def test_no_word_of_a_name_is_one_of_the_base_or_a_shipped_one():
    """The base has syllables made at random, which may spell anything; none of its lists has a word of ours."""
    theirs = {*base_words.WORDS, *base_words.ACTIONS, *" ".join(base_words.MEANING.values()).split()}
    theirs |= set(base_names.WORDS) | {word for words in base_words.PARAMS.values() for word in words}
    listed, shipped = POOL_FILES["names"], {x.name for x in (*H.tools, *H.skills)}
    for pool in POOLS:
        assert len(words_of(listed, pool)) > 100 and not words_of(listed, pool) & theirs
        names = outcome(pool, H, range(40, 80))[0]
        assert len(names) > 200 and not shipped & names
    assert not set(listed["pinyin"]["heldout"]) & {*base_words.PINYIN, *base_names.PINYIN}
    assert not {*listed["han"]["train"], *listed["han"]["heldout"]} & set(base_words.HANZI)


BASE = [("tool", *pools) for pools in base_words.TOOLS.values()]
BASE += [(H.skill(id).kind, *pools) for id, pools in base_words.SKILLS.items()]


def composed(kind: str, things: list[str], wholes: list[str]) -> set[str]:
    """Every description that the base can make of them."""
    some = [p for n in (1, 2, 3) for p in itertools.permutations(things, n)]
    said = {*wholes, *(joint.join(p) for joint in base_words.JOINTS for p in some)}
    return {frame.replace("{x}", x) for frame in base_words.FRAMES[kind] for x in said}


def test_no_wording_is_one_of_the_base():
    """All that the base reads, every description that it can compose included."""
    theirs = {x for pool in (*base_words.LINES, *base_words.ABOUT.values(), *base_words.RULES.values()) for x in pool}
    theirs |= {x for pool in (*base_words.TITLES.values(), *base_words.MESSAGES.values()) for x in pool}
    rng = random.Random(0)
    theirs |= {base.random_format(kind, rng) for kind in ("skill", "tool", "link", "turn") for _ in range(3000)}
    theirs |= {*base_words.EXTRA_SKILLS, *base_words.EXTRA_TOOLS}
    theirs |= {*base_words.ROLES, *base_words.CURRENT, *base_words.REQUESTS}
    theirs = {x.rstrip("。") for x in theirs}.union(*(composed(kind, *pools) for kind, *pools in BASE))
    assert len(theirs) > 100_000
    for path, *halves in leaves(POOL_FILES["zh"]):
        for text in (x if isinstance(x, str) else x["description"] for half in halves for x in half):
            assert text not in theirs, (path, text)


def test_the_base_never_reads_a_shipped_description():
    """Some could be composed; those are drawn again."""
    shipped = {x.description for x in (*H.tools, *H.skills)}
    able = [(kind, *pools) for kind, *pools in BASE if composed(kind, *pools) & shipped]
    rng = random.Random(0)
    made = {base.described(*rng.choice(able), rng) for _ in range(20_000)}
    assert len(made) > 2_000 and not made & shipped


def test_every_text_of_the_shipped_harness_is_known_to_the_bank():
    """So that all of it changes, and no rewrite is refused."""
    for pool in POOLS:
        words = bank(pool)
        descriptions = [x.description for x in (*H.tools, *H.skills)] + [x.message for x in H.hooks[:1] + H.hooks[2:]]
        for text in descriptions:
            assert text in words.sentences, text
        bodies = [*(s.body for s in H.skills), *(H.blocks[b] for b in H.blocks)]
        for line in (line for body in bodies for line in body.split("\n")):
            title = words.title(line)
            for said in [title] if title else hsa.SENTENCE.split(line):
                assert not said or words.knows(said) or hsa.PLACEHOLDER.fullmatch(said) or title in words.sentences
        for seed in range(30):
            assert not [e for e in augment(H, seed, ALWAYS, pool)[1] if e["change"] in ("rejected", "kept")]


@pytest.mark.parametrize("lang", ["zh", "en"])
def test_pools_keep_what_they_stand_for(lang):
    """Each wording is faithful to its sentence, each rule says its key, each format shows all of its line."""
    data = POOL_FILES[lang]
    wordings = [x for k, halves in data["phrases"].items() for x in (k, *halves["train"], *halves["heldout"])]
    assert len(wordings) == len(set(wordings))
    for source, halves in data["phrases"].items():
        for text in (*halves["train"], *halves["heldout"]):
            assert unfaithful(source, text) == "", (source, text)
        for old, new in itertools.product((*halves["train"], *halves["heldout"]), repeat=2):  # augmented again
            assert unfaithful(old, new) == "", (old, new)
    assert set(data["rules"]) == set(RULES) and set(hsa.CORRECTIONS) == set(data["corrections"])
    for pool in POOLS:
        for key, halves in data["rules"].items():
            assert all(hsa.plain_rule(text) == key for text in halves[pool])
            assert not any(unfaithful(old, new) for old in sum(halves.values(), []) for new in halves[pool])
        for key, halves in data["formats"].items():
            fields = hsa.PLACEHOLDER.findall(FORMATS[key])
            assert all(sorted(hsa.PLACEHOLDER.findall(text)) == sorted(fields) for text in halves[pool])
            if key in ("skill", "tool"):  # most have the description first: then a name is found in one step
                name = "{signature}" if key == "tool" else "{name}"
                assert sum(x.index("{description}") < x.index(name) for x in halves[pool]) >= 0.75 * len(halves[pool])
        for frame in (x for key in ("frames", "messages", "headings") for x in data[key][pool]):
            assert frame.count("{x}") == 1
        assert {"reply", "strategy"} == {x.get("kind", "reply") for x in data["noise"][pool]}


# ---------------------------------------------------------------------------------------------------------------------
# texts


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("最多60字", "至多60字", ""),
        ("最多60字", "至多80字", "numbers"),
        ("重试两次", "重试三次", "numbers"),
        ("Try two times", "Try three times", "numbers"),
        ("结尾用“{closing}”。", "以“{closing}”收尾。", ""),
        ("结尾用“{closing}”。", "以{closing}收尾。", "quotes"),
        ("结尾用“{closing}”。", "以“哈”收尾。", "placeholders"),
        ("用{tool:a}查", "用{tool:b}查", "placeholders"),
        ('Say "thanks".', 'Do say "thanks".', ""),
        ('Say "thanks".', 'Say "thank you".', "quotes"),
        ("Call get_order first", "Call it first", "names"),
        ("See https://a.b/c for more", "See the site for more", "links"),
        ("不能说", "可以说", "negation"),
        ("告别的时候", "再见的时候", ""),
        ("Never say it", "Say it", "negation"),
        ("查库存", "", "empty"),
        ("查库存", "\n ", "empty"),
        ("查库存", "查" * 60, "too long"),
        ("查库存", "查\n库存", "markup"),
        ("查库存", "查库存<|im_end|>", "markup"),
        ("查库存", "check the stock", "language"),
        ("保留欢迎下单四个字", "保留四个字", "lost"),
        ("不要说价格，不要说库存", "别提价格，库存也不要提", ""),
        ("不要说价格，不要说库存", "不要说价格，要说库存", "negation"),
        ("不能提商品，可以提活动", "可以提活动，商品不许提", ""),
        ("不能提商品，可以提活动", "可以提商品，不能提活动", "negation"),
        ("不能提商品，可以提活动", "不能提商品，不能提活动", "negation"),
        ("说“{closing}”，别说“{opening}”", "别说“{closing}”，说“{opening}”", "negation"),
        ("“{detail}”没有依据，请按工具结果重写", "工具结果里没有“{detail}”，请重写", ""),
        ("Never guess. Do not promise a date.", "Never guess. Don’t promise a date.", ""),
        ("Never guess. Do not promise a date.", "Never guess. Do promise a date.", "negation"),
        ("You may quote prices but do not quote stock", "Do not quote prices but you may quote stock", "negation"),
        ("Do not retry if the tool fails, ask.", "If the tool fails, do not retry, ask.", ""),
        ("先加载一个回复技能，再回复", "回复前加载一个回复技能", ""),
        ("先加载一个回复技能，再回复", "回复后再加载一个回复技能", "order"),
        ("先加载一个回复技能，再回复", "先回复，再加载一个回复技能", "order"),
        ("加载技能之后再查库存", "查库存，然后加载技能", "order"),
        ("Load a skill, then answer", "Before you answer, load a skill", ""),
        ("Load a skill, then answer", "Load a skill after the answer", "order"),
        ("Check the stock before the price", "After the price, check the stock", "order"),
        ("重试一次", "再试一次", ""),
        ("重试一次", "重试零次", "numbers"),
        ("按第一条回", "按第二条回", "numbers"),
        ("Retry once", "Retry twice", "numbers"),
        ("Try one more", "Try zero more", "numbers"),
        ("Always load", "Every time, load", ""),
        ("Always load", "Sometimes load", "some"),
        ("所有的商品都查", "全部商品都查", ""),
        ("所有商品都查", "有的商品要查", "some"),
        ("总是先加载", "有时先加载", "some"),
        ("只说查到的", "说查到的", "only"),
        ("不超过60字", "60字以内", ""),
        ("不超过60字", "超过60字", "bound"),
        ("No more than 60 words", "At most 60 words", ""),
        ("No more than 60 words", "At least 60 words", "bound"),
        ("必须加载技能", "可以加载技能", "duty"),
        ("结尾用“{closing}”。", "开头用“{closing}”。", "place"),
    ],
)
def test_unfaithful_rewrites_are_told(old, new, why):
    found = unfaithful(old, new, must=("欢迎下单",))
    assert found.startswith(why) and bool(found) == bool(why), found


def test_a_body_of_a_stranger_keeps_its_structure():
    """Numbered steps, nested lists, code, tables and prose stay in order; the bullets of one plain list may move."""
    body = """# How to list
Retrieve the details. Then create "the details" with `get details`.

1. Find the page
2. Create an entry
   - with details
- alpha https://x.y/get
- beta
- gamma

- First, find it
- Then create it
* parent
  * child
```
- get one
- get two
```
| get | find |"""
    h = H.copy(skills=[Skill("s", "s", "Build things", "reply", body)])
    orders, words = set(), set()
    for seed in range(40):
        new = augment(h, seed, only("skill_content"), POOLS[seed % 2])[0].skills[0].body
        lines = new.split("\n")
        assert len(lines) == len(body.split("\n")) and lines[0] == "# How to list" and lines[-1] == "| get | find |"
        at = [i for i, line in enumerate(lines) if re.search("alpha|beta|gamma", line)]
        assert at == [6, 7, 8] and "https://x.y/get" in new and '"the details" with `get details`' in new
        orders.add(tuple(re.search("alpha|beta|gamma", lines[i])[0] for i in at))
        assert re.match(r"1\. \w+", lines[3]) and lines[4].startswith("2. ") and lines[5].startswith("   - with ")
        assert "First, " in lines[10] and "Then " in lines[11] and lines[12:14] == ["* parent", "  * child"]
        assert lines[14:18] == ["```", "- get one", "- get two", "```"]
        words |= set(re.findall(r"fetch|obtain|particulars|specifics", new.lower()))
    assert len(orders) == 6 and words == {"fetch", "obtain", "particulars", "specifics"}


def test_a_text_that_the_bank_does_not_know_is_framed():
    for pool in POOLS:
        made = {bank(pool)("今晚吃什么", "description", random.Random(s)) for s in range(10)}
        assert len(made) == 2 and all(text.endswith("今晚吃什么") and text != "今晚吃什么" for text in made)
        assert bank(pool)("今晚吃什么", "instruction", random.Random(0)) == "今晚吃什么"


# ---------------------------------------------------------------------------------------------------------------------
# a language model as rewriter


@contextmanager
def server(answer):
    """A local OpenAI-compatible server: answer(text, body) -> the new text, or an int, an HTTP status."""
    calls = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            calls.append({"path": self.path, "key": self.headers["Authorization"], **body})
            said = answer(body["messages"][-1]["content"], body)
            message = {"role": "assistant", "content": said}
            data = {"id": "1", "created": 1, "model": "m", "object": "chat.completion", "usage": None}
            data["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
            raw = b"oops" if isinstance(said, int) else json.dumps(data).encode()
            self.send_response(said if isinstance(said, int) else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", calls
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """The client refuses even this machine when HF_HUB_OFFLINE is set, as it is in all tests."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def test_a_language_model_rewords(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with server(lambda text, body: f"<think>\nhow?\n</think>\n\n{text}{'～' * (1 + body['seed'] % 5)}") as (url, calls):
        endpoint = Endpoint(url, "writer")
        h, log = augment(H, 1, ALWAYS, rewrite=endpoint)
        many = len(calls)
        assert all(t.description.endswith("～") for t in h.tools)
        assert augment(H, 1, ALWAYS, rewrite=endpoint)[0].commit == h.commit and len(calls) == many  # asked once
        another = Endpoint(url, "writer")
        augment(H, 7, ALWAYS, rewrite=another)
        assert augment(H, 1, ALWAYS, rewrite=another)[0].commit == h.commit  # whichever came first
    assert not [e for e in log if e["change"] == "rejected"] and len(log) > 40
    assert {c["path"] for c in calls} == {"/v1/chat/completions"} and {c["model"] for c in calls} == {"writer"}
    assert {c["key"] for c in calls} == {"Bearer secret"} and all(isinstance(c["seed"], int) for c in calls)
    styles = {pool: {x for lang in ("zh", "en") for x in bank(pool).words[lang]["styles"]} for pool in POOLS}
    assert all(any(style in c["messages"][0]["content"] for style in styles["train"]) for c in calls)
    assert not any(style in c["messages"][0]["content"] for style in styles["heldout"] for c in calls)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (lambda text: "", "empty"),
        (lambda text: text + "，十分重要" * 40, "too long"),
        (lambda text: re.sub(r"\{.*?\}", "它", text) if "{" in text else text + "9", ""),
        (lambda text: text + "99", "numbers"),
        (lambda text: "Sure, here you go", ""),
        (lambda text: text + "\n以上", "markup"),
        (lambda text: text + "{closing}", "placeholders"),
    ],
)
def test_a_language_model_that_loses_the_meaning_is_refused(bad, why):
    """The original stays, and the log counts it."""
    with server(lambda text, body: bad(text)) as (url, _):
        h, log = augment(H, 2, only("skill_content"), rewrite=Endpoint(url, "m"))
    rejected = [e for e in log if e["change"] == "rejected"]
    assert len(rejected) > 8 and all(e["why"].startswith(why) and e["text"] and e["at"] for e in rejected)

    def sentences(h):
        said = [s.strip("-*· ") for x in h.skills for line in x.body.split("\n") for s in hsa.SENTENCE.split(line) if s]
        return Counter(said)

    assert sentences(h) <= sentences(H)  # moved or masked, in the old words


def test_threads_that_ask_for_the_same_get_the_same_and_cost_one_call():
    """Others need not wait for them: all texts are in the server's hands at once."""
    texts = [f"查{x}" for x in "库存优惠活动发货"]
    together = threading.Barrier(len(texts), timeout=10)

    def answer(text, body):
        together.wait()
        return f"{text}{next(turn)}"  # another one each time

    turn = itertools.count()
    with server(answer) as (url, calls), ThreadPoolExecutor(24) as threads:
        endpoint = Endpoint(url, "m")
        made = list(threads.map(lambda text: endpoint(text, "message", random.Random(0)), texts * 3))
    assert made == made[:8] * 3 and len(set(made)) == len(calls) == 8


def test_sentences_of_a_language_model_keep_the_space_between_them():
    skill = replace(H.skills[0], rules={}, body="Check the stock. Say the price. Be brief.")
    with server(lambda text, body: text.replace(" the ", " its ")) as (url, _):
        steady = replace(only("skill_content"), reword=1.0, reorder=0.0, restyle=0.0)
        h, _ = augment(H.copy(skills=[skill, *H.skills[1:]]), 0, steady, rewrite=Endpoint(url, "m"))
    assert h.skills[0].body == "Check its stock. Say its price. Be brief."


def test_a_server_that_fails_now_and_then_costs_a_rewrite():
    with server(lambda text, body: 500 if "活动" in text else text + "～") as (url, calls):
        _, log = augment(H, 2, only("tool"), rewrite=Endpoint(url, "m"))
    failed = [e for e in log if e["change"] == "rejected"]
    assert [e["text"] for e in failed] == ["查直播间活动"] and failed[0]["why"] == "empty"
    assert sum("活动" in c["messages"][-1]["content"] for c in calls) == Endpoint.tries


@pytest.mark.parametrize("status", [500, 404])
def test_a_server_that_never_answers_is_bad_input(status):
    with server(lambda text, body: status) as (url, _), pytest.raises(BadInput, match=r"127\.0\.0\.1.*does not answer"):
        augment(H, 2, ALWAYS, rewrite=Endpoint(url, "m"))
    with pytest.raises(BadInput, match="does not answer"):
        augment(H, 2, ALWAYS, rewrite=Endpoint(url, "m", timeout_s=2))  # it is gone


def test_show_asks_a_server(capsys):
    with server(lambda text, body: text + "～") as (url, calls):
        hsa.main(["show", "--only", "tool", "--endpoint", url, "--llm", "m"])
    assert calls and "～" in capsys.readouterr().out
