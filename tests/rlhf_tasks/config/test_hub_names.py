from prefect_rlhf.rlhf_tasks.config.hub_names import hub_data, hub_model, name_of_folder, without_login


def test_a_model_is_an_owner_and_a_name_and_may_have_a_revision():
    name = hub_model("Qwen/Qwen3-0.6B@v1.0")
    assert name is not None
    assert (name.id, name.revision) == ("Qwen/Qwen3-0.6B", "v1.0")
    assert hub_model("org/name@refs/pr/3").revision == "refs/pr/3"  # type: ignore[union-attr]
    for path in ("/models/mine", "models/mine/final", "./models", "gpt2", "../a/b", "a/b c", "stage:sft"):
        assert hub_model(path) is None


def test_a_data_set_may_name_a_subset_and_a_split():
    name = hub_data("openai/gsm8k@main:socratic:test")
    assert name is not None
    assert (name.id, name.revision, name.parts) == ("openai/gsm8k", "main", ("socratic", "test"))
    assert hub_data("openai/gsm8k:main").parts == ("main",)  # type: ignore[union-attr]
    for path in ("data/train.jsonl", "data/rows.parquet", "data/*.json", "/data/set"):
        assert hub_data(path) is None


def test_files_of_a_data_set_are_named_by_a_glob():
    name = hub_data("hf://datasets/org/name@refs/convert/parquet/main/*.parquet")
    assert name is not None
    assert (name.id, name.revision, name.files) == ("org/name", "refs/convert/parquet", "main/*.parquet")
    assert hub_data("hf://datasets/org/name/x.csv").revision is None  # type: ignore[union-attr]


def test_a_snapshot_has_its_name_and_commit_wherever_the_cache_lies():
    commit = "a" * 40
    assert (
        name_of_folder(f"/x/hub/models--Qwen--Qwen3-0.6B/snapshots/{commit}") == f"Qwen/Qwen3-0.6B@{commit}"
    )
    assert name_of_folder("/models/mine") == "/models/mine"


def test_no_login_is_shown_of_an_address():
    assert without_login("see https://me:p@ss@hub.example/org/x (http://host/a@b)") == (
        "see https://hub.example/org/x (http://host/a@b)"
    )
