"""The shared-memory segment and the doorbells: what the processes of one engine have in common."""
