from planner.search.compiled.compile import LINKED, PLANNER


def test_every_module_with_compiled_functions_makes_stale_code_stale():
    """A cached function has those of other modules inside."""
    users = {
        ".".join(path.relative_to(PLANNER).with_suffix("").parts)
        for path in PLANNER.rglob("*.py")
        if "from planner.search.compiled.compile import" in path.read_text()
    }
    assert users
    assert users <= set(LINKED)
    assert all(PLANNER.joinpath(*module.split(".")).with_suffix(".py").exists() for module in LINKED)
