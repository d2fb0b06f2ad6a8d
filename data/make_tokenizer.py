"""Makes the byte-level BPE of the base model, so that a name is the same tokens wherever it stands.

    text -> pieces (regex) -> bytes -> merges inside a piece only

A prompt shows a tool in a list, a call writes it between quotes, a skill body puts it into a sentence: a small model copies it
only when all three are the same ids. So no piece crosses a space, a quote or other punctuation, camelCase splits at its humps,
digits stand alone, and so does every Han character; `_` goes with the word behind it. Runs of JSON punctuation (`", "`, `": {"`)
are pieces of their own and become single tokens.

The merges of ASCII pieces are learned (`tokenizers`' BPE trainer); every other character of the corpus gets its token by rule,
bytes joined left to right, because a frequency cut would leave the rare ones in three pieces. The byte alphabet covers the rest:
any text makes the round trip.

    python data/make_tokenizer.py --out runs/tokenizer   # tokenizer.json, tokenizer_config.json, chat_template.jinja

Seconds on one core. Same files, same seed -> same tokenizer; today's files give another one than the shipped base has
learned to read. Without --out it writes over that one: `git checkout data/base-small` brings it back.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

from chat import Codec  # noqa: E402
from options import BadInput, option, parse  # noqa: E402
from common import cli, write_json, write_text  # noqa: E402
from data import base_words, general, names, random_harness  # noqa: E402


@dataclass
class Config:
    out: str = option(str(ROOT / "data" / "base-small"), "directory of the three files")
    merges: int = option(1200, "learned merges of ASCII pieces", min=0)
    samples: int = option(20000, "general instructions in the corpus", min=0)
    dialogues: int = option(1500, "dialogues under random harnesses", min=0)
    seed: int = option(0, "of those samples")


PIECES = "|".join(
    [
        r"_?[A-Z]?[a-z]+|_?[A-Z]+(?![a-z])",  # a word, split at camelCase humps; a snake_case part takes its `_` along
        r"[0-9]",
        r'[{}\[\]":,](?:[{}\[\]":,]|\x20(?=["{\[]))*',  # JSON punctuation; a space only before what it opens
        r"\n+",
        r"\x20+",
        r"</?",
        r"\*+",
        r"-+",
        r"#+",
        r"[\s\S]",  # everything else by the character
    ]
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

# ChatML with Hermes JSON calls, for `apply_chat_template` of other programs; HAT itself writes ids through chat.Codec, and both agree.
# History is append-only: the reasoning of every assistant turn stays.
TEMPLATE = """\
{%- set system = messages[0].content | trim if messages and messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') }}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + tool | tojson }}
{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content }}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""


def corpus(config):
    """Texts to learn from: general instructions, dialogues under random harnesses, the shipped harness and worlds (for
    their characters)."""
    codec = Codec(build([], 0))  # bytes alone: enough to run the dialogues
    for i in range(config.dialogues):
        yield codec.decode([t for t in random_harness.dialogue(codec, i).ids if t not in codec.added.values()])
    rng = random.Random(config.seed)
    for _ in range(config.samples):
        example = general.sample(rng, "train")
        yield "\n".join([example["prompt"], example["reasoning"], example["response"]])
    for path in sorted(path for part in ("harness", "world") for path in (ROOT / "data" / part).rglob("*")):
        if path.suffix in (".md", ".json"):
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".json":  # the model sees compact JSON, not an indented file
                text = json.dumps(json.loads(text), ensure_ascii=False)
            yield text


def splitter():
    pieces = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    return pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def learned_merges(texts, count):
    """The BPE trainer's merges over the ASCII part of the texts, most frequent first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + count, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    ascii_only = ("".join(c if c.isascii() else "\n" for c in text) for text in texts)
    tokenizer.train_from_iterator(ascii_only, trainer)
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def byte_symbols():
    """byte value -> the printable character that byte-level BPE writes for it (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


def character_merges(texts):
    """Merges that join the UTF-8 bytes of every non-ASCII character of the texts (and of names.HAN) into one token."""
    symbol = byte_symbols()
    merges = {}
    for c in sorted({c for text in texts for c in text if not c.isascii()} | set(names.HAN + base_words.CHARACTERS)):
        parts = [symbol[b] for b in c.encode("utf-8")]
        for i in range(1, len(parts)):
            merges["".join(parts[:i]), parts[i]] = None
    return list(merges)


def build(texts, count):
    """Texts -> the finished `tokenizers.Tokenizer`."""
    merges = learned_merges(texts, count) + character_merges(texts)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet + ["".join(pair) for pair in merges])}
    if len(vocab) != len(alphabet) + len(merges):
        raise BadInput(
            "make_tokenizer: two merges make the same token; change PIECES so that each piece has one reading"
        )
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter(), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    return tokenizer


def report(tokenizer, texts):
    """A few lines with their token counts, for the person who runs this."""
    for text in [
        "- get_product_info_by_link_id(link_id:int): 查询商品信息",
        '{"name": "get_inventory", "arguments": {"link_id": 3}}',
        "3号链接多少钱？有券吗",
        "Describe apples. Use only lowercase letters.",
        *texts[:3],
    ]:
        pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text).ids]
        print(f"{len(pieces):4d} tokens / {len(text)} characters: {'|'.join(pieces)}"[:300].replace("\n", "\\n"))


def main(argv):
    config = parse(Config, {}, argv, __doc__)
    texts = list(corpus(config))
    tokenizer = build(texts, config.merges)
    out = Path(config.out)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    settings |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "unk_token": None}
    write_text(out / "tokenizer.json", tokenizer.to_str(pretty=False))
    write_json(out / "tokenizer_config.json", settings)
    write_text(out / "chat_template.jinja", TEMPLATE)
    report(tokenizer, texts)
    print(f"{out}: {tokenizer.get_vocab_size()} tokens from {len(texts)} texts")


if __name__ == "__main__":
    cli(main)
