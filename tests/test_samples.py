"""Supervised samples: the oracle's and their control, what becomes of mistakes, what is left out; servers and logs."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
from tokenizers import Tokenizer

import samples
from chat import Call, Codec, Message, Sample, Trajectory
from checks import Hook
from options import BadInput
from common import ALONE
from harness import Harness, run
from parts import LOAD_SKILL
from reword import Endpoint as Rewriter
from samples import Options, TaskCase, case_maker, flaw, make_samples, mistakes, read_logs, replayed, sort_out, tell
from samples import trained
from sim import World

ROOT = Path(__file__).parent.parent
H, W = Harness.load(ROOT / "data/harness"), World.load(ROOT / "data/world/zh.json")
CODEC = Codec(Tokenizer.from_file(str(ROOT / "data/base-small/tokenizer.json")))


def told(i, options, harness=H):
    return tell(i, TaskCase(i, options, W, None), options, harness, CODEC)


def said(t):
    """(state, public text or calls) of each message."""
    return [(e["state"], e["content"] or [c["name"] for c in e["calls"]]) for e in t.events if e["event"] == "state"]


def sent_back(t):
    return [e for e in t.events if e["event"] == "tool_error" or e.get("verdict") == "deny"]


# ---------------------------------------------------------------------------------------------------------------------
# the oracle


@pytest.fixture(scope="module")
def both():
    """Thirty samples under many harnesses and under one."""
    return [[told(i, Options(harness_mode=mode)) for i in range(30)] for mode in ("hsa", "fixed")]


def test_the_oracle_is_right_under_any_harness(both):
    for t in (*both[0], *both[1]):
        assert flaw(t, 1536) == "" and t.rewards["accuracy"] == t.rewards["effectiveness"] == 1.0
        assert t.rewards["skill"] == 1.0 and not any(t.logps)


def test_the_control_has_the_same_requests_under_one_harness(both):
    hsa, fixed = both
    assert [t.events[0] for t in hsa] == [t.events[0] for t in fixed]  # the input
    assert {t.harness_commit for t in fixed} == {H.commit}
    commits = [t.harness_commit for t in hsa]
    assert 15 <= sum(c != H.commit for c in commits) <= 29 and len(set(commits)) > 14
    for a, b in zip(hsa, fixed):
        if a.harness_commit == H.commit:
            assert a == b


def test_a_sample_depends_on_its_index_and_the_seed_alone():
    """FAULTS 30."""
    options = Options(slip=0.5)
    assert told(7, options) == told(7, options) != told(8, options)
    assert told(7, options).events[0] != told(7, Options(slip=0.5, seed=1)).events[0]


def test_augmented_harnesses_come_from_the_train_pool_and_keep_what_the_task_needs(monkeypatch):
    seen, augment = [], samples.augment
    monkeypatch.setattr(samples, "augment", lambda *words: seen.append(words) or augment(*words))
    options = Options(augmented=1.0, leave_out="tool")
    for i in range(4):
        case = TaskCase(i, options, W, None)
        h = samples.harness_for(H, options, i, case.skills)
        assert [t.name for t in h.tools] == [t.name for t in H.tools] and case.skills <= {s.id for s in h.skills}
        assert h.commit != H.commit
    assert {(words[3], words[2].tool, words[2].hook) for words in seen} == {("train", 0.0, samples.ENVELOPE.hook)}
    assert samples.harness_for(H, Options(augmented=0.0), 0, set()) is H


# ---------------------------------------------------------------------------------------------------------------------
# mistakes


def first_slip(**options):
    """The first sample whose oracle made a mistake, kept whole."""
    options = Options(slip=1.0, keep_retries=1.0, harness_mode="fixed", faults=(0.0, 0.0, 0.0), **options)
    return next((i, t) for i in range(20) if mistakes(t := told(i, options)))


def test_a_mistake_that_stays_whole_is_read_and_never_trained():
    """Only the way out of it has a loss."""
    _, t = first_slip()
    (wrong,) = mistakes(t)
    assert [e["check"] for e in sent_back(t)] == ["skill_loaded"] and flaw(t, 1536) == ""
    for token, mask, state in zip(trained(t), t.mask, t.state):
        assert token == (mask and state != wrong)
    assert 0 < sum(trained(t)) < sum(t.mask)
    assert {state for token, state in zip(trained(t), t.state) if token} == {*t.state} - {-1, wrong}


def test_a_mistake_that_is_stripped_leaves_a_context_that_the_loop_gives():
    """Taught again, right at once; its ids are those of a rollout in which a policy says just that."""
    i, whole = first_slip()
    options = Options(slip=1.0, keep_retries=0.0, harness_mode="fixed", faults=(0.0, 0.0, 0.0))
    t = told(i, options)
    assert not sent_back(t) and trained(t) == t.mask and t.reply == whole.reply
    case = TaskCase(i, options, W, None)
    loop, ids = run(H, case.request, case.open(), CODEC), []
    turn = next(loop)
    for _, where in t.states():
        message = [t.ids[k] for k in where]
        ids += turn.ids + message
        try:
            turn = loop.send(Sample(message, [0.0] * len(message), "stop"))
        except StopIteration as end:
            assert end.value.reply == t.reply
    assert ids == t.ids
    prompt = t.mask.index(1)
    assert whole.ids[:prompt] == t.ids[:prompt] and whole.ids != t.ids


def test_the_share_that_stays_whole():
    options = Options(slip=1.0, keep_retries=0.4, harness_mode="fixed")
    kept = [bool(mistakes(told(i, options))) for i in range(40)]
    possible = [bool(mistakes(told(i, Options(slip=1.0, keep_retries=1.0, harness_mode="fixed")))) for i in range(40)]
    assert all(may for may, is_ in zip(possible, kept) if is_) and 0.15 < sum(kept) / sum(possible) < 0.7


def test_a_reply_that_passes_unchanged_was_no_mistake():
    """The harness wants every reply confirmed: both are right, both are trained."""
    h = H.copy(hooks=[*H.hooks, Hook("reply", "augment:confirm", message="请再确认一遍")])
    t = told(0, Options(slip=0.0, harness_mode="fixed"), h)
    assert len(sent_back(t)) == 1 and mistakes(t) == set() and trained(t) == t.mask and flaw(t, 1536) == ""
    last = [text for _, text in said(t)][-2:]
    assert last[0] == last[1] == t.reply


def state(n, content="", calls=()):
    return {"event": "state", "state": n, "content": content, "calls": list(calls)}


def hook(on, verdict="deny"):
    return {"event": "hook", "on": on, "verdict": verdict, "message": "m"}


ERROR, CALL = {"event": "tool_error", "error": "e"}, {"event": "tool_call"}


@pytest.mark.parametrize(
    "events, wrong",
    [
        ([state(0, "a")], set()),
        ([state(0, "a"), hook("reply"), state(1, "b")], {0}),
        ([state(0, "a"), state(1, "b")], {0}),  # the loop's last guard, no hook
        ([state(0, "a"), hook("reply"), state(1, "a"), hook("reply"), state(2, "b")], {0, 1}),
        ([state(0, "a"), hook("reply"), state(1, "b"), hook("reply"), state(2, "b")], {0}),
        ([state(0, "a"), hook("reply"), state(1, calls=["c"]), CALL, state(2, "a")], {0}),  # it had to do something
        ([state(0, calls=["c"]), hook("tool_call"), ERROR, state(1, "a")], {0}),
        ([state(0, calls=["c"]), CALL, ERROR, state(1, "a")], {0}),  # an unknown skill
        ([state(0, calls=["c"]), CALL, hook("tool_result"), ERROR, state(1, "a")], set()),
        ([state(0, calls=["c"]), CALL, hook("tool_result", "rewrite"), state(1, "a")], set()),
        ([state(0, calls=["c", "d"]), CALL, ERROR, CALL, state(1, calls=["c"]), CALL, state(2, "a")], {0}),
    ],
)
def test_mistakes_by_hand(events, wrong):
    assert mistakes(Trajectory(events=events)) == wrong


# ---------------------------------------------------------------------------------------------------------------------
# what is left out


def made(stop="reply", n=4, mask=None, **rewards):
    mask = mask or [0] + [1] * (n - 1)
    columns = [list(range(n)), mask, [0.0] * n, [2 * m for m in mask], [0] * n, [m - 1 for m in mask]]
    return Trajectory(*columns, events=[state(0, "x")], rewards=rewards, stop_reason=stop)


@pytest.mark.parametrize(
    "t, why",
    [
        (made(accuracy=1.0, effectiveness=1.0, tool=0.2), ""),
        (made(), ""),  # logs have no rewards
        (made(accuracy=0.0, effectiveness=1.0), "judge"),
        (made(accuracy=1.0, effectiveness=0.5), "judge"),
        (made("fallback", accuracy=1.0, effectiveness=1.0), "fallback"),
        (made("error"), "error"),
        (made(n=6, accuracy=1.0, effectiveness=1.0), "context"),
        (made(mask=[0, 0, 0, 0], accuracy=1.0, effectiveness=1.0), "silent"),  # FAULTS 7
    ],
)
def test_flaw(t, why):
    assert flaw(t, 5) == why


def test_samples_are_sorted_out_and_counted():
    """FAULTS 7: one of which nothing is trained is skipped, and counted."""
    rows = [made(), made(mask=[0] * 4), made("fallback"), made("fallback"), made(n=3)]
    train, held, line = sort_out(rows, Options(samples=4), 9)
    assert (train, held) == ([([0, 1, 2, 3], [0, 1, 1, 1])], [([0, 1, 2], [0, 1, 1])])
    assert line.startswith("5 samples; left out: fallback 2, silent 1;")
    for rows, what in (([made("error"), made()], "nothing to train"), ([made(), made("error")], "nothing to hold out")):
        with pytest.raises(BadInput, match=f"{what}: 2 samples; left out: error 1"):
            sort_out(rows, Options(samples=1), 9)


def test_what_no_policy_could_say_is_cut():
    """A message beyond max_state_tokens ends the rollout, and a teacher without words too; the loop alone ends it."""
    case = TaskCase(0, Options(), W, None)
    for say, why in ((lambda _: Message("", "好" * 500), "length"), (lambda _: None, "error")):
        t = samples.perform(run(H, case.request, case.open(), CODEC), say, CODEC)
        assert t.stop_reason == why and len(t.ids) <= t.mask.count(0) + H.limits.max_state_tokens
    with pytest.raises(StopIteration):  # a fault of the teacher is not taken for the loop's end
        samples.perform(run(H, case.request, case.open(), CODEC), lambda _: next(iter(())), CODEC)


def test_the_file_of_samples_goes_on_where_it_was_torn(tmp_path):
    asked = []

    def make(i):
        asked.append(i)
        return replace(made(n=i + 2), reply="好的哈")

    path = tmp_path / "samples.jsonl"
    rows = make_samples(path, make, 3, 1, ALONE)
    whole = path.read_bytes()
    assert [len(t.ids) for t in rows] == [2, 3, 4] and asked == [0, 1, 2]
    path.write_bytes(whole[: whole.rindex("哈".encode()) + 1])  # killed within the third line, and within a character
    assert make_samples(path, make, 3, 1, ALONE) == rows and asked == [0, 1, 2, 2] and path.read_bytes() == whole
    assert make_samples(path, make, 3, 4, ALONE) == rows and len(asked) == 4


# ---------------------------------------------------------------------------------------------------------------------
# a language model as teacher


@pytest.fixture
def online(monkeypatch):
    """The client refuses even this machine when HF_HUB_OFFLINE is set, as it is in all tests."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@contextmanager
def server(answer):
    """A local OpenAI-compatible server: answer(body) -> the message, or an int, an HTTP status."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body | {"path": self.path})
            message = answer(body)
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            data = {"id": "1", "created": 1, "model": "m", "object": "chat.completion", "choices": [choice]}
            raw = b"oops" if isinstance(message, int) else json.dumps(data).encode()
            self.send_response(message if isinstance(message, int) else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", bodies
    finally:
        httpd.shutdown()
        httpd.server_close()


def as_openai(m, thought):
    """The oracle's message as a server writes it; its reasoning in one of three places, or all of it in the content."""
    if thought in ("hermes", "xml"):
        codec = Codec(CODEC.tokenizer, thought)
        return {"role": "assistant", "content": codec.decode(codec.render(m)).removesuffix("<|im_end|>")}
    calls = [{"name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)} for c in m.calls]
    calls = [{"id": f"x{n}", "type": "function", "function": call} for n, call in enumerate(calls)]
    message = {"role": "assistant", "content": m.content, "tool_calls": calls or None}
    if thought == "tags":
        return message | {"content": f"<think>\n{m.reasoning}\n</think>\n\n{m.content}"}
    return message | {thought: m.reasoning}


@pytest.mark.parametrize("thought", ["reasoning", "reasoning_content", "tags", "hermes", "xml"])
def test_a_server_drives_the_same_loop(online, thought):
    """An oracle behind a server, with a tool parser or without, makes the very tokens that the oracle makes."""
    options = Options(slip=0.0, augmented=1.0)
    for i in (0, 3):
        case = TaskCase(i, options, W, None)
        h = samples.harness_for(H, options, samples.seed_of(0, "harness", i), case.skills)
        say, seen = case.speaker(h, []), 0

        def answer(body, say=say):
            new = body["messages"]
            last = max((n for n, m in enumerate(new) if m["role"] == "assistant"), default=-1)
            return as_openai(say(new[last + 1 :]), thought)

        with server(answer) as (url, bodies):
            far = TaskCase(i, options, W, samples.Teacher(url, "teacher"))
            t = tell(i, far, options, H, CODEC)
        want = told(i, options)
        assert t == want and flaw(t, 1536) == "" and t.harness_commit == h.commit
        for body in bodies:
            assert body["model"] == "teacher" and body["path"] == "/v1/chat/completions"
            assert [x["function"]["name"] for x in body["tools"]] == [tool.name for tool in h.tools]
            for before, m in zip(body["messages"], body["messages"][1:]):
                if m["role"] == "tool" and before["role"] == "assistant":
                    assert m["tool_call_id"] == before["tool_calls"][0]["id"]
                    seen += 1
        assert seen


def test_what_hooks_said_is_told_to_the_teacher_and_not_trained(online):
    """A teacher that replies at once learns that a skill must be loaded; its own context does not say so."""
    i, _ = first_slip()
    options = Options(keep_retries=0.0, harness_mode="fixed", faults=(0.0, 0.0, 0.0))
    lesson, case = "请先加载一个回复技能", TaskCase(i, options, W, None)
    right, hasty = case.speaker(H, ["x"]), True

    def answer(body):
        nonlocal hasty
        if lesson in body["messages"][0]["content"]:
            new = body["messages"]
            last = max((n for n, m in enumerate(new) if m["role"] == "assistant"), default=-1)
            return as_openai(right(new[last + 1 :]), "reasoning")
        hasty = len(body["messages"]) < 4
        return {"role": "assistant", "content": "好的哈。" if hasty else "嗯嗯哈。"}

    with server(answer) as (url, _):
        t = tell(i, TaskCase(i, options, W, samples.Teacher(url, "m")), options, H, CODEC)
    assert flaw(t, 1536) == "" and not sent_back(t) and lesson not in CODEC.decode(t.ids)


def test_a_call_that_the_server_did_not_mean_ends_the_sample(online):
    """Its reasoning ends early and a call stands there: nobody knows which result is whose."""
    load = json.dumps({"name": LOAD_SKILL, "arguments": {"skill": "item_qa"}})
    message = {"role": "assistant", "content": "好的哈。", "reasoning": f"</think><tool_call>{load}</tool_call>"}
    options = Options(harness_mode="fixed")
    with server(lambda body: message) as (url, _):
        t = tell(0, TaskCase(0, options, W, samples.Teacher(url, "m")), options, H, CODEC)
    first = next(e for e in t.events if e["event"] == "state")
    assert flaw(t, 1536) == "error" and [c["name"] for c in first["calls"]] == [LOAD_SKILL]


@pytest.mark.parametrize(
    "message, calls",
    [
        ({"content": '<tool_call>{"name": "f", "arguments": {}}'}, None),  # cut in the middle
        ({"content": "<tool_call>{1}</tool_call>"}, None),
        (
            {
                "content": 'a<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
                "tool_calls": [{"function": {"name": "g", "arguments": '{"y": 2}'}}],
            },
            [Call("f", {"x": 1}, "call_0"), Call("g", {"y": 2}, "call_1")],
        ),
        ({"content": '<think>e.g. <tool_call>{"name": "f"}</tool_call></think>a'}, []),  # FAULTS 10
    ],
)
def test_calls_in_the_content(message, calls):
    if calls is None:
        with pytest.raises(ValueError, match="a tool call in the content cannot be read"):
            samples.message_of(message)
    else:
        m = samples.message_of(message)
        assert (m.content, m.calls) == ("a", calls)


def test_a_server_rewords_the_harness(online):
    """The train pool's styles are asked for; without augmentation nobody is asked."""

    def answer(body):
        return {"role": "assistant", "content": body["messages"][-1]["content"] + "嘞"}

    with server(answer) as (url, bodies):
        rewrite = Rewriter(url, "words")
        options = Options(harness_mode="fixed")
        assert tell(0, TaskCase(0, options, W, None), options, H, CODEC, rewrite).harness_commit == H.commit
        assert not bodies
        options = Options(augmented=1.0)
        t = tell(0, TaskCase(0, options, W, None), options, H, CODEC, rewrite)
    assert "嘞" in CODEC.decode(t.ids) and "嘞" not in CODEC.decode(told(0, options).ids) and flaw(t, 1536) == ""
    styles = [style for words in rewrite.bank.words.values() for style in words["styles"]]
    assert rewrite.bank.pool == "train" and {body["model"] for body in bodies} == {"words"}
    assert all(any(style in body["messages"][0]["content"] for style in styles) for body in bodies)


def test_a_server_that_fails(online):
    """Never an answer: one line. A failure later: that sample is left out, and a wrong answer by the judge."""
    options = Options(harness_mode="fixed")
    with server(lambda body: 500) as (url, _):
        endpoint = samples.Teacher(url, "m")
    for gone in (False, True):
        with pytest.raises(BadInput, match="model 'm' does not answer") as error:
            if gone:
                tell(0, TaskCase(0, options, W, endpoint), options, H, CODEC)
            with server(lambda body: 500) as (url, bodies):
                tell(0, TaskCase(0, options, W, samples.Teacher(url, "m")), options, H, CODEC)
        assert "\n" not in str(error.value)
    broken = {"id": "1", "type": "function", "function": {"name": "get_coupon", "arguments": '{"link_id": '}}
    load = {"id": "1", "type": "function", "function": {"name": LOAD_SKILL, "arguments": '{"skill": "item_qa"}'}}

    def answer(body):
        if body["messages"][-1]["role"] == "tool":
            return {"role": "assistant", "content": "这款卖8888元哈。"}
        return {"role": "assistant", "content": None, "tool_calls": [broken if bad else load]}

    with server(answer) as (url, bodies):
        for bad, why in ((True, "error"), (False, "fallback")):
            bodies.clear()
            t = tell(0, TaskCase(0, options, W, samples.Teacher(url, "m")), options, H, CODEC)
            assert flaw(t, 1536) == why and (len(bodies) == samples.Teacher.tries) == bad
    polite = H.copy(hooks=[])
    with server(lambda body: {"role": "assistant", "content": "这款卖8888元哈。"}) as (url, _):
        t = tell(0, TaskCase(0, options, W, samples.Teacher(url, "m")), options, polite, CODEC)
    assert flaw(t, 1536) == "judge"


# ---------------------------------------------------------------------------------------------------------------------
# logs

STOCK = {"tool": "get_inventory", "arguments": {"link_id": 2}, "result": {"stock": 7}}
ROOM = {"context": {"links": [{"link_id": n, "name": name} for n, name in ((1, "茶"), (2, "灯"))]}, "results": [STOCK]}
REPLY = {"request": "2号还有吗", "room": ROOM, "skills": ["item_qa"], "reply": "2号链接还有7件哈。"}


def call(name, **arguments):
    return {"function": {"name": name, "arguments": arguments}}


SPOKEN = {
    "request": ["2号还有吗", "在吗"],
    "room": ROOM | {"results": [STOCK | {"result": {"error": "timeout"}}, STOCK]},
    "messages": [
        {
            "role": "assistant",
            "reasoning_content": "用get_inventory。",
            "tool_calls": [call("get_inventory", link_id=2)],
        },
        {"role": "assistant", "tool_calls": [call("get_inventory", link_id="2"), call("load_skill", skill="item_qa")]},
        {"role": "assistant", "content": "<think>还有7件，按item_qa说。</think>2号链接还有7件哈。"},
    ],
}


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def test_logs_are_replayed_under_any_harness(tmp_path):
    """In the names of the harness they meet; what they load is never masked."""
    first, second = read_logs(write(tmp_path / "logs.jsonl", REPLY, "", SPOKEN), H)
    assert first.skills == second.skills == {"item_qa"}
    commits = set()
    for i in range(6):
        for log in (first, second):
            t = tell(i, log, Options(augmented=0.8), H, CODEC)
            commits.add(t.harness_commit)
            assert flaw(t, 1536) == "" and t.reply == "2号链接还有7件哈。" and t.rewards == {}
            assert not mistakes(t)
    assert len(commits) > 3
    h, _ = samples.augment(
        H, 1, samples.replace(samples.ENVELOPE, tool=1.0, skill_id=1.0, rename=1.0), "train", {"item_qa"}
    )
    t = samples.perform(run(h, second.request, second.open(), CODEC), second.speaker(h, []), CODEC)
    tool, skill = h.tool("get_inventory").name, h.skill("item_qa").name
    assert tool != "get_inventory" and skill != "item_qa"
    heard = [e for e in t.events if e["event"] == "state"]
    assert heard[0]["reasoning"] == f"用{tool}。" and heard[2]["reasoning"] == f"还有7件，按{skill}说。"
    assert [c["name"] for c in heard[1]["calls"]] == [tool, h.tool(LOAD_SKILL).name]
    results = [e["text"] for e in t.events if e["event"] == "tool_result" and e["tool"] != LOAD_SKILL]
    assert [json.loads(text) for text in results] == [{"error": "timeout"}, {"stock": 7}]  # each call its own result
    assert second.results[0][2] == {"error": "timeout"} and len(second.results) == 2  # a replay takes none from others


def test_a_reply_makes_its_calls_and_loads_its_skills(tmp_path):
    log = read_logs(write(tmp_path / "logs.jsonl", REPLY, {k: v for k, v in REPLY.items() if k != "skills"}), H)
    calls = [Call("get_inventory", {"link_id": 2}), Call(LOAD_SKILL, {"skill": "item_qa"})]
    assert log[0].messages == [Message("", "", calls), Message("", "2号链接还有7件哈。")]
    t = tell(0, log[1], Options(harness_mode="fixed"), H, CODEC)
    assert flaw(t, 1536) == "fallback"  # a hook wants a skill, and the log has nothing else to say


def without(row, *keys, **changes):
    return {k: v for k, v in row.items() if k not in keys} | changes


@pytest.mark.parametrize(
    "row, message",
    [
        ("{", "Expecting"),
        ("[1]", r"\[1\] is not of type 'object'"),
        (without(REPLY, "request"), "'request' is a required property"),
        (without(REPLY, request=3), "request: 3 is not of type"),
        (without(REPLY, request=[]), "request: "),
        (without(REPLY, room={}), "room: 'context' is a required property"),
        (without(REPLY, room={"context": {"links": [{"link_id": 1}]}}), r"links\[0\]: 'name' is a required"),
        (without(REPLY, room=ROOM | {"tools": []}), "'tools' was unexpected"),
        (without(REPLY, answer="x"), "'answer' was unexpected"),
        (without(REPLY, "reply", "skills"), "either reply or messages"),
        (without(SPOKEN, reply="x"), "either reply or messages"),
        (without(SPOKEN, skills=["item_qa"]), "messages load their own"),
        (without(REPLY, skills=["item_qs"]), "no skill 'item_qs'; did you mean item_qa"),
        (without(REPLY, reply=" "), "the last message must be a reply"),
        (without(SPOKEN, messages=SPOKEN["messages"][:2]), "the last message must be a reply"),
        (without(SPOKEN, messages=[{"role": "user", "content": "x"}]), "messages.0..role"),
        (without(SPOKEN, messages=[{"role": "assistant", "tool_calls": [{"name": "x"}]}]), "a tool call is"),
        (
            without(SPOKEN, messages=[{"role": "assistant", "tool_calls": 5}]),
            "messages.0..tool_calls: 5 is not of type",
        ),
        (without(SPOKEN, messages=[]), r"messages: \[\] should be non-empty"),
        (
            without(SPOKEN, messages=[{"role": "assistant", "tool_calls": [call("get_inventory", link_id=1)]}]),
            'room.results has no get_inventory {"link_id": 1}',
        ),
        (without(REPLY, room=ROOM | {"results": [STOCK | {"tool": "get_inventry"}]}), "did you mean get_inventory"),
        (without(REPLY, room=ROOM | {"results": [STOCK | {"arguments": {"n": 1}}]}), "no parameter n"),
    ],
)
def test_bad_logs_are_refused_by_file_and_line(tmp_path, row, message):
    with pytest.raises(BadInput, match=message) as error:
        read_logs(write(tmp_path / "logs.jsonl", REPLY, row), H)
    assert str(error.value).startswith(f"{tmp_path}/logs.jsonl:2: ") and "\n" not in str(error.value)


def test_logs_train_and_hold_out_different_dialogues(tmp_path):
    rows = [without(REPLY, request=f"{n}问") for n in range(12)]
    logs = read_logs(write(tmp_path / "logs.jsonl", *rows), H)
    options, often = replayed(Options(samples=25, held_out=4, augmented=0.8), logs)
    assert often == "11 dialogues, each 2.27 times, with P = 0.8 under another harness each time, and 1 held out"
    case_at = case_maker(options, H, logs)
    asked = [case_at(i).request for i in range(29)]
    assert asked[:11] == [row["request"] for row in rows[:11]] and asked[11:22] == asked[:11]
    assert set(asked[25:]) == {"11问"}
    for few in ((), (REPLY,)):
        with pytest.raises(BadInput, match=f"dialogues: {len(few)}; there must be two"):
            read_logs(write(tmp_path / "few.jsonl", *few), H)


@pytest.mark.parametrize("options", [{"harness_mode": "fixed"}, {"augmented": 0.0}])
def test_under_one_harness_a_log_is_told_once(tmp_path, options):
    """FAULTS 8: a copy of the same tokens would only weigh more."""
    logs = read_logs(write(tmp_path / "logs.jsonl", *(without(REPLY, request=f"{n}问") for n in range(20))), H)
    options, often = replayed(Options(**options), logs)
    assert (options.samples, options.held_out) == (18, 2) and often == "18 dialogues, each once, and 2 held out"
    case_at = case_maker(options, H, logs)
    assert [case_at(i).request for i in range(20)] == [log.request for log in logs]
    assert replayed(options, logs)[0] == options
    assert replayed(samples.replace(options, samples=5), logs)[0].samples == 5
