"""Processes that a run starts and that never outlive it. Linux, standard library only.

handle.py        the owner's side: `with Supervisor.start(...) as s: s.spawn(spec)`
supervisor.py    the supervisor process: ends everything, then sees to it that all is written
watch.py         what it waits for: the owner's words and death, signals, the deadline
requests.py      what it does for the owner: start, stop, status, note
children.py      the processes it started: start, signal, reap
teardown.py      the one ending of a run, and the ending of a run whose supervisor died
sweep.py         find and kill whatever is left of a run, and nothing else
settling.py      the command that writes what a dead owner left unwritten
registry.py      the runs of this user that are not settled yet
reaper.py        ends and settles the runs that died with their supervisor
dead_run.py      ends a run that has no supervisor, for whoever finds it
locks.py         a lock on a file, without waiting
leases.py        one lock per device of this host
gpu_memory.py    the GPUs of this host and the memory in use on them
ledger.py        `ledger.jsonl`: what was started, written before it starts; one writer at a time
records.py       `ChildSpec` and `Receipt`
receipt_text.py  a receipt as text
order.py         what a supervisor is told at its start
conversation.py  the owner's half of the control line: requests, answers, news
channel.py       JSON lines over the socket pair between owner and supervisor
launch.py        start the supervisor process
bond.py          processes that the kernel kills when who started them ends
signals.py       signals as bytes in a pipe
process.py       facts from Linux: start ticks, boot id, /proc, prctl, pidfd
ports.py         reserve free loopback ports, check that a port is free
logs.py          the last lines of a log, for error messages
errors.py        what can go wrong, each with what to do

Nothing here imports the rest of the package: the supervisor starts in isolated mode (no site
packages), so that it is up within a tenth of a second and cannot be broken by what a run installs.
"""
