"""Seeded general instructions: look-up and copy tasks, and requests that the IFEval checkers can verify.

    sample(rng, split, kind) -> {"prompt", "response", "reasoning", "checks": [(instruction_id, kwargs)], "source"}

The base model learns to copy from `lookup` (random key-value lists) and `repeat` (copy, reorder, pick, call), and to follow
instructions from `ifeval` (19 of the official instruction ids, Chinese and English, one or two constraints at a time).
Copying unfamiliar names is the slow part of pre-training, so names come in many kinds. The test split shares no topic and no
wording with the train split. No torch, no files, no global randomness: everything follows from `rng`.

    python data/general.py --seed 3          # prints a few examples of each kind
"""

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from options import option, parse  # noqa: E402
from common import cli  # noqa: E402
from data.names import TOOL_KINDS, distinct, name  # noqa: E402

# --------------------------------------------------------------------------------------------------- look-up and copying
LAYOUTS = ["{k}: {v}", "{k}：{v}", "{k} = {v}", "{k}={v}", "- {k}: {v}", "{k} -> {v}", "{k}({v})", "「{k}」{v}"]
LISTS = {"train": ["资料：\n", "", "下面是一张表：\n", "Data:\n", "# 列表\n"], "test": ["已知：\n", "给你这些数据：\n"]}
ASK_VALUE = {
    "train": ["{k}是什么？", "{k}的值？", "请给出{k}", "查一下{k}", "What is {k}?", "{k}对应什么？"],
    "test": ["请查一下{k}的值", "{k}的值是什么？"],
}
ASK_KEY = {"train": ["哪个是{v}？", "谁的值是{v}？", "Which one is {v}?"], "test": ["值是{v}的是谁？"]}
ASK_MANY = {"train": ["依次给出：{ks}", "{ks}分别是什么？", "逐行回答：{ks}"], "test": ["请依次回答：{ks}"]}


def lookup(rng, split):
    """A list of random pairs and a question about one or a few of them; the answer is copied from the list."""
    n = rng.choice([2, 3, 4, 5, 6, 8, 12])
    keys, values = distinct(rng, n), distinct(rng, n)
    if rng.random() < 0.15:
        table = json.dumps(dict(zip(keys, values, strict=True)), ensure_ascii=False)
    else:
        layout = rng.choice(LAYOUTS)
        table = "\n".join(layout.format(k=k, v=v) for k, v in zip(keys, values, strict=True))
    i, roll, reasoning = rng.randrange(n), rng.random(), ""
    if roll < 0.5:
        ask, response = rng.choice(ASK_VALUE[split]).format(k=keys[i]), values[i]
        reasoning = f"找{keys[i]}" if rng.random() < 0.3 else ""
    elif roll < 0.65:
        ask, response = rng.choice(ASK_KEY[split]).format(v=values[i]), keys[i]
    else:
        few = rng.sample(range(n), min(n, rng.randint(2, 4)))
        ask = rng.choice(ASK_MANY[split]).format(ks="、".join(keys[j] for j in few))
        response = "\n".join(values[j] for j in few)
    return {
        "prompt": rng.choice(LISTS[split]) + table + "\n" + ask,
        "response": response,
        "reasoning": reasoning,
        "checks": [],
    }


# What a name stands for, said in two ways: the list shows one, the request the other.
PURPOSES = """查询天气|今天会下雨吗 播放音乐|放一首歌 订购机票|买张飞机票 翻译文字|这句话用英文怎么说 计算数学|算一下三加五 设置闹钟|早上叫我起床
发送邮件|给老师写封信 查看地图|去车站怎么走 查询股票|这支股票多少 预订酒店|找个地方住 推荐电影|有什么好看的片子 查看日程|我明天有什么事
写一首诗|来首诗吧 查询快递|我的包裹到哪了 叫出租车|帮我打车 记录笔记|帮我记下来 开关电灯|把灯打开 调节温度|屋里太热了 找餐厅|哪里好吃
查询价格|这个多少钱 查看库存|还有货吗 领取优惠|有没有折扣 退货流程|不想要了怎么退 讲笑话|逗我笑一下 查询火车|几点有高铁 健身计划|我想减肥
看病挂号|我不舒服 学习单词|这个词什么意思 拍照修图|照片变好看 宠物照顾|小猫怎么养""".split()
REPEAT = {
    "train": ["重复：{a}", "请照抄：{a}", "说{a}", "只回答{a}", "Repeat: {a}", "Say {a}"],
    "test": ["请重复{a}", "请说：{a}"],
}
TWICE = {"train": ["把{a}说两遍", "重复两次：{a}", "Say {a} twice"], "test": ["{a}，重复两遍"]}
SWAP = {"train": ["交换顺序：{l}", "倒过来写：{l}", "Reverse: {l}"], "test": ["把顺序倒过来：{l}"]}
NTH = {
    "train": ["{l}\n第{n}个是什么？", "列表：{l}。给出第{n}项", "{l}\nItem {n}?"],
    "test": ["{l}。请给出第{n}个"],
}
ENDS = {"train": ["{l}\n最后一个？", "{l}\nLast item?"], "test": ["{l}\n最后一项是什么？"]}
CHOOSE = {
    "train": ["{t}\n选一个：{q}", "{t}\n用户说：{q}\n用哪个？", "工具：\n{t}\n问题：{q}"],
    "test": ["{t}\n{q}用哪个？"],
}
CALL = {
    "train": ["调用{a}，{k}是{v}", "用{a}，参数{k}={v}", "Call {a} with {k} = {v}", "{k}={v}，请写出{a}的调用"],
    "test": ["请调用{a}，参数{k}是{v}"],
}


def repeat(rng, split):
    """Copy, repeat, reorder, pick or choose among random names, or write them into a JSON call."""
    task = rng.choice(["repeat", "twice", "swap", "nth", "ends", "choose", "choose", "call", "call"])
    names, checks, reasoning = distinct(rng, rng.randint(2, 6)), [], ""
    joined, a, b = rng.choice(["，", "、", ", ", " / "]).join(names), names[0], names[1]
    if task == "repeat":
        ask, response = rng.choice(REPEAT[split]).format(a=joined if rng.random() < 0.4 else a), None
        response = joined if joined in ask else a
    elif task == "twice":
        ask, response = rng.choice(TWICE[split]).format(a=a), f"{a} {a}"
    elif task == "swap":
        ask, response = rng.choice(SWAP[split]).format(l=f"{a}，{b}"), f"{b}，{a}"
    elif task == "nth":
        n = rng.randrange(len(names))
        ask, response = rng.choice(NTH[split]).format(l=joined, n=n + 1), names[n]
    elif task == "ends":
        ask, response = rng.choice(ENDS[split]).format(l=joined), names[-1]
    elif task == "choose":
        pairs, layout = rng.sample(PURPOSES, len(names)), rng.choice(LAYOUTS)
        table = "\n".join(layout.format(k=n, v=p.split("|")[0]) for n, p in zip(names, pairs, strict=True))
        pick = rng.randrange(len(names))
        ask, response = rng.choice(CHOOSE[split]).format(t=table, q=pairs[pick].split("|")[1]), names[pick]
        reasoning = pairs[pick].split("|")[0] if rng.random() < 0.5 else ""
    else:
        tool, key, value = name(rng, TOOL_KINDS), name(rng, ["plain", "snake", "letters", "camel"]), a
        ask = rng.choice(CALL[split]).format(a=tool, k=key, v=value)
        response = json.dumps({"name": tool, "arguments": {key: value}}, ensure_ascii=False)
        checks = [("detectable_format:json_format", {})]
    return {"prompt": ask, "response": response, "reasoning": reasoning, "checks": checks}


# ----------------------------------------------------------------------------------------------- verifiable instructions
# class: (Chinese train | Chinese test | English train | English test)
TOPICS = {
    "水果": "苹果 香蕉 葡萄 西瓜 桃子 橙子 草莓 樱桃|芒果 柠檬 荔枝|apples bananas grapes peaches oranges cherries|mangoes lemons",
    "城市": "北京 上海 杭州 成都 广州 西安 南京 武汉|苏州 重庆 厦门|Paris London Tokyo Berlin Rome Cairo|Madrid Oslo Lima",
    "天气": "晴天 下雨 刮风 下雪 多云 大雾|雷雨 台风|rain snow wind sunshine fog|storms clouds",
    "运动": "跑步 游泳 足球 篮球 爬山 网球|乒乓球 滑雪 骑车|running swimming football tennis hiking|skiing cycling golf",
    "书": "小说 诗歌 童话 历史书 词典 漫画|散文 传记|novels poems comics stories|essays diaries",
    "动物": "小猫 小狗 大象 老虎 兔子 熊猫|狮子 小鸟 海豚|cats dogs tigers rabbits horses|lions birds pandas",
    "食物": "米饭 面条 饺子 面包 火锅 豆腐|包子 烧烤 月饼|rice noodles bread soup cheese|pizza salad",
    "饮料": "绿茶 咖啡 牛奶 果汁|红茶 豆浆|tea coffee milk juice|water cocoa",
    "季节": "春天 夏天 冬天|秋天|spring summer winter|autumn",
    "工作": "老师 医生 司机 厨师 警察|律师 农民 护士|teachers doctors drivers cooks|nurses farmers",
    "音乐": "钢琴 吉他 唱歌 跳舞|小提琴 古筝|piano guitar singing dancing|violin drums",
    "交通": "火车 飞机 地铁 汽车|轮船 公交车|trains planes buses cars|ships taxis",
}
ZH_LINES = """我喜欢{x} {x}很受欢迎 {x}让人开心 大家常说{x} {x}值得了解 很多人喜欢{x} {x}非常有趣 今天聊聊{x} {x}给人好心情 我想多了解{x}
{x}很特别 生活里少不了{x}""".split()
EN_LINES = """i like {x}|{x} can be fun|many people like {x}|{x} make a good topic|we often talk about {x}|i want to know {x}|people
enjoy {x}|{x} are worth a look|let us talk about {x}|there is much to say about {x}""".replace("\n", " ").split("|")
ENDINGS = {
    "zh": "谢谢大家 以上就是全部 祝你愉快 希望有帮助 回答完毕 还有问题吗 下次再见 请多指教".split(),
    "en": ["That is all.", "Hope this helps.", "Have a nice day!", "Any other questions?", "Thank you.", "The end."],
}
FACTS = {"zh": ("{x}是{c}吗？", "{x}算不算{c}？"), "en": ("Is {x} related to {c}?", "Does {x} belong to {c}?")}
CLASS_EN = dict(
    zip(TOPICS, "fruit city weather sport book animal food drink season job music travel".split(), strict=True)
)
REQUEST = {
    ("zh", "train"): ["写一句关于{x}的话", "介绍一下{x}", "说说{x}", "谈谈{x}", "请讲讲{x}", "写写{x}"],
    ("zh", "test"): ["请说一说{x}", "请写一下{x}"],
    ("en", "train"): ["Write about {x}", "Tell me about {x}", "Describe {x}", "Talk about {x}"],
    ("en", "test"): ["Write a line about {x}", "Please tell me about {x}"],
}
# How a constraint is said: id -> (Chinese train, Chinese test, English train, English test); "/" separates wordings.
SAY = {
    "startend:end_checker": (
        "以「{p}」结尾/最后一句是「{p}」/结束时说「{p}」/末尾写上「{p}」",
        "结尾写「{p}」/最后说「{p}」",
        'End with "{p}"/Finish your answer with "{p}"/The last words must be "{p}"',
        'The answer must end with "{p}"',
    ),
    "startend:quotation": (
        "把回答放在双引号里/用英文双引号包住回答/全文加双引号",
        "回答要用双引号包住",
        "Wrap your answer in double quotation marks/Put the whole answer in double quotes",
        "Wrap the whole answer in double quotes",
    ),
    "keywords:existence": (
        "要提到{p}/必须包含{p}/带上这些词：{p}/用上{p}",
        "必须用上{p}/要包含{p}",
        "Include the words {p}/Use {p}/Mention {p}",
        "Include {p}/Use the words {p}",
    ),
    "keywords:forbidden_words": (
        "不要出现「{p}」/不能用「{p}」这个词/别说「{p}」/避免「{p}」",
        "不能出现「{p}」/不要说「{p}」",
        'Do not use the word "{p}"/Avoid the word "{p}"/Never say "{p}"',
        'Do not say the word "{p}"',
    ),
    "keywords:frequency": (
        "「{p}」至少出现{n}次/把「{p}」说{n}遍以上/至少用{n}次「{p}」",
        "「{p}」至少说{n}次",
        'Use "{p}" at least {n} times/The word "{p}" should appear at least {n} times',
        'Say "{p}" at least {n} times',
    ),
    "change_case:english_lowercase": (
        "用英文小写字母/英文回答且全部小写/只用小写英文",
        "用英文回答，全部用小写字母",
        "Use only lowercase letters/All lowercase, no capital letters/Write in lowercase",
        "Write in all lowercase letters",
    ),
    "change_case:english_capital": (
        "用英文大写字母/英文回答且全部大写/只用大写英文",
        "用英文回答，全部用大写字母",
        "Use only capital letters/All capitals/Write in uppercase",
        "Write in all capital letters",
    ),
    "punctuation:no_comma": (
        "不要用逗号/不能出现逗号/全文没有逗号",
        "不要出现逗号",
        "Do not use commas/Use no commas/Avoid any comma",
        "Do not use any comma",
    ),
    "detectable_format:number_bullet_lists": (
        "列出{n}个要点/用{n}条列表/分{n}点，每点以 * 开头/写{n}个项目符号",
        "用列表写{n}个要点",
        "Use exactly {n} bullet points/Give {n} bullets/Write a list of {n} bullets",
        "Write exactly {n} bullet points",
    ),
    "detectable_format:title": (
        "加上标题，放在双尖括号里，如 <<标题>>/用 <<>> 写一个标题/要有 <<标题>>",
        "写一个标题，如 <<标题>>",
        "Add a title in double angular brackets like <<title>>/Include a <<title>>",
        "Write a title like <<title>>",
    ),
    "detectable_format:json_format": (
        "用JSON格式/整个回答是JSON/输出JSON",
        "整个回答用JSON格式",
        "Answer in JSON format/The whole output must be JSON/Use JSON",
        "The whole answer must be in JSON format",
    ),
    "detectable_format:number_highlighted_sections": (
        "用 *星号* 标出至少{n}处/至少高亮{n}处，如 *重点*/加{n}个 *高亮*",
        "至少标出{n}处 *重点*",
        "Highlight at least {n} parts like *this*/Mark {n} parts with *stars*",
        "Mark at least {n} parts like *this*",
    ),
    "detectable_content:number_placeholders": (
        "至少用{n}个方括号占位符，如 [名字]/留{n}个占位符，如 [地址]/加入{n}个 [占位符]",
        "至少留{n}个占位符，如 [名字]",
        "Use at least {n} placeholders in square brackets like [name]/Leave {n} placeholders such as [address]",
        "Leave at least {n} placeholders like [name]",
    ),
    "detectable_content:postscript": (
        "最后加一句附言，以 {p} 开头/结尾写附言 {p}/补上 {p}",
        "最后写一句附言 {p}",
        "Add a postscript starting with {p}/At the end write {p} and a note",
        "At the end add a postscript {p}",
    ),
    "combination:repeat_prompt": (
        "先重复这句话，再回答/先一字不改地抄写问题，再作答/回答前先照抄要求",
        "先照抄这句话，再回答",
        "First repeat the request word for word, then answer/Repeat the request first, then give the answer",
        "First repeat the request, then give the answer",
    ),
    "combination:two_responses": (
        "给出两个不同的回答，中间用 ****** 隔开/两种回答，以 ****** 分开",
        "给出两种不同的回答，用 ****** 分开",
        "Give two different answers separated by ******/Write two answers with ****** between them",
        "Write two different answers separated by ******",
    ),
    "length_constraints:number_paragraphs": (
        "写{n}段，段落之间用 *** 隔开/分成{n}段，用 *** 分开",
        "写成{n}段，用 *** 分开",
        "Write {n} paragraphs separated by ***/Use {n} paragraphs with *** between them",
        "Write exactly {n} paragraphs separated by ***",
    ),
    "length_constraints:number_words": (
        "用英文回答，{r}{n}个单词/英文，单词数{r}{n}",
        "用英文，{r}{n}个单词",
        "Use {r} {n} words/Answer in {r} {n} words",
        "Write {r} {n} words",
    ),
}
HINTS = {
    i: h
    for i, h in zip(
        SAY,
        "结尾 引号 含词 禁词 次数 小写 大写 无逗号 列表 标题 JSON 高亮 占位 附言 照抄 两答 分段 字数".split(),
        strict=True,
    )
}
BODIES = [
    "keywords:existence",
    "keywords:frequency",
    "detectable_format:number_bullet_lists",
    "detectable_format:number_highlighted_sections",
    "detectable_content:number_placeholders",
    "length_constraints:number_paragraphs",
]
EXTRAS = [
    "startend:end_checker",
    "change_case:english_lowercase",
    "change_case:english_capital",
    "punctuation:no_comma",
    "detectable_format:title",
    "detectable_content:postscript",
]
ENGLISH_ONLY = {"change_case:english_lowercase", "change_case:english_capital", "length_constraints:number_words"}


@dataclass
class Draft:
    """A response under construction: constraints edit its parts, `text` puts them together."""

    x: str
    lang: str
    sentences: list[str]
    head: str = ""
    tail: str = ""
    join: str = ""
    finish: list = field(default_factory=list)  # functions text -> text, applied last

    def text(self):
        out = (self.head + "\n" if self.head else "") + self.join.join(self.sentences)
        out += ("\n" if self.join else self.space()) + self.tail if self.tail else ""
        for change in self.finish:
            out = change(out)
        return out

    def space(self):
        return " " if self.lang == "en" else ""


def sentences(rng, lang, x, n, avoid=None):
    """n different simple sentences about x, none with the word `avoid`."""
    lines = [line for line in (ZH_LINES if lang == "zh" else EN_LINES) if avoid is None or avoid not in line]
    picked = [line.format(x=x) for line in rng.sample(lines, n)]
    return [s + "。" for s in picked] if lang == "zh" else [s[0].upper() + s[1:] + "." for s in picked]


def topic(rng, lang, split):
    """(class, item): items of the two splits are disjoint."""
    group = rng.choice(list(TOPICS))
    column = (0 if lang == "zh" else 2) + (split == "test")
    return group, rng.choice(TOPICS[group].split("|")[column].split())


def constrain(draft, instruction, rng, split, request):
    """Edits the draft so that it obeys `instruction`; returns (slots for its wording, kwargs for its checker)."""
    lang, x, n = draft.lang, draft.x, rng.randint(2, 3)
    if instruction == "startend:end_checker":
        draft.tail = rng.choice(ENDINGS[lang])
        return {"p": draft.tail}, {"end_phrase": draft.tail}
    if instruction == "startend:quotation":
        draft.finish.append(lambda text: f'"{text}"')
    elif instruction == "keywords:existence":
        keys = [
            topic(rng, lang, split)[1] if rng.random() < 0.5 else name(rng, ["han" if lang == "zh" else "plain"])
            for _ in range(n - 1)
        ]
        draft.sentences += [
            ("还有{}。" if lang == "zh" else "Also {}.").format(("和" if lang == "zh" else " and ").join(keys))
        ]
        draft.join = draft.join or draft.space()
        return {"p": "、".join(keys) if lang == "zh" else " and ".join(keys)}, {"keywords": keys}
    elif instruction == "keywords:forbidden_words":
        banned = rng.choice(
            ["喜欢", "开心", "很多", "了解", "有趣", "大家"]
            if lang == "zh"
            else ["like", "people", "about", "can", "talk"]
        )
        draft.sentences = sentences(rng, lang, x, 1, avoid=banned)
        return {"p": banned}, {"forbidden_words": [banned]}
    elif instruction == "keywords:frequency":
        key = topic(rng, lang, split)[1]
        draft.sentences += [("、" if lang == "zh" else " and ").join([key] * n) + ("。" if lang == "zh" else ".")]
        draft.join = draft.join or draft.space()
        return {"p": key, "n": n}, {"keyword": key, "frequency": n, "relation": "at least"}
    elif instruction == "change_case:english_lowercase":
        draft.finish.append(str.lower)
    elif instruction == "change_case:english_capital":
        draft.finish.append(str.upper)
    elif instruction == "detectable_format:number_bullet_lists":
        n = rng.randint(2, 4)
        draft.sentences, draft.join = ["* " + s for s in sentences(rng, lang, x, n)], "\n"
        return {"n": n}, {"num_bullets": n}
    elif instruction == "detectable_format:title":
        draft.head = f"<<{x}>>"
    elif instruction == "detectable_format:json_format":
        body = {("话题" if lang == "zh" else "topic"): x, ("回答" if lang == "zh" else "answer"): draft.sentences[0]}
        draft.sentences = [json.dumps(body, ensure_ascii=False)]
    elif instruction == "detectable_format:number_highlighted_sections":
        n = rng.randint(1, 3)
        draft.sentences, draft.join = sentences(rng, lang, f"*{x}*", n), draft.space()
        return {"n": n}, {"num_highlights": n}
    elif instruction == "detectable_content:number_placeholders":
        n = rng.randint(1, 3)
        slots = rng.sample(
            ["[名字]", "[地址]", "[时间]", "[电话]"] if lang == "zh" else ["[name]", "[address]", "[time]", "[phone]"],
            n,
        )
        draft.sentences += [
            ("请填写" if lang == "zh" else "Fill in ") + draft.space().join(slots) + ("。" if lang == "zh" else ".")
        ]
        draft.join = draft.space()
        return {"n": n}, {"num_placeholders": n}
    elif instruction == "detectable_content:postscript":
        draft.tail, draft.join = ("P.S. 再见" if lang == "zh" else "P.S. Bye"), draft.join or "\n"
        return {"p": "P.S."}, {"postscript_marker": "P.S."}
    elif instruction == "combination:repeat_prompt":
        draft.head = request
        return {}, {"prompt_to_repeat": request}
    elif instruction == "combination:two_responses":
        draft.sentences, draft.join = sentences(rng, lang, x, 2), "\n******\n"
    elif instruction == "length_constraints:number_paragraphs":
        draft.sentences, draft.join = sentences(rng, lang, x, n), "\n***\n"
        return {"n": n}, {"num_paragraphs": n}
    elif instruction == "length_constraints:number_words":
        few = rng.random() < 0.5
        n = rng.choice([10, 20, 30]) if few else rng.choice([5, 8, 10])
        draft.sentences, draft.join = sentences(rng, lang, x, 1 if few else n // 3 + 1), " "
        said = {("zh", True): "少于", ("zh", False): "至少", ("en", True): "less than", ("en", False): "at least"}
        return {"n": n, "few": few, "said": said}, {"relation": said["en", few], "num_words": n}
    return {}, {}


def ifeval(rng, split):
    """A request about a topic with one or two verifiable constraints, and a short response that obeys them."""
    alone = [i for i in SAY if i not in BODIES + EXTRAS]
    roll = rng.random()
    if roll < 0.06:
        return yes_no(rng, split)
    if roll < 0.4:
        chosen = [rng.choice(alone)]
    elif roll < 0.75:
        chosen = [rng.choice(BODIES + EXTRAS)]
    else:
        chosen = [rng.choice(BODIES), rng.choice(EXTRAS)]
    ask = "zh" if rng.random() < 0.65 else "en"  # language of the prompt; some Chinese prompts want English answers
    lang = "en" if ENGLISH_ONLY & set(chosen) else ask
    x = topic(rng, lang, split)[1]
    request = rng.choice(REQUEST[ask, split]).format(x=x) + ("。" if ask == "zh" else ".")
    draft, said, checks = Draft(x, lang, sentences(rng, lang, x, 1)), [], []
    for instruction in chosen:
        slots, kwargs = constrain(draft, instruction, rng, split, request)
        if "few" in slots:
            slots["r"] = slots["said"][ask, slots["few"]]
        wordings = SAY[instruction][(0 if ask == "zh" else 2) + (split == "test")].split("/")
        said.append(rng.choice(wordings).format(**slots))
        checks.append((instruction, kwargs))
    stop = "。" if ask == "zh" else ". "
    if rng.random() < 0.7 or "combination:repeat_prompt" in chosen:
        prompt = request + ("" if ask == "zh" else " ") + stop.join(said) + stop.strip()
    else:
        prompt = stop.join(said) + ("：" if ask == "zh" else ": ") + request
    reasoning = "，".join(HINTS[i] for i in chosen) if rng.random() < 0.5 else ""
    return {"prompt": prompt, "response": draft.text(), "reasoning": reasoning, "checks": checks}


def yes_no(rng, split):
    """detectable_format:constrained_response, with a right answer."""
    lang = rng.choice(["zh", "en"])
    group, x = topic(rng, lang, split)
    asked = group if rng.random() < 0.5 else rng.choice(list(TOPICS))
    question = FACTS[lang][split == "test"].format(x=x, c=asked if lang == "zh" else CLASS_EN[asked])
    options = 'Answer with one of "My answer is yes.", "My answer is no.", "My answer is maybe."'
    options = options if lang == "en" else "只能回答 My answer is yes. 或 My answer is no. 或 My answer is maybe."
    response = "My answer is yes." if asked == group else "My answer is no."
    checks = [("detectable_format:constrained_response", {})]
    return {"prompt": f"{question} {options}", "response": response, "reasoning": "", "checks": checks}


# ---------------------------------------------------------------------------------------------------------------- sample
KINDS = {"lookup": lookup, "repeat": repeat, "ifeval": ifeval}


def sample(rng: random.Random, split: str = "train", kind: str | None = None) -> dict:
    """One example of `kind` (a random one when None); `source` in the result names its kind."""
    kind = kind or rng.choice(list(KINDS))
    return {**KINDS[kind](rng, split), "source": kind}


@dataclass
class Config:
    seed: int = option(0, "of the examples")


def main(argv):
    demo = random.Random(parse(Config, {}, argv, __doc__).seed)
    for each in [kind for kind in KINDS for _ in range(4)]:
        shown = sample(demo, "train", each)
        print(f"--- {each} {shown['checks']}\n{shown['prompt']}\n  => [{shown['reasoning']}] {shown['response']}")


if __name__ == "__main__":
    cli(main)
