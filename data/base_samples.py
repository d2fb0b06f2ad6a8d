"""What the base model learns from: dialogues, routings, readings, instructions, copies, and random echoes and quotations.

    ids (T), mask (T)        mask 0 = environment, SAID = trained and scored, THOUGHT = trained

A dialogue is one oracle trajectory under its own random harness. Two sources are dialogues cut down to what is hard in
them: routings choose tools and skills from lists, readings reply by what the tools returned. General instructions are
those of general.py; copies are its look-ups and repetitions. Worker processes make all of them once and keep them in a
cache file. Echoes and quotations are random tokens, made batch by batch.

    samples = make_data(config)          # {(source, split): Samples}
    ids, mask = samples["dialogue", "train"].batch([0, 1], "cpu")
"""

import hashlib
import multiprocessing
import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402, F401  before torch: it sets the thread variables
import numpy as np  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tqdm import tqdm  # noqa: E402

from chat import REPLY, Codec, Message  # noqa: E402
from options import BadInput  # noqa: E402
from common import seed_of, write_text  # noqa: E402
from data import general, random_harness  # noqa: E402

SOURCES = ("quotation", "copy", "ifeval", "routing", "reading", "dialogue")
HELD_OUT = (*SOURCES[1:], "original")  # accuracy is also measured under the original harness, which the base never sees
ECHO = 2048  # tokens of a micro-batch of echoes or quotations
GAPS = (0, 1, 4, 16, 64)  # tokens between the two halves of an echo
QUOTED = 160  # tokens of all pieces that are quoted from one context
LENGTHS = [*range(32, 129, 16), *range(160, 257, 32), *range(320, 1025, 64), 1280, 1536, 2048]
CODE = """chat.py parts.py checks.py harness.py sim.py oracle.py
data/base_samples.py data/general.py data/names.py data/base_words.py data/layouts.py data/random_harness.py""".split()  # what samples are made from: when it changes they are made anew
SAID, THOUGHT = 1, 2  # mask values; reasoning is trained but not scored: its wording is free


def make_sample(codec, source, seed, split, strange):
    """(ids, mask) of one sample of a source; mask 0 = environment. Everything follows from `seed`."""
    rng = random.Random(seed)
    if source in ("dialogue", "original", "reading"):
        strange, reading = strange if split == "train" else 0.0, source == "reading"
        t = random_harness.dialogue(codec, seed, split, source == "original", strange, lists=not reading)
        kept = [not reading or segment == REPLY for segment in t.segment]
        return t.ids, [k * m * (1 + think) for k, m, think in zip(kept, t.mask, t.think, strict=True)]
    if source == "routing":
        prompt, said = random_harness.routing(codec, seed, split)
        return prompt + said, [0] * len(prompt) + [SAID] * len(said)
    kind = rng.choice(["lookup", "repeat"]) if source == "copy" else "ifeval"
    example = general.sample(rng, split, kind)
    prompt = codec.prompt([{"role": "user", "content": example["prompt"]}])
    said = codec.render(Message(example["reasoning"], example["response"]))
    return prompt + said, [0] * len(prompt) + [SAID + t for t in codec.think_mask(said)]


def make_chunk(job):
    """Worker: the samples `start .. stop` of one source as two flat arrays and their lengths."""
    tokenizer, source, split, seed, strange, start, stop = job
    codec = Codec(Tokenizer.from_file(tokenizer))
    seeds = [seed_of("base", seed, source, split, i) for i in range(start, stop)]
    pairs = [make_sample(codec, source, each, split, strange) for each in seeds]
    ids = np.concatenate([np.array(p[0], np.uint16) for p in pairs])
    mask = np.concatenate([np.array(p[1], np.uint8) for p in pairs])
    return ids, mask, [len(p[0]) for p in pairs]


class Samples:
    """Many (ids, mask) pairs as two flat arrays."""

    def __init__(self, ids, mask, lengths):
        self.ids, self.mask, self.ends = ids, mask, np.cumsum(lengths)
        self.lengths = np.asarray(lengths)

    def __len__(self):
        return len(self.lengths)

    def batch(self, indices, device):
        """Rows `indices` padded on the right to one of LENGTHS: ids and mask, both (B, T) int64."""
        width = padded(max(self.lengths[i] for i in indices))
        ids, mask = np.zeros((2, len(indices), width), np.int64)
        for row, i in enumerate(indices):
            span = slice(self.ends[i] - self.lengths[i], self.ends[i])
            ids[row, : self.lengths[i]], mask[row, : self.lengths[i]] = self.ids[span], self.mask[span]
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)  # (B, T)

    def groups(self, budget, seed):
        """Endless micro-batches of indices: rows of like length, at most `budget` padded tokens, each sample once per epoch."""
        rng = random.Random(seed)
        while True:
            order, batches = rng.sample(range(len(self)), len(self)), []
            for start in range(0, len(order), 1024):  # sorting within a window keeps batches random enough
                window = sorted(order[start : start + 1024], key=lambda i: (self.lengths[i], i))
                group = []
                for i in window:
                    if group and (len(group) + 1) * padded(self.lengths[i]) > budget:
                        batches.append(group)
                        group = []
                    group.append(i)
                batches.append(group)
            rng.shuffle(batches)
            yield from batches


def padded(length):
    return next(n for n in LENGTHS if n >= length)


def make_data(config, start=0):
    """{(source, split): Samples}, from the cache when the same code and settings made it.

    A run that goes on after step `start` keeps the samples that it began with, whatever became of the code since.
    """
    counts = {"copy": config.copies, "ifeval": config.instructions}
    counts |= {"routing": config.routings, "reading": config.readings, "dialogue": config.dialogues}
    counts = {(source, "train"): n for source, n in counts.items()}
    counts |= {(s, "test"): config.held_out for s in HELD_OUT if config.dialogues or s in ("copy", "ifeval")}
    counts = {key: n for key, n in counts.items() if n}
    note = Path(config.run) / "samples.txt"
    cache = Path(note.read_text(encoding="utf-8").strip()) if start else sample_file(config, counts)
    if not cache.exists():
        if start:
            raise BadInput(f"{cache}: the samples of this run are gone; start it anew")
        generate(config, counts, cache)
    write_text(note, f"{cache}\n")
    stored = np.load(cache)
    return {k: Samples(*(stored[f"{k[0]}.{k[1]}.{part}"] for part in ("ids", "mask", "lengths"))) for k in counts}


def sample_file(config, counts):
    """Path of the cache file for these settings and the files that samples are made from."""
    key = hashlib.sha256(repr((sorted(counts.items()), config.seed, config.strange, config.max_length)).encode())
    code = [ROOT / name for name in CODE]
    shown = sorted(
        path for part in ("harness", "world", "hsa") for path in (ROOT / "data" / part).rglob("*") if path.is_file()
    )
    for path in (tokenizer_file(config), *code, *shown):
        key.update(path.read_bytes())
    return Path(config.cache) / f"samples-{key.hexdigest()[:12]}.npz"


def tokenizer_file(config):
    path = Path(config.out) / "tokenizer.json"
    if not path.exists():
        raise BadInput(f"{path}: no tokenizer; run data/make_tokenizer.py --out {path.parent} first")
    return path


def generate(config, counts, cache, chunk=100):
    """Make all samples in worker processes and write the cache file."""
    jobs = [
        (str(tokenizer_file(config)), source, split, config.seed, config.strange, start, min(start + chunk, n))
        for (source, split), n in counts.items()
        for start in range(0, n, chunk)
    ]
    parts, dropped = {key: ([], [], []) for key in counts}, 0
    with multiprocessing.get_context("spawn").Pool(config.workers) as pool:
        made = tqdm(pool.imap(make_chunk, jobs), f"samples x{chunk}", len(jobs))
        for (_, source, split, *_), (ids, mask, lengths) in zip(jobs, made, strict=True):
            keep = np.asarray(lengths) <= config.max_length
            rows = np.repeat(keep, lengths)
            for store, part in zip(
                parts[source, split], (ids[rows], mask[rows], np.asarray(lengths)[keep]), strict=True
            ):
                store.append(part)
            dropped += len(lengths) - int(keep.sum())
    arrays = {}
    for (source, split), stores in parts.items():
        for part, store in zip(("ids", "mask", "lengths"), stores, strict=True):
            arrays[f"{source}.{split}.{part}"] = np.concatenate(store)
        lengths = arrays[f"{source}.{split}.lengths"]
        share = np.mean(arrays[f"{source}.{split}.mask"] > 0)
        print(
            f"{source} {split}: {len(lengths)} samples of {lengths.mean():.0f} tokens, at most {lengths.max()}, {share:.0%} trained"
        )
    print(f"{dropped} samples longer than {config.max_length} left out")
    cache.parent.mkdir(parents=True, exist_ok=True)
    temp = cache.with_suffix(".tmp.npz")
    np.savez(temp, **arrays)
    os.replace(temp, cache)


def echo(rng, few, tokens, device):
    """A micro-batch of echoes: `few` different ids, any of `tokens` in between, and the first ones again, which are trained.

    All its rows have one length, so that short ones, which are learned first, weigh as much as long ones.
    """
    n, gap = rng.choice([2, 4, 8, 16, 32]), rng.choice(GAPS)
    rows = max(1, ECHO // (2 * n + gap))
    first, between = rng.integers(0, few, (rows, n)), rng.integers(0, tokens, (rows, gap))
    ids = torch.from_numpy(np.concatenate([first, between, first], axis=1)).to(device)  # (B, T)
    mask = torch.zeros_like(ids)
    mask[:, n + gap + 1 :] = SAID  # the first of them nothing announces
    return ids, mask


def quotation(rng, tokens, device):
    """A micro-batch of random contexts with pieces of each behind it, which are trained but for the start of each piece.

    An echo comes back at one distance, and short ones leave most of a prompt out; here a piece may be from anywhere in
    hundreds of ids. In a third of the batches each id stands there four times, as `_` does in names: what follows is
    told by the three before it.
    """
    n, length = rng.choice([64, 200, 600]), rng.choice([2, 4, 8])
    few, told = (tokens, 1) if rng.random() < 2 / 3 else (n // 4, 3)
    length += told - 1
    pieces, some = QUOTED // length, rng.choice(tokens, few, replace=False)
    rows = max(1, ECHO // (n + pieces * length))
    context = some[rng.integers(0, few, (rows, n))]  # (B, N)
    places = rng.integers(0, n - length + 1, (rows, pieces, 1)) + np.arange(length)  # (B, pieces, length)
    said = np.take_along_axis(context, places.reshape(rows, -1), axis=1)
    mask = np.tile(np.where(np.arange(length) < told, 0, SAID), (rows, pieces))
    ids, mask = (np.concatenate(pair, axis=1) for pair in ((context, said), (np.zeros_like(context), mask)))
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)  # (B, T)
