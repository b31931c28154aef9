"""Public audits and exports of published checkpoints."""
