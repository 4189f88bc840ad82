"""Echo for verifiers 0.4: one turn, worth 1 where the words come back."""

import verifiers.v1 as vf


class EchoData(vf.TaskData):
    words: str


class EchoTask(vf.Task[EchoData]):
    @vf.reward(weight=1.0)
    async def echoed(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content == self.data.words)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages[-1].content or ""))


class EchoConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("one", "two", "three")


class EchoTaskset(vf.Taskset[EchoTask, EchoConfig]):
    def load(self) -> list[EchoTask]:
        return [EchoTask(EchoData(words=words, prompt=words)) for words in self.config.words]


__all__ = ["EchoTaskset"]
