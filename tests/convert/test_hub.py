"""A teacher on the hub: what is downloaded when, and what is said when it cannot be (no network is used)."""

import fnmatch
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi, errors
from safetensors.torch import load_file

from supra.config import Conversion
from supra.convert import execute, make_plan
from supra.errors import UserError
from supra.weights.headers import read_header


class FakeHub:
    """Serves one folder as `tiny/llama`, as snapshot_download and get_safetensors_metadata would."""

    def __init__(self, teacher: Path, cache: Path) -> None:
        self.teacher, self.snapshot = teacher, cache / "snapshots" / "0123abc"
        self.downloads: list[tuple[str, str | None]] = []

    def snapshot_download(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for file in self.teacher.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, self.snapshot)
                self.downloads.append((file.name, revision))
        return str(self.snapshot)

    def get_safetensors_metadata(self, _: HfApi, repo_id: str, *, revision: str | None) -> Any:
        tensors = read_header(self.teacher / "model.safetensors")
        info = huggingface_hub.utils.TensorInfo
        file = huggingface_hub.utils.SafetensorsFileMetadata(
            {}, {t.name: info(t.dtype, list(t.shape), (t.start, t.start + t.num_bytes)) for t in tensors}
        )
        return huggingface_hub.utils.SafetensorsRepoMetadata(None, False, {}, {"model.safetensors": file})


@pytest.fixture
def hub(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(llama, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(
        HfApi, "get_safetensors_metadata", lambda *args, **kw: fake.get_safetensors_metadata(*args, **kw)
    )
    return fake


def test_a_plan_downloads_no_weights_and_a_conversion_does(hub: FakeHub, llama: Path, tmp_path: Path) -> None:
    plan = make_plan("tiny/llama", Conversion(), revision="main")
    names = [name for name, _ in hub.downloads]
    assert "config.json" in names
    assert "tokenizer.json" in names
    assert not any(name.endswith(".safetensors") for name in names)
    assert plan.source.bytes_to_download() == pytest.approx(
        (llama / "model.safetensors").stat().st_size, rel=0.05
    )
    execute(plan, tmp_path / "out", seed=0, recipe_yaml="")
    # The weights come from the very commit that was planned, not from wherever `main` has moved to.
    assert hub.downloads[0][1] == "main"
    assert ("model.safetensors", "0123abc") in hub.downloads
    copied = load_file(next((tmp_path / "out").glob("model-00001*")))
    assert copied.keys() == load_file(llama / "model.safetensors").keys()


def test_cached_weights_are_not_asked_for_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.snapshot_download("tiny/llama", revision=None, allow_patterns=["*"])
    plan = make_plan("tiny/llama", Conversion())
    assert plan.source.bytes_to_download() == 0


RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.RepositoryNotFoundError("x", response=RESPONSE), "neither such a folder nor such a model"),
        (errors.GatedRepoError("x", response=RESPONSE), "accept terms"),
        (errors.RevisionNotFoundError("x", response=RESPONSE), "no revision 'v9'"),
        (errors.LocalEntryNotFoundError("x"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("x"), "cannot be reached"),
        (ConnectionError("x"), "cannot be reached"),
        (errors.HTTPError("x"), "cannot be reached"),
    ],
)
def test_every_failure_of_the_hub_is_explained(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=words) as caught:
        make_plan("tiny/llama", Conversion(), revision="v9")
    assert caught.value.thing == "tiny/llama"
