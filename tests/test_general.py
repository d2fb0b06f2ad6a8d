"""General instructions: seeded, answers that are right by the letter, train and test apart."""

import json
import random
import re
from collections import Counter

import pytest

from data import general, names

N = 1500


def examples(kind, split="train", n=N):
    return [general.sample(random.Random(seed), split, kind) for seed in range(n)]


def occurrences(pattern, text):
    return len(re.findall(pattern, text, re.IGNORECASE))


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# The official checkers, each in a line: (response, keyword arguments) -> followed?
FOLLOWED = {
    "startend:end_checker": lambda r, end_phrase: r.strip().lower().endswith(end_phrase.lower()),
    "startend:quotation": lambda r: len(r) > 1 and r[0] == r[-1] == '"',
    "keywords:existence": lambda r, keywords: all(k.lower() in r.lower() for k in keywords),
    "keywords:forbidden_words": lambda r, forbidden_words: not any(w.lower() in r.lower() for w in forbidden_words),
    "keywords:frequency": lambda r, keyword, frequency, relation: (
        relation == "at least" and occurrences(re.escape(keyword), r) >= frequency
    ),
    "change_case:english_lowercase": lambda r: r.islower() and r.isascii(),
    "change_case:english_capital": lambda r: r.isupper() and r.isascii(),
    "punctuation:no_comma": lambda r: "," not in r and "，" not in r,
    "detectable_format:number_bullet_lists": lambda r, num_bullets: (
        len(re.findall(r"^\s*(?:\*[^*]|-).*$", r, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:title": lambda r: any(t.strip("<> ") for t in re.findall(r"<<[^\n]+>>", r)),
    "detectable_format:json_format": is_json,
    "detectable_format:number_highlighted_sections": lambda r, num_highlights: (
        len(re.findall(r"\*[^\n*]+\*", r)) >= num_highlights
    ),
    "detectable_content:number_placeholders": lambda r, num_placeholders: (
        len(re.findall(r"\[.*?\]", r)) >= num_placeholders
    ),
    "detectable_content:postscript": lambda r, postscript_marker: (
        postscript_marker == "P.S." and re.search(r"\s*p\.\s?s\..*$", r.lower(), re.MULTILINE)
    ),
    "detectable_format:constrained_response": lambda r: r in [f"My answer is {a}." for a in ("yes", "no", "maybe")],
    "combination:repeat_prompt": lambda r, prompt_to_repeat: (
        r.startswith(prompt_to_repeat) and len(r) > len(prompt_to_repeat) + 1
    ),
    "combination:two_responses": lambda r: len({a.strip() for a in r.split("******")}) == len(r.split("******")) == 2,
    "length_constraints:number_paragraphs": lambda r, num_paragraphs: (
        len([p for p in re.split(r"\s?\*\*\*\s?", r) if p.strip()]) == num_paragraphs
    ),
    "length_constraints:number_words": lambda r, relation, num_words: (
        (len(re.findall(r"\w+", r)) < num_words) == (relation == "less than")
    ),
}


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_response_obeys_its_instructions(split):
    for example in examples("ifeval", split) + examples("repeat", split, 300):
        for instruction, kwargs in example["checks"]:
            assert FOLLOWED[instruction](example["response"], **kwargs), (instruction, kwargs, example)


def test_every_instruction_occurs_alone_and_most_in_pairs():
    alone, paired = Counter(), Counter()
    for example in examples("ifeval"):
        ids = [instruction for instruction, _ in example["checks"]]
        (alone if len(ids) == 1 else paired).update(ids)
    assert alone.keys() == FOLLOWED.keys()
    assert paired.keys() == {*general.BODIES, *general.EXTRAS}


def test_the_request_says_what_is_checked():
    for example in examples("ifeval"):
        for _, kwargs in example["checks"]:
            told = [str(v) for value in kwargs.values() for v in (value if isinstance(value, list) else [value])]
            missing = [t for t in told if t not in example["prompt"] and t not in ("at least", "less than")]
            assert not missing, (missing, example)


def test_same_seed_same_example_and_no_global_randomness():
    random.seed(1)
    before = random.getstate()
    for kind in general.KINDS:
        assert examples(kind, n=50) == examples(kind, n=50)
    assert random.getstate() == before


def test_topics_and_wordings_of_the_splits_are_apart():
    for column in (0, 2):
        pools = [{w for row in general.TOPICS.values() for w in row.split("|")[column + i].split()} for i in (0, 1)]
        assert not pools[0] & pools[1]
    banks = [v for k, v in vars(general).items() if isinstance(v, dict) and set(v) == {"train", "test"}]
    assert len(banks) > 8
    for bank in banks:
        assert not set(bank["train"]) & set(bank["test"])
    for wordings in general.SAY.values():
        for column in (0, 2):
            assert not set(wordings[column].split("/")) & set(wordings[column + 1].split("/"))
    for lang in ("zh", "en"):
        assert not set(general.REQUEST[lang, "train"]) & set(general.REQUEST[lang, "test"])


def test_test_prompts_never_occur_in_training():
    seen = {example["prompt"] for example in examples("ifeval")}
    assert not seen & {example["prompt"] for example in examples("ifeval", "test")}


def test_look_up_answers_stand_in_the_list():
    for example in examples("lookup", n=500):
        table = example["prompt"]
        assert all(line in table for line in example["response"].split("\n"))


def test_choosing_follows_the_description():
    chosen = [e for e in examples("repeat") if e["reasoning"]]
    assert len(chosen) > 100
    for example in chosen:
        row = next(line for line in example["prompt"].split("\n") if example["reasoning"] in line)
        assert example["response"] in row


def test_names_are_of_many_kinds_and_distinct():
    rng = random.Random(0)
    for kind in names.NAMES:
        assert len({names.name(rng, [kind]) for _ in range(200)}) > 50, kind
    found = names.distinct(rng, 12)
    assert len(set(found)) == 12
    for kind in names.TOOL_KINDS:  # what function-calling APIs allow
        assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", names.name(rng, [kind])) for _ in range(100))
