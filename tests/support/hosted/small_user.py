"""A scripted user for verifiers 0.4: says three numbers, one a turn, and wants each back."""

import verifiers.v1 as vf


class UserTask(vf.Task[vf.TaskData]):
    pass


class UserTaskset(vf.Taskset[UserTask, vf.TasksetConfig]):
    def load(self) -> list[UserTask]:
        return [UserTask(vf.TaskData(prompt=None, system_prompt="Repeat."))]


class UserConfig(vf.EnvConfig):
    assistant: vf.AgentConfig = vf.AgentConfig()


class UserEnv(vf.Env[UserConfig]):
    async def run(self, task: UserTask, agents: vf.Agents) -> None:
        right = 0
        async with agents.assistant.interaction(task) as assistant:
            for number in ("1", "2", "3"):
                segment = await assistant.turn(number)
                right += not segment.terminated and segment.last_reply == number
        assistant.trace.record_reward("repeated", right / 3)


__all__ = ["UserEnv", "UserTaskset"]
