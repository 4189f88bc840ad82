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


def back(message: str) -> str:
    """Say it back."""
    return f"{message}!"


def load_environment(tool: bool = False, words: str = "hello", stuck: bool = False):
    async def said(completion, answer, **kwargs):
        return float(sum(words in str(message["content"]) for message in completion)) / 2

    rows = Dataset.from_list([{"question": words, "answer": words}] * 4)
    rubric = vf.Rubric(funcs=[said])
    if tool:
        return vf.ToolEnv(dataset=rows, tools=[back], rubric=rubric, max_turns=3)
    made = TwoTurns(dataset=rows, rubric=rubric, max_turns=3)
    made.stuck = stuck
    return made
