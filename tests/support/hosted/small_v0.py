"""Environments of verifiers before 0.2, in the form of published packages: two turns, or a tool."""

import verifiers as vf
from datasets import Dataset


class TwoTurns(vf.MultiTurnEnv):
    stuck = False

    async def env_response(self, messages, state, **kwargs):
        while self.stuck:
            pass
        return [{"role": "user", "content": "again"}]

    @vf.stop
    async def enough(self, state):
        return len(state["trajectory"]) >= 2


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def load_environment(tool: bool = False, words: str = "hello", stuck: bool = False):
    async def said(completion, answer, **kwargs):
        return float(sum(words in str(message["content"]) for message in completion)) / 2

    async def added(completion, answer, **kwargs):
        return float(str(completion[-1]["content"]).strip() == answer)

    if tool:
        sums = [
            {"question": f"What is {a} + {b}?", "answer": str(a + b)}
            for a in range(3, 99, 6)
            for b in range(4, 99, 6)
        ]
        adds = vf.ToolEnv(
            dataset=Dataset.from_list(sums), tools=[add], rubric=vf.Rubric(funcs=[added]), max_turns=3
        )
        numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
        schema = {"type": "object", "properties": numbers, "required": ["a", "b"]}
        # As the small policy of the examples has seen it: it knows no other way to tell of a tool.
        adds.tool_defs = [vf.Tool(name="add", description="Adds two numbers.", parameters=schema)]
        return adds
    rows = Dataset.from_list([{"question": words, "answer": words}] * 4)
    made = TwoTurns(dataset=rows, rubric=vf.Rubric(funcs=[said]), max_turns=3)
    made.stuck = stuck
    return made
