"""Makes the evaluation sets of the small world: seeded, held out, the same rows on every machine.

    row i of a set = f(seed, set, i, harness, world)      the first N rows are the set of size N

    T1         the original harness, rooms of the test world
    T2         the same questions, each under a variant of its own from the heldout pool of augment.py
    T3-tool    one to three of TOOL_CHANGES: other names, parameters, types; tools too many, one too few; failing tools
    T3-prompt  one to three of PROMPT_CHANGES: other order, format, wording, limits; noise skills, noise lines
    T4         general instructions that ifeval.py can check, of the test split of data/general.py

A row is one JSON line: id, set, task seed, split, intent, bullet comments and context in clear text, the pool and seed
of its variant, what was changed, the commit of the harness it runs under, and the rates of its faults. T4 rows have the
fields of the official IFEval file. The manifest in data/sets holds the SHA-256 of each set; the sets themselves, some
megabytes, are made again on first use in runs/sets, and must have these hashes. `stage` builds harness and task of a
row and refuses it if they are not those that it was made with.

The oracle answers every row when a manifest is made: its score says that all can be answered, its longest rollout how
much context a model needs. T3-tool has no small talk, which needs no tool.

    python data/make_sets.py                              # data/sets/small.json, a minute or two
    python data/make_sets.py --harness DIR --out my.json  # sets of your own harness, for `python eval.py --manifest my.json`

Left out: the JSON tool list in place of the one-line list, which doubles the prompt of the small world.
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from augment import DIMENSIONS, augment  # noqa: E402
from chat import Codec, read_codec  # noqa: E402
from options import BadInput, option, parse  # noqa: E402
from common import cli, read_json, read_text, seed_of, write_json, write_text  # noqa: E402
from data import general  # noqa: E402
from envelope import ENVELOPE, Draft  # noqa: E402
from facts import score  # noqa: E402
from harness import Harness  # noqa: E402
from reword import bank, language, mention  # noqa: E402
from oracle import teach  # noqa: E402
from parts import LOAD_SKILL, Skill, Tool  # noqa: E402
from sim import NO_FAULTS, ROUTES, Faults, Task, World, check_harness, make_task  # noqa: E402

SETS = ("T1", "T2", "T3-tool", "T3-prompt", "T4")
SPLIT, POOL = "test", "heldout"
MAKE = "python data/make_sets.py"  # for error messages


@dataclass
class Config:
    config: str = option("small", "preset")
    harness: str = option("data/harness", "harness directory")
    world: str = option("data/world/zh.json", "world file")
    out: str = option("", "manifest; empty = data/sets/PRESET.json")
    model: str = option("data/base-small", "directory of the tokenizer that counts the tokens")
    seed: int = option(0, "of all sets")
    items: int = option(500, "rows of each set", min=1)


PRESETS = {"tiny": dict(items=8), "small": dict()}

# ---------------------------------------------------------------------------------------------------------------------
# what T3 changes: fields of the Envelope, on top of one in which nothing acts, or a function below

STILL = replace(
    ENVELOPE,
    **dict.fromkeys(
        (*DIMENSIONS, "rename", "describe", "reword", "reorder", "restyle", "mask_skill", "mask_rule"), 0.0
    ),
    noise=(0, 0),
    reply_chars=(1.0, 1.0),
    turns=(1.0, 1.0),
)
TOOL_CHANGES = {
    "names": dict(tool=1.0, rename=1.0),
    "descriptions": dict(tool=1.0, describe=1.0, reorder=1.0),
    "parameters": dict(tool=1.0, rename_parameters=1.0),
    **dict.fromkeys(("types", "extra", "missing", "timeout", "malformed", "denied"), {}),
}
PROMPT_CHANGES = {
    "order": dict(prompt=1.0, skill_id=1.0, tool=1.0, reorder=1.0),
    "format": dict(prompt=1.0, restyle=1.0),
    "wording": dict(prompt=1.0, reword=1.0),
    "limits": dict(prompt=1.0, reply_chars=ENVELOPE.reply_chars, turns=ENVELOPE.turns),
    "noise skills": dict(skill_id=1.0, noise=(2, 4)),
    "noise lines": {},
}
CHANGES = {"T3-tool": TOOL_CHANGES, "T3-prompt": PROMPT_CHANGES}
FAULT = 0.5  # probability of a fault that is among the changes; in training each has a few percent

EXTRA_TOOLS = {  # (description, its parameters): none is of use to any request
    "zh": [
        ("调镜头的远近", {"zoom": "integer"}),
        ("把一条弹幕置顶", {"text": "string"}),
        ("看粉丝团的等级", {"viewer": "string"}),
        ("问下一场几点开播", {}),
        ("截一张画面", {"name": "string"}),
        ("记下观众的建议", {"text": "string"}),
        ("发起一轮投票", {"title": "string"}),
        ("把灯光调亮", {"level": "integer"}),
    ],
    "en": [
        ("Zoom the camera", {"zoom": "integer"}),
        ("Pin a comment", {"text": "string"}),
        ("Tell the level of a fan", {"viewer": "string"}),
        ("Tell when the next show starts", {}),
        ("Take a screenshot", {"name": "string"}),
        ("Write down a suggestion", {"text": "string"}),
        ("Open a poll", {"title": "string"}),
        ("Turn up the lights", {"level": "integer"}),
    ],
}
NOISE_LINES = {
    "zh": """背景板今天换成了浅色。 场控坐在镜头左边。 麦克风已经试过音了。 助播稍后会来打招呼。 镜头外放着一束花。
样品都摆在后面的架子上。 灯光师在中场会调一次光。 今天的妆造是新换的。 楼下的咖啡店重新开门了。 上一场的录像已经存好。""".split(),
    "en": """The backdrop is a light one today.|The floor manager sits left of the camera.|The microphone has been
tested.|The assistant will say hello later.|There are flowers beside the camera.|The samples stand on the shelf behind.|
The lights will be adjusted at half time.|Make-up is by someone new today.|The café downstairs has opened again.|
The last show has been recorded.""".replace("\n", " ").split("|"),
}


def needed(task: Task) -> set[str]:
    """Ids of the skills that a right answer loads."""
    return {id for id in (task.reply_skill, task.strategy) if id}


def mentions(tool: Tool, texts: Iterable[str]) -> bool:
    """Whether a text speaks of the tool, by its name or as {tool:ID}."""
    pattern = mention([tool.name])
    return any(found in (tool.name, f"{{tool:{tool.id}}}") for text in texts for found in pattern.findall(text))


def missing(h: Harness, task: Task, rng: random.Random) -> Harness:
    """One tool is gone, two times of three one that was asked for, and with it the skills that send to it.

    None that a block, a message or a skill that the task needs speaks of. An ask may be left without any tool: then an
    honest word is the right answer.
    """

    def said(s: Skill) -> list[str]:
        return [s.description, s.body]

    texts = [*h.blocks.values(), *(x.message for x in h.hooks), h.fallback]
    texts += [text for s in h.skills if s.id in needed(task) for text in said(s)]
    free = [t for t in h.tools if t.id != LOAD_SKILL and not mentions(t, texts)]
    asked = [t for t in free if t.id in {ROUTES[ask.kind][0] for ask in task.asks}]
    if not free:
        return h
    gone = rng.choice(asked if asked and rng.random() < 2 / 3 else free)
    skills = [s for s in h.skills if s.id in needed(task) or not mentions(gone, said(s))]
    return h.copy(tools=[t for t in h.tools if t.id != gone.id], skills=skills)


def types(h: Harness, task: Task, rng: random.Random) -> Harness:
    """Parameters of wider types: whatever was a right argument stays one."""

    def wider(schema):
        kind = schema.get("type") if isinstance(schema, dict) else None
        options = [[kind, "null"]] + ["number"] * (kind == "integer")
        return {**schema, "type": rng.choice(options)} if isinstance(kind, str) else schema

    def changed(t: Tool) -> Tool:
        properties = {key: wider(schema) for key, schema in t.parameters["properties"].items()}
        return t if t.id == LOAD_SKILL else replace(t, parameters={**t.parameters, "properties": properties})

    return h.copy(tools=[changed(t) for t in h.tools])


def extra(h: Harness, task: Task, rng: random.Random) -> Harness:
    """One to three tools more, of no use here; the room knows none of them."""
    draft, tools = Draft(h, ENVELOPE, bank(POOL), None, bank(POOL)), list(h.tools)
    draft.rng, taken = rng, draft.taken()
    for n, (text, keys) in enumerate(rng.sample(EXTRA_TOOLS[draft.language], rng.randint(1, 3))):
        schema = {"type": "object", "properties": {k: {"type": v} for k, v in keys.items()}, "required": list(keys)}
        tools.insert(rng.randint(0, len(tools)), Tool(f"extra_{n}", draft.draw_name(taken), text, schema))
    return h.copy(tools=tools)


def noise_lines(h: Harness, task: Task, rng: random.Random) -> Harness:
    """Two to four lines in the system prompt that have nothing to do with any request; headings stay first."""
    blocks = dict(h.blocks)
    for line in rng.sample(NOISE_LINES[language("".join(blocks[name] for name in h.system))], rng.randint(2, 4)):
        name = rng.choice(h.system)
        lines = blocks[name].split("\n")
        lines.insert(rng.randint(1, len(lines)), line)
        blocks[name] = "\n".join(lines)
    return h.copy(blocks=blocks)


EDITS = {"missing": missing, "types": types, "extra": extra, "noise lines": noise_lines}

# ---------------------------------------------------------------------------------------------------------------------
# rows


def variant(h: Harness, name: str, seed: int, changes: list[str], task: Task) -> tuple[Harness, list[str]]:
    """The harness of a row, and what is changed in it. changes: those of T3; T2 draws its own, the five dimensions."""
    if name == "T1":
        return h, []
    if name == "T2":
        h, log = augment(h, seed, ENVELOPE, POOL, needed(task))
        acted = {entry["dimension"] for entry in log if entry["change"] not in ("kept", "rejected")}
        return h, [d for d in DIMENSIONS if d in acted]
    chosen = {key: value for change in changes for key, value in CHANGES[name][change].items()}
    h, _ = augment(h, seed, replace(STILL, **chosen), POOL, needed(task))
    for change in (c for c in EDITS if c in changes):
        h = EDITS[change](h, task, random.Random(seed_of("edit", seed, change)))
    return h, changes


def task_of(name: str, i: int, world: World, seed: int) -> Task:
    """The request of row i: T1 and T2 ask the same, T3-tool asks for something that a tool tells."""
    asked = "T1" if name == "T2" else name
    tasks = (make_task(world, seed_of("evaluation", seed, asked, i, n)) for n in count())
    return next(t for t in tasks if name != "T3-tool" or any(ROUTES[ask.kind][0] for ask in t.asks))


def make_row(name: str, i: int, original: Harness, world: World, seed: int = 0) -> dict:
    """Row i of T1, T2 or T3."""
    task, rng = task_of(name, i, world, seed), random.Random(seed_of("changes", seed, name, i))
    drawn = rng.sample(list(CHANGES[name]), rng.randint(1, 3)) if name in CHANGES else []
    for n in count():
        spec = seed_of("variant", seed, name, i, n)
        h, changes = variant(original, name, spec, drawn, task)
        if name != "T2" or changes:  # once in a thousand the dice change nothing
            break
    return {
        "id": f"{name}/{i}",
        "set": name,
        "seed": task.seed,
        "split": world.split,
        "intent": task.intent,
        "danmaku": task.danmaku,
        "context": task.context,
        "harness": None if name == "T1" else {"pool": POOL, "seed": spec},
        "changes": changes,
        "commit": h.commit,
        "faults": [FAULT * (kind in changes) for kind in asdict(NO_FAULTS)],
    }


def make_prompts(seed: int = 0) -> Iterator[dict]:
    """The rows of T4, without end; no prompt twice."""
    seen = set()
    for n in count():
        made = general.sample(random.Random(seed_of("evaluation", seed, "T4", n)), SPLIT, "ifeval")
        if made["prompt"] not in seen:
            seen.add(made["prompt"])
            ids, kwargs = map(list, zip(*made["checks"]))
            row = {"id": f"T4/{len(seen) - 1}", "set": "T4", "split": SPLIT, "key": f"T4/{len(seen) - 1}"}
            yield row | {"prompt": made["prompt"], "instruction_id_list": ids, "kwargs": kwargs}


def make_rows(name: str, items: int, original: Harness, world: World, seed: int = 0) -> list[dict]:
    """The first `items` rows of a set."""
    rows = make_prompts(seed) if name == "T4" else (make_row(name, i, original, world, seed) for i in count())
    return list(tqdm(islice(rows, items), desc=f"making {name}", total=items, leave=False))


@dataclass
class Case:
    """A row with the harness and the task that it names."""

    row: dict
    harness: Harness
    task: Task

    def open(self):
        """A fresh room, whose tools fail at the rates of the row."""
        return self.task.open(Faults(*self.row["faults"]), self.row["seed"])


def stage(row: dict, original: Harness, world: World) -> Case:
    """Harness and task of a row of T1, T2 or T3; BadInput when they are not those that it was made with."""
    task, spec = make_task(world, row["seed"]), row["harness"] or {"seed": 0}
    h, changes = variant(original, row["set"], spec["seed"], row["changes"], task)
    asked = [world.split, task.intent, task.danmaku, task.context, changes]
    if [row[key] for key in ("split", "intent", "danmaku", "context", "changes")] != asked or h.commit != row["commit"]:
        raise BadInput(f"{row['id']}: made of another harness, world or code; {MAKE} makes new sets")
    return Case(row, h, task)


# ---------------------------------------------------------------------------------------------------------------------
# manifest


def lines_of(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def hash_of(text: str) -> str:
    """SHA-256 of a set, or of its first rows, as it stands in a file."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Sets:
    """The sets of a manifest, with the harness and the world that they are of."""

    path: str
    entries: dict[str, dict]  # set -> items, sha256, and what `measure` says
    original: Harness
    world: World
    seed: int

    @classmethod
    def load(cls, path: str | Path) -> "Sets":
        """Read a manifest; BadInput for one that is none, or whose harness is another one by now."""
        manifest = read_json(path)
        for key, kind in dict(harness=str, harness_commit=str, world=str, seed=int, sets=dict).items():
            if not isinstance(manifest, dict) or not isinstance(manifest.get(key), kind):
                raise BadInput(f"{path}: no {key!r} in it; {MAKE} makes a manifest")
        original = Harness.load(manifest["harness"])
        if original.commit != manifest["harness_commit"]:
            now = f"{manifest['harness']} is {original.commit}"
            raise BadInput(
                f"{path}: its sets are of harness {manifest['harness_commit']}, but {now}; {MAKE} makes new ones"
            )
        world = World.load(manifest["world"], SPLIT)
        return cls(str(path), manifest["sets"], original, world, manifest["seed"])

    def rows(self, name: str, cache: str | Path = "runs/sets") -> list[dict]:
        """The rows of a set, made now unless they lie in `cache`.

        BadInput, one line, when what lies there or what the code makes now has not the hash of the manifest.
        """
        if name not in self.entries:
            raise BadInput(f"{self.path}: no set {name} in it; there are {', '.join(self.entries)}")
        entry = self.entries[name]
        if not (
            isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("items"), int)
        ):
            raise BadInput(f"{self.path}: set {name} has no 'items' and 'sha256'; {MAKE} makes a manifest")
        right, items = entry["sha256"], entry["items"]
        file = Path(cache) / f"{name}-{right[:12]}.jsonl"
        if kept := file.exists():
            text, where, mend = read_text(file), str(file), "remove it, and it is made again"
        else:
            text, where = lines_of(make_rows(name, items, self.original, self.world, self.seed)), f"{name}, made now,"
            mend = f"the code has changed since; {MAKE} makes new sets"
        if (found := hash_of(text)) != right:
            raise BadInput(f"{where} is not the set of {self.path} (hash {found[:12]}, not {right[:12]}): {mend}")
        if not kept:
            write_text(file, text)
        return [json.loads(line) for line in text.split("\n") if line]


def measure(rows: list[dict], original: Harness, world: World, codec: Codec) -> dict:
    """What the oracle says of a set: its score when it reasons briefly, the longest prompt, its longest rollout, in tokens.

    At length it may be beyond the harness's own limit of a state.
    """
    if rows[0]["set"] == "T4":
        longest = max(len(codec.prompt([{"role": "user", "content": row["prompt"]}])) for row in rows)
        return {"longest_prompt": longest}
    points, prompts, rollouts = [], [], []
    for row in tqdm(rows, desc=rows[0]["set"], leave=False):
        case = stage(row, original, world)
        told = [teach(case.harness, case.task, codec, row["seed"], Faults(*row["faults"]), verbosity=v) for v in (0, 2)]
        got = score(case.harness, case.task, told[0])
        points.append(50 * (got["accuracy"] + got["effectiveness"]))
        prompts.append(told[0].mask.index(1))
        rollouts += [len(t.ids) for t in told]
    return {"longest_prompt": max(prompts), "longest_rollout": max(rollouts), "oracle": sum(points) / len(points)}


def make(cfg: Config) -> dict:
    """Make all sets and write their manifest."""
    if not cfg.out and (cfg.harness, cfg.world) != (Config.harness, Config.world):
        raise BadInput("--out: sets of another harness or world need a manifest of their own, which --out names")
    original, world = Harness.load(cfg.harness), World.load(cfg.world, SPLIT)
    check_harness(original)
    codec = read_codec(cfg.model)
    entries = {}
    for name in SETS:
        rows = make_rows(name, cfg.items, original, world, cfg.seed)
        entries[name] = {"items": len(rows), "sha256": hash_of(lines_of(rows))} | measure(rows, original, world, codec)
        print(f"{name:9}  {'  '.join(f'{key} {value}' for key, value in entries[name].items())}")
    about = {"harness": cfg.harness, "harness_commit": original.commit, "world": cfg.world, "seed": cfg.seed}
    manifest = about | {"sets": entries}
    write_json(cfg.out or ROOT / "data" / "sets" / f"{cfg.config}.json", manifest)
    return manifest


def main(argv: list[str]) -> None:
    make(parse(Config, PRESETS, argv, __doc__))


if __name__ == "__main__":
    cli(main)
