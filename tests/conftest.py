"""What all tests share: one thread, no network, the same examples every time, optional golden files."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: many small tests on few cores are fastest so
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import common  # noqa: F401  before torch, for the variables it sets

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent

hypothesis.settings.register_profile("hat", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("hat")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """A new policy of two layers under the shipped tokenizer: small, and the same whatever the shipped weights are."""
    from transformers import PreTrainedTokenizerFast

    from model import create

    path = tmp_path_factory.mktemp("policy") / "model"
    create(PreTrainedTokenizerFast.from_pretrained(ROOT / "data" / "base-small"), layers=2).publish(path)
    return path


@pytest.fixture(scope="session")
def headed_dir(model_dir, tmp_path_factory) -> Path:
    """The policy of model_dir with a new MTP head."""
    from model import MTP, load

    path, policy = tmp_path_factory.mktemp("headed") / "model", load(model_dir)
    policy.mtp = MTP(policy.model)
    policy.publish(path)
    return path


@pytest.fixture(scope="session")
def dense_dir(tmp_path_factory) -> Path:
    """A toy policy with an MTP head: weights large enough for distributions that are far from uniform, uneven norms."""
    import torch

    from model import MTP
    from test_model import small

    policy, path = small(), tmp_path_factory.mktemp("dense") / "model"
    policy.mtp = MTP(policy.model, seed=1)
    g = torch.Generator().manual_seed(0)
    for p in [*policy.model.parameters(), *policy.mtp.parameters()]:
        p.data = p.data * 6 if p.dim() > 1 else p.data + 0.2 * torch.randn(p.shape, generator=g)
    policy.publish(path)
    return path


@pytest.fixture
def at_the_root(monkeypatch) -> None:
    """Where the paths of manifests and presets start."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def shared_data() -> Path:
    """Golden files too large or not ours to ship; a test that needs them is skipped where they are not."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("the golden files of ../shared/data are not on this machine")
    return path


@pytest.fixture(scope="session")
def qwen36_dir(tmp_path_factory) -> Path:
    """A tiny Qwen3.6: gated-delta and attention layers, experts, an MTP head, random weights."""
    from data import make_qwen36

    path = tmp_path_factory.mktemp("qwen36") / "model"
    make_qwen36.main(["--out", str(path)])
    return path


@pytest.fixture
def guided():
    """An engine that drafts what a copy of its policy finds likeliest: many drafts are right, whatever the head."""
    import copy

    import torch

    from infer import Engine

    class Guided(Engine):
        def __init__(self, policy, *args, **options):
            super().__init__(policy, *args, **options)
            self.guide = copy.deepcopy(policy.model)

        @torch.no_grad()
        def _draft(self, *step):
            super()._draft(*step)
            for row in (r for r in self.rows if r.drafts):
                for end in range(row.length, row.length + row.drafts):
                    logits = self.guide(torch.from_numpy(self.tokens[row.slot, None, :end])).logits[0, -1]
                    self.tokens[row.slot, end] = int(logits[: self.vocab].argmax())

    return Guided
