"""A teacher kept across runs: its servers under a keeper that outlives the command.

record.py   what stands on disk of a kept teacher: what it is, how it is, until when, who ends it
users.py    the runs that use one; while there are any it is not ended
keeper.py   the keeper process: starts, proves and restarts its servers, and ends them

The keeper owns a supervisor as a run's flow does, so what is true of a run's servers is true of
these: they hold their devices, and none outlives keeper and supervisor.
"""
