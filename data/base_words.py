"""The words of random harnesses: names, descriptions, rules, headings and formats that the base model reads in its pre-training.

These pools are the base's alone: nothing of data/harness is in them, and no list has a word of HSA's pools (data/hsa).
random_harness.py draws from them; the tokenizer gives every character here a token.
"""

from pathlib import Path

WORDS = (
    "get query fetch find look read load check list show ask call use open pull product info link id inventory stock coupon shipping "
    "search faq room state item price detail order goods data note page live store shop sale deal code card help guide step rule plan "
    "reply answer talk chat small skill promo logistics after compare multi intent qa one two main fast plus core base node task job "
    "alpha beta gamma delta sigma omega red blue green north south east west sun moon star river stone cloud tree leaf bird fish by of"
).split()
PINYIN = "cha kan jia ge ku cun huo pin fa you hui quan shang fu wu liao tian hui da bi duo wen ti ji neng zhi bo jian xin lian".split()
SYLLABLES = [c + v for c in "bcdfghjklmnprstvwz" for v in "aeiou"]
HANZI = "天地玄黄宇宙洪荒日月星辰春夏秋冬东南西北甲乙丙丁山水风云金木火土梅兰竹菊松柏青白红蓝大小高低远近快慢新旧查看问答帮助"

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
        [
            "商品",
            "名称",
            "商品名",
            "价格",
            "价钱",
            "券后价",
            "规格",
            "参数",
            "颜色材质",
            "属性",
            "商品信息",
            "卖价",
            "品名",
        ],
        [
            "商品信息和价格",
            "名称、价格和参数",
            "商品详情",
            "价格、颜色材质等规格",
            "链接的详细资料",
            "这是什么、多少钱",
            "叫什么名、券后什么价、什么规格",
            "一个链接卖的是什么",
            "品名、卖价、材质大小",
        ],
    ),
    "get_inventory": (
        ["库存", "件数", "存货", "余量", "库存数", "剩余"],
        [
            "还剩多少件",
            "库存数量",
            "有没有货",
            "剩余件数",
            "商品存货",
            "还有几件可卖",
            "库里的件数",
            "货还多不多",
            "能卖的件数",
        ],
    ),
    "get_coupon": (
        ["优惠券", "券", "券后价", "到手价", "折扣", "优惠", "券额"],
        [
            "券和到手价",
            "优惠信息",
            "可用的券",
            "折扣和券后价",
            "商品优惠",
            "用券后多少钱",
            "能领的券",
            "券减多少",
            "领券的价",
        ],
    ),
    "get_shipping": (
        ["发货", "发货地", "发货时间", "物流", "时效", "城市", "快递", "寄出时间"],
        [
            "从哪发货、几小时发出",
            "物流时间",
            "发货城市和时效",
            "什么时候发货",
            "何地何时寄出",
            "寄出的地方和时间",
            "快递从哪走",
            "多久能寄",
        ],
    ),
    "search_faq": (
        ["常见问题", "问答", "售后", "退换", "退货", "用法", "商品问答", "适用"],
        [
            "商品问答和退货",
            "能不能用、能不能退",
            "问题库",
            "适用人群和退换",
            "使用问题与售后",
            "能退几天",
            "大家常问的和售后",
            "谁能用、怎么退",
        ],
    ),
    "get_room_state": (
        ["活动", "直播间活动", "直播间", "促销", "满减", "赠品", "全场优惠"],
        ["直播间状态", "当前活动", "房间活动信息", "全场活动", "现在有什么活动", "场内满减", "今天的促销"],
    ),
    "load_skill": (
        ["技能", "技能内容", "技能正文", "技能说明", "技能要求"],
        ["一个技能", "技能全文", "技能写了什么", "一个技能的要求", "技能里的话"],
    ),
}
SKILLS = {
    "item_qa": (
        ["商品", "价格", "规格", "库存", "用法", "产品", "参数"],
        [
            "商品问题",
            "介绍商品",
            "价格库存规格问答",
            "商品怎么样",
            "商品信息",
            "商品问答",
            "价格规格库存用法",
            "多少钱、什么料、剩几件、怎么用",
        ],
    ),
    "price_promo": (
        ["优惠", "活动", "券", "优惠券", "满减", "折扣", "促销"],
        ["优惠活动", "优惠和满减", "优惠券", "活动与折扣", "券和促销问题", "怎么更便宜", "直播间活动和券", "能省多少"],
    ),
    "logistics": (
        ["发货", "物流", "快递", "配送", "时效", "发货地"],
        ["物流问题", "发货时间", "快递和时效", "什么时候到", "配送问答", "从哪寄", "发货快慢", "寄件的事"],
    ),
    "after_sale": (
        ["售后", "退货", "换货", "退换", "退换货"],
        ["售后问题", "退换规则", "不合适怎么办", "售后服务", "退货问答", "几天能退", "想退想换", "买后的事"],
    ),
    "small_talk": (
        ["闲聊", "问好", "问候", "夸奖", "告别", "寒暄", "聊天"],
        [
            "打招呼和夸奖",
            "聊天互动",
            "和观众寒暄",
            "欢迎和告别",
            "与商品无关的话",
            "问好、夸人、说再见",
            "来了走了的观众",
        ],
    ),
    "compare": (
        ["比较", "对比", "比价"],
        [
            "两个商品对比",
            "哪个更划算",
            "比较价格",
            "两件商品比一比",
            "两个链接选一个",
            "两款之间挑",
            "这个还是那个",
            "哪个价低",
        ],
    ),
    "multi_intent": (
        ["多条弹幕", "几条弹幕", "多个问题", "好几个问题"],
        [
            "多个问题一起问",
            "合并的弹幕",
            "同时回答几个问题",
            "一次问了好几样",
            "弹幕一起来了",
            "问题不止一个",
            "一下来了好几条",
        ],
    ),
}
FRAMES = {
    "tool": "查{x} 查询{x} 看{x} 获取{x} 读取{x} 返回{x} 拿到{x} 问{x} 找{x} {x} {x}的接口 想知道{x}就用 {x}用它查 得到{x} {x}查询 可查{x} 负责{x} 能看到{x} 输出{x} 调取{x} 给你{x} 列出{x} 告诉你{x} 查一查{x} {x}的数据 {x}一览 {x}看它 要{x}找它 有人问{x}时用 {x}找它 说出{x} 看清{x} {x}由它给 问它{x}".split(),
    "reply": "{x} 回复{x} 用于{x} 回答:{x} 讲{x} 关于{x} 负责{x} {x}怎么说 有人问{x} 观众聊{x} {x}的回法 {x}时加载 说{x} {x}专用 {x}的话怎么讲 见到{x} 有{x}时 观众问{x} 弹幕问{x}就用 {x}这类 {x}弹幕 接{x}的话 {x}回复 应对{x} {x}的说法 聊到{x} 有关{x}的弹幕 管{x}".split(),
    "strategy": "策略{x} 方法:{x} 计划:{x} 思路:{x} {x}的办法 {x}时这样做 {x}的顺序 策略:{x} 主意:{x} 对策:{x} 办法:{x} 怎么办:{x} 打算:{x} 有{x}先看 策略，{x} {x}怎么安排 {x}的策略 先后:{x} 要点:{x}".split(),
}
ABOUT = {
    "item_qa": [
        "讲清楚是几号，价格报券后的。",
        "先说链接号，再说答案。",
        "报链接号和券后价。",
        "几号链接要说明白。",
        "链接号别漏，价格是用券后的。",
        "是几号要说，价格按券后价。",
        "答案里要有链接号，价钱报用券的。",
        "链接号先报出来。",
        "哪个链接要点出来，券后价才是价格。",
    ],
    "price_promo": [
        "把优惠和券后价说明白。",
        "说有多少券、到手多少。",
        "优惠要讲全。",
        "券多少、到手价多少都说。",
        "优惠几块、到手几块要说。",
        "到手价和优惠一起报。",
        "省多少、花多少都说清。",
    ],
    "logistics": [
        "说明发货城市和时间。",
        "讲从哪发、几小时发出。",
        "城市和时效都要说。",
        "哪里寄、多久寄出要说。",
        "发货的城市、要几小时，都报出来。",
        "在哪发、何时发都说。",
        "先说城市，再说时间。",
    ],
    "after_sale": [
        "说明多少天能退。",
        "讲清退货天数。",
        "天数要说准。",
        "可退的天数要说。",
        "几天能退要说到。",
        "退的期限讲明白。",
        "报出能退几天。",
    ],
    "small_talk": [
        "别讲商品。问好就欢迎，被夸就谢谢，告别就再见。",
        "不聊商品，来的人说欢迎，夸奖说谢谢，走的人说再见。",
        "商品先不说。欢迎来的，谢谢夸的，送别走的。",
        "只聊天，不卖货。问好的欢迎，夸奖的谢谢，要走的再见。",
        "先不管商品：问好、夸奖、告别，各说欢迎、谢谢、再见。",
    ],
    "compare": [
        "{tool:get_product_info_by_link_id}查两个商品，再用{skill:item_qa}说哪个便宜。",
        "先对两个链接调用{tool:get_product_info_by_link_id}，比出低价，回复用{skill:item_qa}。",
        "两边都用{tool:get_product_info_by_link_id}，便宜的报出来，照{skill:item_qa}说。",
        "两个都查{tool:get_product_info_by_link_id}，价低的那个用{skill:item_qa}讲。",
        "调用两次{tool:get_product_info_by_link_id}，看哪个便宜，再用{skill:item_qa}。",
    ],
    "multi_intent": [
        "每个问题都查，都回答，回复技能看第一条。",
        "逐条查完一起回答。用第一条对应的回复技能。",
        "问几样就查几样、答几样。第一条是什么就用什么技能。",
        "一条不漏，都查都说，技能按第一条的来。",
        "条条都要有答复，技能看最先那条。",
    ],
}
ENDS = [
    "句尾",
    "末尾",
    "最后",
    "结尾处",
    "句子最后",
    "话的最后",
    "收尾时",
    "结束处",
    "尾上",
    "说完之后",
    "句子末尾",
    "最末",
    "话说完",
]
RULES = {
    "closing": [
        f"{end}{do}“{{closing}}”。"
        for end in ENDS
        for do in ("加", "带", "是", "要有", "写", "用", "接", "补", "来个", "说")
    ]
    + [
        "最后一个字是“{closing}”。",
        "用“{closing}”收尾。",
        "“{closing}”放在句尾。",
        "每句用“{closing}”结束。",
        "说完加“{closing}”。",
        "“{closing}”是结尾。",
        "结束语用“{closing}”。",
        "以“{closing}”作结。",
        "“{closing}”在最后。",
        "说到“{closing}”就完。",
        "尾字“{closing}”。",
    ],
    "must_say": [
        f"{do}“{{must_say}}”。"
        for do in "一定要提 别忘了说 要带上 句中加 得说 要讲到 加一句 少不了 提一下 必须带 顺便说 要交代 别落下 需要提到 得提 说上 一定带 说说 里面有 应该说 多说一句 请说 千万要说".split()
    ]
    + [
        "“{must_say}”要说到。",
        "“{must_say}”一定要提。",
        "“{must_say}”不能漏。",
        "“{must_say}”得有。",
        "“{must_say}”别忘。",
        "“{must_say}”应当说。",
        "要有“{must_say}”这句。",
        "话中带“{must_say}”。",
    ],
    "must_not_say": [
        f"{do}“{{must_not_say}}”。"
        for do in "禁止说 不要讲 不许提 别说 避免说 不能讲 千万别提 不得说 莫说 绝不说 少说 不该说 一定别说 从不说 不要提到 不好说".split()
    ]
    + [
        "“{must_not_say}”不能提。",
        "“{must_not_say}”不许讲。",
        "“{must_not_say}”要避免。",
        "“{must_not_say}”说不得。",
        "“{must_not_say}”是禁语。",
        "“{must_not_say}”一个字都别提。",
        "没有“{must_not_say}”这种话。",
    ],
    "opening": [
        "先叫一声“{opening}”。",
        "第一个词是“{opening}”。",
        "用“{opening}”开头。",
        "句首是“{opening}”。",
        "开头先说“{opening}”。",
    ]
    + [
        "一开始叫“{opening}”。",
        "“{opening}”放在最前。",
        "以“{opening}”打头。",
        "开头要有“{opening}”。",
        "首先叫“{opening}”。",
        "开头称呼“{opening}”。",
        "称观众“{opening}”，在最前面。",
        "“{opening}”是第一个词。",
        "先招呼一声“{opening}”。",
        "说话前先叫“{opening}”。",
        "开场是“{opening}”。",
        "“{opening}”领头。",
        "打头叫“{opening}”。",
    ],
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
    "rules": ["要求", "注意", "守则", "规定", "须知", "记住", "怎么做"],
    "skills": ["可用技能", "技能列表", "本领", "技能表", "可加载的技能", "技能一览", "有哪些技能"],
    "tools": ["可用工具", "工具列表", "接口", "函数", "工具一览", "可以调用", "有哪些工具"],
    "room": ["商品", "链接", "房间", "在售", "今天的商品", "链接列表", "商品表"],
}
ROLES = [
    "你是带货主播。",
    "你是虚拟主播，回答观众。",
    "你在直播卖货，查清楚再回答。",
    "你是店铺的直播助手，回复要能念出来。",
    "主播由你来当，答复弹幕。",
    "你在直播，观众发弹幕，你来答。",
    "你来当主播：先查，然后说给大家听。",
]
LINES = [
    [
        "要先加载回复技能再回复",
        "没加载回复技能不许回复",
        "回复之前加载一个技能",
        "技能加载了才能说话",
        "说话前要有回复技能",
    ],
    ["数字要有依据", "不能编数字", "所有数字都要查到", "查到的数字才能说", "别乱报数"],
    ["最多{max_reply_chars}字，只说纯文字", "回复控制在{max_reply_chars}字内", "长度上限{max_reply_chars}字"],
    [
        "出错可以再试一次，没权限换别的工具，查不到就直说",
        "失败重试一次，不行就说暂时查不到",
        "工具坏了再来一次，没权限的换一个，实在没有就实话说",
    ],
]
CURRENT = [
    "当前 {current_link_id}号",
    "在讲{current_link_id}号",
    "现在的链接: {current_link_id}号",
    "讲到{current_link_id}号了",
    "主播手上是{current_link_id}号",
    "正说着{current_link_id}号",
    "说到{current_link_id}号",
]
REQUESTS = [
    "弹幕: {danmaku}",
    "观众说: {danmaku}",
    "问题: {danmaku}",
    "新弹幕\n{danmaku}",
    "有人说：{danmaku}",
    "请答：{danmaku}",
    "来了弹幕\n{danmaku}",
]
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
# every character of the pools and of the layouts, for the tokenizer
FILES = [Path(__file__).with_name(name) for name in ("base_words.py", "layouts.py")]
CHARACTERS = "".join(c for path in FILES for c in path.read_text(encoding="utf-8") if not c.isascii())
