"""Lines of lists in very many layouts, put together at random: what is copied must be found in any of them.

    pair(rng, "{description}", "{name}")  ->  "- [{description}] | {name}"

All from `rng`; no torch, no files. A model that has only seen a name after a space does not find it after a colon: with
five fixed formats a base scored 4 of 100 on T1, with these 38. The base reads the Chinese ones (data/random_harness.py),
HSA makes most of those of its train half here (reword.py).
"""

BULLETS = ["", "", "", "- ", "* ", "+ ", "> ", "· ", "• ", "~ ", "o ", "# "]
AROUND = ["{}"] * 5 + ["[{}]", "「{}」", "({})", "“{}”", "<{}>", "（{}）", "（{}）", "【{}】", "《{}》", "`{}`", "*{}*"]
BETWEEN = [
    ": ",
    "：",
    ":",
    " -> ",
    "->",
    "=>",
    " = ",
    "=",
    " | ",
    "|",
    "，",
    "；",
    "; ",
    " - ",
    "——",
    "→",
    " ~ ",
    " · ",
]
BETWEEN += [" ", " ", "。", "、", "、", " / ", "/", ">>", "，叫", "，用", "：用", "…", " & ", "\u3000", ", "]
ENGLISH = [*(x for x in BETWEEN if x.isascii()), ", use ", ", take ", ", by ", ": call ", " ... ", " => ", " — "]


def pair(rng, first, second, between=BETWEEN, item=True):
    """A line with both, mostly in this order: what is known first, then what is looked for.

    item: it may have a bullet, and either may stand in brackets; else the first alone may, and nothing is swapped.
    """
    if item and rng.random() < 0.2:
        first, second = second, first
    around, middle, which = rng.choice(AROUND), rng.choice(between), rng.random()
    if not item or which < 0.25:
        first = around.format(first)
    elif which < 0.5:
        second = around.format(second)
    if around != "{}" and which < 0.5 and rng.random() < 0.4:
        middle = ""  # the brackets part them
    return rng.choice(BULLETS) * item + first + middle + second


def bare(line):
    """The line without its bullet."""
    return next((line.removeprefix(b) for b in BULLETS if b and line.startswith(b)), line)
