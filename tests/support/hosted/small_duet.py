"""A duet for verifiers 0.4: two agents at once, and what each earns depends on both."""

import asyncio

import verifiers.v1 as vf


class DuetTask(vf.Task[vf.TaskData]):
    pass


class DuetTaskset(vf.Taskset[DuetTask, vf.TasksetConfig]):
    def load(self) -> list[DuetTask]:
        return [DuetTask(vf.TaskData(prompt=f"say {number}")) for number in range(4)]


class DuetConfig(vf.EnvConfig):
    high: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    low: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class DuetEnv(vf.Env[DuetConfig]):
    async def run(self, task: DuetTask, agents: vf.Agents) -> None:
        await asyncio.gather(agents.high.run(task), agents.low.run(task))

    async def finalize(self, task: DuetTask, episode: vf.Episode) -> None:
        equal = len({trace.assistant_messages[-1].content for trace in episode.traces}) == 1
        for trace in episode.traces:
            trace.record_reward("equal", float(equal))


__all__ = ["DuetEnv", "DuetTaskset"]
