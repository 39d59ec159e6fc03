"""verifiers tasks with a tool, which is served by a process of its own."""

import verifiers.v1 as vf

__all__ = ["Tooled"]


class CalcConfig(vf.ToolsetConfig):
    pass


class Calc(vf.Toolset[CalcConfig, vf.State]):
    @vf.tool
    async def double(self, number: int) -> str:
        """Twice a number."""
        return str(2 * number)


class SumConfig(vf.TaskConfig):
    tools: CalcConfig = CalcConfig()


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calc(config.tools)]

    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply.strip() == task.answer)


class TooledConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()


class Tooled(vf.Taskset[Sum, TooledConfig]):
    def load(self):
        return [Sum(SumData(prompt=f"{n} + {n}", answer=str(2 * n)), self.config.task) for n in range(3)]


if __name__ == "__main__":
    Calc.run()
