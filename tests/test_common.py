"""Seeds, whole-or-absent files, run directories, checkpoints under kill, signals, processes."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import common
from options import BadInput
from common import Run, Stop, load_checkpoint, save_checkpoint, seed_of
from test_options import Config

import pytest
import torch

ROOT = Path(__file__).parent.parent


# ------------------------------------------------------------------------------------------------ the end of a script


@pytest.mark.parametrize(
    "body, code, line",
    [
        ("raise options.BadInput('no\\nsuch thing')", 2, "tool.py: no such thing"),
        ("raise OSError(28, 'No space left on device', 'x')", 2, "tool.py: [Errno 28] No space left on device: 'x'"),
        ("raise KeyboardInterrupt", 130, "tool.py: interrupted"),
        ("return 3", 3, ""),
        ("pass", 0, ""),
    ],
)
def test_cli_ends_with_one_line_and_a_code(tmp_path, body, code, line):
    tool = tmp_path / "tool.py"
    tool.write_text(f"import common, options\ndef main(argv):\n    {body}\ncommon.cli(main)\n")
    done = python(tool, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (code, "", line)


def test_cli_lets_a_bug_be_seen_and_a_closed_pipe_pass(tmp_path):
    tool = tmp_path / "tool.py"
    tool.write_text("import common\ncommon.cli(lambda argv: open('absent'))\n")
    assert "Traceback" in python(tool, capture_output=True, text=True).stderr
    tool.write_text("import common\ncommon.cli(lambda argv: [print('x' * 80) for _ in range(10**5)] and None)\n")
    with popen(tool, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == ""


def test_importing_common_quiets_openmp_and_respects_the_user():
    code = "import os, common; print(*(os.environ[k] for k in ('KMP_BLOCKTIME', 'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')))"
    plain = {k: v for k, v in os.environ.items() if k not in ("KMP_BLOCKTIME", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    for env, expected in ((plain, "0 PASSIVE 10000"), (plain | {"KMP_BLOCKTIME": "7"}, "7 PASSIVE 10000")):
        out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True).stdout
        assert out.strip() == expected


def python(*args, call=subprocess.run, **options):
    return call([sys.executable, *map(str, args)], env=os.environ | {"PYTHONPATH": str(ROOT)}, **options)


popen = partial(python, call=subprocess.Popen)


# ----------------------------------------------------------------------------------------------------- seeds and files


def test_seeds_are_the_same_everywhere_and_differ_by_every_part():
    """FAULTS 30: one number per (run, task, index), whatever machine or order."""
    assert seed_of("rl", 0, None, [1.5]) == 3707766855666373752
    parts = [("rl", 1, 2), ("rl", 12), ("rl", "1", 2), ("rl1", 2), ("rl", [1, 2]), ("rl", 1, 2.0), ("rl", True, 2), ()]
    seeds = [seed_of(*p) for p in parts]
    assert len(set(seeds)) == len(parts) and all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))
    with pytest.raises(TypeError):
        seed_of(object())  # its repr would be an address, another one in each run


@pytest.mark.parametrize("step", ["replace", "fsync"])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, failure):
    def fail(*_):
        raise failure

    path = tmp_path / "new" / "file.txt"
    common.write_text(path, "old\n")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(failure)):
        common.write_text(path, "new\n")
    assert path.read_text() == "old\n" and list(path.parent.iterdir()) == [path]


def test_json_round_trip_and_its_faults(tmp_path):
    path = tmp_path / "a.json"
    common.write_json(path, {"名": [1, None, "é"]})
    assert common.read_json(path) == {"名": [1, None, "é"]} and "名" in path.read_text(encoding="utf-8")
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert common.read_json(path) == [1]
    with pytest.raises(ValueError):
        common.write_json(path, float("nan"))
    bad = (b'{\n "a": }', ":2:7: not valid JSON"), (b"\xff", ": not UTF-8 .byte 0"), (None, ": no such")
    for data, message in bad:
        path.unlink() if data is None else path.write_bytes(data)
        with pytest.raises(BadInput, match=f"a.json{message}"):
            common.read_json(path)


def test_code_version_is_the_commit_or_unknown(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(tmp_path)]
    monkeypatch.setattr(common, "__file__", str(tmp_path / "common.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert common.code_version() == "unknown"
    (tmp_path / "common.py").write_text("1")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(git + command, check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout[:12]
    assert common.code_version() == commit
    (tmp_path / "common.py").write_text("2")
    assert common.code_version() == commit + "+dirty"


# ------------------------------------------------------------------------------------------------------ run directories


def rows(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]


def write_nothing(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


def test_a_run_records_config_metrics_and_what_it_printed(tmp_path, capsys):
    run = Run(str(tmp_path / "a"), Config(steps=3))
    run.log(1, loss=0.123456, note="名\u2028", n=3)
    run.log(2, loss=float("nan"))
    saved = json.loads((run.dir / "config.json").read_text())
    assert saved["steps"] == 3 and saved["weights"] == [1.0, 2.0] and saved["code_version"]
    assert rows(run) == [{"step": 1, "loss": 0.123456, "note": "名\u2028", "n": 3}, {"step": 2, "loss": None}]
    out = capsys.readouterr().out
    assert "step 1 | loss 0.1235" in out and "step 2 | loss nan" in out and "  steps      3\n" in out
    assert (run.dir / "log.txt").read_text(encoding="utf-8") == out


def test_a_fresh_start_never_touches_another_run(tmp_path):
    base = str(tmp_path / "rl-small")
    names = [Run("", Config(), base=base).dir.name for _ in range(3)]
    assert names == ["rl-small", "rl-small-2", "rl-small-3"]
    assert Run("", Config(resume=True), resume=True, base=base).dir.name == "rl-small-3"
    with pytest.raises(BadInput, match="not empty; --resume continues"):
        Run(str(tmp_path / "rl-small"), Config())
    (tmp_path / "empty").mkdir()
    assert Run(str(tmp_path / "empty"), Config()).start == 0


@dataclass
class Machine:
    micro: int = 16
    slots: int = 96
    shard: bool = False
    teacher_device: str = "auto"
    workers: int = 8
    seed: int = 0


def test_resume_needs_a_run_of_the_same_config(tmp_path):
    with pytest.raises(BadInput, match="holds no run"):
        Run(str(tmp_path / "absent"), Config(), resume=True)
    Run(str(tmp_path / "a"), Config())
    with pytest.raises(BadInput, match="lr was 0.001 and is now 0.1; resume with the same options"):
        Run(str(tmp_path / "a"), Config(lr=0.1), resume=True)
    longer = (str(tmp_path / "a"), Config(steps=99, resume=True), True)
    with pytest.raises(BadInput, match="steps was 30 and is now 99"):
        Run(*longer)
    assert Run(*longer, free=("steps",)).start == 0  # killed before its first save
    Run(str(tmp_path / "b"), Machine())
    fewer = dict(micro=4, slots=8, shard=True, teacher_device="cpu", workers=1)
    for change, fits in ((fewer, True), ({"micro": 4, "seed": 1}, False)):
        with nullcontext() if fits else pytest.raises(BadInput, match="seed was 0 and is now 1"):
            Run(str(tmp_path / "b"), Machine(**change), True)  # for one that could not hold more


def test_an_option_of_later_code_counts_as_at_its_default(tmp_path):
    Run(str(tmp_path / "a"), Config())
    config = tmp_path / "a" / "config.json"
    common.write_json(config, {k: v for k, v in json.loads(config.read_text()).items() if k != "lr"})
    with pytest.raises(BadInput, match="lr was 0.001 and is now 0.1"):
        Run(str(tmp_path / "a"), Config(lr=0.1), True)
    Run(str(tmp_path / "a"), Config(), True)


def test_resume_needs_the_same_inputs_too(tmp_path):
    """Their content counts, not their path: a harness that was edited makes another run."""
    path = tmp_path / "logs.jsonl"
    path.write_text("one\n")

    def start(**more):
        return Run(str(tmp_path / "a"), Config(), inputs={"logs": common.digest(path)}, **more)

    start()
    start(resume=True)
    path.write_text("two\n")
    with pytest.raises(BadInput, match="logs was [0-9a-f]{12} and is now [0-9a-f]{12}; resume with"):
        start(resume=True)


@pytest.mark.parametrize("saved", [False, True])
def test_the_rows_of_step_0_stay_if_a_checkpoint_has_them(tmp_path, saved):
    run = Run(str(tmp_path / "a"), Config())
    run.log(0, loss=1.0)
    if saved:
        save_checkpoint(run.dir, 0, write_nothing, {})
    assert len(rows(Run(str(tmp_path / "a"), Config(resume=True), resume=True))) == saved


def test_resume_drops_rows_after_the_checkpoint_and_a_torn_one(tmp_path):
    run = Run(str(tmp_path / "a"), Config())
    for step in range(1, 6):
        run.log(step, loss=step / 2)
        if step == 3:
            save_checkpoint(run.dir, step, write_nothing, {})
    with open(run.dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    (run.dir / ".config.json.123.tmp").write_text("{")
    resumed = Run(str(tmp_path / "a"), Config(resume=True), resume=True)
    assert resumed.start == 3 and [row["step"] for row in rows(resumed)] == [1, 2, 3]
    assert not list(run.dir.glob("*.tmp"))
    resumed.log(4, loss=2.0)
    assert rows(resumed)[-1] == {"step": 4, "loss": 2.0}


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoint_round_trip_keeps_the_last_two(tmp_path):
    Run(str(tmp_path), Config())
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "python": random.Random(1).getstate(), "cursor": (3, None, "é")}
    state["torch"] = torch.Generator().manual_seed(1).get_state()
    for step in (1, 2, 10):
        path = save_checkpoint(tmp_path, step, write_nothing, state)
    assert [path.name for path in common.checkpoints(tmp_path)] == ["ckpt-000002", "ckpt-000010"]
    step, model_dir, loaded = load_checkpoint(tmp_path)
    assert (step, model_dir) == (10, path / "model") and (model_dir / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((path / "config.json").read_text())["steps"] == 30
    assert loaded["cursor"] == state["cursor"] and loaded["python"] == state["python"]
    assert torch.equal(loaded["torch"], state["torch"])
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], optimizer.state[weight]["exp_avg"])


@pytest.mark.parametrize("name", ["model/model.safetensors", "state.pt", "files.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    save_checkpoint(tmp_path, 1, write_nothing, {"x": torch.ones(4)})
    save_checkpoint(tmp_path, 2, write_nothing, {"x": torch.ones(4)})
    file = tmp_path / "ckpt-000002" / name
    data = file.read_bytes()
    flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    file.unlink() if damage == "missing" else file.write_bytes(flipped if damage == "flipped" else data[:-1])
    if name == "files.json":
        file.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadInput, match=name):
        load_checkpoint(tmp_path)


def test_no_checkpoint_is_said_and_a_half_written_one_is_none(tmp_path):
    with pytest.raises(BadInput, match="no checkpoint"):
        load_checkpoint(tmp_path)
    (tmp_path / "ckpt-000009.tmp" / "model").mkdir(parents=True)
    with pytest.raises(BadInput, match="no checkpoint"):
        load_checkpoint(tmp_path)
    assert (tmp_path / "ckpt-000009.tmp").exists()  # it may be another process's save under way: readers leave it
    save_checkpoint(tmp_path, 1, write_nothing, {})
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-000001"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("bug")])
def test_a_failed_save_keeps_the_one_before_and_leaves_nothing(tmp_path, error):
    def fail(folder):
        (folder / "half").write_text("x")
        raise error

    save_checkpoint(tmp_path, 1, write_nothing, {"n": 1})
    with pytest.raises(BadInput if isinstance(error, OSError) else RuntimeError, match="ckpt-000002: no space|bug"):
        save_checkpoint(tmp_path, 2, fail, {"n": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-000001"] and load_checkpoint(tmp_path)[2] == {"n": 1}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_under_the_optimizer_state_is_one_line(tmp_path):
    def write_model(folder):
        (folder.parent / "state.pt").symlink_to("/dev/full")

    with pytest.raises(BadInput, match="no space left on the disk"):
        save_checkpoint(tmp_path, 1, write_model, {"x": torch.ones(100_000)})
    assert not list(tmp_path.iterdir())


SAVER = """
import sys, time, common, torch
out, stall = sys.argv[1], int(sys.argv[2])
def write_model(folder):
    (folder / "model.safetensors").write_bytes(b"x" * 200_000)
    if step == stall:
        print("stalled", flush=True)
        time.sleep(60)
step = common.checkpoints(out)[-1:] and common.load_checkpoint(out)[0] or 0
while True:
    step += 1
    common.save_checkpoint(out, step, write_model, {"step": step, "x": torch.full((50_000,), float(step))})
    print(step, flush=True)
"""


def test_the_checkpoint_before_loads_after_a_kill_within_a_write(tmp_path):
    """FAULTS 32."""
    (tmp_path / "saver.py").write_text(SAVER)
    out = tmp_path / "run"
    with popen(tmp_path / "saver.py", str(out), "3", stdout=subprocess.PIPE, text=True) as child:
        while child.stdout.readline() != "stalled\n":
            assert child.poll() is None
        child.kill()
    assert (out / "ckpt-000003.tmp").exists() and load_checkpoint(out)[0] == 2


def test_some_checkpoint_loads_after_a_kill_at_any_moment(tmp_path):
    """FAULTS 32: whole and right each time, and the next start goes on from it."""
    (tmp_path / "saver.py").write_text(SAVER)
    out, before, moment = tmp_path / "run", 0, random.Random(0)
    for _ in range(3):
        with popen(tmp_path / "saver.py", str(out), "0", stdout=subprocess.PIPE, text=True) as child:
            assert int(child.stdout.readline()) == before + 1
            time.sleep(moment.uniform(0, 0.2))
            child.kill()
        before, _, state = load_checkpoint(out)
        assert state["step"] == before and torch.equal(state["x"], torch.full((50_000,), float(before)))


def test_memory_is_in_mb():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("the system has no /proc to compare with")
    known = dict(line.split(":", 1) for line in status.read_text().splitlines())
    assert common.peak_mb() == pytest.approx(int(known["VmHWM"].split()[0]) / 1024, rel=0.05)
    before = common.held_mb()
    assert before == pytest.approx(int(known["VmRSS"].split()[0]) / 1024, rel=0.05)
    block = bytearray(200 << 20)
    assert common.held_mb() - before == pytest.approx(200, rel=0.2)
    del block
    assert common.held_mb() - before < 50 and common.peak_mb() > before + 150


# -------------------------------------------------------------------------------------------------- signals, processes


TRAINER = """
import sys, time, common, options
from dataclasses import dataclass
@dataclass
class Config:
    out: str = ""
    resume: bool = False
    steps: int = 10
    nap: float = 0.0
def main(argv):
    config = options.parse(Config, {}, argv)
    run = common.Run(config.out, config, config.resume)
    state = common.load_checkpoint(run.dir)[2] if run.start else {"x": 0}
    with common.Stop() as stop:
        for step in range(run.start + 1, config.steps + 1):
            state["x"] = common.seed_of(state["x"], step)
            time.sleep(config.nap)
            run.log(step, x=state["x"])
            last = stop.requested or step == config.steps
            if last or step % 4 == 0:
                common.save_checkpoint(run.dir, step, lambda folder: None, state)
            if last:
                break
    print("evaluated")
common.cli(main)
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "trainer.py").write_text(TRAINER)
    assert python(folder / "trainer.py", "--out", str(folder / "run"), capture_output=True).returncode == 0
    return folder / "run"


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_n_steps_equal_k_and_a_stop_and_the_rest(tmp_path, uninterrupted, number, code):
    """FAULTS 31, 32: a signal lets the step end and be saved, a kill falls back on the last save; the result is one."""
    trainer, out = tmp_path / "trainer.py", tmp_path / "run"
    trainer.write_text(TRAINER)
    options = ["--out", str(out), "--nap", "0.05"]
    with popen(trainer, *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        while not child.stdout.readline().startswith("step 6 "):
            assert child.poll() is None
        child.send_signal(number)
        output, errors = child.communicate()
    assert child.returncode == code and "evaluated" not in output
    if number != signal.SIGKILL:
        assert errors == "\nstopping after this step; once more aborts at once\ntrainer.py: interrupted\n"
        assert load_checkpoint(out)[0] >= 6
    resumed = python(trainer, *options, "--resume", capture_output=True, text=True)
    assert resumed.returncode == 0 and "evaluated" in resumed.stdout
    assert (out / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    assert load_checkpoint(out)[2] == load_checkpoint(uninterrupted)[2]


def test_the_second_signal_aborts_at_once_and_handlers_come_back():
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second signal must not return")
    with Stop() as stop:
        pass
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_one_process_needs_no_group():
    ranks = common.dist("cpu")
    x = torch.ones(2)
    assert (ranks.rank, ranks.world, ranks.device) == (0, 1, torch.device("cpu"))
    assert ranks.all_reduce_sum(x) is x and x.tolist() == [1, 1]
    assert ranks.share("a") == "a" and ranks.any(True) and not ranks.any(False)
    ranks.barrier()


def test_a_rank_is_gone_once_its_work_is_done(tmp_path):
    """The interpreter's own end would wait for nobody, and stop a thread of the group inside C++: an abort."""
    tool = tmp_path / "tool.py"
    tool.write_text("""
import atexit, common, torch.distributed as group
def main(argv):
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    atexit.register(print, "the interpreter's end")
    print("done")
    return 3
common.cli(main)
""")
    done = python(tool, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "done\n"), done.stderr


RANK = """
import sys, common, torch
from dataclasses import dataclass
@dataclass
class Config:
    steps: int = 1
def main(argv):
    ranks = common.dist("cpu")
    run = common.Run("", Config(), base=argv[0], ranks=ranks)
    assert ranks.world == 2 and ranks.all_reduce_sum(torch.tensor([ranks.rank + 1.0])).item() == 3
    assert ranks.share(ranks.rank) == 0 and ranks.any(ranks.rank == 1) and not ranks.any(False)
    assert ranks.all(ranks.rank) == [0, 1]
    run.log(1, loss=0.5)
    common.save_checkpoint(run.dir, 1, lambda folder: (folder / "m").write_text("m"), {"n": 7}, ranks)
    step, model_dir, state = common.load_checkpoint(run.dir, ranks)
    assert step == 1 and state == {"n": 7} and (model_dir / "m").read_text() == "m"
    with common.Stop(ranks) as stop:
        if ranks.rank == 1:
            stop.signal = 15
        assert stop.requested
common.cli(main)
"""


def test_two_processes_share_one_run(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = python(*launch, tmp_path / "rank.py", tmp_path / "run", capture_output=True, text=True)
    assert done.stderr.count("rank.py: interrupted") == 2 and "AssertionError" not in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank.py", "run"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert load_checkpoint(tmp_path / "run")[2] == {"n": 7}  # by one process as well
