"""A model is put on a Hub, or a sentence says why not. The Hub is ours, on loopback; its client is the real one."""

import json
import socket

import pytest

from prefect_rlhf.flows import pushes
from prefect_rlhf.flows.pushes import PushError, check_push, push_model
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.run_folder import new_run_folder
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.config.models import HubPush
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.loopback_hub import READER, WRITER, Hub

SECRET = "hf_loopbackNobodyKnowsThis"
TARGET = HubPush(repo="org/new")


@pytest.fixture
def as_account(hub: Hub, tmp_path, monkeypatch):
    """Be an account, by its token, for the client's processes."""

    def be(token: str | None, **changes: str) -> None:
        for name, value in {**hub.environment(tmp_path / "home", token), **changes}.items():
            monkeypatch.setenv(name, value)

    return be


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("# mine\n")
    (folder / "model.safetensors").write_bytes(bytes(100_000))
    return folder


def refusal(target: HubPush = TARGET) -> str:
    with pytest.raises(ConfigError) as refused:
        check_push(target)
    return str(refused.value)


def test_a_model_becomes_a_private_repository(hub: Hub, as_account, model):
    as_account(WRITER)
    check_push(TARGET)
    assert not hub.repositories, "a check makes nothing"
    assert push_model(model, TARGET, "mine after 3 iterations") == f"{hub.url}/org/new"
    repository = hub.repositories["model", "org/new"]
    assert repository.private
    assert {name: content for name, content in hub.files("org/new").items() if name != ".gitattributes"} == {
        path.name: path.read_bytes() for path in model.iterdir()
    }


def test_a_later_push_changes_the_same_repository(hub: Hub, as_account, model):
    as_account(WRITER)
    push_model(model, TARGET, "first")
    (model / "README.md").write_text("# now\n")
    check_push(TARGET)
    push_model(model, TARGET, "second")
    assert hub.files("org/new")["README.md"] == b"# now\n"


def test_a_push_leaves_no_weights_of_an_earlier_one_to_be_read_with_its_own(hub: Hub, as_account, model):
    as_account(WRITER)
    adapter = {
        "adapter_config.json": '{"base_model_name_or_path": "org/base"}',
        "adapter_model.safetensors": "a",
    }
    shards = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    kept = {"notes.md": "mine", "onnx/model.safetensors": "x"}
    hub.add("org/new", {**adapter, **dict.fromkeys(shards, "{}"), **kept}, private=True)
    push_model(model, TARGET, "merged")
    whole = {"README.md", "config.json", "model.safetensors"}
    assert hub.files("org/new").keys() - {".gitattributes"} == whole | kept.keys()
    for name in whole - {"README.md"}:
        (model / name).unlink()
    for name, text in adapter.items():
        (model / name).write_text(text)
    push_model(model, TARGET, "adapter")
    assert hub.files("org/new").keys() - {".gitattributes"} == {"README.md"} | adapter.keys() | kept.keys()
    assert len(hub.repositories["model", "org/new"].files) == 3, "each push is one commit"


def test_a_push_shows_how_much_is_sent(hub: Hub, as_account, model, monkeypatch):
    as_account(WRITER)
    monkeypatch.setattr("prefect_rlhf.flows.view.terminal.STEP_S", 0.0)
    (model / "model.safetensors").write_bytes(bytes(4 << 20))
    said: list[str] = []
    push_model(model, TARGET, "mine", said.append)
    assert said[0] == "uploading org/new, 4.2 MB ..."
    assert "org/new: 2.1 MB of 4.2 MB" in said, said
    assert said[-1].startswith("uploaded org/new, 4.2 MB: ")


def test_a_password_in_the_address_of_the_hub_is_in_no_sentence(hub: Hub, as_account, model):
    as_account(WRITER, HF_ENDPOINT=hub.url.replace("://", "://me:hunter2@"))
    assert f"{hub.url} does not accept the token" in refusal()
    with pytest.raises(PushError, match=f"^{hub.url} does not accept the token"):
        push_model(model, TARGET, "first")


def test_a_public_repository_is_made_only_where_that_is_asked_for(hub: Hub, as_account, model):
    as_account(WRITER)
    public = HubPush(repo="org/open", private=False)
    push_model(model, public, "first")
    assert not hub.repositories["model", "org/open"].private
    assert "org/open is public, and a model is put there as private." in refusal(HubPush(repo="org/open"))
    with pytest.raises(PushError, match="org/open is public"):
        push_model(model, HubPush(repo="org/open"), "second")
    check_push(public)


def test_an_adapter_names_its_model_by_the_id_and_not_by_a_folder_of_here(hub: Hub, as_account, model):
    as_account(WRITER)
    base = f"/home/me/.cache/hub/models--org--base/snapshots/{'a' * 40}"
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
    push_model(model, TARGET, "adapter")
    put = json.loads(hub.files("org/new")["adapter_config.json"])
    assert put == {"base_model_name_or_path": "org/base", "r": 4, "revision": "a" * 40}
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/home/me/base"}))
    push_model(model, TARGET, "of a folder")
    assert json.loads(hub.files("org/new")["adapter_config.json"]) == {"base_model_name_or_path": "base"}


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (None, "org/new: there is no token of the Hub. Run `hf auth login`, or set HF_TOKEN."),
        (SECRET, "does not accept the token. Run `hf auth login`, or correct HF_TOKEN."),
        (READER, "org/new: the token may only read. Make one at "),
    ],
)
def test_a_token_that_may_not_write_is_refused_before_a_run(as_account, token, said):
    as_account(token)
    sentence = refusal()
    assert said in sentence
    assert SECRET not in sentence


def test_an_account_writes_under_its_own_names_only(hub: Hub, as_account):
    as_account(WRITER)
    check_push(HubPush(repo="writer/new"))
    assert "may write under writer, org, not under others. Name one of these." in refusal(
        HubPush(repo="others/new")
    )
    hub.accounts[WRITER]["orgs"][0]["roleInOrg"] = "read"
    assert "the token's account writer may only read in org." in refusal()


@pytest.mark.parametrize(
    ("scope", "may"),
    [
        ({"entity": {"type": "org", "name": "org"}, "permissions": ["repo.write"]}, True),
        ({"entity": {"type": "model", "name": "org/new"}, "permissions": ["repo.write"]}, True),
        ({"entity": {"type": "org", "name": "org"}, "permissions": ["repo.content.read"]}, False),
        ({"entity": {"type": "user", "name": "writer"}, "permissions": ["repo.write"]}, False),
    ],
)
def test_a_fine_grained_token_needs_the_right_to_write_there(hub: Hub, as_account, scope, may):
    as_account(WRITER)
    hub.accounts[WRITER]["auth"]["accessToken"] = {"role": "fineGrained", "fineGrained": {"scoped": [scope]}}
    if may:
        check_push(TARGET)
    else:
        assert "the token may only read" in refusal()


def test_without_network_both_say_so(as_account, model):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    as_account(WRITER, HF_ENDPOINT=url)
    assert f"org/new: {url} cannot be reached, or the connection broke (" in refusal()
    with pytest.raises(PushError, match="cannot be reached"):
        push_model(model, TARGET, "first")
    as_account(WRITER, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set. Unset it." in refusal()


def test_a_hub_that_does_not_answer_is_waited_for_until_a_deadline(as_account, monkeypatch):
    monkeypatch.setattr(pushes, "CHECK_S", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        as_account(WRITER, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert refusal() == "org/new: the Hub's client has not ended within 4 s."


@pytest.mark.parametrize(
    ("where", "status", "said"),
    [
        ("POST /api/repos/create", 403, "the token may not write to org/new"),
        ("POST .*/commit/", 403, "the token may not write to org/new"),
        ("POST .*/commit/", 500, "answers with status 500"),
    ],
)
def test_a_push_that_the_hub_refuses_is_a_sentence_without_the_token(
    hub: Hub, as_account, model, where, status, said
):
    as_account(WRITER)
    hub.next_answers(where, status=status, times=100)
    with pytest.raises(PushError) as refused:
        push_model(model, TARGET, "first")
    assert said in str(refused.value)
    assert WRITER not in str(refused.value)


@pytest.mark.parametrize(
    "repo", ["mine", "org/-x", "org/a--b", "org/a..b", "org/x.git", "a/b/c", "org/" + "x" * 97, ""]
)
def test_a_name_that_the_hub_does_not_take_is_refused_where_it_is_written(repo):
    with pytest.raises(ValueError, match=r"is no name of a model on the Hub\. Write ORG/NAME"):
        HubPush(repo=repo)


@pytest.mark.parametrize("repo", ["org/model", "o1/Qwen2.5-0.5B_x", "My-Org/a.b"])
def test_names_of_the_hub_are_taken(repo):
    assert HubPush(repo=repo).private


def test_a_run_that_could_not_push_is_refused_before_it_starts_and_one_that_continues_is_warned(
    call, document, as_account, tmp_path
):
    as_account(None)
    document["push_to_hub"] = "org/new"
    status, _, err = call("config", "validate", "FILE")
    assert (status, "org/new: there is no token of the Hub." in err) == (2, True)
    folder = new_run_folder(make_config({**document, "name": "mine"}))
    prepared = prepare(make_config({**document, "name": "mine"}), folder)
    assert any("there is no token of the Hub" in warning for warning in prepared.warnings)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "Name the FOLDER to write, or a repository: --push ORG/NAME."),
        (("--public",), "--public is for --push ORG/NAME."),
        (("--push", "mine"), "'mine' is no name of a model on the Hub."),
        (("--push", "org/new"), "org/new: there is no token of the Hub."),
    ],
)
def test_an_export_that_cannot_push_says_why(call, document, as_account, options, said):
    as_account(None)
    folder = new_run_folder(make_config({**document, "name": "mine"}))
    status, _, err = call("export", str(folder), *options)
    assert (status, said in err) == (2, True), err
