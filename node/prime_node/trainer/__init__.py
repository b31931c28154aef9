"""The trainer: teaches the format, then turns accepted rollouts into the next policy, step after step."""
