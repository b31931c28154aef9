"""The trainer: supervised training on the format, then reinforcement learning from accepted rollouts, step after step."""
