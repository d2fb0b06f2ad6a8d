"""Other words for the same thing: the word pools of HSA, and two rewriters of a harness's texts.

    rewrite(text, what, dice)  ->  another text        what: description, body, message ...
    unfaithful(old, new)       ->  why not, or ""      numbers, quotes, names, negations, bounds, order ... must survive

`Bank` knows sentences, headings and names of data/hsa, where every pool has a train and a heldout half without a common
entry; rules by their key ({closing}, {must_say} ...); and for texts of strangers single words, outside of quotes, code,
links and names. `Endpoint` asks a language model behind an OpenAI-compatible server. Neither is trusted: augment.py
lets `unfaithful` look at every text, and one that fails stays as it was.

Left out: rewriting across sentences; languages other than Chinese and English; a change of meaning by words of content
(商品 -> 活动): `unfaithful` looks at the small words that carry a rule, and rather refuses too much than too little.
"""

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from options import BadInput
from common import read_json, seed_of
from parts import RULES
from data import layouts, names

POOLS = ("train", "heldout")
WORDS = Path(__file__).parent / "data" / "hsa"
P_MADE = 0.75  # of a word, syllable ... of a name, and of the layout of a list, in the train half
MADE = {
    "words": lambda rng: (
        names.letters(rng, rng.randint(3, 7)) if rng.random() < 0.4 else names.syllables(rng, rng.randint(1, 3))
    ),
    "syllables": lambda rng: names.letters(rng, rng.randint(2, 4)) if rng.random() < 0.4 else names.syllables(rng, 1),
    "codes": lambda rng: names.letters(rng, 2),
    "pinyin": lambda rng: rng.choice(names.PINYIN),
    "han": lambda rng: rng.choice(names.HAN),
}

# ---------------------------------------------------------------------------------------------------------------------
# texts: what may be changed in them, and what may not

PLACEHOLDER = re.compile(r"\{[A-Za-z_][\w:.\-]*\}")
QUOTE = re.compile(r"`[^`\n]+`|“[^”\n]+”|「[^」\n]+」|『[^』\n]+』|\"[^\"\n]+\"|(?<!\w)'[^'\n]+'(?!\w)")
URL = re.compile(r"https?://[^\s)>]+|\]\([^)\n]*\)")
IDENTIFIER = re.compile(r"[A-Za-z0-9]+(?:[_./\-][A-Za-z0-9]+)+|\b[a-z]+[A-Z]\w*|#\w+")  # get_x, a/b.md, camelCase
NUMBER = re.compile(  # 一 only where it counts or ranks: elsewhere it comes and goes (一起, 看一看, 便宜的一个)
    r"\d+(?:[.,]\d+)*|[零〇二三四五六七八九十百千万两]|(?<=[试来第头])一(?=[次遍条个步])"
    r"|\b(?:zero|one|once|two|twice|three|four|five|six|seven|eight|nine|ten)\b",
    re.I,
)
MEANING = {"placeholders": PLACEHOLDER, "quotes": QUOTE, "links": URL, "names": IDENTIFIER, "numbers": NUMBER}
KEPT = re.compile("|".join(f"(?:{p.pattern})" for p in (PLACEHOLDER, QUOTE, URL, IDENTIFIER)))
SENTENCE = re.compile(r"(?<=[。！？])|(?<=[.!?])(?=\s+[A-Z])")
CORE = re.compile(r"(\s*)(.*?)([。.！!？?\s]*)", re.DOTALL)  # leading space, what is said, how it ends
LINE = re.compile(r"(\s*(?:[-*+·•] |\d+[.)、] ?)?)(.*)")
STIFF = re.compile(r"\s*(?:#|\||<|>|---|===|\*\*\*|$)")  # headings, tables, tags, quotations, rules, nothing
BULLETS = ("- ", "* ", "· ", "• ", "+ ")
STEP = re.compile(
    r"\b(?:first|second|then|next|finally|last|after|above|below|step|otherwise|else|instead)\b"
    r"|先|然后|接着|再|最后|第|上述|以上|否则|另外",
    re.I,
)

# What a sentence says by small words. Bounds and "only" go before negations are counted: 不超过 denies nothing.
ONLY = re.compile(r"[只仅]|都从|之外[^，；。]*?不|\bonly\b", re.I)
SOME = re.compile(r"有时|偶尔|很少|部分|(?<![没所])有[的些]|\b(?:some|sometimes|occasionally|rarely|seldom)\b", re.I)
AT_MOST = re.compile(
    r"不超过?|不[多高长]于|不过(?=[\d{])|[至最]多|以内|封顶|\b(?:at most|within|up to)\b"
    r"|(?:no|not|never|n['’]t) (?:more than|longer than|over|exceed)\b",
    re.I,
)
AT_LEAST = re.compile(
    r"不[少低短]于|[至最]少|超过|[多高长]于|(?:no|not) (?:less|fewer) than\b"
    r"|\b(?:at least|more than|longer than|over|exceed)\b",
    re.I,
)
NOT = re.compile(
    r"[不没无未勿禁]|避免|(?<![告特分级区])别(?![的人])"
    r"|\b(?:not?|never|none|nor|nothing|without|cannot|avoid)\b|n['’]t\b",
    re.I,
)
OPPOSITES = {
    "bound": (AT_MOST, AT_LEAST),
    "duty": (re.compile(r"必须|务必|一定|\bmust\b", re.I), re.compile(r"可以|可选|\b(?:may|optional(?:ly)?)\b", re.I)),
    "place": (
        re.compile(r"[开起打]头|句首|\b(?:begin|start|open)\b", re.I),
        re.compile(r"[结收末]尾|句[尾末]|\b(?:end|finish|close)\b", re.I),
    ),
}
THEN = r"(?<![券售最])后"  # not that of 券后价, 售后, 最后
ORDER = [  # a before b: the first that fits
    re.compile(pattern, re.I | re.M)
    for pattern in (
        rf"先(?P<a>.+?)(?:再|然后|{THEN}|才)(?P<b>.+)",
        r"^(?P<b>.+?)(?<![当目提])前(?P<a>.+)",
        rf"^(?P<a>.+?)(?:{THEN}|[，；。](?:再(?![不试])|然后|接着))(?P<b>.+)",
        r"^after (?P<a>.+?), (?P<b>.+)",
        r"^before (?P<b>.+?), (?P<a>.+)",
        r"^(?P<a>.+?)\b(?:then|before)\b(?P<b>.+)",
        r"^(?P<b>.+?)\bafter\b(?P<a>.+)",
    )
]
CLAUSE = re.compile(r"[，,；;。.!！?？\n]|\bbut\b|但|而是", re.I)
SMALL = "the and for you your can may any not never with but it".split() + list("的了就也都还要能可以请把是和在不没别")
WORD = re.compile(KEPT.pattern + r"|[A-Za-z]{2,}|[\u4e00-\u9fff]")


def language(text: str, default: str = "en") -> str:
    """zh for a text with a Han character, en for one with Latin words, else the default."""
    if re.search(r"[\u4e00-\u9fff]", text):
        return "zh"
    return "en" if re.search(r"[A-Za-z]", PLACEHOLDER.sub("", text)) else default


def sides(parts: Iterable[tuple[bool, str]]) -> dict[str, bool]:
    """The side on which each word stands; a word of both sides has none."""
    found = {}
    for side, text in parts:
        for word in WORD.findall(text.lower()):
            found.setdefault(word, set()).add(side)
    return {word: min(at) for word, at in found.items() if len(at) == 1 and word not in SMALL}


def crossed(old: dict[str, bool], new: dict[str, bool]) -> Counter:
    """How many of the words in both texts went from which side to which: (old side, new side) -> words."""
    return Counter((old[word], new[word]) for word in old.keys() & new.keys())


def denied(text: str) -> tuple[int, dict[str, bool]]:
    """How many negations a text has, and which of its words stand in a clause with one."""

    def negations(clause):
        for pattern in (ONLY, AT_MOST, AT_LEAST, KEPT):
            clause = pattern.sub(" ", clause)
        return len(NOT.findall(clause))

    clauses = [(negations(clause), clause) for clause in CLAUSE.split(text)]
    return sum(n for n, _ in clauses), sides((n > 0, clause) for n, clause in clauses)


def ordered(text: str) -> dict[str, bool]:
    """Which words are said to come first (False) or then (True); empty when a text speaks of no order."""
    found = next(filter(None, (pattern.search(text) for pattern in ORDER)), None)
    return sides([(False, found["a"]), (True, found["b"])]) if found else {}


@lru_cache(1 << 14)  # a bank says the same again and again
def other_sense(old: str, new: str) -> str:
    """Which of the small words that carry the meaning were lost, added or turned round; empty if none."""
    for what, pattern in (("only", ONLY), ("some", SOME)):
        if bool(pattern.search(old)) != bool(pattern.search(new)):
            return what
    for what, (pattern, opposite) in OPPOSITES.items():
        said = [(bool(pattern.search(t)), bool(opposite.search(pattern.sub(" ", t)))) for t in (old, new)]
        if set(said) == {(True, False), (False, True)}:
            return what
    (many, denied_before), (still, denied_after) = denied(old), denied(new)
    moved = crossed(denied_before, denied_after)
    if many != still or (moved[True, False] and moved[False, True]):  # one way alone: a clause was split or joined
        return "negation"
    moved = crossed(ordered(old), ordered(new))
    turned = moved[True, False] + moved[False, True]
    return "order" if turned > moved.total() - turned else ""


def unfaithful(old: str, new: str, must: tuple[str, ...] = (), longest: int = 4096) -> str:
    """Why `new` cannot stand for `old`; empty when it can. must: strings that a text may not lose."""
    if not new.strip():
        return "empty"
    if len(new) > min(longest, 2 * len(old) + 40):
        return "too long"
    if new.count("\n") > old.count("\n") or re.search(r"<\||</?(?:think|tool_call)", new):
        return "markup"
    for what, pattern in MEANING.items():
        before, after = (Counter(x.strip("`“”「」『』\"'").lower() for x in pattern.findall(t)) for t in (old, new))
        if before != after:
            return f"{what}: {', '.join((before - after) or (after - before))}"
    if lost := next((word for word in must if word in old and word not in new), ""):
        return f"lost {lost}"
    return other_sense(old, new) or ("" if language(old) == language(new) else "language")


def plain_rule(sentence: str) -> str:
    """The one rule key of which a sentence speaks and nothing else; empty if there is none, or more to it."""
    keys = [found[1:-1] for found in PLACEHOLDER.findall(sentence)]
    simple = len(sentence) <= 40 and not re.search(r"[，,；;：:]", sentence)
    return keys[0] if len(keys) == 1 and keys[0] in RULES and simple else ""


def mention(names: Iterable[str]) -> re.Pattern:
    """Whole-word mentions of the names; a {placeholder}, which holds an id, is matched whole and so is none."""
    word, parts = "[A-Za-z0-9_]", [PLACEHOLDER.pattern]
    for name in sorted(names, key=len, reverse=True):
        before = rf"(?<!{word})(?<![A-Za-z0-9]-)" if re.match(word, name) else ""
        after = rf"(?!{word})(?!-[A-Za-z0-9])" if re.search(word + "$", name) else ""
        parts.append(before + re.escape(name) + after)
    return re.compile("|".join(parts))


def some_of(words: dict, key: str, n: int, rng: random.Random) -> list[str]:
    """n different entries of a pool of names. In the train half most are made anew, and none is one of the other half.

    A list is learned by heart, however long it is: with one of 600 words, four times the samples of supervised training
    took new names from 72% to 52 (LOG.md). What must be learned is to copy.
    """
    listed, never = rng.sample(words[key], n), words.get("never")
    if never is None:
        return listed
    found = {}
    while len(found) < n:
        word = MADE[key](rng) if rng.random() < P_MADE else listed[len(found)]
        if word not in never:
            found[word] = None
    return list(found)


def new_name(words: dict, kind: str, old: str, sense: dict[str, str], more: int, rng: random.Random) -> str:
    """A name of that kind. sense: word of an old name -> its synonym, for telling names; more: words to add."""
    some = some_of(words, "words", rng.choice([1, 2, 2, 3]) + more, rng)
    if kind == "telling":
        known = [sense[w.lower()] for w in re.findall(r"[A-Z]?[a-z]+", old) if w.lower() in sense]
        known = [known[i] for i in sorted(rng.sample(range(len(known)), min(len(known), rng.choice([1, 2, 2, 3]))))]
        return "_".join(dict.fromkeys([*known, *some[: more + (rng.random() < 0.3)]])) or "_".join(some)
    if kind == "camel":
        first, *others = some_of(words, "words", max(len(some), 2), rng)
        return first + "".join(w.capitalize() for w in others)
    if kind == "pinyin":
        return "_".join(some_of(words, "pinyin", rng.randint(1, 3) + more, rng))
    if kind == "pseudo":
        syllables = iter(some_of(words, "syllables", 6, rng))
        return "_".join("".join(next(syllables) for _ in range(rng.randint(1, 2))) for _ in range(rng.randint(1, 3)))
    if kind == "code":
        return some_of(words, "codes", 1, rng)[0] + str(rng.randint(0, 10 ** (more + 2) - 1))
    if kind == "han":
        return "".join(some_of(words, "han", rng.randint(2, 3) + more, rng))
    return ("-" if kind == "kebab" else "_").join(some)


def new_format(words: dict, key: str, lang: str, rng: random.Random) -> str:
    """A layout for a line of that list (harness.FORMATS); most of the train half are made anew, as names are."""
    listed, never = words["formats"][key], words.get("never")
    if never is None or rng.random() >= P_MADE:
        return rng.choice(listed)
    number = "{link_id}号" if lang == "zh" else "{link_id}"
    fields = {
        "skill": ("{description}", "{name}"),
        "tool": ("{description}", "{signature}"),
        "link": ("{name}", number),
        "turn": ("{role}", "{text}"),
        "signal": ("{name}", "{value}"),
    }[key]
    between, item = layouts.BETWEEN if lang == "zh" else layouts.ENGLISH, key in ("skill", "tool", "link")
    while True:
        if layouts.bare(made := layouts.pair(rng, *fields, between, item)) not in never:
            return made


# ---------------------------------------------------------------------------------------------------------------------
# rewriters: (text, what it is, dice) -> another text

Rewriter = Callable[[str, str, random.Random], str]
T = TypeVar("T")


class Bank:
    """One half, train or heldout, of the pools in data/hsa, and the rewriter that needs nothing else."""

    def __init__(self, pool: str):
        def half(node):
            if isinstance(node, dict):
                return node[pool] if set(node) == set(POOLS) else {key: half(value) for key, value in node.items()}
            return node

        data = read_json(WORDS / "names.json")
        self.pool, self.names = pool, half(data)
        if pool == "train":
            self.names["never"] = {word for key in MADE for word in data[key]["heldout"]}  # those that must not be
            self.names["never"] |= {word for halves in data["meaning"].values() for word in halves["heldout"]}
        self.words, self.sentences, self.headings, self.swaps = {}, {}, [], {}
        for lang, edge in (("zh", ""), ("en", r"\b")):
            data = read_json(WORDS / f"{lang}.json")
            self.words[lang] = half(data)
            if pool == "train":
                texts = [text for halves in data["formats"].values() for text in halves["heldout"]]
                self.words[lang]["never"] = {layouts.bare(text) for text in texts}
            self.swaps[lang] = re.compile(f"{edge}(?:{'|'.join(sorted(data['swaps'], key=len)[::-1])}){edge}", re.I)
            self.headings += [style.split("{x}") for pool in POOLS for style in data["headings"][pool]]
            for source, halves in data["phrases"].items():  # each wording of a sentence leads to the others
                for text in (source, *halves["train"], *halves["heldout"]):
                    self.sentences[text] = halves[pool]
        self.headings += [("# ", ""), ("## ", ""), ("### ", ""), ("【", "】"), ("[", "]"), ("== ", " =="), ("", ":")]

    def knows(self, sentence: str) -> bool:
        """Whether it stands on its own wherever it is put: a sentence of the pools, or a plain rule."""
        return CORE.fullmatch(sentence)[2] in self.sentences or bool(plain_rule(sentence))

    def title(self, line: str) -> str:
        """What a heading says, in any style of the pools or of Markdown; empty for a line that is none."""
        for before, after in self.headings:
            title = line.removeprefix(before).removesuffix(after)
            if line == before + title + after and re.fullmatch(r"\w[\w' ]{0,30}", title):
                return title
        return ""

    def __call__(self, text: str, what: str, rng: random.Random) -> str:
        """Each sentence in other words; a description of which nothing else is known gets a frame."""
        lines = ["".join(self.sentence(s, rng) for s in SENTENCE.split(line)) for line in text.split("\n")]
        if (new := "\n".join(lines)) == text and what == "description":
            return rng.choice(self.words[language(text)]["frames"]).replace("{x}", text)
        return new

    def sentence(self, sentence: str, rng: random.Random) -> str:
        """One sentence in other words, with the same ends: whole if it is known, else word by word."""
        lead, core, end = CORE.fullmatch(sentence).groups()
        lang, out, start = language(core), "", 0
        words = self.words[lang]
        known = self.sentences.get(core) or words["rules"].get(plain_rule(sentence), [])
        if others := [x for x in known if x != core]:
            return lead + rng.choice(others) + end

        def swap(found):
            new = rng.choice(words["swaps"][found[0].lower()])
            loud = found[0].isupper() and len(found[0]) > 1
            return new.upper() if loud else new.capitalize() if found[0][0].isupper() else new

        for kept in [*KEPT.finditer(core), None]:
            stop = kept.start() if kept else len(core)
            out += self.swaps[lang].sub(swap, core[start:stop]) + (kept[0] if kept else "")
            start = kept.end() if kept else stop
        return lead + out + end


@cache
def bank(pool: str) -> Bank:
    """The bank of that pool, read once; BadInput for another pool than train and heldout."""
    if pool not in POOLS:
        raise BadInput(f"pool {pool!r} is not one of {' | '.join(POOLS)}")
    return Bank(pool)


class Server:
    """A language model behind an OpenAI-compatible server. The key is that of OPENAI_API_KEY."""

    tries = 3  # of one message

    def __init__(self, base_url: str, model: str, timeout_s: float = 120.0):
        from huggingface_hub import InferenceClient

        key = os.environ.get("OPENAI_API_KEY", "none")  # never this machine's login to another place
        self.client = InferenceClient(base_url=base_url, api_key=key, timeout=timeout_s)
        self.url, self.model, self.answered = base_url, model, False

    def ask(self, messages: list[dict], read: Callable[[Any], T], **options) -> T | None:
        """What `read` makes of the next message, which may raise; None after `tries` failures.

        BadInput when the server has never answered.
        """
        for _ in range(self.tries):
            try:
                made = self.client.chat_completion(messages, model=self.model, **options)
                said, self.answered = made.choices[0].message, True
                return read(said)
            except Exception as e:  # down, slow, or an answer of another shape: each client library has its own errors
                why = f"{type(e).__name__}: {' '.join(str(e).split())}"[:200]
        if not self.answered:
            raise BadInput(f"{self.url}: model {self.model!r} does not answer: {why}")
        return None


class Endpoint(Server):
    """A language model as rewriter; train and heldout ask for different styles.

    Each text is asked for a few variants, which are kept, so thousands of harnesses cost a few calls per text,
    whichever threads ask. When the server fails later, a text stays as it is.
    """

    variants = 3  # of one text in one style

    def __init__(self, base_url: str, model: str, pool: str = "train", timeout_s: float = 60.0):
        super().__init__(base_url, model, timeout_s)
        self.bank = bank(pool)
        self.answers: dict[tuple, str] = {}
        self.asking: dict[tuple, Lock] = {}

    def __call__(self, text: str, what: str, rng: random.Random) -> str:
        style = rng.choice(self.bank.words[language(text)]["styles"])
        key = (text, what, style, rng.randrange(self.variants))
        with self.asking.setdefault(key, Lock()):  # who wants the same waits, all others go on
            if key in self.answers:
                return self.answers[key]
            task = f"Rewrite this {what} of an agent's harness. Style: {style}. Same language, same meaning, about the "
            task += "same length, on as many lines. Keep every number, name, quoted string, link, code and everything "
            task += "in braces {like_this} as it is. Answer with the new text alone."
            messages = [{"role": "system", "content": task}, {"role": "user", "content": text}]
            seed = seed_of(*key) >> 32  # the same whichever harness comes first
            answer = self.ask(messages, lambda said: said.content or "", seed=seed, temperature=0.7)
            if answer is None:
                return ""  # not kept: the next time it may answer
            self.answers[key] = re.sub(r"(?s)^.*</think>", "", answer).strip()
            return self.answers[key]
