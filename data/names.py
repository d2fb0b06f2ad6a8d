"""Random names of many kinds, for look-up and copy tasks: a model copies only kinds of names that it has seen.

    name(rng), name(rng, ["snake", "camel"]), distinct(rng, 5)

All from `rng`; no torch, no files. HAN is also the list of common characters that the tokenizer gives a token each.
"""

CONSONANTS = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl pr sh sk sl st th tr".split()
VOWELS = "a e i o u a e i o u ai ea ee oo ou".split()
CODAS = ["", "", "", "n", "r", "l", "m", "s", "t", "k", "x", "nd", "rt", "ng"]
WORDS = """get find query fetch list show read load check look search open make send ask tell give view pull lookup info data
item items goods product stock store shop price money coupon deal sale order cart ship shipping post pack track room live
link code key name id type size color model brand part unit value status state level score user guest team group
skill tool plan rule note text page file row map tree node point path line card box set pool queue task job step
flow talk chat reply answer help guide care after safe fast new old hot top main sub any all one two up down in out by of for
from with on faq log now day time date city home food book music game sport weather news compare multi intent small""".split()
PINYIN = """cha kan wen da kou hui jia ge ku cun fa huo shang pin you quan wu ding zhi bo jian fang ke hu xiao hou
huan bi xin xi chu dian zi ma yang li wei si ren bei dong tian qi zhong shu
lian jie shi jian liang duo zhe man""".split()
HAN = """的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事成方
多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此已工使情明性
知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老给世位次度门
任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活尔更别打女变四神总何电数安少报才结反受目太量再感建务做接必
场件计管期市直德资命山金指克许统区保至队形社便空决治展马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路记南品住告类
求据程北边死张该交规万取拉格望觉术领共确传师观清今切院让识候带导争运笔元节息板买卖价钱货店券优惠库存单快递包邮退换尺码颜款质材
轻重软硬薄厚甜酸辣香鲜红黄蓝绿黑紫灰粉橙棕春夏秋冬早晚雨雪风云晴茶咖啡奶酒果菜肉鱼米面糖盐油杯碗锅刀伞鞋袜衣裤帽巾床桌椅灯车船
飞球跑跳游泳歌舞画琴棋猫狗鸟花草树木石玉星月亮哦呀呢啦吧哈嗯亲宝主播间直播链接查询客服帮助回答问题介绍推荐比较选择""".replace(
    "\n", ""
)


def word(rng):
    """One lower-case word: a real one, letters at random, or a pseudo-word of one or two syllables."""
    if (kind := rng.random()) < 0.35:
        return rng.choice(WORDS)
    if kind < 0.6:
        return letters(rng, rng.randint(3, 7))
    return syllables(rng, rng.choice([1, 2, 2]))


def syllables(rng, n):
    """n syllables of a pseudo-word."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(n))


def words(rng, low=1, high=3):
    """low..high words; in a quarter of the cases all of them are pinyin."""
    n = rng.randint(low, high)
    if rng.random() < 0.25:
        return ["".join(rng.choice(PINYIN) for _ in range(rng.choice([1, 2, 2]))) for _ in range(n)]
    return [word(rng) for _ in range(n)]


def letters(rng, n):
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(n))


def digits(rng, low=1, high=4):
    return "".join(rng.choice("0123456789") for _ in range(rng.randint(low, high)))


NAMES = {
    "snake": lambda rng: "_".join(words(rng, 2, 4)),
    "kebab": lambda rng: "-".join(words(rng, 2, 3)),
    "camel": lambda rng: "".join(w if i == 0 else w.capitalize() for i, w in enumerate(words(rng, 2, 3))),
    "pascal": lambda rng: "".join(w.capitalize() for w in words(rng, 1, 3)),
    "plain": lambda rng: words(rng, 1, 1)[0],
    "numbered": lambda rng: rng.choice(["{}{}", "{}_{}"]).format(word(rng), digits(rng, 1, 2)),
    "letters": lambda rng: letters(rng, rng.randint(2, 5)),
    "short": lambda rng: letters(rng, 1) + digits(rng, 1, 3) + letters(rng, rng.randint(0, 1)),
    "upper": lambda rng: letters(rng, rng.randint(2, 4)).upper(),
    "code": lambda rng: letters(rng, rng.randint(1, 2)).upper() + "-" + digits(rng, 1, 4),
    "digits": lambda rng: digits(rng, 2, 5),
    "han": lambda rng: "".join(rng.choice(HAN) for _ in range(rng.randint(2, 4))),
    "han_code": lambda rng: "".join(rng.choice(HAN) for _ in range(2)) + digits(rng, 1, 2),
}
# What a function name may be: letters, digits, underscore and hyphen.
TOOL_KINDS = ["snake", "snake", "kebab", "camel", "camel", "pascal", "plain", "numbered", "letters", "short", "upper"]


def name(rng, kinds=None):
    """A random name of one of `kinds` (all kinds when None)."""
    return NAMES[rng.choice(kinds or list(NAMES))](rng)


def distinct(rng, n, kinds=None):
    """n different names; one in two lists is all of one kind, so that the kind alone does not give the answer away."""
    if kinds is None and rng.random() < 0.5:
        kinds = [rng.choice(list(NAMES))]
    found = {}
    while len(found) < n:
        found[name(rng, kinds)] = None
    return list(found)
