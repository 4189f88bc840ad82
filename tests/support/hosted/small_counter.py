"""A tool with state for verifiers 0.4: the reward is how often it was called, at most twice."""

import verifiers.v1 as vf


class CounterState(vf.State):
    count: int = 0


class CounterToolset(vf.Toolset[vf.ToolsetConfig, CounterState]):
    TOOL_PREFIX = "counter"

    @vf.tool
    def bump(self) -> str:
        """Count."""
        self.state.count += 1
        return f"count={self.state.count}"


class CounterConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CounterTask(vf.Task[vf.TaskData, CounterState, CounterConfig]):
    @classmethod
    def toolsets(cls, config: CounterConfig) -> list[vf.Toolset]:
        return [CounterToolset(config.tools)]

    @vf.reward(weight=0.5)
    async def counted(self, trace: vf.Trace) -> float:
        return float(min(trace.state.count, 2))


class CounterTasksetConfig(vf.TasksetConfig):
    task: CounterConfig = CounterConfig()


class CounterTaskset(vf.Taskset[CounterTask, CounterTasksetConfig]):
    def load(self) -> list[CounterTask]:
        return [CounterTask(vf.TaskData(prompt="count"), self.config.task)]


__all__ = ["CounterTaskset"]

if __name__ == "__main__":
    CounterToolset.run()
