"""On-policy distillation: divergences by hand and enumerated, alignment, prompts, refusals, and whole tiny runs."""

import copy
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import common
import torch
from torch import nn

import opd
from chat import Codec, Sample, Trajectory
from options import BadInput
from model import create, load, pad_batch, token_logps

ROOT = Path(__file__).parent.parent
KINDS = ("reverse", "forward", "jsd", "sampled")
NONE = torch.zeros(1, dtype=torch.int64)  # the sampled id, where the form does not look at it


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def logits(n, vocab, seed=0, scale=2.0):
    return scale * torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def config(**options):
    return opd.parse(opd.Config, opd.PRESETS, ["--model", "m"] + [f"--{k}={v}" for k, v in options.items()])


# ---------------------------------------------------------------------------------------------------------------------
# divergences


def test_kl_by_hand():
    """FAULTS 33: direction, and a negative term that is not clamped: 0.5 ln(0.5 / 0.9) is one of the first sum."""
    student, teacher = t([0.5, 0.5]).log(), t([0.9, 0.1]).log()
    assert opd.divergence(student, teacher, NONE).item() == pytest.approx(0.5 * math.log(0.5 / 0.9 * 0.5 / 0.1))
    forward = opd.divergence(student, teacher, NONE, "forward").item()
    assert forward == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5))
    assert opd.divergence(student, teacher, NONE + 1, "sampled").item() == pytest.approx(math.log(0.5 / 0.1))
    assert opd.divergence(student, teacher, NONE, "sampled").item() == pytest.approx(math.log(0.5 / 0.9))


def test_jsd_by_hand():
    """FAULTS 33: beta is the teacher's share, in the mixture and in the sum."""
    student, teacher = t([0.5, 0.5]).log(), t([0.9, 0.1]).log()
    m = [0.25 * 0.9 + 0.75 * 0.5, 0.25 * 0.1 + 0.75 * 0.5]
    want = 0.25 * (0.9 * math.log(0.9 / m[0]) + 0.1 * math.log(0.1 / m[1]))
    want += 0.75 * (0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1]))
    assert opd.divergence(student, teacher, NONE, "jsd", 0.25).item() == pytest.approx(want)
    for beta, kind, share in ((1e-6, "forward", 1e-6), (1 - 1e-6, "reverse", 1e-6)):
        near = opd.divergence(student, teacher, NONE, "jsd", beta).item() / share
        assert near == pytest.approx(opd.divergence(student, teacher, NONE, kind).item(), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_at_equality_and_never_negative(kind):
    """FAULTS 33: no value and no gradient at equality; finite where probabilities underflow."""
    sampled = torch.arange(50)
    for scale in (0.0, 1e-4, 2.0, 60.0):
        z = logits(50, 70, scale=scale).float().requires_grad_()
        s, other = z.log_softmax(-1), logits(50, 70, seed=1, scale=scale).float().log_softmax(-1)
        same = opd.divergence(s, s.detach(), sampled, kind)
        pull = torch.autograd.grad(same.sum(), z, retain_graph=True)[0]
        assert max(same.abs().max(), pull.abs().max()) <= (0 if kind in ("reverse", "sampled") else 1e-6)
        d = opd.divergence(s, other, sampled, kind)
        assert d.isfinite().all() and torch.autograd.grad(d.sum(), z)[0].isfinite().all()
        if kind != "sampled":  # one draw of which may be negative: its mean is the KL
            assert d.min() > -1e-6 and (scale < 1 or d.mean() > 0.1)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_gradient_is_that_of_the_plain_formula(kind):
    """What autograd makes of the sums over the vocabulary, through the log_softmax."""
    z, teacher = logits(6, 9).requires_grad_(), logits(6, 9, seed=1).log_softmax(-1)
    s, beta = z.log_softmax(-1), 0.3
    m = (beta * teacher.exp() + (1 - beta) * s.exp()).log()
    plain = {
        "reverse": (s.exp() * (s - teacher)).sum(-1),
        "forward": (teacher.exp() * (teacher - s)).sum(-1),
        "jsd": (beta * teacher.exp() * (teacher - m) + (1 - beta) * s.exp() * (s - m)).sum(-1),
    }[kind]
    ours = opd.divergence(s, teacher, NONE, kind, beta)
    torch.testing.assert_close(ours, plain)
    weight = t(1, -2, 0.5, 0, 3, 1)
    want = torch.autograd.grad((weight * plain).sum(), z, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad((weight * ours).sum(), z)[0], want)


def test_sampled_form_is_reverse_in_expectation():
    """FAULTS 35: over the five tokens that could be sampled, mean value and mean gradient are those of the reverse KL.

    The advantage is detached: nothing reaches the teacher, and the gradient of each draw is D times that of its own
    log-prob. Without that (the log-ratio itself as the loss) the expected gradient would be 0.
    """
    z, zt = logits(1, 5).requires_grad_(), logits(1, 5, seed=1).requires_grad_()
    s, teacher = z.log_softmax(-1), zt.log_softmax(-1)
    exact = opd.divergence(s, teacher.detach(), NONE)
    exact_gradient = torch.autograd.grad(exact.sum(), z, retain_graph=True)[0]
    value, gradient, naive = 0, torch.zeros_like(z), torch.zeros_like(z)
    for a in range(5):
        p, d = s[0, a].exp().detach(), opd.divergence(s, teacher, NONE + a, "sampled")
        value += p * d.detach()
        one, none = torch.autograd.grad(d.sum(), (z, zt), retain_graph=True, allow_unused=True)
        own = torch.autograd.grad(s[0, a], z, retain_graph=True)[0]
        torch.testing.assert_close(one, (s - teacher)[0, a].detach() * own)
        assert none is None
        gradient, naive = gradient + p * one, naive + p * own
    torch.testing.assert_close((value, gradient), (exact.detach(), exact_gradient))
    assert gradient.abs().max() > 0.1 and naive.abs().max() < 1e-12


def test_the_tail_counts():
    """FAULTS 36: over the two likeliest tokens alone this reverse KL would be negative."""
    student, teacher = t([0.4, 0.3, *[0.003] * 100]).log(), t([0.55, 0.4, *[0.0005] * 100]).log()
    top = (student.exp() * (student - teacher))[:, :2].sum()
    d = opd.divergence(student, teacher, NONE).item()
    assert top < 0 < d and d == pytest.approx(top.item() + 100 * 0.003 * math.log(6))


# ---------------------------------------------------------------------------------------------------------------------
# heads and chunks


def heads(rows=40, hidden=8, tokens=19, seed=0):
    """Hidden states, heads and sampled ids; the last rows of both heads are padding with huge logits."""
    g = torch.Generator().manual_seed(seed)
    sides = []
    for width in (hidden, 2 * hidden):  # student and teacher need not be of one size
        head = nn.Linear(width, rows, bias=True).double()
        with torch.no_grad():
            head.weight.copy_(torch.randn(rows, width, generator=g))
            head.bias.copy_(torch.arange(rows) >= rows - 3).mul_(50)
        sides.append((torch.randn(tokens, width, generator=g, dtype=torch.float64).requires_grad_(), head))
    return *sides, torch.randint(0, rows - 3, (tokens,), generator=g)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 19, 64])
def test_chunked_is_unchunked(kind, chunk):
    """Values and gradients are those of `divergence` over all logits at once; padding rows of a head are no tokens."""
    cfg, (student, teacher, sampled) = config(kl=kind, beta=0.3, temperature=0.7), heads()
    s, q = ((head(h)[:, :37].float() / 0.7).log_softmax(-1) for h, head in (student, teacher))
    d = opd.divergence(s, q.detach(), sampled, kind, 0.3)
    want = torch.stack([d, (s.exp() * (s - q)).sum(-1), -(s.exp() * s).sum(-1)], -1)
    got = opd.chunked(student, teacher, sampled, 37, cfg, chunk)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    leaves = (student[0], student[1].weight, student[1].bias)
    weight = torch.rand(19, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad((weight * want[:, 0]).sum(), leaves, retain_graph=True)
    for a, b in zip(torch.autograd.grad((weight @ got).sum(), leaves), wanted, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()  # of the sum of all columns: the other two carry no gradient
    opd.chunked(student, teacher, sampled, 37, cfg, chunk).sum().backward()
    assert teacher[0].grad is None and teacher[1].weight.grad is None


def test_tokens_x_vocabulary_never_exists_at_once():
    """No product of a head is larger than a chunk, forwards or backwards."""
    (student, teacher, sampled), seen = heads(), []
    for head in (student[1], teacher[1]):
        head.register_forward_hook(lambda head, args, out: seen.append(len(out)))
    opd.chunked(student, teacher, sampled, 37, config(), chunk=5).sum().backward()
    assert max(seen) == 5 and sum(seen) == 4 * 19  # each head over each token, forwards and again backwards


def test_nothing_sampled_is_an_empty_result():
    student, teacher, sampled = heads(tokens=0)
    assert opd.chunked(student, teacher, sampled, 37, config()).shape == (0, 3)


# ---------------------------------------------------------------------------------------------------------------------
# alignment


@pytest.fixture(scope="module")
def student(model_dir):
    return load(model_dir)


@pytest.fixture(scope="module")
def teacher_dir(student, tmp_path_factory):
    """Another policy over the same tokenizer, surer of what it says than a new one is."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    policy = create(student.tokenizer, layers=2, hidden=64, heads=2, kv_heads=1, seed=1)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.mul_(8)
    policy.publish(path)
    return path


@pytest.fixture(scope="module")
def teacher(teacher_dir):
    return load(teacher_dir)


SILENT = Trajectory([5], [0], [0.0], [0], [0], [-1])  # its prompt left no room
ROWS = ((3, 9), (12, 40), (6, 1))  # tokens of prompt and answer


def babble(rows=ROWS):
    """Trajectories of unequal prompts and answers; id 0, with which rows are padded, is among the sampled ones."""
    made = []
    for i, (prompt, said) in enumerate(rows):
        ids = [(17 * i + 5 * j) % 250 for j in range(prompt + said)]
        ids[-1], n = 0, len(ids)
        mask = [0] * prompt + [1] * said
        made.append(
            Trajectory(ids, mask, [-7.8 * m for m in mask], [2 * m for m in mask], [0] * n, [m - 1 for m in mask])
        )
    return made


def divergences(student, teacher, trajectories, cfg, bucket=8):
    """`token_divergences` of one batch, as a list of (n, 3) per row."""
    ids, mask = pad_batch([x.ids for x in trajectories], [x.mask for x in trajectories], bucket=bucket)
    with torch.no_grad():
        return opd.token_divergences(student.model, teacher.model, ids, mask, cfg).split(
            [sum(x.mask) for x in trajectories]
        )


def test_tokens_are_aligned_with_what_predicts_them(student, teacher):
    """FAULTS 34: against all logits of each row alone: position t - 1 of both models speaks of token t."""
    rows = babble()
    for got, x in zip(divergences(student, teacher, rows, config(temperature=0.8)), rows, strict=True):
        out = (p.model(torch.tensor([x.ids])).logits[0, :, : student.codec.vocab_size] for p in (student, teacher))
        s, q = ((z / 0.8).log_softmax(-1) for z in out)
        where = [i - 1 for i, m in enumerate(x.mask) if m]
        want = (s.exp() * (s - q)).sum(-1)[where]
        torch.testing.assert_close(got[:, 0], want, atol=1e-5, rtol=1e-4)
        assert want.min() > 0.01


def test_self_distillation_is_zero_at_every_token(student):
    """FAULTS 34."""
    for kind in KINDS:
        d = torch.cat(divergences(student, copy.deepcopy(student), babble(), config(kl=kind)))
        assert d.shape == (50, 3) and d[:, :2].abs().max() < 1e-6 and d[:, 2].min() > 1


def test_order_and_padding_do_not_matter(student, teacher):
    """FAULTS 34."""
    rows = babble()
    want = divergences(student, teacher, rows, config())
    for order, bucket in (((2, 0, 1), 8), ((1, 2, 0), 64), ((0, 2), 1)):
        again = divergences(student, teacher, [rows[i] for i in order], config(), bucket)
        for i, d in zip(order, again, strict=True):
            torch.testing.assert_close(d, want[i], atol=1e-5, rtol=1e-4)


def test_only_sampled_tokens_have_a_gradient(student, teacher):
    """The student's embedding of an unsampled last token, which nothing after it reads, gets none."""
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 1, 0]])
    model = copy.deepcopy(student.model)
    model.get_output_embeddings().weight = nn.Parameter(model.get_output_embeddings().weight.detach().clone())  # untied
    d = opd.token_divergences(model, teacher.model, ids, mask, config())
    d[:, 0].sum().backward()
    rows = model.get_input_embeddings().weight.grad.abs().sum(-1)
    assert len(d) == 2 and rows[7] == rows[8] == 0 and rows[5] > 0 and rows[6] > 0


def test_the_loss_reads_the_distribution_that_was_sampled(student, teacher):
    """Engine and loss agree on the student: D of `sampled` is the engine's log-prob less the teacher's."""
    cfg = config(kl="sampled", batch=4, reply_tokens=9, temperature=0.7)
    engine = opd.Engine(student, 4, 512, cfg.temperature)
    rows = opd.collect(engine, None, 1, cfg, common.ALONE)
    ids, mask, logps = pad_batch(*([getattr(x, name) for x in rows] for name in ("ids", "mask", "logps")))
    with torch.no_grad():
        d = opd.token_divergences(student.model, teacher.model, ids, mask, cfg)
        theirs = token_logps(teacher.model, ids, mask, cfg.temperature)
    torch.testing.assert_close(d[:, 0], (logps - theirs)[mask.bool()], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# the update


def gradient(student, teacher, trajectories, **options):
    """Log of an update and its gradient; no weight moves."""
    optimizer = torch.optim.SGD(student.model.parameters(), 0.0)
    optimizer.zero_grad = lambda: None
    student.model.zero_grad()
    log = opd.update(student, teacher, optimizer, trajectories, config(**{"grad_clip": 0} | options), common.ALONE)
    return log, [torch.zeros_like(p) if p.grad is None else p.grad for p in student.model.parameters()]


@pytest.mark.parametrize("kind", ["reverse", "sampled"])
def test_update_is_one_mean_over_all_tokens(student, teacher, kind):
    """One denominator: neither micro-batches, answers of other lengths nor silent ones change the step."""
    rows = babble()
    log, whole = gradient(student, teacher, rows, kl=kind)
    d = torch.cat(divergences(student, teacher, rows, config(kl=kind))).mean(0)
    assert [log["loss"], log["kl"], log["entropy"]] == pytest.approx(d.tolist(), rel=1e-4)
    norm = torch.stack([g.norm() for g in whole]).norm().item()
    assert log["grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 0
    for micro in (1, 2):
        other, parts = gradient(student, teacher, [SILENT, *rows[::-1]], kl=kind, micro=micro)
        assert other == pytest.approx(log, rel=1e-4)
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_student_approaches_the_teacher(student, teacher, kind):
    """Updates on the same answers: the student is half as far from the teacher, who has not moved."""
    student, before = copy.deepcopy(student), copy.deepcopy(teacher.model.state_dict())
    optimizer = torch.optim.AdamW(student.model.parameters(), lr=3e-3)
    logs = [opd.update(student, teacher, optimizer, babble(), config(kl=kind), common.ALONE) for _ in range(25)]
    assert logs[-1]["loss"] < 0.5 * logs[0]["loss"]
    assert all(torch.equal(x, before[name]) for name, x in teacher.model.state_dict().items())


def test_the_gradient_is_clipped(student, teacher):
    (log, free), (_, cut) = (gradient(student, teacher, babble(), grad_clip=limit) for limit in (0, 0.01))
    norms = [torch.stack([g.norm() for g in each]).norm().item() for each in (free, cut)]
    assert norms == pytest.approx([log["grad_norm"], 0.01], rel=1e-3) and norms[0] > 0.02


def test_a_step_without_a_token_is_refused(student, teacher):
    """FAULTS 7."""
    with pytest.raises(BadInput, match="no answer has a token"):
        gradient(student, teacher, [SILENT])


# ---------------------------------------------------------------------------------------------------------------------
# student and teacher


def altered(policy, **changes):
    """The policy with a tokenizer of its own whose JSON, template or calls differ."""
    tokenizer = copy.deepcopy(policy.tokenizer)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return opd.Policy(policy.model, tokenizer, Codec(tokenizer), "other")


def test_the_same_tokenizer_passes(student, teacher):
    opd.compare(student, teacher)


def test_another_vocabulary_is_refused(student):
    """FAULTS 37: one token more, or the same tokens under other ids; the line names the first that differs."""
    more = altered(student)
    more.tokenizer.add_tokens(["<|more|>"])
    with pytest.raises(BadInput, match=r"differ in vocabulary: '<\|more\|>' has the id None here and \d+ there"):
        opd.compare(student, more)
    data = json.loads(student.codec.tokenizer.to_str())
    vocab = data["model"]["vocab"]
    a, b = sorted(vocab)[:2]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    swapped = altered(student, _tokenizer=type(student.codec.tokenizer).from_str(json.dumps(data)))
    with pytest.raises(BadInput, match="differ in vocabulary"):
        opd.compare(student, swapped)


def test_other_merges_are_refused(student):
    """FAULTS 37: the same ids, but a text becomes other ones."""
    data = json.loads(student.codec.tokenizer.to_str())
    data["model"]["merges"] = []
    other = altered(student, _tokenizer=type(student.codec.tokenizer).from_str(json.dumps(data)))
    with pytest.raises(BadInput, match="differ in how text becomes tokens"):
        opd.compare(student, other)


OPENED = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n<think>\n"


def test_another_thinking_switch_is_refused(student):
    """FAULTS 37: seen in what the chat templates write, and in what the codec does; one line shows both."""
    open_, shut = altered(student, chat_template=OPENED), altered(student, chat_template=OPENED + "\n</think>\n\n")
    opd.compare(open_, altered(student, chat_template="{# another text, the same prompt #}" + OPENED))
    with pytest.raises(BadInput, match="chat template, which holds the thinking switch: '' here") as error:
        opd.compare(open_, shut)
    assert "\n" not in str(error.value)
    with pytest.raises(BadInput, match="chat template"):
        opd.compare(open_, altered(student, chat_template=None))
    for options in ({"calls": "xml"}, {"thinking": False}):
        other = altered(student)
        other.codec = Codec(other.tokenizer, **options)
        with pytest.raises(BadInput, match="thinking switch"):
            opd.compare(student, other)
    with pytest.raises(BadInput, match="other: its chat template cannot render"):
        opd.compare(altered(student, chat_template="{{ messages[0].nothing.at_all }}"), student)


# ---------------------------------------------------------------------------------------------------------------------
# prompts

U, A, S = ({"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"), ("system", "be")))


@pytest.mark.parametrize(
    "row, kept",
    [
        ({"messages": [U, A], "source": "x"}, [U]),
        ({"messages": [S, U, A, U, A]}, [S, U, A, U]),
        ({"messages": [U, A, U]}, [U, A, U]),
        ({"messages": [U, A, A]}, [U]),
        ({"prompt": "hi"}, [U]),
        ({"prompt": [S, U]}, [S, U]),
        ({"messages": [U, A], "prompt": "other"}, [U]),
        ({"messages": None, "prompt": "hi"}, [U]),
        ({"messages": [S, A]}, []),
        ({"messages": [A]}, []),
        ({"prompt": " \n"}, []),
    ],
)
def test_conversation(row, kept):
    assert opd.conversation(row, "f:1") == kept


@pytest.mark.parametrize(
    "row, message",
    [
        ("hi", "f:1: must be"),
        ({"text": "hi"}, "f:1: must be"),
        ({"messages": []}, "f:1: must be"),
        ({"messages": ["hi"]}, "f:1: each message"),
        ({"messages": [{"role": "user", "content": None}]}, "f:1: each message"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "f:1: role 'tool'"),
    ],
)
def test_bad_rows_are_refused(row, message):
    with pytest.raises(BadInput, match=message):
        opd.conversation(row, "f:1")


def test_read_prompts(tmp_path):
    lines = [json.dumps({"prompt": "一"}), "", json.dumps({"messages": [A]}), json.dumps({"messages": [U, A]})]
    (path := tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert opd.read_prompts(str(path)) == ([[{"role": "user", "content": "一"}], [U]], 1)


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "p.jsonl:2: not one JSON value a line"),
        (b'{"prompt": "\xff"}\n', "p.jsonl:1: not one JSON value a line"),
        (b'[{"prompt": "a"}]', "p.jsonl:1: must be"),
        (b"\n", "p.jsonl: no prompt in 0 rows"),
        (b'{"prompt": ""}\n', "p.jsonl: no prompt in 1 rows"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, message):
    (path := tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(BadInput, match=message):
        opd.read_prompts(str(path))


def test_a_missing_file_and_a_missing_parquet_reader_are_one_line(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="none.jsonl: no such file"):
        opd.read_prompts(str(tmp_path / "none.jsonl"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match="pip install pyarrow"):
        opd.read_prompts(str(tmp_path / "p.parquet"))


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    table = pyarrow.table({"id": ["1", "2"], "messages": [[S, U, A], [A]], "source": ["x", "y"]})
    parquet.write_table(table, tmp_path / "p.parquet")
    assert opd.read_prompts(str(tmp_path / "p.parquet")) == ([[S, U]], 1)
    (tmp_path / "q.parquet").write_bytes(b"no parquet")
    with pytest.raises(BadInput, match="q.parquet: "):
        opd.read_prompts(str(tmp_path / "q.parquet"))


def test_each_epoch_takes_each_prompt_once_in_a_new_order():
    cfg, prompts = config(batch=4), [[{"role": "user", "content": str(i)}] for i in range(10)]
    taken = [m["content"] for step in range(1, 6) for [m] in opd.prompts_of(prompts, step, range(4), cfg)]
    first, second = taken[:10], taken[10:]
    assert sorted(first) == sorted(second) == [str(i) for i in range(10)] and first != second
    few = opd.prompts_of(prompts[:3], 1, range(7), cfg)  # fewer prompts than a batch has places
    assert sorted(m["content"] for [m] in few[:6]) == sorted("012012")


@pytest.mark.parametrize("prompts", [None, [[U], [S, U], [U, A, U]]])
def test_ranks_share_the_prompts_of_a_step(prompts):
    """FAULTS 30: a prompt follows from seed, step and place in the global batch, whoever asks."""
    cfg = config(batch=6)
    whole = opd.prompts_of(prompts, 2, range(6), cfg)
    assert [opd.prompts_of(prompts, 2, range(r, 6, 2), cfg) for r in (0, 1)] == [whole[0::2], whole[1::2]]
    if prompts is None:
        assert opd.prompts_of(None, 3, range(6), cfg) != whole != opd.prompts_of(None, 2, range(6), config(seed=1))
        want = opd.general.sample(random.Random(common.seed_of(0, "prompt", 2, 4)), "train")["prompt"]
        assert whole[4] == [{"role": "user", "content": want}]


def test_each_answer_has_a_seed_of_its_own(student):
    """FAULTS 30: from seed, step and place; one prompt gets four answers, and a rank alone samples the same ones."""
    cfg, engine = config(batch=4, reply_tokens=5), opd.Engine(student, 4, 512)
    whole, again = (opd.collect(engine, [[U]], step, cfg, common.ALONE) for step in (2, 3))
    assert len({x.seed for x in whole + again}) == len({tuple(x.ids) for x in whole + again}) == 8
    shard = opd.collect(engine, [[U]], 2, cfg, common.Dist(rank=1, world=2))
    assert [x.ids for x in shard] == [x.ids for x in whole[1::2]]


@pytest.mark.parametrize(
    "finish, reason", [("stop", "reply"), ("length", "length"), ("context", "length"), ("error", "error")]
)
def test_answer(student, finish, reason):
    """One turn, whose ids are the prompt; what was sampled is the reply."""
    codec = student.codec
    said = codec.encode("好的") + codec.stop_ids[:1]
    loop = opd.answer([S, U], codec, 7, seed=3)
    turn = next(loop)
    assert turn.ids == codec.prompt([S, U]) and turn.max_new_tokens == 7
    with pytest.raises(StopIteration) as end:
        loop.send(Sample(said, [-1.0] * len(said), finish))
    x = end.value.value
    assert (x.ids, x.mask) == (turn.ids + said, [0] * len(turn.ids) + [1] * len(said))
    assert (x.reply, x.stop_reason, x.seed) == ("好的", reason, 3)


# ---------------------------------------------------------------------------------------------------------------------
# whole runs

TIMES = ("tokens_per_s", "rollout_s", "update_s")


@pytest.fixture(scope="module")
def flags(model_dir, teacher_dir):
    """Flags of a tiny run whose student is quick to follow."""
    where = {"--model": model_dir, "--teacher": teacher_dir, "--device": "cpu", "--lr": 3e-3, "--lr-end": 1}
    return ["--config", "tiny", *(str(word) for pair in where.items() for word in pair)]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The directory of a run of four steps that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    opd.main([*flags, "--steps", "4", "--out", str(out)])
    return out


def rows(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def weights(out):
    return (out / "model" / "model.safetensors").read_bytes()


def test_run_leaves_its_files(whole, model_dir):
    log = rows(whole)
    assert [row["step"] for row in log] == [1, 2, 3, 4] and all(row["grad_norm"] > 0 for row in log)
    assert all(row["length"] <= 12 and (row["cut"] == 1) == (row["length"] == 12) for row in log)
    assert (whole / "kl.png").read_bytes().startswith(b"\x89PNG")
    saved, last, first = (load(p) for p in (whole / "model", whole / "ckpt-000004" / "model", model_dir))
    pairs = zip(saved.model.parameters(), last.model.parameters(), first.model.parameters(), strict=True)
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in pairs)


def test_stop_kill_and_resume_bit_for_bit(flags, whole, tmp_path, monkeypatch):
    """FAULTS 31: Ctrl-C within step 1, resume; then as if killed in step 4; weights and log are those of `whole`."""
    words, collect = [*flags, "--steps", "4", "--out", str(out := tmp_path / "run")], opd.collect

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return collect(*args)

    monkeypatch.setattr(opd, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opd.main(words)
    assert (out / "ckpt-000001").exists() and len(rows(out)) == 1 and not (out / "model").exists()
    monkeypatch.setattr(opd, "collect", collect)
    opd.main([*words, "--resume"])
    assert rows(out) == rows(whole) and weights(out) == weights(whole)
    with monkeypatch.context() as patch, pytest.raises(BadInput, match="teacher_digest was"):  # other weights by now
        patch.setattr(opd, "model_digest", lambda path: "another")
        opd.main([*words, "--resume"])
    shutil.rmtree(out / "ckpt-000004")  # it had got to step 4, and saved step 3
    opd.main([*words, "--resume"])
    assert rows(out) == rows(whole) and weights(out) == weights(whole)


def test_two_processes_take_the_same_step(flags, whole, tmp_path):
    """FAULTS 16: answers sharded over ranks, one number of tokens, sums before the clip; weights sharded."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", ROOT / "opd.py"]
    out, env = tmp_path / "run", os.environ | {"OMP_NUM_THREADS": "1"}
    words = [*command, *flags, "--steps", "2", "--shard", "--out", out]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for got, want in zip(rows(out), rows(whole)[:2], strict=True):
        assert got == pytest.approx(want, rel=1e-3, abs=1e-5)


def test_a_file_of_prompts_another_form_and_a_bf16_teacher(flags, tmp_path):
    """Also: a prompt that fills the context is passed over and counted."""
    lines = [{"prompt": "你好"}, {"messages": [U, A]}, {"prompt": "长" * 300}, {"prompt": "hi"}, {"messages": [A]}]
    (path := tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["--prompts", path, "--kl", "jsd", "--teacher-dtype", "bfloat16", "--context", 100, "--steps", 1]
    words += ["--teacher-device", "cpu"]
    opd.main([*flags, *map(str, words), "--out", str(tmp_path / "run")])
    [row] = rows(tmp_path / "run")
    assert row["silent"] == 1 and 0 < row["loss"] < row["kl"]
    assert "4 prompts, 1 rows without a question" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "nowhere"], "nowhere: no such model directory"),
        (["--teacher", "nowhere"], "nowhere: no such model directory"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--context", "5000"], "context 5000 is beyond"),
        (["--kl", "revers"], "did you mean reverse"),
        (["--beta", "1"], "--beta: 1.0 is not within"),
        (["--temperature", "0"], "--temperature"),
        (["--batchs", "3"], "did you mean --batch"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_directory(flags, tmp_path, words, message):
    with pytest.raises(BadInput, match=message):
        opd.main([*flags, "--out", str(tmp_path / "run"), *words])
    assert not list(tmp_path.iterdir())


def test_a_student_is_asked_for():
    with pytest.raises(BadInput, match="required: --model"):
        opd.main(["--config", "tiny"])


def test_a_teacher_of_another_kind_is_refused_at_start(flags, tmp_path, teacher_dir):
    """FAULTS 37: and so is a context that the teacher has no positions for."""
    shutil.copytree(teacher_dir, other := tmp_path / "other")
    (other / "chat_template.jinja").write_text(OPENED)
    with pytest.raises(BadInput, match="thinking switch"):
        opd.main([*flags, "--teacher", str(other), "--out", str(tmp_path / "run")])
    shutil.copytree(teacher_dir, short := tmp_path / "short")
    settings = common.read_json(short / "config.json") | {"max_position_embeddings": 500}
    common.write_json(short / "config.json", settings)
    with pytest.raises(BadInput, match="--context 768 is beyond the 500 positions of teacher"):
        opd.main([*flags, "--teacher", str(short), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_bench_opd(capsys):
    """The last line is one JSON object; what both sides allocate alike counts for more here than in a real size."""
    spec = importlib.util.spec_from_file_location("bench_opd", ROOT / "bench" / "opd.py")
    spec.loader.exec_module(bench := importlib.util.module_from_spec(spec))
    words = ["--vocab", "50000", "--chunk", "25", "--threads", "1"]
    bench.main([*words, "--tokens", "200"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures) == {"bench", "memory_ratio", "grad_rel_err"}
    assert 0.1 < figures["memory_ratio"] < 0.4 and figures["grad_rel_err"] < 1e-5
    with pytest.raises(BadInput, match="are free; take fewer tokens"):
        bench.main([*words, "--tokens", "800000000"])
