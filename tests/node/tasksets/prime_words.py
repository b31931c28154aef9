"""A taskset as a third party would publish it: words to spell backward, a tool for it, and attempts to read a secret file and to
reach a port of the machine's loopback interface."""

from __future__ import annotations

import socket
from pathlib import Path

import verifiers.v1 as vf


class WordData(vf.TaskData):
    answer: str


class Speller(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def backward(self, word: str) -> str:
        """Spell a word backward."""
        return word[::-1]


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, task: WordData, trace: vf.Trace) -> float:
        answer = [node for node in trace.nodes if node.sampled][-1].message.content or ""
        return float(answer.strip() == task.answer)

    @vf.metric
    async def letters(self, task: WordData, trace: vf.Trace) -> float:
        return float(len(task.answer))


class ToolTask(WordTask):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Speller(vf.ToolsetConfig())]


class WordsConfig(vf.TasksetConfig):
    snoop: str = ""
    dial: int = 0
    tools: bool = False


class Words(vf.Taskset[WordTask, WordsConfig]):
    def load(self):  # type: ignore[no-untyped-def]
        seen = "nothing"
        if self.config.snoop:
            try:
                seen = Path(self.config.snoop).read_text()
            except OSError as error:
                seen = type(error).__name__
        if self.config.dial:
            try:
                socket.create_connection(("127.0.0.1", self.config.dial), timeout=5.0).close()
                seen += ", connected"
            except OSError as error:
                seen += f", {type(error).__name__}"
        kind = ToolTask if self.config.tools else WordTask
        for word in ("abc", "tree", "house"):
            yield kind(WordData(prompt=f"{seen}: reverse {word}", answer=word[::-1]), self.config.task)


__all__ = ["Words"]

if __name__ == "__main__":
    Speller.run()
