"""What every script shares: seeds, files that are whole or absent, run directories, checkpoints, processes.

    seed   = H(run seed, task, index, ...)           no global random state: nothing depends on the order of a batch
    resume : N steps == k steps, kill, N - k steps   on a CPU bit for bit, the kill at any moment

A training script reads

    config = parse(Config, PRESETS, argv, __doc__)   # options.py
    ranks = dist()                                   # one process, or one of many under torchrun
    run = Run(config.out, config, config.resume, base=f"runs/rl-{config.config}", ranks=ranks)
    step, model_dir, state = load_checkpoint(run.dir, ranks) if checkpoints(run.dir) else (0, config.model, {})
    with Stop(ranks) as stop:                        # the first Ctrl-C lets the step end and be saved
        for step in range(run.start + 1, config.steps + 1):
            ...
            run.log(step, loss=loss)                 # before the save: a resume keeps the rows up to its checkpoint
            if (last := stop.requested or step == config.steps) or step % config.save_every == 0:
                save_checkpoint(run.dir, step, write_model, state, ranks)
            if last:
                break

and ends with `if __name__ == "__main__": cli(main)`. Import this module before torch, for the variables below.
PyTorch itself is imported inside the functions that need it: a command that touches no tensor starts at once.
"""

import dataclasses
import errno
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from options import BadInput

# Waiting OpenMP threads spin. On shared cores the spinner takes the core from the very thread it waits for, and all is
# up to ten times slower; a thread that sleeps at once costs 0.1 ms to wake, more than most products of a small model.
# So they spin for some ten microseconds and then sleep. The runtimes read these once, when torch is loaded; a value
# that the user has set stays.
os.environ.setdefault("KMP_BLOCKTIME", "0")  # Intel's and LLVM's runtime: whole milliseconds, so not at all
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # GNU's runtime
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # which this overrules

KEEP = 2  # checkpoints kept: the newest, and one to go back to should a disk have spoiled it
# may change, for what a machine can hold; anything else makes another run
FREE_ON_RESUME = {"out", "resume", "save_every", "device", "teacher_device", "workers"}
FREE_ON_RESUME |= {"micro", "slots", "shard", "recompute"}
# what of the disk is the user's to mend, not ours
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)

# ------------------------------------------------------------------------------------------------ the end of a script


def cli(main: Callable[[list[str]], int | None]) -> None:
    """Run `main(argv)` and exit with what it returns; one line and 2 for bad input or a full disk, 130 for ^C."""
    name = Path(sys.argv[0]).name
    try:
        leave(main(sys.argv[1:]) or 0)
    except BrokenPipeError:  # `python harness.py show | head`; what is still buffered has no reader either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        leave(128 + signal.SIGPIPE)
    except KeyboardInterrupt as error:
        print(f"{name}: interrupted", file=sys.stderr)
        leave(128 + (error.args[0] if error.args else signal.SIGINT))
    except Exception as error:
        if isinstance(error, BadInput) or isinstance(error, OSError) and error.errno in DISK:
            print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
            leave(2)
        traceback.print_exc()
        leave(1)


def leave(status: int) -> None:
    """Exit; a rank of a process group at once, without the interpreter's own end.

    To destroy a group in whose collectives others wait would wait for them, so a rank that fails leaves it as it is,
    and torchrun ends the others. And a thread of gloo that drops its last tensor during the interpreter's end would be
    stopped inside C++, which aborts a rank whose work is done (after fully_shard nothing joins these threads).
    """
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_initialized():
        if status == 0:
            torch.distributed.destroy_process_group()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


# ------------------------------------------------------------------------------------------------------ seeds and files


def seed_of(*parts: Any) -> int:
    """63-bit seed of `parts` (strings, numbers, None, lists of them) and of nothing else, the same on every machine."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1


def write_text(path: str | Path, text: str) -> None:
    """Write `path` whole or leave it as it was: a file beside it, flushed to the disk, renamed. Makes its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temp, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """`write_text` of indented JSON; raises ValueError for NaN, which JSON does not have."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def read_text(path: str | Path) -> str:
    """A UTF-8 file without its byte-order mark and carriage returns; BadInput names the file that cannot be read."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise BadInput(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 (byte {error.start})") from None


def read_json(path: str | Path) -> Any:
    """The value in a JSON file; BadInput names the file, and line and column of a fault."""
    text = read_text(path)
    try:
        value = json.loads(text)
        if r"\ud" in text.lower():  # half of a character, as programs write that cut texts: no file could hold it
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # UnicodeEncodeError; a number or a nesting beyond Python's limits
        raise BadInput(f"{path}: not valid JSON: {error}") from None


def code_version() -> str:
    """Commit of this code, `+dirty` if tracked files differ from it; `unknown` outside a git checkout."""
    git = "git describe --always --abbrev=12 --exclude=* --dirty=+dirty".split()
    with suppress(FileNotFoundError, subprocess.CalledProcessError):
        return subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def digest(*paths: str | Path) -> str:
    """12 hexadecimal digits of the contents of files, in this order."""
    found = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    return found.hexdigest()[:12]


def model_digest(path: str | Path) -> str:
    """`digest` of the weights in a model directory; where there are none, as of a model of a hub, the name itself."""
    weights = sorted(Path(path).glob("*.safetensors"))
    return digest(*weights) if weights else str(path)


def gpu_peak_mb() -> float | None:
    """Most memory that tensors of this process have held on its GPU so far, in MB; None without one."""
    import torch

    return torch.cuda.max_memory_allocated() / (1 << 20) if torch.cuda.is_available() else None


def held_mb() -> float:
    """Memory that this process holds now, in MB; NaN where there is no /proc."""
    return _status_mb("VmRSS")


def _status_mb(field: str) -> float:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else ()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), math.nan)


def peak_mb() -> float:
    """Most memory that this process has held so far, in MB; NaN where the system does not tell.

    From /proc where there is one: on Linux, ru_maxrss of a process begins with that of the one that started it.
    """
    if not math.isnan(peak := _status_mb("VmHWM")):
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# ------------------------------------------------------------------------------------------------ processes and signals


@dataclasses.dataclass(frozen=True)
class Dist:
    """Rank `rank` of `world` processes on `device`. All ranks must call each method; alone, none does anything."""

    rank: int = 0
    world: int = 1
    device: Any = "cpu"  # torch.device
    group: Any = None  # torch.distributed

    def all_reduce_sum(self, tensor: Any) -> Any:
        """Sum `tensor` over the ranks, in place, and return it."""
        if self.world > 1:
            self.group.all_reduce(tensor)
        return tensor

    def share(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        box = [value]
        if self.world > 1:
            self.group.broadcast_object_list(box, device=self.device)
        return box[0]

    def all(self, value: Any) -> list:
        """The `value` of every rank, on every rank."""
        values = [value] * self.world
        if self.world > 1:
            self.group.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Is `flag` true on any rank?"""
        return any(self.all(flag))

    def in_step(self, parts: list, joint: bool) -> list:
        """The parts of this rank, and where a forward is a joint act of all a None for each that another has more."""
        rounds = max(self.all(len(parts))) if joint else len(parts)
        return parts + [None] * (rounds - len(parts))

    def barrier(self) -> None:
        self.any(False)


ALONE = Dist()


def dist(device: str | None = None, group: bool = False) -> Dist:
    """Join the process group that torchrun describes in the environment (NCCL on GPUs, else gloo), or stay alone.

    `device` is "cpu" or "cuda"; None takes this rank's GPU if there are any. group: one for a single process too, which
    what is sharded needs. It ends with the program (`leave`).
    """
    import torch

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    rank, world, local = (int(os.environ.get(*item)) for item in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if kind == "cuda":
        if local >= torch.cuda.device_count():
            raise BadInput(f"process {local} has no GPU: {torch.cuda.device_count()} are visible; or use --device cpu")
        torch.cuda.set_device(local)
    if (world > 1 or group) and not torch.distributed.is_initialized():  # the stages of hat.py share one
        patience = timedelta(days=1)  # one rank may wait for another's teacher; torchrun ends all when one fails
        alone = dict(store=torch.distributed.HashStore(), rank=0, world_size=1) if world == 1 else {}
        torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=patience, **alone)
    return Dist(rank, world, torch.device(f"cuda:{local}" if kind == "cuda" else kind), torch.distributed)


class Stop:
    """`with Stop(ranks) as stop:` the first SIGINT or SIGTERM only sets `stop.requested`; the second aborts at once.

    Leaving the block after a request raises KeyboardInterrupt: what would follow (evaluation, the next stage) is not
    wanted any more. The ranks agree on `requested`, so all must read it at the same point, once a step.
    """

    def __init__(self, ranks: Dist = ALONE):
        self.ranks, self.signal = ranks, 0

    def __enter__(self) -> "Stop":
        self.before = {number: signal.signal(number, self.catch) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def catch(self, number: int, frame: Any) -> None:
        if self.signal:
            raise KeyboardInterrupt(number)
        self.signal = number
        os.write(2, b"\nstopping after this step; once more aborts at once\n")  # print is not safe in a handler

    @property
    def requested(self) -> bool:
        if self.ranks.any(self.signal > 0):
            self.signal = self.signal or signal.SIGINT
        return self.signal > 0

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.signal and error is None:
            raise KeyboardInterrupt(self.signal)


# -------------------------------------------------------------------------------------------------------- run directory


class Run:
    """A run directory: config.json, metrics.jsonl (a row per step), log.txt (what was printed), checkpoints.

    config  the options, a dataclass
    out     the directory; "" = the first free one of `base`, `base`-2, `base`-3, ... (to resume: the last that exists)
    resume  go on from the newest checkpoint; rows after it and files that a kill has torn are removed
    free    more options that a resume may change: `steps`, where no step depends on how many follow
    inputs  what else a resume must find the same: the commit of a harness, the digest of a file
    dir, start  the directory, and the step of that checkpoint (0 without one), on every rank; rank 0 alone writes

    BadInput: a fresh start where files are, a resume where no run is or of a run with another config.
    """

    def __init__(self, out: str, config, resume=False, base="runs/run", ranks: Dist = ALONE, free=(), inputs=None):
        self.rank = ranks.rank
        self.dir = ranks.share(find_run(out, base, resume) if self.rank == 0 else None)
        self.start = max(map(step_of, checkpoints(self.dir)), default=0)
        if self.rank == 0:
            now = settings(config) | (inputs or {})
            if resume:
                same_settings(self.dir, config, free, inputs)
                self.rewind()
            write_json(self.dir / "config.json", now | {"code_version": code_version()})
            options = (f"\n  {name:{max(map(len, now))}}  {value}" for name, value in now.items())
            self.say(f"{self.dir}, {f'resumed after step {self.start}' if resume else 'a new run'}{''.join(options)}")
        ranks.barrier()

    def rewind(self) -> None:
        remove_torn(self.dir)
        path = self.dir / "metrics.jsonl"
        rows = path.read_text().splitlines(keepends=True) if path.exists() else []  # a kill can tear the last one
        done = self.start if checkpoints(self.dir) else -1  # without one all is done again, step 0 too
        write_text(path, "".join(row for row in rows if row.endswith("\n") and json.loads(row)["step"] <= done))

    def log(self, step: int, **metrics: Any) -> None:
        """Append a row to metrics.jsonl (NaN and infinity as null) and print `step 7 | loss 0.6931 | reward 0.5`."""
        row = {"step": step, **metrics}
        self.say(" | ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.append("metrics.jsonl", json.dumps(row))  # ASCII: no byte of it can end a line or be half a character

    def say(self, text: str) -> None:
        """Print `text` and append it to log.txt."""
        from tqdm import tqdm

        self.append("log.txt", text)
        if self.rank == 0:
            tqdm.write(text)  # leaves a progress bar in one piece
            sys.stdout.flush()

    def append(self, name: str, line: str) -> None:
        if self.rank == 0:
            with open(self.dir / name, "a", encoding="utf-8") as file:
                file.write(line + "\n")


def settings(config: Any) -> dict:
    """The options as config.json has them."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def same_settings(run: Path, config: Any, free: Iterable[str] = (), inputs: dict | None = None) -> None:
    """BadInput unless the run in a directory had these options and inputs, but for those that may change.

    An option that the code of that run did not have yet counts as if it had been at its default.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    saved = json.loads(json.dumps(defaults, default=str)) | read_json(run / "config.json")
    now = settings(config) | (inputs or {})
    for name in sorted(now.keys() - FREE_ON_RESUME - set(free)):
        if saved.get(name) != now[name]:
            change = f"{name} was {saved.get(name)} and is now {now[name]}"
            raise BadInput(f"{run}: {change}; resume with the same options and files, or start another run")


def find_run(out: str, base: str, resume: bool) -> Path:
    """The run to resume, or a new directory. Making it claims it: runs started side by side never share one."""
    names = [Path(out)] if out else (Path(f"{base}-{n}" if n > 1 else base) for n in count(1))
    if resume:
        path = [Path(out or base), *takewhile(Path.exists, names)][-1]
        if not (path / "config.json").exists():
            raise BadInput(f"{path}: holds no run; start one without --resume")
        return path
    for path in names:
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        if out and path.is_dir() and all(file.suffix == ".tmp" for file in path.iterdir()):  # killed at its first write
            return path
    raise BadInput(f"{out}: is not empty; --resume continues the run in it, another --out starts a new one")


# ---------------------------------------------------------------------------------------------------------- checkpoints
# ckpt-000010/ holds model/, state.pt, config.json and files.json (size and CRC of each file). The directory appears
# under this name by one rename, when all of it has reached the disk. Nothing in it depends on the number of processes.


def save_checkpoint(run_dir: Path, step: int, write_model: Callable, state: dict, ranks: Dist = ALONE) -> Path:
    """Save the state after `step` steps and drop all but the newest two checkpoints. All ranks must call it.

    write_model(dir) writes model and tokenizer into the new `dir`. `state` is what every rank has: tensors, numbers,
    strings and containers of them (optimizer, cursor). Rank 0 writes both. On any failure, a full disk (BadInput) among
    them, what was there before stays.
    """
    import torch

    path = Path(run_dir) / f"ckpt-{step:06d}"
    if path.exists():  # a run resumed at its last step: the same state, by the promise of resume
        return path
    temp = path.with_name(path.name + ".tmp")
    ranks.barrier()
    with no_leftovers(temp, path):
        if ranks.rank == 0:
            remove_torn(run_dir)
            (temp / "model").mkdir(parents=True)
            write_model(temp / "model")
            with open(temp / "state.pt", "wb") as file:  # torch's own writer hides why it fails
                torch.save(state, file)
            seal(temp)
            os.replace(temp, path)
            fsync(path.parent)
            for old in checkpoints(run_dir)[:-KEEP]:
                os.replace(old, old.with_name(old.name + ".tmp"))  # half removed, it must not look whole
            remove_torn(run_dir)
    ranks.barrier()
    return path


@contextmanager
def no_leftovers(temp: Path, path: Path) -> Iterator[None]:
    """Should filling the directory `temp`, which is to become `path`, fail: remove it; BadInput for a full disk."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(temp, ignore_errors=True)
        if "No space left" in str(error):  # OSError here, RuntimeError or SafetensorError when a library wrote
            raise BadInput(f"{path}: no space left on the disk; what was saved before is whole") from error
        raise


def load_checkpoint(run_dir: str | Path, ranks: Dist = ALONE) -> tuple[int, Path, dict]:
    """(step, model directory, state) of the newest checkpoint; BadInput names a file that is damaged."""
    import torch

    if not (found := checkpoints(run_dir)):
        raise BadInput(f"{run_dir}: no checkpoint")
    path = found[-1]
    files = read_json(path / "files.json")
    for name in files if ranks.rank == 0 else ():  # one rank reads all of it; the others could say nothing else
        if not (path / name).is_file() or fingerprint(path / name) != files[name]:
            raise BadInput(f"{path / name}: missing or damaged; remove {path} to go on from the one before it")
    # mapped, or each rank would hold a whole optimizer; not where rank 0, alone, is to remove the file one day
    state = torch.load(path / "state.pt", "cpu", weights_only=True, mmap=ranks.rank > 0)
    return step_of(path), path / "model", state


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted((path for path in Path(run_dir).glob("ckpt-*") if path.name[5:].isdigit()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])


def remove_torn(run_dir: str | Path) -> None:
    """Remove what a kill left half written. For the run's owner only: a reader must not touch a save under way."""
    for path in Path(run_dir).glob("*.tmp"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def seal(path: Path) -> None:
    """Add config.json and files.json to a finished checkpoint and push everything to the disk."""
    if (config := path.parent / "config.json").exists():
        shutil.copy(config, path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    write_json(path / "files.json", {str(file.relative_to(path)): fingerprint(file) for file in files})
    for each in (*path.rglob("*"), path):
        fsync(each)


def fingerprint(path: Path) -> list[int]:
    """[size, CRC-32]: finds a truncated, swapped or flipped file at the speed of the disk."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return [path.stat().st_size, crc]


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)  # open() takes no directories
    os.fsync(handle)
    os.close(handle)
