# Install one wheel into a new virtual environment and use it outside the checkout.
# Usage: PYTHON=an-environment-with-the-dependencies/bin/python sh check_wheel.sh WHEEL
set -eu
wheel=$1
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$PYTHON" -m venv "$place/venv"
# The dependencies are those of the first environment: only our own package is under test here.
"$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$place/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
"$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --ignore-installed "$wheel"
# Only what is said of our own package counts: the venv's setuptools hides the first environment's newer one.
if "$place/venv/bin/python" -m pip check --disable-pip-version-check | grep '^prefect-rlhf'; then exit 1; fi
cd "$place"
"$place/venv/bin/prefect-rlhf" graph ppo | grep actor_generate
"$place/venv/bin/prefect-rlhf" config schema >schema.json
"$place/venv/bin/python" - <<'PYTHON'
import json
from importlib.resources import files
from pathlib import Path

from prefect.blocks.core import Block

import prefect_rlhf
from prefect_rlhf.flows.demo import write_jsonl, write_model_folder

root = Path(prefect_rlhf.__file__).parent
assert root.is_relative_to(Path.cwd().resolve()), f"the checkout's own package was used: {root}"
assert json.loads(Path("schema.json").read_text())["title"] == "PPOConfig"
here = {str(path.relative_to(root / "deployments")) for path in (root / "deployments").rglob("*.yaml")}
assert {"prefect.yaml", "demo_plan.yaml", "demo/ppo.yaml", "examples/ppo.yaml"} <= here, here
assert (files("prefect_rlhf.deployments") / "demo" / "sft.yaml").is_file()
assert not (root.parent / "tests").exists() and not (root.parent / "bench").exists(), "the wheel holds tests or benches"
found = Block.get_block_class_from_key("rlhf-cluster").__module__
assert found == "prefect_rlhf.blocks.cluster", f"Prefect's collections give {found}"
write_model_folder(Path("base"))
write_jsonl(Path("rows.jsonl"), [{"prompt": f"{i}>", "completion": str(i)} for i in range(8)])
PYTHON
cat >sft.yaml <<YAML
type: sft
name: first
models: {actor: base}
random_init: true
data: {train: rows.jsonl}
batch_size: 8
total_iterations: 1
YAML
"$place/venv/bin/prefect-rlhf" config validate sft.yaml
"$place/venv/bin/prefect-rlhf" run sft --config sft.yaml
"$place/venv/bin/python" - <<'PYTHON'
import json
from pathlib import Path

from transformers import AutoModelForCausalLM

run = Path("runs/first")
assert json.loads((run / "summary.json").read_text())["iterations"] == 1
AutoModelForCausalLM.from_pretrained(run / "model")
print("the wheel works")
PYTHON
