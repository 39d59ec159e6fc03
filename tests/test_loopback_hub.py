"""The Hub of the tests does what the real client expects of the real one."""

from pathlib import Path

import pytest
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.loopback_hub import READER, WRITER, Hub

FILES = {"config.json": "{}", "sub/notes.txt": "notes", "model.safetensors": bytes(100_000)}


def test_a_snapshot_has_the_files_of_its_revision(hub: Hub, tmp_path):
    first = hub.add("org/model", FILES)
    hub.add("org/model", {"config.json": '{"now": 1}'})
    with hub.used_here(tmp_path):
        assert Path(snapshot_download("org/model"), "config.json").read_text() == '{"now": 1}'
        folder = Path(snapshot_download("org/model", revision=first))
    assert (folder / "config.json").read_text() == "{}"
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not hub.leaked


def test_a_tree_of_several_pages_is_whole(hub: Hub, tmp_path):
    hub.add("org/data", {f"part-{i}.txt": str(i) for i in range(120)}, "dataset")
    with hub.used_here(tmp_path):
        assert len(list(HfApi().list_repo_tree("org/data", recursive=True, repo_type="dataset"))) == 120


def test_private_and_gated_repositories_need_their_tokens(hub: Hub, tmp_path):
    hub.add("org/private", FILES, private=True)
    hub.add("org/gated", FILES, gated=True)
    with hub.used_here(tmp_path):
        with pytest.raises(HfHubHTTPError, match="401"):
            snapshot_download("org/private")
        with pytest.raises(GatedRepoError):
            snapshot_download("org/gated")
        hub.add("org/open", FILES)
        with pytest.raises(RevisionNotFoundError):
            snapshot_download("org/open", revision="v9")
    with hub.used_here(tmp_path, READER):
        snapshot_download("org/private")
        with pytest.raises(RepositoryNotFoundError):
            snapshot_download("org/typo")
        with pytest.raises(GatedRepoError):
            snapshot_download("org/gated")
        hub.add("org/gated", {}, members=("reader",))
        snapshot_download("org/gated")


@pytest.mark.filterwarnings("ignore:Use 'content=")  # the client's own use of its HTTP library
def test_a_folder_is_uploaded_and_comes_back(hub: Hub, tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with hub.used_here(tmp_path / "home", WRITER):
        api = HfApi()
        assert api.whoami()["name"] == "writer"
        api.create_repo("org/new", private=True)
        api.create_repo("org/new", exist_ok=True)
        api.upload_folder(repo_id="org/new", folder_path=folder, commit_message="model")
        api.upload_folder(
            repo_id="org/new", folder_path=folder, path_in_repo="again", delete_patterns="*.txt"
        )
        back = Path(snapshot_download("org/new"))
    assert (back / "again/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.repositories["model", "org/new"].private
