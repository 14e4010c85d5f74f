"""The scheduler process: drain, plan, execute, commit, wake."""
