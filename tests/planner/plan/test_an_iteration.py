"""PPO's iteration on one page: each request of it in order, the ranks that get it, and what it waits for.

The plan is the demo's: 4 ranks, six calls under different placements. `rank:number` is a request's number in that
rank's order. The last column has the lines that it waits for; a line of the iteration before has a minus. So line 3
of the next iteration, generation on ranks 0 and 1, waits for line 20, and may run beside line 22 on ranks 2 and 3.
"""

from prefect_rlhf.planner.plan.build import ExecutionPlan
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from tests.rlhf_tasks.settings import DEADLINES

PAGE = """
 1  fetch                                           0:0  1:0
 2  reallocate_actor_to_actor_generate              0:1  1:1                -20
 3  actor_generate                                  0:2  1:2                1 2
 4  release_actor_of_actor_generate                 0:3  1:3                3
 5  transfer_actor_generate_to_critic_inference     0:4  1:4  3:0           3
 6  transfer_actor_generate_to_reward_inference     0:5  1:5  2:0           3
 7  transfer_actor_generate_to_ref_inference        0:6  1:6                3
 8  reallocate_critic_to_critic_inference           2:1  3:1                -22
 9  critic_inference                                3:2                     5 8
10  release_critic_of_critic_inference              3:3                     9
11  reward_inference                                2:2                     6
12  ref_inference                                   0:7  1:7                4 7
13  transfer_actor_generate_to_actor_train          0:8  1:8                3
14  transfer_ref_inference_to_actor_train           0:9  1:9                12
15  transfer_critic_inference_to_actor_train        0:10  1:10  3:4         9
16  transfer_reward_inference_to_actor_train        0:11  1:11  2:3         11
17  transfer_actor_generate_to_critic_train         0:12  1:12  2:4  3:5    3
18  transfer_ref_inference_to_critic_train          0:13  1:13  2:5  3:6    12
19  transfer_reward_inference_to_critic_train       2:6  3:7                11
20  actor_train                                     0:14  1:14              13 14 15 16 -21
21  save_actor                                      0:15  1:15              20
22  critic_train                                    2:7  3:8                10 17 18 19 -23
23  save_critic                                     2:8  3:9                22
"""


def page(plan: ExecutionPlan) -> str:
    """Ranks run their requests in the order of these lines."""
    requests = Sequencer(plan, "run", 1, DEADLINES).requests(0)
    line_of = {node.name: number for number, node in enumerate(plan.nodes, start=1)}
    lines = []
    for node in plan.nodes:
        numbers = [
            f"{rank}:{request.number}"
            for rank, mine in sorted(requests.items())
            for request in mine
            if request.key.node == node.name
        ]
        parents = [*map(line_of.get, node.after), *(f"-{line_of[name]}" for name in node.after_previous)]
        what = f"{line_of[node.name]:2}  {node.name:48}{'  '.join(numbers):24}{' '.join(map(str, parents))}"
        lines.append(what.rstrip())
    return "\n".join(lines)


def test_an_iteration_of_ppo_request_by_request(demo_plan: ExecutionPlan):
    assert page(demo_plan) == PAGE.strip("\n")
