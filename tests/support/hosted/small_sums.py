"""A tool with state for verifiers 0.4, on one server for all rollouts: it adds, and counts in each one."""

import verifiers.v1 as vf

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}
"""As the small policy of the examples has seen it: it knows no other way to tell of a tool."""


class SumsState(vf.State):
    sums: int = 0


class SumsToolset(vf.Toolset[vf.SharedToolsetConfig, SumsState]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        self.state.sums += 1
        return str(a + b)

    def register(self, mcp):
        super().register(mcp)
        declared = mcp.list_tools

        async def listed():
            return [tool.model_copy(update={"input_schema": SCHEMA}) for tool in await declared()]

        mcp.list_tools = listed


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, SumsState]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """Right after the tool was asked once."""
        said = (trace.assistant_messages[-1].content or "").strip()
        return float(said == self.data.answer and trace.state.sums == 1)


class SumsConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [SumsToolset(config.tools)]

    def load(self) -> list[SumsTask]:
        return [
            SumsTask(SumsData(prompt=f"What is {a} + {b}?", answer=str(a + b)))
            for a in range(3, 99, 6)
            for b in range(4, 99, 6)
        ]


__all__ = ["SumsTaskset"]

if __name__ == "__main__":
    SumsToolset.run()
