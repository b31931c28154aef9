"""An environment of two agents as a third party would publish it: a planner passes a word to a speller and repeats its answer."""

from __future__ import annotations

import verifiers.v1 as vf
from prime_words import WordData, WordTask


class HandoffConfig(vf.EnvConfig):
    planner: vf.AgentConfig = vf.AgentConfig()
    speller: vf.AgentConfig = vf.AgentConfig()


class Handoff(vf.Env[HandoffConfig]):
    async def run(self, task: WordTask, agents: vf.Agents) -> None:
        async with agents.planner.interaction(task) as planner:
            word = (await planner.turn()).last_reply
            order = WordData(prompt=f"spell {word} backward", answer=task.data.answer)
            trace = await agents.speller.run(WordTask(order, task.config))
            spelled = [node for node in trace.nodes if node.sampled][-1].message.content
            await planner.turn(f"the speller says {spelled}")


__all__ = ["Handoff"]
