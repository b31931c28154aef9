"""How checkpoints travel: the publisher's side, and the side of everybody who follows."""
