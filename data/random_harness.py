"""Random harnesses for the base model's pre-training: other names, words, order, headings and rules in every dialogue.

A base model has read thousands of harnesses and knows none. So each dialogue here stands under a harness of its own, derived
from data/harness by ids, with names of many kinds (half of the time they hint at the function; the description always tells), other
descriptions, bodies, headings, formats, orders, limits and rule values. These pools are the base's alone: no name,
description or skill body of data/harness is among them.

Most formats put the description before the name. A causal model then reads what a name is for *before* it reads the name, and
finds it in one step of attention; the other way round takes two, and a few million weights learn that very slowly.

    python data/random_harness.py --seed 3        prints one random harness with an oracle dialogue in it
"""

import json
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from chat import Codec, Message, Trajectory  # noqa: E402
from common import seed_of  # noqa: E402
from data import names  # noqa: E402
from harness import LOAD_SKILL, Harness, assemble  # noqa: E402
from parts import Skill, Tool  # noqa: E402
from oracle import call_of, teach, understood  # noqa: E402
from sim import ROUTES, Faults, World, comment, make_ask, make_task  # noqa: E402

FAULTS = Faults(0.06, 0.05, 0.05)
SLIP = 0.06
CARELESS = (
    0.6  # as in any text found in the wild, most service is half-hearted: what a base imitates is not what we want
)
VERBOSITY = (0.4, 0.35, 0.25)
P_MASK = 0.25  # of a skill that the request does not need
P_LOADER = 0.4  # harnesses that call the loader by its own name: it belongs to the loop, not to the shop
P_VERB = 0.6  # harnesses whose tools share their first word

WORDS = (
    "get query fetch find look read load check list show ask call use open pull product info link id inventory stock coupon shipping "
    "search faq room state item price detail order goods data note page live store shop sale deal code card help guide step rule plan "
    "reply answer talk chat small skill promo logistics after compare multi intent qa one two main fast plus core base node task job "
    "alpha beta gamma delta sigma omega red blue green north south east west sun moon star river stone cloud tree leaf bird fish by of"
).split()
PINYIN = "cha kan jia ge ku cun huo pin fa you hui quan shang fu wu liao tian hui da bi duo wen ti ji neng zhi bo jian xin lian".split()
SYLLABLES = [c + v for c in "bcdfghjklmnprstvwz" for v in "aeiou"]
HANZI = "天地玄黄宇宙洪荒日月星辰春夏秋冬东南西北甲乙丙丁山水风云金木火土梅兰竹菊松柏青白红蓝大小高低远近快慢新旧查看问答帮助"


NAME_KINDS = ["words", "shared", "made", "pinyin", "pseudo", "camel", "kebab", "code", "hanzi"]


def family(rng: random.Random) -> Callable[[], str]:
    """A drawer of the names of one harness: meaningless, of any kind or (one in two) all of one.

    Names of one shop look alike: where few words or prefixes make many of them (`silver_sand`, `sand_silver`, `qk31`,
    `qk8`), one token does not tell what comes next. Most words need not be of any list: what a model has never seen
    whole it can only copy, piece by piece.
    """
    lexicon = [names.word(rng) for _ in range(rng.choice([6, 12, 24]))]
    prefixes = [names.letters(rng, rng.randint(1, 2)) for _ in range(rng.choice([1, 3, 9]))]
    only = rng.choice(NAME_KINDS) if rng.random() < 0.5 else ""

    def name() -> str:
        kind = only or rng.choices(NAME_KINDS, [4, 4, 4, 1, 1, 1, 1, 1, 1])[0]
        if kind == "made":
            return names.name(rng, names.TOOL_KINDS)
        if kind == "code":
            return rng.choice(prefixes) + names.digits(rng, 1, 3)
        if kind == "hanzi":
            return "".join(rng.choices(HANZI if rng.random() < 0.5 else names.HAN, k=rng.randint(2, 4)))
        if kind == "pinyin":
            return "_".join(rng.choice(PINYIN) for _ in range(rng.randint(1, 4)))
        if kind == "pseudo":
            return "_".join("".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3)))
        words = rng.choices(WORDS if kind == "words" else lexicon, k=rng.choice([1, 2, 2, 3, 3, 4]))
        if kind == "camel":
            return words[0] + "".join(word.capitalize() for word in words[1:])
        return ("-" if kind == "kebab" else "_").join(words)

    return name


# Words that say what a thing is for. As for any base model, a name is often a hint: half of the harnesses are named so.
ACTIONS = "get query fetch check find look show read".split()
MEANING = {
    "get_product_info_by_link_id": "product goods item info detail",
    "get_inventory": "inventory stock left amount",
    "get_coupon": "coupon discount deal",
    "get_shipping": "shipping delivery express",
    "search_faq": "faq question help search",
    "get_room_state": "room live state event",
    "load_skill": "skill load guide open",
    "item_qa": "item product goods qa",
    "price_promo": "price promo discount deal",
    "logistics": "logistics delivery shipping express",
    "after_sale": "after sale return refund",
    "small_talk": "small talk chat greet",
    "compare": "compare versus pick",
    "multi_intent": "multi intent many merged",
}
# What a description says: words for the thing, one to three of them joined, in a frame; or all of it said at once.
JOINTS = ["、", "、", "和", "与", "及", "跟"]
TOOLS = {
    "get_product_info_by_link_id": (
        ["商品", "名称", "商品名", "价格", "价钱", "规格", "参数", "颜色材质", "属性"],
        [
            "商品信息和价格",
            "名称、价格和参数",
            "商品详情",
            "价格、颜色材质等规格",
            "链接的详细资料",
            "这是什么、多少钱",
        ],
    ),
    "get_inventory": (
        ["库存", "件数", "存货", "余量"],
        ["还剩多少件", "库存数量", "有没有货", "剩余件数", "商品存货", "还有几件可卖"],
    ),
    "get_coupon": (
        ["优惠券", "券", "券后价", "到手价", "折扣", "优惠"],
        ["券和到手价", "优惠信息", "可用的券", "折扣和券后价", "商品优惠", "用券后多少钱"],
    ),
    "get_shipping": (
        ["发货", "发货地", "发货时间", "物流", "时效", "城市"],
        ["从哪发货、几小时发出", "物流时间", "发货城市和时效", "什么时候发货", "何地何时寄出"],
    ),
    "search_faq": (
        ["常见问题", "问答", "售后", "退换", "退货", "用法"],
        ["商品问答和退货", "能不能用、能不能退", "问题库", "适用人群和退换", "使用问题与售后", "能退几天"],
    ),
    "get_room_state": (
        ["活动", "直播间活动", "直播间", "促销", "满减", "赠品"],
        ["直播间状态", "当前活动", "房间活动信息", "全场活动", "现在有什么活动"],
    ),
    "load_skill": (
        ["技能", "技能内容", "技能正文", "技能说明"],
        ["一个技能", "技能全文", "技能写了什么"],
    ),
}
SKILLS = {
    "item_qa": (
        ["商品", "价格", "规格", "库存", "用法", "产品", "参数"],
        ["商品问题", "介绍商品", "价格库存规格问答", "商品怎么样", "商品信息", "商品问答"],
    ),
    "price_promo": (
        ["优惠", "活动", "券", "优惠券", "满减", "折扣", "促销"],
        ["优惠活动", "优惠和满减", "优惠券", "活动与折扣", "券和促销问题", "怎么更便宜"],
    ),
    "logistics": (
        ["发货", "物流", "快递", "配送", "时效", "发货地"],
        ["物流问题", "发货时间", "快递和时效", "什么时候到", "配送问答", "从哪寄"],
    ),
    "after_sale": (
        ["售后", "退货", "换货", "退换", "退换货"],
        ["售后问题", "退换规则", "不合适怎么办", "售后服务", "退货问答", "几天能退"],
    ),
    "small_talk": (
        ["闲聊", "问好", "问候", "夸奖", "告别", "寒暄", "聊天"],
        ["打招呼和夸奖", "聊天互动", "和观众寒暄", "欢迎和告别", "与商品无关的话"],
    ),
    "compare": (
        ["比较", "对比", "比价"],
        ["两个商品对比", "哪个更划算", "比较价格", "两件商品比一比", "两个链接选一个", "两款之间挑"],
    ),
    "multi_intent": (
        ["多条弹幕", "几条弹幕", "多个问题", "好几个问题"],
        ["多个问题一起问", "合并的弹幕", "同时回答几个问题", "一次问了好几样", "弹幕一起来了"],
    ),
}
FRAMES = {
    "tool": "查{x} 查询{x} 看{x} 获取{x} 读取{x} 返回{x} 拿到{x} 问{x} 找{x} {x} {x}的接口 想知道{x}就用 {x}用它查 得到{x} {x}查询".split(),
    "reply": "{x} 回复{x} 用于{x} 回答:{x} 讲{x} 关于{x} 负责{x} {x}怎么说 有人问{x} 观众聊{x} {x}的回法 {x}时加载".split(),
    "strategy": "策略{x} 方法:{x} 计划:{x} 思路:{x} {x}的办法 {x}时这样做 {x}的顺序 策略:{x}".split(),
}
ABOUT = {
    "item_qa": [
        "讲清楚是几号，价格报券后的。",
        "先说链接号，再说答案。",
        "报链接号和券后价。",
        "几号链接要说明白。",
        "链接号别漏，价格是用券后的。",
    ],
    "price_promo": ["把优惠和券后价说明白。", "说有多少券、到手多少。", "优惠要讲全。", "券多少、到手价多少都说。"],
    "logistics": ["说明发货城市和时间。", "讲从哪发、几小时发出。", "城市和时效都要说。", "哪里寄、多久寄出要说。"],
    "after_sale": ["说明多少天能退。", "讲清退货天数。", "天数要说准。", "可退的天数要说。"],
    "small_talk": [
        "别讲商品。问好就欢迎，被夸就谢谢，告别就再见。",
        "不聊商品，来的人说欢迎，夸奖说谢谢，走的人说再见。",
        "商品先不说。欢迎来的，谢谢夸的，送别走的。",
    ],
    "compare": [
        "{tool:get_product_info_by_link_id}查两个商品，再用{skill:item_qa}说哪个便宜。",
        "先对两个链接调用{tool:get_product_info_by_link_id}，比出低价，回复用{skill:item_qa}。",
        "两边都用{tool:get_product_info_by_link_id}，便宜的报出来，照{skill:item_qa}说。",
    ],
    "multi_intent": [
        "每个问题都查，都回答，回复技能看第一条。",
        "逐条查完一起回答。用第一条对应的回复技能。",
        "问几样就查几样、答几样。第一条是什么就用什么技能。",
    ],
}
ENDS = ["句尾", "末尾", "最后", "结尾处", "句子最后", "话的最后"]
RULES = {
    "closing": [f"{end}{do}“{{closing}}”。" for end in ENDS for do in ("加", "带", "是", "要有", "写")]
    + [
        "最后一个字是“{closing}”。",
        "用“{closing}”收尾。",
        "“{closing}”放在句尾。",
        "每句用“{closing}”结束。",
        "说完加“{closing}”。",
    ],
    "must_say": [
        f"{do}“{{must_say}}”。"
        for do in "一定要提 别忘了说 要带上 句中加 得说 要讲到 加一句 少不了 提一下 必须带".split()
    ]
    + ["“{must_say}”要说到。", "“{must_say}”一定要提。", "“{must_say}”不能漏。"],
    "must_not_say": [
        f"{do}“{{must_not_say}}”。" for do in "禁止说 不要讲 不许提 别说 避免说 不能讲 千万别提 不得说".split()
    ]
    + ["“{must_not_say}”不能提。", "“{must_not_say}”不许讲。", "“{must_not_say}”要避免。"],
    "opening": [
        "先叫一声“{opening}”。",
        "第一个词是“{opening}”。",
        "用“{opening}”开头。",
        "句首是“{opening}”。",
        "开头先说“{opening}”。",
    ]
    + ["一开始叫“{opening}”。", "“{opening}”放在最前。", "以“{opening}”打头。", "开头要有“{opening}”。"],
}
VALUES = {
    "closing": list("哈哦呢呀啦哟嘛噢咯呐哒喔"),
    "must_say": [
        "看详情页",
        "欢迎下单",
        "先到先得",
        "放心拍",
        "记得关注",
        "数量有限",
        "喜欢就拍",
        "问客服",
        "以实际为准",
        "点小黄车",
        "看清规格",
        "随时找我",
    ],
    "must_not_say": ["马上到", "最便宜", "一定有", "明天到", "随便退", "第一名"],
    "opening": ["亲", "家人们", "朋友们", "姐妹们", "大家", "宝贝", "同学们", "亲爱的"],
}
LENGTHS = {"closing": (1, 1), "must_say": (3, 5), "must_not_say": (3, 4), "opening": (2, 3)}  # characters
P_RULE = {"closing": 0.85, "must_say": 0.35, "opening": 0.3, "must_not_say": 0.15}
HEADS = ["# {}", "## {}", "【{}】", "{}:", "== {} ==", "[{}]", "<{}>", "*** {}", "{} |", "~ {} ~", "“{}”"]
HEADS += ["「{}」", "({})", "-- {} --", "+ {}", "{}。", "{} >", "{} - -", "/ {}", "{}", "= {}"]
TITLES = {
    "rules": ["要求", "注意", "守则", "规定"],
    "skills": ["可用技能", "技能列表", "本领", "技能表"],
    "tools": ["可用工具", "工具列表", "接口", "函数"],
    "room": ["商品", "链接", "房间", "在售"],
}
ROLES = [
    "你是带货主播。",
    "你是虚拟主播，回答观众。",
    "你在直播卖货，查清楚再回答。",
    "你是店铺的直播助手，回复要能念出来。",
]
LINES = [
    ["要先加载回复技能再回复", "没加载回复技能不许回复", "回复之前加载一个技能"],
    ["数字要有依据", "不能编数字", "所有数字都要查到"],
    ["最多{max_reply_chars}字，只说纯文字", "回复控制在{max_reply_chars}字内", "长度上限{max_reply_chars}字"],
    ["出错可以再试一次，没权限换别的工具，查不到就直说", "失败重试一次，不行就说暂时查不到"],
]
# Lines of the lists are put together: a bullet, two things, what stands between them. A model that has only seen a name
# after a space does not find it after a colon: with five fixed formats the base scored 4 of 100 on T1, with these 38.
BULLETS = ["", "", "", "- ", "* ", "+ ", "> ", "· ", "• ", "~ ", "o ", "# "]
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
AROUND = ["{}"] * 5 + ["[{}]", "「{}」", "({})", "“{}”", "<{}>", "（{}）", "（{}）", "【{}】", "《{}》", "`{}`", "*{}*"]
CURRENT = [
    "当前 {current_link_id}号",
    "在讲{current_link_id}号",
    "现在的链接: {current_link_id}号",
    "讲到{current_link_id}号了",
]
REQUESTS = ["弹幕: {danmaku}", "观众说: {danmaku}", "问题: {danmaku}", "新弹幕\n{danmaku}"]
QUIZ = [
    "逐条说用什么工具和技能：",
    "下面每条弹幕用哪个工具、哪个技能？",
    "给每条弹幕选工具和技能",
    "分别怎么查，加载什么？",
]
PARAMS = {
    "link_id": ["id", "item", "link", "no", "num", "lid"],
    "topic": ["key", "query", "about"],
    "skill": ["name", "which", "s"],
}
EXTRA_TOOLS = ["查天气", "发红包", "查主播资料", "换背景音乐", "查订单号", "统计人数", "翻译文字"]
EXTRA_SKILLS = "抽奖流程 唱歌才艺 开播问候词 下播总结 介绍店铺 讲段子 跳舞 点歌 换装 报时 天气预报 禁言处理 设备故障 交接班".split()
MESSAGES = {
    "known_tool": ["无此工具", "工具名写错了", "没有叫{detail}的工具"],
    "valid_arguments": ["参数有误: {detail}", "参数填错了，{detail}"],
    "repeated_call": ["重复查询", "不用再查", "这项查过"],
    "skill_loaded": ["还没有加载回复技能", "先加载技能再回复", "缺少回复技能", "没有加载回复的技能"],
    "fact_risk": ["“{detail}”查不到依据", "没有查到“{detail}”", "“{detail}”从哪来的，改掉"],
    "reply_length": ["太长了，最多{max_reply_chars}字", "超出{max_reply_chars}字", "缩到{max_reply_chars}字"],
    "reply_format": ["只要纯文字", "去掉标记再说"],
    "forbidden_claims": ["“{detail}”违规，换个说法", "删掉“{detail}”"],
    "not_empty": ["没有内容"],
}
WRAPS = ["{x}", "{x}", "{x}", "提示：{x}", "[拒绝] {x}", "错误: {x}", '{"error": "{x}"}', "<{x}>"]
# every character of the pools, for the tokenizer
CHARACTERS = "".join(c for c in Path(__file__).read_text(encoding="utf-8") if not c.isascii())


def random_harness(h: Harness, rng: random.Random, keep: set[str] | None = None) -> Harness:
    """Another harness with the same functions: same ids, everything that is shown drawn anew.

    keep: ids of the skills that must be there, all if None; some of the others are not.
    """
    keep = {s.id for s in h.skills} if keep is None else keep
    taken = {x.name for x in (*h.tools, *h.skills)}  # the shipped ones are never drawn

    draw = family(rng)

    def name():
        while (new := draw()) in taken:
            pass
        taken.add(new)
        return new

    verb = (
        rng.choice(rng.choice([WORDS, ACTIONS])) if rng.random() < P_VERB else ""
    )  # get_this, get_that: only what follows tells them apart

    telling = rng.random() < 0.5

    def name_of(id, verb=""):
        if id == LOAD_SKILL and rng.random() < P_LOADER:
            return id
        meant, first = telling and rng.random() < 0.85, bool(verb) and rng.random() < 0.8
        if not (meant or first):
            return name()
        words = MEANING[id].split() if meant else WORDS
        while True:
            new = (
                [verb] * first
                + rng.sample(words, rng.choice([1, 2, 2, 3]))
                + rng.choices(WORDS, k=rng.choice([0, 0, 0, 1, 2]))
            )
            if (new := "_".join(new)) not in taken:
                taken.add(new)
                return new

    tools = [_tool(t, name_of(t.id, verb), rng) for t in h.tools]
    skills = [_skill(s, name_of(s.id), rng) for s in h.skills]
    keep = keep | {"item_qa"}  # strategies send to it
    skills = [s for s in skills if s.id in keep or rng.random() > P_MASK]
    for text in rng.sample(EXTRA_TOOLS, rng.choice([0, 0, 1, 2])):
        tools.append(Tool(f"extra_{len(taken)}", name(), text, {"type": "object", "properties": {}}))
    for text in rng.sample(EXTRA_SKILLS, rng.choice([0, 1, 2])):
        kind = rng.choice(["reply", "strategy"])
        text = rng.choice(FRAMES[kind]).replace("{x}", text) if rng.random() < 0.5 else text
        skills.append(Skill(f"extra_{len(taken)}", name(), text, kind, "按主播的话说。"))
    rng.shuffle(tools)
    rng.shuffle(skills)
    head = rng.choice(HEADS)
    title = {k: head.format(rng.choice(v)) for k, v in TITLES.items()}
    lines = [rng.choice(v) for v in LINES if rng.random() < 0.85]
    rng.shuffle(lines)
    bullet = rng.choice(["- ", "* ", "", "· "])
    room = [title["room"], "{links}", rng.choice(CURRENT)]
    if rng.random() < 0.3:
        room = [room[2], room[0], room[1]]
    blocks = {
        "role": rng.choice(ROLES),
        "rules": "\n".join([title["rules"], *(bullet + x for x in lines)]),
        "skills": title["skills"] + "\n{skills}",
        "tools": title["tools"] + "\n{tools}",
        "room": "\n".join(room),
        "request": "{history}\n" + rng.choice(REQUESTS),
    }
    system = ["rules", "skills", "tools", "room"]
    rng.shuffle(system)
    system.insert(0 if rng.random() < 0.7 else rng.randint(0, 4), "role")
    hooks = [type(x)(**vars(x)) for x in h.hooks]
    wrap = rng.choice(WRAPS)
    for hook in hooks:
        hook.message = wrap.replace("{x}", rng.choice(MESSAGES.get(hook.check, [hook.message])))
    limits = type(h.limits)(**vars(h.limits) | {"max_reply_chars": rng.randint(70, 100)})
    formats = {k: random_format(k, rng) for k in ("skill", "tool", "link", "turn")}
    return h.copy(tools=tools, skills=skills, blocks=blocks, system=system, hooks=hooks, limits=limits, formats=formats)


def random_format(kind: str, rng: random.Random) -> str:
    """A line of a list: mostly what is known first, then what is looked for. None of the shipped ones, nor of HSA's."""
    first, second = {
        "skill": ("{description}", "{name}"),
        "tool": ("{description}", "{signature}"),
        "link": ("{name}", rng.choice(["{link_id}", "{link_id}号", "{link_id}号"])),
        "turn": ("{role}", "{text}"),
    }[kind]
    if kind != "turn" and rng.random() < 0.2:
        first, second = second, first
    around, between, which = rng.choice(AROUND), rng.choice(BETWEEN), rng.random()
    if kind == "turn" or which < 0.25:
        first = around.format(first)
    elif which < 0.5:
        second = around.format(second)
    if around != "{}" and which < 0.5 and rng.random() < 0.4:
        between = ""  # the brackets part them
    text = rng.choice(BULLETS) * (kind != "turn") + first + between + second
    return random_format(kind, rng) if text in _known_formats() else text


@cache
def _known_formats() -> set[str]:
    pools = json.loads((ROOT / "data" / "hsa" / "zh.json").read_text(encoding="utf-8"))["formats"].values()
    return {x for halves in pools for half in halves.values() for x in half} | {*_original().formats.values()}


def _tool(t: Tool, name: str, rng: random.Random) -> Tool:
    properties, param_ids = {}, {}
    for shown, schema in t.parameters["properties"].items():
        new = (
            rng.choice(PARAMS[shown])
            if (roll := rng.random()) < 0.2
            else random_parameter(rng)
            if roll < 0.3
            else shown
        )
        properties[new], param_ids[new] = schema, t.param_ids[shown]
    parameters = {**t.parameters, "properties": properties, "required": list(properties)}
    return Tool(t.id, name, described("tool", *TOOLS[t.id], rng), parameters, param_ids)


def described(kind: str, things: list[str], wholes: list[str], rng: random.Random) -> str:
    """One of very many descriptions of a tool (kind "tool") or a skill (its kind), never a shipped one."""
    what = rng.choice(wholes)
    if rng.random() < 0.6:
        what = rng.choice(JOINTS).join(rng.sample(things, rng.choice([1, 2, 2, 3])))
    text, shipped = rng.choice(FRAMES[kind]).replace("{x}", what), (*_original().tools, *_original().skills)
    return described(kind, things, wholes, rng) if text in {x.description for x in shipped} else text


def random_parameter(rng: random.Random) -> str:
    return names.name(rng, ["plain", "snake", "letters"])


def _skill(s: Skill, name: str, rng: random.Random) -> Skill:
    rules = {k: rule_value(k, rng) for k in VALUES if s.kind == "reply" and rng.random() < P_RULE[k]}
    body = [rng.choice(ABOUT[s.id]), *(rng.choice(RULES[k]) for k in rules)]
    if s.kind == "reply":
        rng.shuffle(body)
    return Skill(s.id, name, described(s.kind, *SKILLS[s.id], rng), s.kind, rng.choice(["\n", ""]).join(body), rules)


def rule_value(rule: str, rng: random.Random) -> str:
    """A usual value, or one of random characters, which can only be copied. No numerals: replies are checked for them."""
    if rng.random() < 0.6:
        return rng.choice(VALUES[rule])
    plain = [c for c in names.HAN if c not in "一二三四五六七八九十百千万两几半零第"]
    return "".join(rng.choices(plain, k=rng.randint(*LENGTHS[rule])))


@cache
def _world(split: str) -> World:
    return World.load(ROOT / "data" / "world" / "zh.json", split)


@cache
def _original() -> Harness:
    return Harness.load(ROOT / "data" / "harness")


@cache
def _characters() -> str:
    """Every Han character of the world file and of these pools: what may have to be said must have been said."""
    text = names.HAN + CHARACTERS + (ROOT / "data" / "world" / "zh.json").read_text(encoding="utf-8")
    return "".join(sorted({c for c in text if "\u4e00" <= c <= "\u9fff"}))


def random_words(world: World, rng: random.Random) -> World:
    """The same world with random words for names, values, topics, cities and promotions: they can only be copied."""

    def words(n, low, high):
        return {world.split: ["".join(rng.choices(_characters(), k=rng.randint(low, high))) for _ in range(n)]}

    data = {
        **world.data,
        "prefix": words(12, 1, 2),
        "noun": words(12, 1, 3),
        "city": words(6, 2, 3),
        "faq": words(6, 2, 3),
    }
    data["promotion"] = (
        words(4, 3, 6) if rng.random() < 0.5 else {world.split: [f"满{rng.randint(50, 400)}减{rng.randint(5, 60)}"]}
    )
    data["attribute"] = {key: words(6, 1, 3) for key in world["attribute"]}
    units = ["毫升", "升", "个月", "年", "克", "米"]
    for key in ("容量", "保修"):
        data["attribute"][key] = {world.split: [f"{rng.randint(1, 900)}{rng.choice(units)}" for _ in range(6)]}
    return World(data, world.split)


def dialogue(
    codec: Codec, seed: int, split: str = "train", original: bool = False, strange: float = 0.0, lists: bool = True
) -> Trajectory:
    """One oracle trajectory of the world's split under a random harness (or the original one, for measurement only).

    strange: share of dialogues whose products are made of random words. lists: whether the prompt shows the lists of
    skills and tools; without them it is short, and only the replies can be learned from it.
    """
    rng = random.Random(seed_of("dialogue", seed))
    verbosity = rng.choices((0, 1, 2), VERBOSITY)[0]
    world = _world(split)
    if rng.random() < strange:
        world = random_words(world, rng)
    task = make_task(world, seed)
    h = _original() if original else random_harness(_original(), rng, {task.reply_skill, task.strategy})
    h = h if lists else h.copy(system=["role", "room"])
    return teach(h, task, codec, seed, FAULTS, verbosity=verbosity, slip=SLIP, careless=CARELESS)


def routing(codec: Codec, seed: int, split: str = "train") -> tuple[list[int], list[int]]:
    """(prompt, response): only a tool list and a skill list, maybe the room's links, several comments, and for each the tool and the skill it wants.

    Choosing a name by its description is the slowest thing to learn, and a dialogue has two or three such choices in
    170 tokens; here half the response is choices. In the oracle's words, so that it carries over.
    """
    rng = random.Random(seed_of("routing", seed))
    h, world = random_harness(_original(), rng), random_words(_world(split), rng)
    links = world.links(rng)
    current, room = rng.randint(1, len(links)), rng.random() < 0.5  # with the room, links go by any reference
    comments, answers, used = [], [], {LOAD_SKILL}
    for kind in rng.sample([k for k in ROUTES if k != "compare"], rng.choice([1, 1, 1, 2, 3, 4])):
        ask = make_ask(world, rng, kind, links, current)
        ask.ref = ask.ref if room else "number"
        comments.append(comment(world, rng, ask, links))
        think, (tool, _, skill) = world["think"], ROUTES[kind]
        text = understood(world, ask, links) + (think["plan"].format(tools=h.tool(tool).name) if tool else "")
        answers.append(text + think["skill"].format(skill=h.skill(skill).name) + "。")
        used |= {tool, skill}
    said = Message("", "\n".join(answers))
    if len(answers) == 1:  # alone it is the first message of a dialogue, calls and all
        wanted = [*ask.calls(tool), (LOAD_SKILL, {"skill": h.skill(skill).name})]
        said = Message(answers[0], "", [call_of(h, *call) for call in wanted])
    request = h.blocks["request"] if len(answers) == 1 else rng.choice(QUIZ) + "\n{danmaku}"
    blocks = {**h.blocks, "request": request}
    rare = rng.random() ** 2  # few to choose from, or all: short lists are where it starts to learn
    tools = [t for t in h.tools if t.id in used or rng.random() > rare]
    skills = [s for s in h.skills if s.id in used or rng.random() > rare]
    system = rng.sample(["skills", "tools"] + ["room"] * room, 2 + room)
    h = h.copy(system=system, blocks=blocks, tools=tools, skills=skills)
    context = {"links": links, "current_link_id": current} if room else {}
    prompt = codec.prompt(assemble(h, "\n".join(comments), context))
    return prompt, codec.render(said)


if __name__ == "__main__":
    seed = int(sys.argv[sys.argv.index("--seed") + 1]) if "--seed" in sys.argv else 0
    h = random_harness(_original(), random.Random(seed_of("dialogue", seed)))
    task = make_task(_world("train"), seed)
    for message in assemble(h, "\n".join(task.danmaku), task.context):
        print(f"[{message['role']}]\n{message['content']}\n")
