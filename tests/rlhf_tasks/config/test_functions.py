"""Function objects as rewards: where they are, what they take along, and when two are the same."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    ConfigError,
    make_config,
    override,
    resolve_paths,
)
from prefect_rlhf.rlhf_tasks.config.functions import (
    MOST_BYTES,
    PickledFunction,
    keep_function,
    located,
    unpickled,
)
from prefect_rlhf.rlhf_tasks.config.responses import RewardConfig
from prefect_rlhf.rlhf_tasks.user_code import builtin_rewards
from tests.tiny_reward import length_reward

ROOT = Path(__file__).parents[3]


def inner(bonus: float = 1.0, table: object = None):
    """A function that no other process can find by its name."""
    words = frozenset({"yes", "no", "maybe"})

    def judged(completions, **_):
        """Judge."""
        return [bonus + (c in words) + bool(table) for c in completions]

    return judged


def test_a_function_of_a_module_is_named_by_the_module_or_its_file(tmp_path, monkeypatch):
    assert located(length_reward) == f"{length_reward.__module__}:length_reward"
    (tmp_path / "my_rewards.py").write_text("def short(completions): ...\nclass Judge: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_rewards  # pyright: ignore[reportMissingImports]

    assert located(my_rewards.short) == f"{tmp_path}/my_rewards.py:short"
    assert located(my_rewards.Judge) == f"{tmp_path}/my_rewards.py:Judge"
    assert located(builtin_rewards.exact_match) == "builtin:exact_match"


MODULE = """
def doubled(f):
    def of(*a, **k): return [2 * x for x in f(*a, **k)]
    of.__module__, of.__qualname__, of.__name__ = f.__module__, f.__qualname__, f.__name__
    return of
def helper(completions, **_): return [0.0 for _ in completions]
def strict(completions, **_): return [1.0 for _ in completions]
@doubled
def twice(completions, **_): return [1.0 for _ in completions]
def later(completions, **_): return [1.0 for _ in completions]
later = doubled(later)
"""


@pytest.fixture
def judges(tmp_path, monkeypatch):
    """A module of a user's."""
    (tmp_path / "judges.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import judges  # pyright: ignore[reportMissingImports]

    yield judges
    del sys.modules["judges"]


def test_a_label_does_not_change_which_function_of_a_module_it_is(judges):
    judges.strict.__name__ = "helper"
    assert located(judges.strict) == f"{judges.__file__}:strict"


def test_a_function_decorated_in_its_source_is_named_and_one_decorated_later_is_kept(judges, tmp_path):
    assert located(judges.twice) == f"{judges.__file__}:twice"
    assert located(judges.later) == f"{judges.__file__}:later"
    judges.strict = judges.doubled(judges.strict)
    place = located(judges.strict)
    keep_function(place, tmp_path)
    file, _, name = place.rpartition(":")
    program = (
        "import sys; from pathlib import Path; from prefect_rlhf.rlhf_tasks.config.functions import unpickled; "
        "print(unpickled(Path(sys.argv[1]))(['a']))"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "-c", program, str(tmp_path / file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (name, done.stdout.strip()) == ("strict", "[2.0]"), done.stderr


def test_another_function_is_kept_with_its_code_which_only_its_owner_can_read(tmp_path):
    place = located(inner(2.0))
    assert isinstance(place, PickledFunction)
    keep_function(place, tmp_path)
    file, _, name = place.rpartition(":")
    assert (name, (tmp_path / file).stat().st_mode & 0o777) == ("judged", 0o600)
    assert unpickled(tmp_path / file)(completions=["yes", "why"]) == [3.0, 2.0]


def test_the_code_stays_with_a_configuration_that_is_changed(tmp_path):
    document = {
        "type": "grpo", "models": {"actor": "m"}, "data": {"train": "d.jsonl"}, "total_iterations": 1,
        "sampling": {"max_completion_length": 8}, "rewards": [{"function": inner(), "weight": 0.5}, length_reward],
    }  # fmt: skip
    config = resolve_paths(make_config(document), tmp_path)
    kept, named = config.rewards
    assert isinstance(kept.function, PickledFunction)
    assert (kept.name, kept.weight, named.name) == ("judged", 0.5, "length_reward")
    written = override(config, ["seed=1"]).rewards[0].function
    assert written == str(kept.function)
    assert written.startswith("functions/")


PROGRAM = """
import sys
from prefect_rlhf.rlhf_tasks.config.functions import located
WORDS, unused = {WORDS}, 1
class Scale:
    factor = {FACTOR}
    def __call__(self, x): return x * self.factor
def helper(text): return len(set(text) & WORDS)
def judged(completions, **_):{REMARK}
    return [Scale()(helper(c)) for c in completions]
if __name__ == "__main__": print(located(judged))
"""


def place_of(
    folder: Path, seed: str, words: str = "{'a', 'b', 'c'}", factor: int = 2, remark: str = ""
) -> str:
    """Where a program, in a process of its own, says that its function is."""
    program = folder / f"program_{seed}.py"
    text = PROGRAM.replace("{WORDS}", words).replace("{FACTOR}", str(factor)).replace("{REMARK}", remark)
    program.write_text("\n" * int(seed) + text)
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, str(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_a_function_that_does_the_same_has_the_same_place_in_every_process_file_and_line(tmp_path):
    assert place_of(tmp_path, "1") == place_of(tmp_path, "22", remark="  # another remark")


@pytest.mark.parametrize("change", [{"words": "{'a', 'b'}"}, {"factor": 3}])
def test_a_function_that_uses_something_else_has_another_place(tmp_path, change):
    assert place_of(tmp_path, "1") != place_of(tmp_path, "1", **change)


def test_defaults_and_what_a_function_closes_over_are_part_of_it():
    assert located(inner(1.0)) == located(inner(1.0))
    assert located(inner(1.0)) != located(inner(2.0))
    assert located(inner(table={"a": [1]})) != located(inner(table={"a": [2]}))


def defined(text: str):
    variables: dict = {}
    exec(text, variables)
    return variables["f"]


def test_what_a_try_covers_and_a_functions_attributes_are_part_of_it():
    whole = "def f(c):\n try: y = g(c); return h(y)\n except ValueError: return 0\n"
    half = "def f(c):\n y = g(c)\n try: return h(y)\n except ValueError: return 0\n"
    assert located(defined(whole)) == located(defined(whole))
    assert located(defined(whole)) != located(defined(half))
    function = inner()
    function.bonus = 2.0  # pyright: ignore[reportFunctionMemberAccess]
    assert located(function) != located(inner())


def test_a_tensor_is_part_of_a_function_by_its_values_alone():
    import torch

    def place(tensor: torch.Tensor) -> str:
        return located(inner(table=tensor))

    for dtype in (torch.bfloat16, torch.bool, torch.complex64):
        assert place(torch.ones(2, 3, dtype=dtype)) == place(torch.ones(3, 2, dtype=dtype).T)
    assert place(torch.tensor(1.0)) == place(torch.tensor(1.0))
    assert place(torch.ones(2)) == place(torch.ones(4)[::2])
    assert place(torch.eye(2).to_sparse()) == place(torch.eye(2).to_sparse())
    assert (
        len({place(each) for each in (torch.ones(2), torch.ones(1, 2), torch.ones(2).int(), torch.zeros(2))})
        == 4
    )


def test_a_file_of_a_function_that_others_read_is_replaced_as_a_whole(tmp_path):
    place = located(inner())
    keep_function(place, tmp_path)
    file = tmp_path / place.rpartition(":")[0]
    with file.open("rb") as read:
        keep_function(place, tmp_path)
        assert unpickled(file)(completions=["yes"]) == [2.0]
        assert (read.read(), file.stat().st_ino == os.fstat(read.fileno()).st_ino) == (
            file.read_bytes(),
            False,
        )


def test_a_name_may_have_any_letters(tmp_path):
    def übung(completions, **_):
        return [1.0 for _ in completions]

    reward = RewardConfig.model_validate(übung)
    assert RewardConfig.model_validate(reward.model_dump(mode="json")).name == "übung"
    with pytest.raises(ValueError, match="function"):
        RewardConfig(function="file.py:1a")


def refusal(function) -> str:
    with pytest.raises(ValueError, match="reward") as refused:
        RewardConfig.model_validate(function)
    return str(refused.value)


def test_a_lambda_is_refused():
    assert (
        "a lambda has no name by which metrics could call the reward. Define a function with def."
        in refusal(lambda completions: [0.0])
    )


def test_an_object_or_a_method_is_refused():
    assert "a reward is a function or a class, found" in refusal({"function": [].append})


def test_what_another_process_cannot_have_is_refused_by_its_name(tmp_path):
    import torch

    for held, kind in (
        (torch.zeros(2, device="meta"), "a Tensor on meta"),  # as on a GPU, which tests need not have
        ([{"deep": torch.zeros(2, device="meta")}], "a list"),
        (threading.Lock(), "a lock"),
        ((tmp_path / "log").open("w"), "a TextIOWrapper"),
    ):
        assert (
            f"the reward 'judged' takes along 'table', {kind}, and rewards run in a process of their own, which "
            "cannot have that. Make it inside the function (a tensor: take .cpu() along)."
            in refusal(inner(table=held))
        )
        if hasattr(held, "close"):
            held.close()


def test_too_much_is_refused_by_its_name():
    assert "takes along 67 MB, most of it 'table'; 67 MB are allowed." in refusal(
        inner(table=bytes(MOST_BYTES))
    )


def test_a_faulty_configuration_made_in_python_is_a_sentence():
    from prefect_rlhf import GRPOConfig

    with pytest.raises(ConfigError) as refused:
        GRPOConfig(models={"actor": "m"}, data={"train": "d"}, rewards=[inner()], total_iteration=3)
    assert "did you mean 'total_iterations'?" in str(refused.value)
    assert "pydantic" not in str(refused.value)


def test_importing_the_package_and_a_configuration_loads_neither_torch_nor_prefect():
    program = (
        "import sys, prefect_rlhf; from prefect_rlhf import GRPOConfig, train; "
        "from prefect_rlhf.rlhf_tasks.algorithms.grpo import GRPOConfig as same; assert same is GRPOConfig; "
        "print({'torch', 'prefect', 'transformers', 'distributed'} & set(sys.modules))"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
