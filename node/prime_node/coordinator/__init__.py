"""The coordinator: leases work, takes rollouts in, has them judged, and hands the accepted ones to the trainer."""
