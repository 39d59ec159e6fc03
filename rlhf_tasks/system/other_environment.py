"""The program of a process in another environment: `PYTHON -P THIS_FILE module:function [ARGUMENT ...]`.

Of what is installed beside this package it sees this package only. It is a file, since processes that multiprocessing
spawns there, such as vLLM's workers, run the main file first: so they see this package, too.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name


def _admit_package() -> None:
    package = Path(__file__).parents[2]  # its folders may be links, so this path is not resolved
    spec = spec_from_file_location(
        "prefect_rlhf", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["prefect_rlhf"] = module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ in ("__main__", "__mp_main__"):
    _admit_package()
if __name__ == "__main__":
    resolve_name(sys.argv[1])(*sys.argv[2:])
