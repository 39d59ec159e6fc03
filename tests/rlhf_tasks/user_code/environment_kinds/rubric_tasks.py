"""verifiers tasks of one turn, with two rewards."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 5)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        return [
            Sum(SumData(prompt=f"{n} + {n}", system_prompt="Add.", answer=str(2 * n)), self.config.task)
            for n in range(3)
        ]
