"""A script that calls a flow outside a main guard is told so, before anything is made or started."""

import os
import subprocess
import sys

import pytest

from tests.flows.dask_commands import ROOT
from tests.tiny_runs import ppo_config

CALL = "from flows.cluster.main_guard import refuse_unguarded_script as call\n"
SENTENCE = "a flow is called outside a main guard, and each worker process would call it again"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("call()", 2),
        ("def train():\n    call()\n\nif 1 > 0:\n    train()", 6),
        ("from concurrent.futures import ThreadPoolExecutor as Pool\nPool(1).submit(call).result()", 3),
        ("if __name__ == '__main__':\n    call()", None),
        (
            "import sys\nif 'x' in sys.argv or __name__ == '__main__':\n    for _ in range(2):\n        call()",
            None,
        ),
        ("import multiprocessing\nif multiprocessing.parent_process() is None:\n    call()", None),
        ("__name__ == '__main__' and call()", None),
        ("call() if __name__ == '__main__' else None", None),
        ("if __name__ != '__main__':\n    raise SystemExit\ncall()", None),
        ("if __name__ == '__main__':\n    print()\ncall()", 4),
    ],
)
def test_the_line_that_calls_a_flow_must_be_below_a_main_guard(tmp_path, text, line):
    script = tmp_path / "train.py"
    script.write_text(CALL + text)
    ended = run(str(script))
    if line is None:
        assert ended.returncode == 0, ended.stderr
        return
    assert ended.returncode == 1
    assert f"ConfigError: {script}:{line}: {SENTENCE}" in ended.stderr
    assert "Put the call below `if __name__ == '__main__':`" in ended.stderr


def test_what_no_worker_imports_needs_no_guard(tmp_path):
    """A command, as a prompt is; a package; and a module that a guarded script calls."""
    assert run("-c", f"{CALL}call()").returncode == 0
    (tmp_path / "__main__.py").write_text(f"{CALL}call()")
    assert run(str(tmp_path)).returncode == 0
    (tmp_path / "mine.py").write_text(f"{CALL}call()")
    (tmp_path / "train.py").write_text("if __name__ == '__main__':\n    import mine")
    ended = run(str(tmp_path / "train.py"))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.whole
@pytest.mark.cluster
def test_a_script_without_a_guard_leaves_no_folder_and_trains_when_it_has_one(tmp_path):
    config = ppo_config(tmp_path, name="mine", total_iterations=1)
    (tmp_path / "run.json").write_text(config.model_dump_json())
    imports = (
        "import asyncio, json\nfrom flows.ppo import rlhf_ppo\n"
        "from rlhf_tasks.algorithms.configurations import make_config\n"
        f"config = make_config(json.load(open({str(tmp_path / 'run.json')!r})))\n"
    )
    script = tmp_path / "train.py"
    script.write_text(f"{imports}asyncio.run(rlhf_ppo(config=config))\n")
    ended = run(str(script))
    assert ended.returncode == 1
    assert f"ConfigError: {script}:5: {SENTENCE}" in ended.stderr
    assert "Nanny" not in ended.stderr
    assert not (tmp_path / "runs").exists()
    script.write_text(f"{imports}if __name__ == '__main__':\n    asyncio.run(rlhf_ppo(config=config))\n")
    ended = run(str(script))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs" / "mine" / "summary.json").exists()
