"""Which calls wait for each other around a cycle."""

from prefect_rlhf.planner.search.bounds.cycles import call_cycles


def named(cycles, graph) -> set[tuple[frozenset[str], int]]:
    names = [call.name for call in graph.calls]
    return {
        (frozenset(name for name, inside in zip(names, row, strict=True) if inside), int(delay))
        for row, delay in zip(cycles.members, cycles.delays, strict=True)
    }


def test_cycles_of_ppo(make_graph):
    """Generation, one inference, training; the critic's; and the paths to the critic's training, twice T."""
    graph = make_graph()
    inferences = ("reward_inference", "ref_inference", "critic_inference")
    assert named(call_cycles(graph), graph) == {
        *((frozenset({"actor_generate", i, "actor_train"}), 1) for i in inferences),
        (frozenset({"critic_inference", "critic_train"}), 1),
        *((frozenset({"actor_generate", i, "critic_train"}), 2) for i in inferences),
    }
