import pytest

from prefect_rlhf.planner.plan.graph import DataflowGraph, GraphError, VersionEdge
from prefect_rlhf.rlhf_tasks.spec import ModelFunctionCall
from tests.planner.ahead import drawn_ahead_by


def call(name, inputs=("x",), outputs=(), kind="inference", role=None, n_seqs=8, **more) -> ModelFunctionCall:
    return ModelFunctionCall(
        name=name, role=role or name, kind=kind, inputs=inputs, outputs=outputs, n_seqs=n_seqs, **more
    )


def test_ppo_is_six_calls_on_four_models(make_graph):
    graph = make_graph()
    kinds = {call.name: (call.role, call.kind) for call in graph.calls}
    assert kinds == {
        "actor_generate": ("actor", "generate"),
        "reward_inference": ("reward", "inference"),
        "ref_inference": ("ref", "inference"),
        "critic_inference": ("critic", "inference"),
        "actor_train": ("actor", "train_step"),
        "critic_train": ("critic", "train_step"),
    }
    assert set(graph.roles) == {"actor", "reward", "ref", "critic"}
    assert graph.source.name == "actor_generate"


def test_ppo_edges_carry_keys_and_roles(make_graph):
    digraph = make_graph().digraph
    assert set(digraph.edges) == {
        ("actor_generate", "reward_inference"),
        ("actor_generate", "ref_inference"),
        ("actor_generate", "critic_inference"),
        *((a, b) for a in digraph if not a.endswith("train") for b in ("actor_train", "critic_train")),
    }
    assert digraph.edges["ref_inference", "critic_train"] == {"keys": ("ref_logprobs",), "roles": ()}
    assert digraph.edges["critic_inference", "critic_train"] == {"keys": ("values",), "roles": ("critic",)}


def test_versions_cross_iterations(make_graph):
    graph = make_graph()
    assert set(graph.across) == {
        VersionEdge("actor_train", "actor_generate", "actor"),
        VersionEdge("actor_train", "actor_train", "actor"),
        VersionEdge("critic_train", "critic_inference", "critic"),
        VersionEdge("critic_train", "critic_train", "critic"),
    }


def test_a_role_is_idle_before_its_first_call_and_after_its_last(make_graph):
    """GRPO generates first and trains last; if it draws ahead, scores may come before it generates the next."""
    graph = make_graph()
    assert graph.while_idle("critic") == {
        "actor_generate",
        "ref_inference",
        "reward_inference",
        "actor_train",
    }
    assert graph.while_idle("actor") == {"critic_train"}
    assert graph.while_idle("ref") == {call.name for call in graph.calls} - {"ref_inference"}
    learns = {"group_size": 8, "beta": 0.1, "max_rounds": 1, "mask_truncated_completions": False}
    grpo = make_graph("grpo", **learns)
    assert grpo.while_idle("actor") == make_graph("sft").while_idle("actor") == set()
    ahead = DataflowGraph(drawn_ahead_by(1, grpo.calls), grpo.dataset_keys)
    assert ahead.while_idle("actor") == {"ref_inference", "reward_inference"}


def test_a_call_downstream_of_the_training_reads_the_new_version():
    graph = DataflowGraph(
        [
            call("before", role="actor", outputs=("a",)),
            call("train", role="actor", kind="train_step", inputs=("a",), outputs=("b",)),
            call("after", role="actor", inputs=("b",)),
        ],
        ("x",),
    )
    assert graph.reads_updated(graph.call("after"))
    assert not graph.reads_updated(graph.call("before"))
    assert not graph.reads_updated(graph.call("train"))
    assert VersionEdge("train", "after", "actor") not in graph.across
    assert graph.digraph.edges["train", "after"]["roles"] == ("actor",)


@pytest.mark.parametrize("algorithm", ["sft", "reward_model"])
def test_one_node_graphs(make_graph, algorithm):
    graph = make_graph(algorithm)
    assert [call.kind for call in graph.calls] == ["train_step"]
    assert graph.source is graph.calls[0]
    assert [edge.reader for edge in graph.across] == [graph.calls[0].name]


def test_calls_are_sorted_and_keep_the_given_order_where_they_may():
    graph = DataflowGraph(
        [call("c", inputs=("b",)), call("z", outputs=("b",)), call("a")],
        ("x",),
    )
    assert [call.name for call in graph.calls] == ["z", "c", "a"]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([], "has no calls"),
        ([call("a"), call("a")], "Two calls are named 'a'"),
        ([call("a", outputs=("x",))], "'x' is produced twice: by the data set and by call 'a'"),
        (
            [call("a", outputs=("y",)), call("b", outputs=("y",))],
            "'y' is produced twice: by calls 'a' and 'b'",
        ),
        ([call("a", inputs=("x", "z"))], "Call 'a' needs key 'z'"),
        ([call("a", inputs=())], "No call reads the data set's keys"),
        ([call("a"), call("b", n_seqs=9)], "Call 'b' processes 9 sequences, 'a' 8"),
        ([call("a", mini_batches=9)], "cuts 8 sequences into 9 mini-batches"),
        ([call("a", remap={"q": "r"})], r"renames \['q'\]"),
        (
            [call("a", kind="train_step", role="r"), call("b", kind="train_step", role="r")],
            "Role 'r' is trained by two calls, 'a' and 'b'",
        ),
        (
            [call("a", inputs=("x", "v"), outputs=("u",)), call("b", inputs=("u",), outputs=("v",))],
            "'b' needs u of 'a'; 'a' needs v of 'b'",
        ),
    ],
)
def test_refused_with_the_reason(calls, message):
    with pytest.raises(GraphError, match=message):
        DataflowGraph(calls, ("x",))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            [{"group_size": 4}, {"group_size": 2}],
            "'b' keeps 2 sequences together, 'a' 4: all calls of an iteration",
        ),
        ([{"group_size": 3}, {"group_size": 3}], "'a' processes 8 sequences: no whole groups of 3"),
        (
            [{"group_size": 4}, {"group_size": 4, "mini_batches": 3}],
            "'b' cuts 2 groups of 4 sequences into 3 mini-batches",
        ),
    ],
)
def test_groups_that_no_plan_could_keep_whole_are_refused(sizes, message):
    with pytest.raises(GraphError, match=message):
        DataflowGraph([call(name, **size) for name, size in zip("ab", sizes, strict=True)], ("x",))


@pytest.mark.parametrize("name", ["fetch", "save_actor", "transfer_a_to_b"])
def test_a_call_has_no_name_of_the_nodes_that_plans_insert(name):
    with pytest.raises(GraphError, match=f"A call is named '{name}', as nodes are that plans insert"):
        DataflowGraph([call(name)], ("x",))


def test_a_cycle_through_versions_is_refused():
    """Each role is read, in its old version, by a call that needs the other role's training."""
    calls = [
        call("train_1", role="one", kind="train_step", outputs=("t1",)),
        call("train_2", role="two", kind="train_step", outputs=("t2",)),
        call("read_1", role="one", inputs=("t2",)),
        call("read_2", role="two", inputs=("t1",)),
    ]
    with pytest.raises(GraphError, match="the parameters of"):
        DataflowGraph(calls, ("x",))


def test_unknown_call_is_named(make_graph):
    with pytest.raises(GraphError, match="ppo has no call 'critic'; its calls are actor_generate"):
        make_graph().call("critic")
