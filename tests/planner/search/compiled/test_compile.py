from pathlib import Path

from planner.search.compiled import compile as compiled


def test_every_module_with_compiled_functions_makes_stale_code_stale():
    """A cached function has those of other modules inside."""
    package = Path(compiled.__file__).parent
    users = {
        path.stem
        for path in package.glob("*.py")
        if "from planner.search.compiled.compile import" in path.read_text()
    }
    assert users
    assert users <= set(compiled.LINKED)
    assert all((package / f"{module}.py").exists() for module in compiled.LINKED)
