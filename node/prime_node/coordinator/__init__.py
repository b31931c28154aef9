"""The coordinator: leases work, accepts rollouts, has them judged, and gives the accepted ones to the trainer."""
